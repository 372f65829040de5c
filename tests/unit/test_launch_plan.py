"""The plan of a launch: method, hosts, ranks and environment, from a job and what is installed."""
from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.unit.launch_plans import (
    MPICH,
    OPENMPI5,
    PALS,
    PBS,
    PYTHON,
    SLURM,
    TOOLS,
    Programs,
    job,
    make,
)
from utils.launch.dry_run import shell_lines
from utils.launch.environment import clean, rank_environment
from utils.launch.host_processes import host_processes
from utils.launch.methods import NAMES
from utils.launch.plan import PlanError
from utils.launch.planner import describe
from utils.schedulers import Allocation

# The method


@pytest.mark.parametrize(("scheduler", "missing", "name"), [
    ("slurm", "", "srun"), ("slurm", "srun", "ssh"), ("pbs", "", "pbs_tmrsh"),
    ("pbs", "pbs_tmrsh", "pbsdsh"), ("pbs", "pbs_tmrsh pbsdsh", "ssh")])
def test_auto_is_the_best_installed_method(scheduler: str, missing: str, name: str) -> None:
    installed = {tool: path for tool, path in TOOLS.items() if tool not in missing.split()}
    plan = make(job(scheduler), programs=Programs(installed))
    assert (plan.method.name, plan.method.path) == (name, f"/bin/{name}")


def test_auto_is_pals_on_a_cray_with_pbs() -> None:
    plan = make(job("pbs"), programs=Programs(mpiexec=PALS, pals=PALS))
    assert (plan.method.title, plan.method.path) == ("PALS", PALS.path)


@pytest.mark.parametrize(("allocation", "options", "host", "hosts", "ranks"), [
    (None, {}, "laptop", ("laptop",), (3,)),  # one for each GPU
    (None, {"ntasks_per_node": 2}, "laptop", ("laptop",), (2,)),
    (job("pbs", (2,), hosts=("n1.pbs.lab",)), {}, "n1", ("n1.pbs.lab",), (2,)),
    (job("pbs", (2, 3)), {"launcher": "local"}, "n2.cluster", ("n2.cluster",), (3,))])
def test_this_host_alone_needs_no_launcher(
        allocation: Allocation | None, options: dict[str, object], host: str,
        hosts: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    plan = make(allocation, host=host, gpus=3, **options)
    assert (plan.method.name, plan.hosts, plan.ranks) == ("local", hosts, ranks)


def test_one_rank_without_job_and_gpus() -> None:
    assert make(None).ranks == (1,)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_method_that_needs_a_job(name: str) -> None:
    with pytest.raises(PlanError, match=f"--launcher {name} needs an allocation"):
        make(None, launcher=name)


@pytest.mark.parametrize(("allocation", "options", "message"), [
    (job("pbs"), {"launcher": "magic"}, "--launcher is 'magic'. Expected auto, srun, mpiexec"),
    (job("pbs"), {"launcher": "srun"}, "--launcher srun was given in PBS job 7"),
    (job(), {"launcher": "pbs_tmrsh"}, "--launcher pbs_tmrsh was given in Slurm job 7"),
    (job(), {"launcher": "mpiexec"}, "no mpiexec of PALS, Open MPI, Intel MPI, MPICH is on PATH"),
    (job("pbs"), {"launcher": "ssh", "programs": Programs({})},
     "ssh was not found on PATH, and is needed to start ranks on 2 hosts"),
    (job(), {"nodes": 3}, "--nodes is 3. Expected 1 to 2, out of the 2 hosts with ranks: n1, n2"),
    (job(), {"nodes": 0}, "--nodes is 0. Expected 1 to 2"),
    (None, {"nodes": 2}, "--nodes is 2. Expected 1 to 1, out of the 1 hosts with ranks: n1"),
    (job(), {"nodes": 1, "nodelist": "n1"}, "both --nodes and --nodelist are given"),
    (job(), {"nodelist": "n1,n9"}, "--nodelist is 'n1,n9', but n9 is not a host with ranks"),
    (job("pbs", (1, 0)), {"nodelist": "n2"}, "--nodelist is 'n2', but n2 is not a host with ranks"),
    (job(), {"nodelist": "n[1"}, "--nodelist: node list 'n.1'"),
    (job(), {"nodelist": ""}, "--nodelist is '', but no name is not a host"),
    (job(), {"ntasks_per_node": 0}, "--ntasks-per-node is 0. Expected 1 or more"),
    (job(), {"max_restarts": -1}, "--max-restarts is -1. Expected 0 or more"),
    (job(), {"ntasks": 5}, "-n is 5, but there are 2 hosts, .* Expected a multiple of 2"),
    (job(), {"ntasks": 1}, "-n is 1, but there are 2 hosts"),
    (job(), {"ntasks": 0}, "-n is 0. Expected 1 or more"),
    (job(), {"ntasks": 4, "ntasks_per_node": 2}, "both -n and --ntasks-per-node are given"),
    (job("pbs", (0, 0)), {}, "no host of PBS job 7 gets a rank")])
def test_impossible_request_is_refused(
        allocation: Allocation | None, options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(allocation, **options)  # type: ignore[arg-type]


# Hosts and ranks


@pytest.mark.parametrize(("slots", "gpus", "ranks"), [
    ((1, 1), (4, 4), (4, 4)),  # one task on each node, as for torchrun: one rank for each GPU
    ((1, 1), (4, 2), (4, 2)),
    ((2, 2), (4, 4), (2, 2)),
    ((2, 1), (None, None), (2, 1)),
    ((1, 1), (0, 0), (1, 1)),
    ((1, 1), (None, 4), (1, 4))])
def test_ranks_are_the_slots_or_else_the_gpus(
        slots: tuple[int, ...], gpus: tuple[int | None, ...], ranks: tuple[int, ...]) -> None:
    assert make(job("pbs", slots, gpus)).ranks == ranks


@pytest.mark.parametrize(("allocation", "nodes", "ranks"), [
    (None, None, (6,)), (job(ranks=(1, 1, 1)), None, (2, 2, 2)), (job("pbs", (4, 4, 4)), 2, (3, 3))])
def test_ntasks_is_shared_by_the_hosts(
        allocation: Allocation | None, nodes: int | None, ranks: tuple[int, ...]) -> None:
    assert make(allocation, nodes=nodes, ntasks=6).ranks == ranks


@pytest.mark.parametrize("launcher", ["auto", "mpiexec", "ssh"])
@pytest.mark.parametrize(("nodes", "hosts", "ranks"), [
    (None, ("n1", "n3", "n4"), (2, 1, 1)), (2, ("n1", "n3"), (2, 1))])
def test_host_without_slot_gets_no_rank(
        launcher: str, nodes: int | None, hosts: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    plan = make(job("pbs", (2, 0, 1, 1)), launcher=launcher, nodes=nodes,
                programs=Programs(mpiexec=MPICH))
    assert (plan.hosts, plan.ranks) == (hosts, ranks)


def test_gpus_are_counted_where_the_scheduler_does_not() -> None:
    plan = make(job("pbs", (1, 1)), gpus=4)
    assert plan.ranks == (4, 4) and "PBS job 7 does not report how many GPUs" in plan.notes[0]
    assert make(job("slurm", (1, 1)), gpus=4, host="login").ranks == (1, 1)  # not on a login host


@pytest.mark.parametrize(("allocation", "gpus", "environ", "note"), [
    (job("pbs", (8, 8), (4, 4)), 0, PBS, "for one rank on each gpu give --ntasks-per-node 4"),
    (job(ranks=(2, 2), cores=(2, 1)), 0, SLURM, "the 2 ranks on n2 share 1 core, all that the job"),
    (job(ranks=(2, 2), cores=(2, 2)), 0, SLURM, ""),
    (job("pbs", gpus=(2, 2)), 4, PBS, "holds 2 of the 4 gpus of n1, and pbs does not report which"),
    (job("pbs", gpus=(2, 2)), 2, PBS, ""),
    (job("pbs", gpus=(2, 2)), 4, {**PBS, "CUDA_VISIBLE_DEVICES": "0,1"}, ""),
    (job("slurm", gpus=(2, 2)), 4, SLURM, ""),
    (job()._replace(restart_count=2, notes=("a note",)), 0, SLURM, "restart 2 of slurm job 7\na note"),
    (job()._replace(restart_count=0), 0, SLURM, "")])
def test_notes_for_the_user(
        allocation: Allocation, gpus: int, environ: Mapping[str, str], note: str) -> None:
    notes = "\n".join(make(allocation, environ, gpus=gpus).notes).lower()
    assert note in notes and bool(note) == bool(notes)


# What a rank runs


@pytest.mark.parametrize(("command", "program", "under_torchrun"), [
    (("train.py",), (PYTHON, "-u", "train.py"), ("train.py",)),
    (("-m", "a.b", "-x"), (PYTHON, "-u", "-m", "a.b", "-x"), ("-m", "a.b", "-x")),
    (("python", "-m", "x"), (PYTHON, "-m", "x"), ("--no-python", PYTHON, "-m", "x")),
    (("python3", "a.py"), (PYTHON, "a.py"), ("--no-python", PYTHON, "a.py")),
    (("sh", "-c", "x"), ("sh", "-c", "x"), ("--no-python", "sh", "-c", "x"))])
def test_scripts_are_run_by_the_chosen_python(
        command: tuple[str, ...], program: tuple[str, ...], under_torchrun: tuple[str, ...]) -> None:
    assert make(job(), command=command).program == program
    plan = make(job(), command=command, torchrun=True)
    [process] = host_processes(plan, 1, "10.0.0.1", "29500", "10.0.0.2")
    assert tuple(process.words[-len(under_torchrun):]) == under_torchrun
    assert process.variables["NODE_RANK"] == "1"


def test_agents_number_the_ranks_host_by_host() -> None:
    first, second = host_processes(make(job("pbs", (1, 2))), 1, "10.0.0.1", "29500", "10.0.0.2")
    assert first.words == [PYTHON, "-u", "train.py", "--name", "a b"]
    assert first.variables == {
        "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert (second.variables["RANK"], second.variables["LOCAL_RANK"]) == ("2", "1")


def test_torchrun_agents_are_numbered_by_host() -> None:
    plan = make(job("pbs", (1, 1), (2, 3)), torchrun=True)
    [process] = host_processes(plan, 1, "10.0.0.1", "29500", "10.0.0.2")
    assert process.words == [
        PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=0",
        "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500",
        "--local-addr=10.0.0.2", "train.py", "--name", "a b"]


def test_restarts_need_torchrun_and_a_store_on_the_first_host() -> None:
    plan = make(job("pbs"), max_restarts=2)
    assert plan.options.torchrun
    for host in (0, 1):
        words = host_processes(plan, host, "10.0.0.1", "29500", "10.0.0.9")[0].words
        assert {"--rdzv-backend=c10d", "--max-restarts=2",
                f"--rdzv-conf=is_host={int(host == 0)}"} <= set(words)


def test_torchrun_on_one_host_finds_its_own_port() -> None:
    plan = make(None, torchrun=True, ntasks_per_node=2, command=("./program", "x"))
    [process] = host_processes(plan, 0, "127.0.0.1", "1", "127.0.0.1")
    assert process.words[3:] == ["--nproc-per-node=2", "--max-restarts=0", "--standalone",
                                 "--no-python", "./program", "x"]


# The environment


@pytest.mark.parametrize(("omp", "ncpus", "cores", "threads"), [
    ("8", "8", 8, 2), ("8", "8", None, 2), ("2", "2", 16, 2), ("1", "1", 4, 1), ("64", "64", 2, 1),
    ("7", "8", 8, None),  # set by the user
    ("", "8", 8, None)])
def test_threads_of_a_pbs_chunk_are_divided_among_its_ranks(
        omp: str, ncpus: str, cores: int | None, threads: int | None) -> None:
    environ = {**PBS, "OMP_NUM_THREADS": omp, "NCPUS": ncpus}
    assert make(job("pbs", (4, 4), cores=(cores, cores)), environ).threads == (threads, threads)


def test_one_command_for_all_hosts_takes_the_fewest_threads() -> None:
    environ = {**PBS, "OMP_NUM_THREADS": "8", "NCPUS": "8"}
    plan = make(job("pbs", (2, 4), cores=(8, 8)), environ, mpiexec=MPICH)
    assert plan.environ["OMP_NUM_THREADS"] == "2"


def test_torchrun_is_kept_from_one_thread_for_each_rank() -> None:
    assert make(job("slurm", (4, 4), cores=(16, 16)), torchrun=True).threads == (4, 4)


@pytest.mark.parametrize(("environ", "kept"), [
    ({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "MASTER_PORT": "1", "PMI_RANK": "0",
      "PMI_FD": "9", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x",
      "PALS_RANKID": "0", "PBS_NODEFILE": "/aux/7", "SLURM_NTASKS": "4", "MINE": "1"},
     {"PBS_NODEFILE", "SLURM_NTASKS", "MINE"}),
    ({"MASTER_ADDR": "x", "MASTER_PORT": "1"}, {"MASTER_ADDR", "MASTER_PORT"})])  # the user's
def test_variables_of_other_launches_are_removed(environ: dict[str, str], kept: set[str]) -> None:
    assert clean(environ) == {name: environ[name] for name in kept}


@pytest.mark.parametrize(("sent", "own", "same_host", "expected"), [
    ({"FOO": "a\nb", "HOSTNAME": "n1", "PBS_NODENUM": "0", "PBS_NODEFILE": "/7", "TMPDIR": "/tmp/7"},
     {"FOO": "other", "HOSTNAME": "n2", "PBS_NODENUM": "1", "PATH": "/bin"}, False,
     {"FOO": "a\nb", "HOSTNAME": "n2", "PBS_NODENUM": "1", "PBS_NODEFILE": "/7", "TMPDIR": "/tmp/7"}),
    ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, False,
     {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, False, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {}, False, {}),
    ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {}, True, {"CUDA_VISIBLE_DEVICES": "GPU-a"}),
    ({"CUDA_VISIBLE_DEVICES": "MIG-a"}, {}, False, {})])
def test_values_of_a_host_stay_on_that_host(sent: dict[str, str], own: dict[str, str],
                                            same_host: bool, expected: dict[str, str]) -> None:
    assert rank_environment(sent, own, same_host=same_host) == expected


# For the user


def test_plan_is_described_in_one_line() -> None:
    assert next(describe(make(job("pbs", (2, 1))))) == (
        "3 ranks on 2 hosts (1 to 2 each) by pbs_tmrsh")
    assert next(describe(make(None, host="laptop"))) == "1 rank on laptop alone"
    assert next(describe(make(job("pbs", (2, 1)), mpiexec=OPENMPI5, torchrun=True))) == (
        "3 ranks on 2 hosts (1 to 2 each) by Open MPI's mpiexec, with one torchrun agent on each")


def test_dry_run_of_a_native_launcher_can_be_pasted() -> None:
    plan = make(job("pbs", (2, 1)), mpiexec=MPICH, programs=Programs({}))
    [line] = shell_lines(plan, {**plan.environ, "STALE": "1", "CHANGED": "1"})
    assert line == (
        """hosts=$(mktemp) && printf 'n1:2\\nn2:1\\n' >"$hosts" && chmod 600 "$hosts" && """
        "env -u STALE -u CHANGED /mpich/mpiexec -f \"$hosts\" -n 3 "
        "/env/bin/python -u train.py --name 'a b'")


def test_dry_run_of_agents_is_the_command_of_each_rank() -> None:
    lines = list(shell_lines(make(job("pbs", (1, 1))), PBS))
    assert len(lines) == 2 and lines[1] == (
        "/bin/pbs_tmrsh n2 env RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=1 "
        "GROUP_RANK=1 'MASTER_ADDR=<n1>' 'MASTER_PORT=<free port>' "
        "/env/bin/python -u train.py --name 'a b'")

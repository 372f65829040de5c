"""The plan of a launch: method, hosts, ranks and environment, from a job and what is installed."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.launch_plans import MPICH, OPENMPI5, PALS, PBS, PYTHON, TOOLS, Programs, alone, job, make, pbs, slurm
from utils.launch.dry_run import shell_lines
from utils.launch.environment import clean, rank_environment
from utils.launch.host_processes import host_processes
from utils.launch.methods import NAMES
from utils.launch.plan import Plan, PlanError
from utils.launch.planner import describe


def without(*names: str) -> Programs:
    return Programs({tool: path for tool, path in TOOLS.items() if tool not in names})


@pytest.mark.parametrize(("plan", "expected"), [
    # The best installed method
    (slurm(), "srun n1:2 n2:2"), (slurm(programs=without("srun")), "ssh n1:2 n2:2"),
    (pbs(), "pbs_tmrsh n1:2 n2:2"), (pbs(programs=without("pbs_tmrsh")), "pbsdsh n1:2 n2:2"),
    (pbs(programs=without("pbs_tmrsh", "pbsdsh")), "ssh n1:2 n2:2"),
    (pbs(programs=Programs(mpiexec=PALS, pals=PALS)), "PALS n1:2 n2:2"),
    # One host alone needs no launcher
    (alone(), "local n1:1"), (alone(gpus=3), "local n1:3"), (alone(gpus=3, ntasks_per_node=2), "local n1:2"),
    (alone(ntasks=6), "local n1:6"),
    (lambda: make(job("pbs", (2,), hosts=("n1.pbs.lab",))), "local n1.pbs.lab:2"),
    (pbs(ranks=(2, 3), launcher="local", host="n2.cluster"), "local n2.cluster:3"),
    # One task on each node, as for torchrun: one rank for each GPU. Otherwise the slots
    (pbs(ranks=(1, 1), gpus=(4, 4)), "pbs_tmrsh n1:4 n2:4"), (pbs(ranks=(1, 1), gpus=(4, 2)), "pbs_tmrsh n1:4 n2:2"),
    (pbs(gpus=(4, 4)), "pbs_tmrsh n1:2 n2:2"), (pbs(ranks=(2, 1)), "pbs_tmrsh n1:2 n2:1"),
    (pbs(ranks=(1, 1), gpus=(0, 0)), "pbs_tmrsh n1:1 n2:1"),
    (pbs(ranks=(1, 1), gpus=(None, 4)), "pbs_tmrsh n1:1 n2:4"),
    # GPUs are counted where the scheduler does not, and not on a login host
    (pbs(ranks=(1, 1), gpus_here=4), "pbs_tmrsh n1:4 n2:4"),
    (slurm(ranks=(1, 1), gpus_here=4, host="login"), "srun n1:1 n2:1"),
    # --ntasks is shared by the hosts
    (slurm(ranks=(1, 1, 1), ntasks=6), "srun n1:2 n2:2 n3:2"),
    (pbs(ranks=(4, 4, 4), nodes=2, ntasks=6), "pbs_tmrsh n1:3 n2:3"),
    # Hosts without a slot get no rank
    (pbs(ranks=(2, 0, 1, 1)), "pbs_tmrsh n1:2 n3:1 n4:1"), (pbs(ranks=(2, 0, 1, 1), nodes=2), "pbs_tmrsh n1:2 n3:1"),
    (pbs(ranks=(2, 0, 1, 1), launcher="ssh", nodes=2), "ssh n1:2 n3:1"),
    (pbs(ranks=(2, 0, 1, 1), mpiexec=MPICH), "MPICH n1:2 n3:1 n4:1")])
def test_method_hosts_and_ranks(plan: Callable[[], Plan], expected: str) -> None:
    found = plan()
    ranks = " ".join(f"{host}:{count}" for host, count in zip(found.hosts, found.ranks, strict=True))
    assert f"{found.method.title} {ranks}" == expected


@pytest.mark.parametrize(("plan", "message"), [
    *((alone(launcher=name), f"--launcher {name} needs an allocation") for name in NAMES if name != "local"),
    (pbs(launcher="magic"), "--launcher is 'magic'. Expected auto, srun, mpiexec"),
    (pbs(launcher="srun"), "--launcher srun was given in PBS job 7"),
    (slurm(launcher="pbs_tmrsh"), "--launcher pbs_tmrsh was given in Slurm job 7"),
    (slurm(launcher="mpiexec"), "no mpiexec of PALS, Open MPI, Intel MPI, MPICH is on PATH"),
    (pbs(launcher="ssh", programs=Programs({})), "ssh was not found on PATH, and is needed to start ranks on 2 hosts"),
    (slurm(nodes=3), "--nodes is 3. Expected 1 to 2, out of the 2 hosts with ranks: n1, n2"),
    (slurm(nodes=0), "--nodes is 0. Expected 1 to 2"),
    (alone(nodes=2), "--nodes is 2. Expected 1 to 1, out of the 1 hosts with ranks: n1"),
    (slurm(nodes=1, nodelist="n1"), "both --nodes and --nodelist are given"),
    (slurm(nodelist="n1,n9"), "--nodelist is 'n1,n9', but n9 is not a host with ranks"),
    (pbs(ranks=(1, 0), nodelist="n2"), "--nodelist is 'n2', but n2 is not a host with ranks"),
    (slurm(nodelist="n[1"), "--nodelist: node list 'n.1'"),
    (slurm(nodelist=""), "--nodelist is '', but no name is not a host"),
    (slurm(ntasks_per_node=0), "--ntasks-per-node is 0. Expected 1 or more"),
    (slurm(max_restarts=-1), "--max-restarts is -1. Expected 0 or more"),
    (slurm(ntasks=5), "-n is 5, but there are 2 hosts, .* Expected a multiple of 2"),
    (slurm(ntasks=1), "-n is 1, but there are 2 hosts"), (slurm(ntasks=0), "-n is 0. Expected 1 or more"),
    (slurm(ntasks=4, ntasks_per_node=2), "both -n and --ntasks-per-node are given"),
    (pbs(ranks=(0, 0)), "no host of PBS job 7 gets a rank")])
def test_impossible_request_is_refused(plan: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan()


@pytest.mark.parametrize(("plan", "note"), [
    (pbs(ranks=(8, 8), gpus=(4, 4)), "for one rank on each gpu give --ntasks-per-node 4"),
    (pbs(ranks=(1, 1), gpus_here=4), "pbs job 7 does not report how many gpus"),
    (slurm(cores=(2, 1)), "the 2 ranks on n2 share 1 core, all that the job"), (slurm(cores=(2, 2)), ""),
    (pbs(gpus=(2, 2), gpus_here=4), "holds 2 of the 4 gpus of n1, and pbs does not report which"),
    (pbs(gpus=(2, 2), gpus_here=2), ""), (slurm(gpus=(2, 2), gpus_here=4), ""),
    (pbs({"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=(2, 2), gpus_here=4), ""),
    (lambda: make(job()._replace(restart_count=2, notes=("a note",))), "restart 2 of slurm job 7\na note"),
    (lambda: make(job()._replace(restart_count=0)), "")])
def test_notes_for_the_user(plan: Callable[[], Plan], note: str) -> None:
    notes = "\n".join(plan().notes).lower()
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
    assert slurm(command=command)().program == program
    [process] = host_processes(slurm(command=command, torchrun=True)(), 1, "10.0.0.1", "29500", "10.0.0.2")
    assert tuple(process.words[-len(under_torchrun):]) == under_torchrun


def test_agents_number_the_ranks_host_by_host() -> None:
    first, second = host_processes(pbs(ranks=(1, 2))(), 1, "10.0.0.1", "29500", "10.0.0.2")
    assert first.words == [PYTHON, "-u", "train.py", "--name", "a b"]
    assert first.variables == {
        "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert (second.variables["RANK"], second.variables["LOCAL_RANK"]) == ("2", "1")


def test_torchrun_agents_are_numbered_by_host() -> None:
    [process] = host_processes(
        pbs(ranks=(1, 1), gpus=(2, 3), torchrun=True)(), 1, "10.0.0.1", "29500", "10.0.0.2")
    assert process.words == [
        PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=0",
        "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500",
        "--local-addr=10.0.0.2", "train.py", "--name", "a b"]
    assert process.variables["NODE_RANK"] == "1"
    [process] = host_processes(alone(torchrun=True)(), 0, "127.0.0.1", "1", "127.0.0.1")
    assert process.words[3:6] == ["--nproc-per-node=1", "--max-restarts=0", "--standalone"]


def test_restarts_need_torchrun_and_a_store_on_the_first_host() -> None:
    plan = pbs(max_restarts=2)()
    assert plan.options.torchrun
    for host in (0, 1):
        words = host_processes(plan, host, "10.0.0.1", "29500", "10.0.0.9")[0].words
        assert {"--rdzv-backend=c10d", "--max-restarts=2", f"--rdzv-conf=is_host={int(host == 0)}"} <= set(words)


# The environment


@pytest.mark.parametrize(("omp", "ncpus", "cores", "threads"), [
    ("8", "8", 8, 2), ("8", "8", None, 2), ("2", "2", 16, 2), ("1", "1", 4, 1), ("64", "64", 2, 1),
    ("7", "8", 8, None),  # set by the user
    ("", "8", 8, None)])
def test_threads_of_a_pbs_chunk_are_divided_among_its_ranks(
        omp: str, ncpus: str, cores: int | None, threads: int | None) -> None:
    environ = {"OMP_NUM_THREADS": omp, "NCPUS": ncpus}
    assert pbs(environ, ranks=(4, 4), cores=(cores, cores))().threads == (threads, threads)


def test_threads_of_torchrun_and_of_one_command_for_all_hosts() -> None:
    assert slurm(ranks=(4, 4), cores=(16, 16), torchrun=True)().threads == (4, 4)  # torchrun would set 1
    plan = pbs({"OMP_NUM_THREADS": "8", "NCPUS": "8"}, ranks=(2, 4), cores=(8, 8), mpiexec=MPICH)()
    assert plan.environ["OMP_NUM_THREADS"] == "2"  # the fewest


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
    ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, False, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, False, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {}, False, {}), ({"CUDA_VISIBLE_DEVICES": "MIG-a"}, {}, False, {}),
    ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {}, True, {"CUDA_VISIBLE_DEVICES": "GPU-a"})])
def test_values_of_a_host_stay_on_that_host(
        sent: dict[str, str], own: dict[str, str], same_host: bool, expected: dict[str, str]) -> None:
    assert rank_environment(sent, own, same_host=same_host) == expected


# For the user


@pytest.mark.parametrize(("plan", "text"), [
    (pbs(ranks=(2, 1)), "3 ranks on 2 hosts (1 to 2 each) by pbs_tmrsh"),
    (alone(host="laptop"), "1 rank on laptop alone"),
    (pbs(ranks=(2, 1), mpiexec=OPENMPI5, torchrun=True),
     "3 ranks on 2 hosts (1 to 2 each) by Open MPI's mpiexec, with one torchrun agent on each")])
def test_plan_is_described_in_one_line(plan: Callable[[], Plan], text: str) -> None:
    assert next(describe(plan())) == text


def test_dry_run_can_be_pasted() -> None:
    plan = pbs(ranks=(2, 1), mpiexec=MPICH, programs=Programs({}))()
    assert list(shell_lines(plan, {**plan.environ, "STALE": "1", "CHANGED": "1"})) == [
        """hosts=$(mktemp) && printf 'n1:2\\nn2:1\\n' >"$hosts" && chmod 600 "$hosts" && """
        "env -u STALE -u CHANGED /mpich/mpiexec -f \"$hosts\" -n 3 "
        "/env/bin/python -u train.py --name 'a b'"]
    lines = list(shell_lines(pbs(ranks=(1, 1))(), PBS))  # of agents: the command of each rank
    assert len(lines) == 2 and lines[1] == (
        "/bin/pbs_tmrsh n2 env RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=1 "
        "GROUP_RANK=1 'MASTER_ADDR=<n1>' 'MASTER_PORT=<free port>' "
        "/env/bin/python -u train.py --name 'a b'")

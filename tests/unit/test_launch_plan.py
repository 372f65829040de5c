"""The plan of a launch: method, hosts, ranks and environment, from a job and what is installed."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.launch_plans import MPICH, PALS, PBS, PYTHON, Programs, alone, job, make, pbs, slurm
from utils.tools.launch.dry_run import shell_lines
from utils.tools.launch.host_ranks import host_processes
from utils.tools.launch.launch_plan import Plan, PlanError
from utils.tools.launch.methods import NAMES
from utils.tools.launch.planner import describe
from utils.tools.launch.rank_environment import clean, rank_environment

SSH = {"ssh": "/bin/ssh"}


@pytest.mark.parametrize(("plan", "expected"), [
    # The best installed method
    (slurm(programs=Programs(SSH)), "ssh n1:2 n2:2"), (pbs(programs=Programs(SSH)), "ssh n1:2 n2:2"),
    (pbs(programs=Programs({**SSH, "pbsdsh": "/bin/pbsdsh"})), "pbsdsh n1:2 n2:2"),
    (pbs(programs=Programs(mpiexec=PALS, pals=PALS)), "PALS n1:2 n2:2"),
    # One host alone needs no launcher
    (alone(), "local n1:1"), (alone(gpus=3), "local n1:3"), (alone(gpus=3, ranks_per_node=2), "local n1:2"),
    (lambda: make(job("pbs", (2,))._replace(hosts=("n1.pbs.lab",))), "local n1.pbs.lab:2"),
    (pbs(ranks=(2, 3), launcher="local", host="n2.cluster"), "local n2.cluster:3"),
    # One task on each node, as for torchrun: one rank for each GPU. Otherwise the slots
    (pbs(ranks=(1, 1), gpus=(4, 4)), "pbs_tmrsh n1:4 n2:4"), (pbs(ranks=(1, 1), gpus=(4, 2)), "pbs_tmrsh n1:4 n2:2"),
    (pbs(gpus=(4, 4)), "pbs_tmrsh n1:2 n2:2"), (pbs(ranks=(1, 1), gpus=(None, 4)), "pbs_tmrsh n1:1 n2:4"),
    # Tasks that the job requested are kept, except one on each host, as for torchrun
    (slurm(ranks=(1, 1), gpus=(2, 2)), "srun n1:2 n2:2"),
    (slurm(ranks=(1, 1), gpus=(2, 2), tasks_requested=True), "srun n1:2 n2:2"),
    (slurm(ranks=(2, 2), gpus=(4, 4), tasks_requested=True), "srun n1:2 n2:2"),
    (slurm(ranks=(1, 1), gpus=(2, 2), tasks_requested=True, ranks_per_node=1), "srun n1:1 n2:1"),
    (slurm(ranks=(1, 1), gpus_here=2, tasks_requested=True), "srun n1:1 n2:1"),
    (slurm(ranks=(1, 1), gpus=(2, 2), tasks_requested=True, torchrun=True), "srun n1:2 n2:2"),
    # GPUs are counted where the scheduler does not, and not on a login host
    (pbs(ranks=(1, 1), gpus_here=4), "pbs_tmrsh n1:4 n2:4"),
    (slurm(ranks=(1, 1), gpus_here=4, host="login"), "srun n1:1 n2:1"),
    # --ntasks is shared by the hosts; --nodelist in any order
    (pbs(ranks=(4, 4, 4), nodes=2, ntasks=6), "pbs_tmrsh n1:3 n2:3"),
    (slurm(ranks=(2,) * 4, nodelist="n[4,2]"), "srun n2:2 n4:2"),
    (slurm(ranks=(2,) * 4, nodelist="n4,n2.cluster"), "srun n2:2 n4:2"),
    # Hosts without a slot get no rank
    (pbs(ranks=(2, 0, 1, 1), mpiexec=MPICH), "MPICH n1:2 n3:1 n4:1"),
    (pbs(ranks=(2, 0, 1, 1), nodes=2), "pbs_tmrsh n1:2 n3:1")])
def test_method_hosts_and_ranks(plan: Callable[[], Plan], expected: str) -> None:
    found = plan()
    ranks = " ".join(f"{host}:{count}" for host, count in zip(found.hosts, found.ranks, strict=True))
    assert f"{found.method.title} {ranks}" == expected


@pytest.mark.parametrize(("plan", "message"), [
    *((alone(launcher=name), f"--launcher {name} needs an allocation") for name in NAMES if name != "local"),
    (pbs(launcher="magic"), "--launcher is 'magic'. Expected auto, srun, mpiexec"),
    (slurm(launcher="pbs_tmrsh"), "--launcher pbs_tmrsh was given in Slurm job 7"),
    (slurm(launcher="mpiexec"), "no mpiexec of PALS, Open MPI, Intel MPI, MPICH is on PATH"),
    (pbs(launcher="ssh", programs=Programs({})), "ssh was not found on PATH, and is needed to start ranks on 2 hosts"),
    (slurm(nodes=3), "--nodes is 3. Expected 1 to 2, out of the 2 hosts with ranks: n1, n2"),
    (slurm(nodes=1, nodelist="n1"), "both --nodes and --nodelist are given"),
    (pbs(ranks=(1, 0), nodelist="n2"), "--nodelist is 'n2', but n2 is not a host with ranks"),
    (slurm(nodelist="n[1"), "--nodelist: node list 'n.1'"),
    (slurm(ranks_per_node=0), "--ntasks-per-node is 0. Expected 1 or more"),
    (slurm(ntasks=5), "-n is 5, but there are 2 hosts, .* Expected a multiple of 2"),
    (slurm(ntasks=4, ranks_per_node=2), "both -n and --ntasks-per-node are given"),
    (alone(environ={"DDPKIT_CPU_BIND": "0-3"}), "DDPKIT_CPU_BIND is '0-3'. Expected"),
    (slurm({"DDPKIT_CPU_BIND": "list:0:1"}, ranks=(2, 3)), "DDPKIT_CPU_BIND=list:0:1 has CPUs for 2 local ranks"),
    (alone(ntasks=9, cores=2),
     "-n is 9: 9 ranks on n1, which has 2 cores. Expected at most 8 there, 4 for each core. .* add --oversubscribe"),
    (alone(ranks_per_node=9, gpus=4, cores=64), "--ntasks-per-node is 9: .* 4 GPUs. Expected at most 8 there"),
    (slurm(ntasks=4, cores=(9, 1), ranks=(1, 1), gpus=(1, 0), nodes=1), "4 ranks on n1, which has 1 GPU"),
    (slurm(ranks_per_node=5, cores=(9, 1)), "5 ranks on n2, which has 1 core. Expected at most 4"),
    (slurm({"SLURM_HET_SIZE": "2"}), r"Slurm job 7 has 2 components .* with env -u .* srun --het-group=0,1"),
    (pbs(input=True, input_waits=True),
     "standard input is given.* no rank would read it by pbs_tmrsh: only srun and --launcher local"),
    (pbs(input=True, input_waits=True, mpiexec=MPICH), "no rank would read it by MPICH's mpiexec"),
    (slurm(input=True, input_waits=True, torchrun=True), "no rank would read it by srun"),
    (alone(environ={"DDPKIT_REQUIRE_SECRET": "1"}, torchrun=True), "store that asks for no proof. Leave out --torch"),
    (pbs(ranks=(0, 0)), "no host of PBS job 7 gets a rank")])
def test_impossible_request_is_refused(plan: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan()


@pytest.mark.parametrize("plan", [
    alone(ntasks=8, cores=2), alone(ntasks=9, cores=2, oversubscribe=True), alone(ntasks=8, gpus=4, cores=1),
    slurm(ranks=(64, 64), gpus=(4, 4)), pbs(ranks=(9, 9), cores=(1, 1)), slurm(ranks_per_node=99)])
def test_number_of_ranks_that_is_not_refused(plan: Callable[[], Plan]) -> None:
    """What the job requests, on purpose, or on hosts of which nothing is known."""
    assert plan().ranks


def test_an_open_pipe_without_data_is_no_input() -> None:
    """That of sshd, or of slurmstepd in a step."""
    for case in (pbs(input=True), slurm(input=True, torchrun=True)):
        assert not case().options.input
    assert slurm(input=True)().options.input


@pytest.mark.parametrize(("plan", "note"), [
    (pbs(ranks=(8, 8), gpus=(4, 4)), "for one rank on each gpu give ddpkit launch --ntasks-per-node 4"),
    (slurm(ranks=(2, 2), gpus=(4, 4), tasks_requested=True),
     "requests 2 ranks but 4 gpus on n1. for one rank on each gpu give ddpkit launch --ntasks-per-node 4"),
    (slurm(ranks=(1, 1), gpus=(2, 2), tasks_requested=True), ""),
    (pbs(ranks=(1, 1), gpus_here=4), "pbs job 7 does not report how many gpus"),
    (slurm(cores=(2, 1)), "the 2 ranks on n2 share 1 core, all that the job has there. for more, request --cpus-per-"),
    (pbs(cores=(2, 1)), "all that the job has there. for more, request ncpus; for fewer ranks, mpiprocs"),
    (pbs(gpus=(2, 2), gpus_here=4), "holds 2 of the 4 gpus of n1, and pbs does not report which"),
    (pbs(gpus=(2, 2), gpus_here=2), ""), (slurm(gpus=(2, 2), gpus_here=4), ""),
    (pbs({"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=(2, 2), gpus_here=4), ""),
    (slurm({"MASTER_PORT": "29500"}), "master_port=29500 is not used: each launch takes a free port. where a firewall"),
    (slurm({"MASTER_PORT": "29500"}, nodes=1), "set ddpkit_port_range=first-last"),
    (lambda: make(job()._replace(restart_count=2, notes=("a note",))), "restart 2 of slurm job 7\na note"),
    (lambda: make(job()._replace(restart_count=0)), "")])
def test_notes_for_the_user(plan: Callable[[], Plan], note: str) -> None:
    notes = "\n".join(plan().notes).lower()
    assert note in notes and bool(note) == bool(notes)


def test_first_line_says_that_each_gpu_gets_a_rank() -> None:
    first = next(describe(slurm(ranks=(1, 1), gpus=(4, 4), tasks_requested=True)()))
    assert first.startswith("8 ranks on 2 hosts (4 each) by srun, one for each GPU: the job requests one task per host")
    for one in ({"ranks_per_node": 1}, {"ntasks": 2}, {"torchrun": True}):
        assert "each GPU" not in next(describe(slurm(ranks=(1, 1), gpus=(4, 4), tasks_requested=True, **one)()))


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


def test_torchrun_agents() -> None:
    [process] = host_processes(pbs(ranks=(1, 1), torchrun=True)(), 1, "10.0.0.1", "29500", "10.0.0.2")
    assert {"--node-rank=1", "--local-addr=10.0.0.2"} < set(process.words)
    [process] = host_processes(alone(torchrun=True, max_restarts=3)(), 0, "127.0.0.1", "1", "127.0.0.1")
    assert process.words[3:5] == ["--nproc-per-node=1", "--max-restarts=0"]  # ddpkit launch restarts
    assert {"--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=1"} < set(process.words)
    assert not [word for word in process.words if "standalone" in word or "rdzv" in word]


@pytest.mark.parametrize(("omp", "ncpus", "cores", "threads"), [
    ("8", "8", 8, 2), ("8", "8", None, 2), ("2", "2", 16, 2), ("1", "1", 4, 1), ("64", "64", 2, 1),
    ("7", "8", 8, None),  # set by the user
    ("", "8", 8, None)])
def test_threads_of_a_pbs_chunk_are_divided(omp: str, ncpus: str, cores: int | None, threads: int | None) -> None:
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
def test_values_of_a_host(sent: dict[str, str], own: dict[str, str], same_host: bool, expected: dict[str, str]) -> None:
    assert rank_environment(sent, own, same_host=same_host) == expected


def test_dry_run_of_agents_is_the_command_of_each_rank() -> None:
    lines = list(shell_lines(pbs(ranks=(1, 1))(), PBS))
    assert len(lines) == 2 and lines[1] == (
        "/bin/pbs_tmrsh n2 env RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=1 "
        "GROUP_RANK=1 'MASTER_ADDR=<n1>' 'MASTER_PORT=<free port>' DDPKIT_LAUNCH_RANK=1/2 "
        "/env/bin/python -u train.py --name 'a b'")

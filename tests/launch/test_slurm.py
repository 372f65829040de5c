"""srun of a real Slurm: right ranks, one loss, and one process with a note wherever no launcher started it."""
from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import MEET, MPIS, ROOT, SHOW, TORCHRUN, TRAIN, Result, assert_met, final_loss
from tests.matrix import with_all

RANK = shlex.join(MEET)
EXPLAIN = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "utils.launchers"])


def step(name: str, options: str, *more: str) -> str:
    """A line of a job script that runs RANK in a step, between two marks."""
    return f"echo '<{name}>'; srun --label {options} {RANK} {' '.join(more)}; echo '</{name}>'"


def assert_step(done: Result, name: str, hosts: str) -> None:
    """Each rank is the task that Slurm says, on these hosts: with --label, a line starts with the task's number."""
    output = done.output.partition(f"<{name}>\n")[2].partition(f"</{name}>")[0]
    tasks = re.findall(r"^(\d+): (rank (\d+) of .*)$", output, re.MULTILINE)
    assert all(task == rank for task, _, rank in tasks), output
    assert_met(Result(0, "\n".join(line for _, line, _ in tasks)), hosts, "slurm")
    assert len(tasks) == len(hosts.split()) and len({line.split()[-1] for _, line, _ in tasks}) == 1, output


# -w: without it, a step may be given two other nodes while the last processes of the step before it end.
SHAPES = {
    "2x2": ("-N2 -w node1,node2 --ntasks-per-node=2", "node1 node1 node2 node2"),
    "4x1": ("-N4 --ntasks-per-node=1", "node1 node2 node3 node4"),
    "cyclic": ("-N2 -w node1,node2 --ntasks-per-node=2 -m cyclic", "node1 node2 node1 node2"),
    "plane": ("-N2 -w node1,node2 -n8 -m plane=2", "node1 node1 node2 node2 node1 node1 node2 node2"),
    "one node": ("-N1 -n2 -w node3", "node3 node3"),
    "pmi2": ("--mpi=pmi2 -N2 -w node1,node2 -n3 -m block", "node1 node1 node2"),
    "pmix": ("--mpi=pmix -N2 -w node1,node2 --ntasks-per-node=2", "node1 node1 node2 node2"),
    "none": ("--mpi=none -N2 -w node1,node2 --ntasks-per-node=2", "node1 node1 node2 node2"),
}


def test_every_task_of_a_step_is_the_rank_that_slurm_says(slurm: SlurmCluster) -> None:
    done = slurm.batch("-N4 --exclusive", *(step(name, options) for name, (options, _) in SHAPES.items()))
    for name, (_, hosts) in SHAPES.items():
        assert_step(done, name, hosts)


@pytest.mark.matrix
def test_rank_0_may_be_on_any_node(slurm: SlurmCluster) -> None:
    hostfile = slurm.work / "hostfile"
    hostfile.write_text("node2\nnode1\nnode1\n")
    srun = "-n3 -m arbitrary"  # newer Slurms refuse -N beside it
    done = slurm.run(["sh", "-c", step("any", srun)], env={"SLURM_HOSTFILE": str(hostfile)})
    assert_step(done, "any", "node2 node1 node1")
    done = slurm.run(["srun", *srun.split(), "--mpi=pmi2", *TRAIN], env={"SLURM_HOSTFILE": str(hostfile)})
    assert done.status == 0 and "3 ranks on 2 hosts, started by srun (Slurm)," in done.output, done.output
    assert done.line("final loss:") == final_loss()


def test_ranks_of_plain_srun_share_no_secret(slurm: SlurmCluster) -> None:
    srun = ["srun", "--mpi=none", "-N2", "-n3", "-m", "cyclic"]
    done = slurm.run([*srun, *SHOW])
    assert done.status == 0 and all(f"\nrank {rank} of 3\n" in done.output for rank in range(3)), done.output
    assert "connections not authenticated" in done.output, done.output
    required = slurm.run([*srun, *MEET], env={"DDPKIT_REQUIRE_SECRET": "1"})  # the same exchange
    assert required.status != 0 and "share no secret" in required.output, required.output


def test_two_steps_of_one_job_at_the_same_moment(slurm: SlurmCluster) -> None:
    slurm.batch("-N2 --ntasks-per-node=2", f"({step('one', '--overlap -N2 -n2')}) > one 2>&1 & first=$!",
          f"({step('two', '--overlap -N2 -n2')}) > two 2>&1; wait $first")
    for name in ("one", "two"):
        assert_step(Result(0, (slurm.work / name).read_text()), name, "node1 node2")


# Three components whose nodes are not in the order of their names: rank 0's node is not the first of the node list.
COMPONENTS = "-N1 -n1 -w node4 : -N1 -n2 -w node3 : -N2 -n2 -w node[1-2]"
GROUPS = {"0-2": "node4 node3 node3 node1 node2", "1,2": "node3 node3 node1 node2", "0,2": "node4 node1 node2",
          "1": "node3 node3"}


def test_components_of_a_heterogeneous_job_are_one_launch(slurm: SlurmCluster) -> None:
    done = slurm.batch(COMPONENTS, *(step(groups, f"--het-group={groups}") for groups in GROUPS),
                 step("colon", "--het-group=0", f": --het-group=2 {RANK}"))
    for groups, hosts in {**GROUPS, "colon": "node4 node1 node2"}.items():
        assert_step(done, groups, hosts)
    done = slurm.run(["sh", "-c", step("job", "-N1 -n1 -w node2", f": -N1 -n2 -w node1 {RANK}")])
    assert_step(done, "job", "node2 node1 node1")


@pytest.mark.matrix
def test_launchers_below_srun(slurm: SlurmCluster, need: Callable[[str], Path]) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500",
             "--rdzv-id=7", *SHOW[1:]]
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", *agent])
    assert done.status == 0 and "2 ranks on 2 hosts, started by torchrun" in done.output, done.output
    mpiexec = [str(need("mpich")), "-launcher", "fork", "-n", "2"]
    done = slurm.run(["srun", "-w", "node1", "-N1", "-n1", "--mpi=none", *mpiexec, *MEET])
    assert_met(done, "node1 node1", "mpich")


@pytest.mark.matrix
def test_torchrun_of_its_own_in_each_task_is_an_error(slurm: SlurmCluster) -> None:
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node=1"]
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", *agent, *SHOW[1:]])
    assert done.status != 0 and "slurm has started 2 tasks, and the torchrun in each of them a launch" in done.output
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", "--export=ALL,DDPKIT_INDEPENDENT=1", *agent, SHOW[1]])
    assert done.status == 0 and done.output.count("rank 0 of 1") == 2, done.output


@pytest.mark.matrix
def test_launchers_in_a_batch_script(slurm: SlurmCluster, need: Callable[[str], Path]) -> None:
    mpiexec = shlex.join([str(need("mpich")), "-n", "4", "-ppn", "2", *MEET])
    done = slurm.batch("-N2 --ntasks-per-node=2", mpiexec, EXPLAIN, f"srun -N1 -n1 {EXPLAIN}")
    assert_met(done, "node1 node1 node2 node2", "mpich")
    # The choice is explained by the daemon that started the process.
    shell, task = re.findall(r"^launcher +(.*)$", done.output, re.MULTILINE)
    assert re.fullmatch(r"single: .*: slurmstepd: \[\d+\.batch\]", shell), done.output
    assert re.fullmatch(r"slurm: .*: slurmstepd: \[\d+\.\d\]", task), done.output


@pytest.mark.parametrize("mpi", ["openmpi5", *with_all("openmpi4")])
def test_ranks_of_open_mpi_in_a_slurm_job_need_no_address(
        slurm: SlurmCluster, need: Callable[[str], Path], mpi: str) -> None:
    """mpi4py is not there. They find rank 0 by the job's node list, which ranks of all hosts have."""
    mpiexec = [str(need(MPIS[mpi][0])), "--allow-run-as-root", "--bind-to", "none", "--map-by", "ppr:2:node", "-n", "4"]
    done = slurm.batch("-N2 --ntasks-per-node=2 -w node1,node2", shlex.join([*mpiexec, *MEET]))
    assert_met(done, "node1 node1 node2 node2", "openmpi")


@pytest.mark.parametrize("names", ["debian", *with_all("none")])
def test_tasks_follow_the_topology_and_names_need_not_resolve(need: Callable[[str], Path], names: str) -> None:
    need("hosts")
    need("slurm")
    topology = "SwitchName=a Nodes=node2\nSwitchName=b Nodes=node1\nSwitchName=top Switches=a,b\n"
    with SlurmCluster(2, names=names, topology=topology, subnet="10.79.3") as cluster:
        placed = cluster.run(["srun", "--label", "-N2", "--ntasks-per-node=2", "hostname"])
        hosts = " ".join(line.split()[-1] for line in sorted(placed.output.splitlines()))
        assert hosts in ("node1 node1 node2 node2", "node2 node2 node1 node1")  # up to Slurm 25.11, since 26.05
        assert_step(cluster.run(["sh", "-c", step("tree", "-N2 --ntasks-per-node=2")]), "tree", hosts)

"""srun of a real Slurm: right ranks, one loss, and one process with a note wherever no launcher started it."""
from __future__ import annotations

import os
import pty
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import MINIMAL, RANK_PROGRAM, ROOT, Lab, Result

pytest_plugins = ["tests.cluster.slurm_fixture"]

RANK = [sys.executable, str(RANK_PROGRAM), "--join"]
FAULTY = [sys.executable, str(RANK_PROGRAM), "--torch"]
EXPLAIN = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "utils.launchers"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# With `srun --label` a line starts with the task number: Slurm's own word for the rank.
LINE = re.compile(r"^(\d+): rank (\d+) of (\d+), local (\d+) of (\d+), on (\S+), by slurm, rank 0 at (\S+)$",
                  re.MULTILINE)
SHAPES = {
    "2x2": (["-N2", "--ntasks-per-node=2"], "node1 node1 node2 node2"),
    "4x1": (["-N4", "--ntasks-per-node=1"], "node1 node2 node3 node4"),
    "2+1": (["-N2", "-n3", "-m", "block"], "node1 node1 node2"),
    "3+1": (["-N2", "-n4", "-m", "block"], "node1 node1 node1 node2"),
    "cyclic": (["-N2", "--ntasks-per-node=2", "-m", "cyclic"], "node1 node2 node1 node2"),
    "plane": (["-N2", "-n8", "-m", "plane=2"], "node1 node1 node2 node2 node1 node1 node2 node2"),
    "one node": (["-N1", "-n3"], "node1 node1 node1"),
    "pmi2": (["--mpi=pmi2", "-N2", "--ntasks-per-node=2"], "node1 node1 node2 node2"),
    "pmix": (["--mpi=pmix", "-N2", "--ntasks-per-node=2"], "node1 node1 node2 node2"),
    "none": (["--mpi=none", "-N2", "--ntasks-per-node=2"], "node1 node1 node2 node2"),
}


def words(command: Sequence[str]) -> str:
    return shlex.join(command)


def batch(slurm: SlurmCluster, options: Sequence[str], *lines: str) -> Result:
    """Submit a script with these lines and wait until it has ended with status 0."""
    job_id = slurm.sbatch(*options, script="\n".join(["#!/bin/bash", *lines, ""]))
    job = slurm.wait(job_id)
    output = slurm.output(job_id)
    assert job["JobState"] == "COMPLETED", f"{job}\n{output}"
    return Result(0, output)


def hosts_by_rank(output: str) -> list[str]:
    """The host of each rank, after checking that what a rank says of itself is what Slurm says of it."""
    found = sorted((tuple(map(int, line[:5])), *line[5:]) for line in LINE.findall(output))
    hosts = [host for _, host, _ in found]
    for position, ((task, rank, size, local_rank, local_size), host, _) in enumerate(found):
        assert (task, rank, size) == (position, position, len(found)), output
        assert local_rank == hosts[:position].count(host), output
        assert local_size == hosts.count(host), output
    assert len({address for _, _, address in found}) == 1, output
    return hosts


def same_loss(lab: Lab, done: Result, ranks: int, hosts: int, launcher: str = "slurm") -> None:
    assert done.status == 0, done.output
    assert f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)} by {launcher}" in done.output, done.output
    assert done.line("final loss:") == lab.minimal_loss(ranks)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_task_is_the_rank_that_slurm_says(slurm: SlurmCluster, shape: str) -> None:
    options, hosts = SHAPES[shape]
    done = slurm.run(["srun", "--label", *options, *RANK])
    assert done.status == 0, done.output
    assert hosts_by_rank(done.output) == hosts.split(), done.output


def test_the_same_in_a_batch_script(slurm: SlurmCluster) -> None:
    done = batch(slurm, ["-N2", "-n3"], f"srun --label -m block {words(RANK)}", f"srun --label -m cyclic {words(RANK)}")
    halves = done.output.split("rank 0 of 3")
    assert len(halves) == 3, done.output
    assert len(LINE.findall(done.output)) == 6, done.output


def test_rank_0_may_be_on_any_node(slurm: SlurmCluster, lab: Lab) -> None:
    hostfile = slurm.work / "hostfile"
    hostfile.write_text("node2\nnode1\nnode1\nnode2\n")
    srun = ["srun", "-n4", "-m", "arbitrary"]  # newer Slurms refuse -N beside it
    done = slurm.run([*srun, "--label", *RANK], env={"SLURM_HOSTFILE": str(hostfile)})
    assert hosts_by_rank(done.output) == ["node2", "node1", "node1", "node2"], done.output
    same_loss(lab, slurm.run([*srun, "--mpi=pmi2", *MINIMAL], env={"SLURM_HOSTFILE": str(hostfile)}), 4, 2)


def test_same_loss_with_uneven_nodes(slurm: SlurmCluster, lab: Lab) -> None:
    same_loss(lab, slurm.run(["srun", *SHAPES["2+1"][0], *MINIMAL]), 3, 2)


def test_a_step_on_one_node_of_a_larger_job(slurm: SlurmCluster) -> None:
    done = batch(slurm, ["-N3", "--ntasks-per-node=2"], f"srun --label -N1 -n2 -w node3 {words(RANK)}")
    assert hosts_by_rank(done.output) == ["node3", "node3"], done.output


def test_two_steps_of_one_job_at_the_same_moment(slurm: SlurmCluster, lab: Lab) -> None:
    step = f"srun --overlap -N2 -n2 {words(MINIMAL)}"
    batch(slurm, ["-N2", "--ntasks-per-node=2"], f"{step} > one 2>&1 & first=$!", f"{step} > two 2>&1",
          "second=$?; wait $first && exit $second")
    for name in ("one", "two"):
        same_loss(lab, Result(0, (slurm.work / name).read_text()), 2, 2)


# Three components whose nodes are not in the order of their names: rank 0's node is not the first of the node list.
COMPONENTS = ["-N1", "-n1", "-w", "node4", ":", "-N1", "-n2", "-w", "node3", ":", "-N2", "-n2", "-w", "node[1-2]"]


@pytest.mark.parametrize("groups, hosts", [("0-2", "node4 node3 node3 node1 node2"), ("1,2", "node3 node3 node1 node2"),
                                           ("0,2", "node4 node1 node2"), ("1", "node3 node3")])
def test_components_of_a_heterogeneous_job_are_one_launch(slurm: SlurmCluster, groups: str, hosts: str) -> None:
    done = batch(slurm, COMPONENTS, f"srun --label --het-group={groups} {words(RANK)}")
    assert hosts_by_rank(done.output) == hosts.split(), done.output


def test_components_with_a_colon_are_one_launch(slurm: SlurmCluster) -> None:
    done = batch(slurm, COMPONENTS, f"srun --label --het-group=0 {words(RANK)} : --het-group=2 {words(RANK)}")
    assert hosts_by_rank(done.output) == ["node4", "node1", "node2"], done.output
    done = slurm.run(["srun", "--label", "-N1", "-n1", "-w", "node2", *RANK, ":", "-N1", "-n2", "-w", "node1", *RANK])
    assert hosts_by_rank(done.output) == ["node2", "node1", "node1"], done.output


def test_same_loss_in_a_heterogeneous_job(slurm: SlurmCluster, lab: Lab) -> None:
    options = ["-N1", "-n1", "-w", "node2", ":", "-N1", "-n2", "-w", "node1"]
    same_loss(lab, batch(slurm, options, f"srun --het-group=0,1 {words(MINIMAL)}"), 3, 2)


def test_torchrun_under_srun(slurm: SlurmCluster, lab: Lab) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500",
             "--rdzv-id=7", *MINIMAL[1:]]
    done = batch(slurm, ["-N2", "--ntasks-per-node=1"], f"srun {words(agent)}")
    same_loss(lab, done, 4, 2, "torchrun")


def test_mpiexec_in_a_batch_script(slurm: SlurmCluster, lab: Lab, need: Callable[[str], Path]) -> None:
    mpiexec = [str(need("mpich")), "-n", "4", "-ppn", "2"]
    done = batch(slurm, ["-N2", "--ntasks-per-node=2"], words([*mpiexec, *MINIMAL]))
    same_loss(lab, done, 4, 2, "mpich")


def test_mpiexec_started_by_srun(slurm: SlurmCluster, need: Callable[[str], Path]) -> None:
    mpiexec = [str(need("mpich")), "-launcher", "fork", "-n", "2"]
    done = slurm.run(["srun", "-N1", "-n1", "--mpi=none", *mpiexec, *RANK])
    assert done.status == 0, done.output
    assert "rank 0 of 2" in done.output and "rank 1 of 2" in done.output
    assert done.output.count("by mpich") == 2


def test_the_choice_is_explained_by_the_daemon_that_started_the_process(slurm: SlurmCluster) -> None:
    done = batch(slurm, ["-N2", "--ntasks-per-node=2"], words(EXPLAIN), f"srun -N1 -n1 {words(EXPLAIN)}")
    shell, task = re.findall(r"^launcher +(.*)$", done.output, re.MULTILINE)
    assert re.fullmatch(r"single: .*: slurmstepd: \[\d+\.batch\]", shell), done.output
    assert re.fullmatch(r"slurm: .*: slurmstepd: \[\d+\.0\]", task), done.output


# Where no launcher started the process -------------------------------------------------------------------------------

def test_python_in_a_batch_script_is_one_process(slurm: SlurmCluster) -> None:
    done = batch(slurm, ["-N2", "--ntasks-per-node=2"], words(MINIMAL))
    assert "1 rank on 1 host by single" in done.output
    assert "holds 4 tasks on 2 nodes, but no launcher started this process" in done.output


def test_python_in_a_batch_script_submitted_by_a_rank_is_one_process(slurm: SlurmCluster) -> None:
    """The variables of the step that submitted it are still there."""
    submit = f"sbatch --wait --output=inner -N1 -n2 --wrap {shlex.quote(words(RANK))}"
    done = slurm.run(["srun", "-N1", "-n2", "bash", "-c", f"test $SLURM_PROCID = 1 || {submit}"])
    assert done.status == 0, done.output
    assert "rank 0 of 1, local 0 of 1, on node1, by single" in (slurm.work / "inner").read_text()


def test_python_below_salloc_is_one_process(slurm: SlurmCluster) -> None:
    done = slurm.run(["salloc", "-N2", "--ntasks-per-node=2", *RANK])
    assert "rank 0 of 1" in done.output and "by single" in done.output
    assert "holds 4 tasks on 2 nodes" in done.output


@pytest.mark.parametrize("options", [["-N2", "--ntasks-per-node=2"], ["-N2"]], ids=" ".join)
def test_python_in_an_interactive_step_is_one_process(slurm: SlurmCluster, options: list[str]) -> None:
    done = slurm.run(["salloc", *options, "srun", "--interactive", "bash", "-c", f"{words(RANK)}; true"])
    assert "rank 0 of 1" in done.output and "by single" in done.output
    assert "2 nodes, but no launcher started this process" in done.output


def on_a_terminal(slurm: SlurmCluster, command: Sequence[str], *typed: str, env: dict[str, str] | None = None) -> str:
    """What appears on the terminal when these lines are typed into `command`."""
    ours, its = pty.openpty()
    process = slurm.start(["setsid", "--ctty", "--wait", *command], env=env, stdin=its, stdout=its, stderr=its)
    os.close(its)
    seen = b""
    with killed_at_end(process):
        os.write(ours, "".join(f"{line}\n" for line in [*typed, "exit"]).encode())
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the last program has closed the terminal
                break
            if not read:
                break
            seen += read
        process.wait(30)
    os.close(ours)
    return seen.decode(errors="replace").replace("\r\n", "\n")


def test_python_in_the_shell_that_salloc_opens_on_a_node_is_one_process(slurm: SlurmCluster) -> None:
    """LaunchParameters=use_interactive_step, which only salloc itself reads."""
    conf = slurm.folder / "etc-interactive"
    conf.mkdir()
    for file in (slurm.folder / "etc").iterdir():
        (conf / file.name).write_text(file.read_text())
    with (conf / "slurm.conf").open("a") as text:
        text.write("LaunchParameters=use_interactive_step\n")
    seen = on_a_terminal(slurm, ["salloc", "-N2", "--ntasks-per-node=2"], words(RANK),
                         env={"SLURM_CONF": str(conf / "slurm.conf"), "SHELL": "/bin/bash"})
    assert "rank 0 of 1, local 0 of 1, on node1, by single" in seen, seen
    assert "holds 4 tasks on 2 nodes" in seen


@pytest.mark.parametrize("options, note", [
    (["-N1", "-n1"], "holds 2 nodes, but srun --pty started one task"),
    (["-N2", "-n4"], "holds 4 tasks on 2 nodes, but no launcher started this process"),
])
def test_python_in_a_shell_of_srun_pty_is_one_process(slurm: SlurmCluster, options: list[str], note: str) -> None:
    """Of the second step's four shells, a person types into that of rank 0 alone."""
    srun = ["salloc", "-N2", "--ntasks-per-node=2", "srun", *options, "--pty", "bash"]
    seen = on_a_terminal(slurm, srun, words(RANK))
    assert "rank 0 of 1, local 0 of 1, on node1" in seen, seen
    assert note in seen


@pytest.mark.parametrize("shell", [[], ["bash", "-c", '"$@"; true', "bash"]], ids=["directly", "by a script"])
def test_srun_pty_of_python_is_a_launch(slurm: SlurmCluster, shell: list[str]) -> None:
    seen = on_a_terminal(slurm, ["srun", "-N2", "--ntasks-per-node=2", "--pty", *shell, *RANK])
    assert "rank 0 of 4, local 0 of 2, on node1, by slurm" in seen, seen


# When a rank fails ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fault, statuses, cause", [
    ("raise:1", {1}, "ValueError: the loss is not a number"),
    ("kill-training:1", {1, 137}, "died without a message"),
])
def test_a_rank_that_fails_ends_the_step_with_the_cause(slurm: SlurmCluster, fault: str, statuses: set[int],
                                                        cause: str) -> None:
    each = f"{words(FAULTY)}; status=$?; echo rank $SLURM_PROCID ends with $status; exit $status"
    done = slurm.run(["srun", "-N2", "-n3", "bash", "-c", each],
                     env={"FAULT": fault, "FAULT_TIMEOUT": "20"})
    assert done.status in statuses, done.output
    ends = dict(re.findall(r"^rank (\d) ends with (\d+)$", done.output, re.MULTILINE))
    assert sorted(ends) == list("012") and {int(status) for status in ends.values()} == statuses, done.output
    assert cause in done.output, done.output


@pytest.mark.parametrize("fault, cause", [
    ("return:2", r"stops, because rank 2 on node2 left normally after \d+ collectives, and other ranks need it"),
    ("hang:2", r"stops, because rank 2 on node2 \(pid \d+\) did not enter collective \d+, in which .* go_wrong"),
])
def test_a_rank_of_srun_that_leaves_early_or_hangs_is_named(slurm: SlurmCluster, fault: str, cause: str) -> None:
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=2", *FAULTY], env={"FAULT": fault, "FAULT_TIMEOUT": "60"})
    assert done.status != 0
    assert re.search(cause, done.output), done.output
    assert "without a message" not in done.output


# When host names lie -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("names", ["debian", "none"])
def test_host_names_that_do_not_resolve(lab: Lab, need: Callable[[str], Path], names: str) -> None:
    need("slurm")
    with SlurmCluster(2, names=names, subnet="10.79.3") as cluster:
        same_loss(lab, cluster.run(["srun", "-N2", "-n2", *MINIMAL]), 2, 2)

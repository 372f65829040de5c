"""Whatever goes wrong at the start or in the loop ends every rank, soon, with a non-zero status and the cause.

Each fault is seen under an mpiexec, torchrun and srun. What the ranks report of each other without a launcher is in
tests/unit/test_rendezvous.py and test_rank_checks.py.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import MEET, RANK_PROGRAM, Lab, Result

pytest_plugins = ["tests.cluster.slurm_fixture"]

FAULTY = [sys.executable, str(RANK_PROGRAM), "--torch"]
Launch = Callable[..., Result]


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Launch:
    """Run ranks with a fault, so many on each of two hosts, under a launcher; the launch must fail."""
    def run(launcher: str, program: list[str], fault: str, ranks: int, timeout: float, **more: str) -> Result:
        env = {"FAULT": fault, "FAULT_TIMEOUT": str(timeout), **more}
        if launcher == "srun":
            slurm: SlurmCluster = request.getfixturevalue("slurm")
            done = slurm.run(["srun", "-N2", f"--ntasks-per-node={ranks}", *program], env=env)
        elif launcher == "torchrun":
            lab: Lab = request.getfixturevalue("lab")
            done = lab.torchrun(program, "--master-addr=h1", "--master-port=29511", ranks=ranks, env=env)
        else:
            lab = request.getfixturevalue("lab")
            done = lab.mpi(launcher, " ".join(["h1"] * ranks + ["h2"] * ranks), program, env=env)
        assert done.status != 0, done.output
        return done
    return run


def by_hand(lab: Lab, hosts: str, fault: str, port: int) -> Result:
    """Start the ranks without a launcher that could end the others."""
    names = hosts.split()
    return lab.together([(host, FAULTY, {
        "RANK": str(rank), "WORLD_SIZE": str(len(names)), "LOCAL_RANK": str(names[:rank].count(host)),
        "LOCAL_WORLD_SIZE": str(names.count(host)), "MASTER_ADDR": "h1", "MASTER_PORT": str(port), "FAULT": fault})
        for rank, host in enumerate(names)])


# At the start ---------------------------------------------------------------------------------------------------------

def test_what_setup_distributed_refuses_is_reported_by_all_ranks(lab: Lab) -> None:
    """Five refusals, one after the other in the same processes; the last one ends them."""
    done = by_hand(lab, "h1 h1 h2", "refusals", 29600)
    for what, *parts in (("nccl", "backend nccl was requested", "sees no cuda device"),
                         ("version", "differ in kit version", "0.0.1: 1 ranks, the first is rank 1 on h1"),
                         ("shared GPU", "use the same GPU", "GPU-5f3c", "rank 1 (local rank 1)"),
                         ("loopback", "GLOO_SOCKET_IFNAME=lo, the loopback interface")):
        lines = [line for line in done.output.splitlines() if line.startswith(f"{what}: ")]
        assert len(lines) == 3 and all(part in line for part in parts for line in lines), done.output

    assert done.status == 1 and "Traceback" not in done.output, done.output
    assert done.output.count("LaunchError: rank 1 on h1") == done.output.count("LaunchError: ") == 1, done.output
    assert "GLOO_SOCKET_IFNAME=ib7, but h1 has no interface ib7" in done.output
    assert done.output.count("this rank does not start. Rank 0 reports the cause") == 2


def test_a_rank_that_dies_after_the_exchange_ends_the_others(lab: Lab) -> None:
    done = by_hand(lab, "h1 h1 h2", "kill-after-exchange:2", 29610)
    assert done.output.count("died while torch was connecting the ranks") == 2 and "rank 2 on h2" in done.output


@pytest.mark.parametrize(("launcher", "fault", "cause"), [
    *((launcher, "late:2", "1 of 4 ranks did not join: rank 2") for launcher in (
        "mpich5", "openmpi5", "torchrun", "srun")),
    *((launcher, "exit-before:3", "this rank ends before it starts") for launcher in (
        "intel", "openmpi4", "torchrun", "srun")),
    # Some launchers end the other ranks before these can say anything, and report the signal themselves.
    *((launcher, "kill-during:1", r"rank 1 on \w+1|signal:? 9|exit code: 9|killed|SIGKILL") for launcher in (
        "mpich4", "openmpi5", "torchrun", "srun"))])
def test_a_lost_rank_ends_the_start(launch: Launch, launcher: str, fault: str, cause: str) -> None:
    # torch makes starts uneven on a busy machine
    done = launch(launcher, *((FAULTY, fault, 2, 20) if launcher == "torchrun" else (MEET, fault, 2, 6)))
    assert re.search(cause, done.output, re.IGNORECASE) or done.status == 128 + 9, done.output


# In the loop ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("launcher", "rank"), [
    ("mpich5", 0), ("intel", 1), ("openmpi5", 1), ("torchrun", 0), ("srun", 1)])
def test_an_exception_ends_the_launch_with_its_traceback_first(launch: Launch, launcher: str, rank: int) -> None:
    done = launch(launcher, FAULTY, f"raise:{rank}", 1, timeout=100)
    first = done.output.index("Traceback (most recent call last)")
    assert "ValueError: the loss is not a number" in done.output[first:].split("Traceback", 2)[1], done.output
    if launcher == "torchrun":
        root_cause = done.output.partition("Root Cause (first observed failure)")[2]
        assert re.search(rf"traceback : rank {rank} on \S+ failed: ValueError: the loss is not a number", root_cause)
    if launcher == "srun":  # which ends no other rank: that one reports the cause, and ends itself
        assert done.status == 1 and re.search(r"because rank 1 on node2 .*ValueError", done.output), done.output


@pytest.mark.parametrize("launcher", ["by hand", "mpich4", "torchrun", "srun"])
def test_a_killed_rank_ends_the_others(launch: Launch, lab: Lab, launcher: str) -> None:
    if launcher != "by hand":
        done = launch(launcher, FAULTY, "kill-training:1", 1, timeout=60)
    else:
        done = by_hand(lab, "h1 h2", "kill-training:1", 29620)
    if launcher in ("by hand", "srun"):  # the others end any rank that is left before it can say anything
        assert re.search(r"rank 1 on \S+ \(pid \d+\) died without a message", done.output), done.output


@pytest.mark.parametrize(("launcher", "leaving", "without"), [
    ("mpich5", "close:0", "1"), ("openmpi5", "exit:1", "1"), ("torchrun", "return:1", "1"), ("srun", "return:1", "")])
def test_a_rank_that_leaves_early_is_named_with_its_host(launch: Launch, launcher: str, leaving: str,
                                                         without: str) -> None:
    done = launch(launcher, FAULTY, leaving, 1, timeout=60, FAULT_WITHOUT_WITH=without)
    rank = int(leaving[-1])
    cause = (rf"stops, because rank {rank} on \w+{1 + rank} (left normally|ended its program .*) after \d+ "
             "collectives, and other ranks need it for more. The ranks have uneven work")
    assert re.search(cause, done.output), done.output
    assert "without a message" not in done.output and "Traceback" not in done.output.split("elastic", 1)[0], done.output


@pytest.mark.parametrize(("launcher", "rank"), [("openmpi5", 3), ("torchrun", 2), ("srun", 2)])
def test_a_rank_that_hangs_is_named_with_its_host_and_place(launch: Launch, launcher: str, rank: int) -> None:
    done = launch(launcher, FAULTY, f"hang:{rank}", 2, timeout=60)
    cause = (rf"stops, because rank {rank} on \w+{1 + rank // 2} \(pid \d+\) did not enter collective \d+, in which "
             r"the other ranks wait. It is at \S+rank_program.py, line \d+, in go_wrong")
    assert re.search(cause, done.output), done.output
    assert not re.search(r"rank \d on \w+\d failed", done.output), done.output

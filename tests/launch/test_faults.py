"""Whatever goes wrong at the start or in the loop ends every rank, soon, with a non-zero status and the cause.

What the ranks report of each other without a launcher is in tests/unit/test_rendezvous.py and test_rank_checks.py.
"""
from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.hosts import CLEAN_ENV
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import LAUNCH, MEET, ROOT, SHOW, TORCHRUN, Lab
from tests.matrix import with_all

Launch = Callable[..., str]


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Launch:
    """Run ranks with a fault, so many on each of two hosts, under a launcher; return the output of their failure."""
    def run(launcher: str, program: list[str], fault: str, ranks: int = 1, timeout: int = 60) -> str:
        program = [*program, "--fault", fault, "--timeout", str(timeout)]
        begin = time.monotonic()
        if launcher == "srun":
            slurm: SlurmCluster = request.getfixturevalue("slurm")
            done = slurm.run(["srun", "-N2", f"--ntasks-per-node={ranks}", *program])
        else:
            lab: Lab = request.getfixturevalue("lab")
            done = lab.mpi(launcher, " ".join(["h1"] * ranks + ["h2"] * ranks), program)
        assert done.status != 0, done.output
        request.node.user_properties.append(("seconds from the start to the end", time.monotonic() - begin))
        return f"{done.output}\nexit status {done.status}"
    return run


# Some launchers end the other ranks before these can say anything, and report the signal themselves.
KILLED = r"rank 1 on \w+1|signal:? 9|exit code: 9|killed|SIGKILL|status 137"


@pytest.mark.parametrize(("launcher", "fault", "cause"), [
    ("mpich5", "late:2", "1 of 4 ranks did not join: rank 2"),
    ("srun", "kill-during:1", KILLED), *with_all(
        ("srun", "late:2", "1 of 4 ranks did not join: rank 2"), ("mpich4", "kill-during:1", KILLED),
        ("openmpi5", "kill-during:1", KILLED))])
def test_a_lost_rank_ends_the_start(launch: Launch, launcher: str, fault: str, cause: str) -> None:
    output = launch(launcher, MEET, fault, ranks=2, timeout=6)
    assert re.search(cause, output, re.IGNORECASE), output


@pytest.mark.parametrize(("fault", "cause"), [
    ("interface:1", "GLOO_SOCKET_IFNAME=ib7, but node2 has no interface ib7"),
    *with_all(("nccl:1", "backend nccl was requested"))])
def test_a_rank_that_cannot_start_is_an_error_without_a_traceback(launch: Launch, fault: str, cause: str) -> None:
    output = launch("srun", SHOW, fault)
    assert output.count("LaunchError: rank 1 on node2") == output.count("LaunchError: ") == 1, output
    assert cause in output and "Traceback" not in output, output


@pytest.mark.parametrize("launcher", ["srun", *with_all("mpich5", "openmpi5")])
def test_an_exception_ends_the_launch_with_its_traceback_first(launch: Launch, launcher: str) -> None:
    output = launch(launcher, SHOW, "raise:1")
    first = output.index("Traceback (most recent call last)")
    assert "ValueError: the loss is not a number" in output[first:].split("Traceback", 2)[1], output
    if launcher == "srun":  # which ends no other rank: that one ends itself, and says nothing
        assert len(re.findall(r"^rank \d on .*", output, re.MULTILINE)) == 1, output
        assert re.search(r"^rank 1 on node2 failed: ValueError", output, re.MULTILINE), output


@pytest.mark.matrix
def test_an_exception_is_the_root_cause_of_torchrun(lab: Lab) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--master-addr=h1", "--master-port=29511"]
    done = lab.together([(f"h{node + 1}", [*agent, f"--node-rank={node}", *SHOW[1:], "--fault", "raise:0"], {})
                         for node in range(2)])
    root_cause = done.output.partition("Root Cause (first observed failure)")[2]
    assert re.search(r"traceback : rank 0 on h1 failed: ValueError: the loss is not a number", root_cause), done.output


UNEVEN = (r"rank \d on \w+\d called \w+\(\) at .*, and rank {0} on \w+{1} (left normally|left by sys.exit.*|ended its "
          r"program .*) after \d+ collectives. .*, or the ranks run different numbers of steps")
HUNG = (r"rank 1 on \w+2 \(pid \d+\) did not enter collective \d+, in which rank 0 waits. "
        r"It is at [^,]+rank_program.py, line \d+, in go_wrong")


@pytest.mark.parametrize(("launcher", "fault", "cause"), [
    ("srun", "kill-after-exchange:1", "rank 1 on node2 .*died while torch was connecting the ranks"),
    ("srun", "kill-training:1", r"rank 1 on node2 \(pid \d+\) ended without a report"),
    ("mpich5", "close:0", UNEVEN.format(0, 1)), ("openmpi5", "hang:1", HUNG), *with_all(
        ("openmpi5", "exit:1", UNEVEN.format(1, 2)), ("srun", "return:1", UNEVEN.format(1, 2)),
        ("srun", "hang:1", HUNG))])
def test_a_rank_that_is_lost_later_is_named(launch: Launch, launcher: str, fault: str, cause: str) -> None:
    output = launch(launcher, SHOW, fault)
    assert re.search(cause, output), output
    if "kill" not in fault:
        assert "without a report" not in output and "Traceback" not in output, output
        assert not re.search(r"rank \d on \w+\d failed", output), output


# Rank 1 is alone on its host and keeps Python's lock. Under launch.py, which ends them, it has workers that wait for
# ever and hold the output open.
LOCKED = f"""\
import ctypes, os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from torch.utils.data import DataLoader
from utils import setup_distributed
class Blocked(list):
    def __getitem__(self, index):
        threading.Event().wait()
with setup_distributed("gloo", hang_timeout=4) as job:
    for step in range(100):
        if step == 20 and job.rank == 1:
            loader = iter(DataLoader(Blocked(range(4)), num_workers=2)) if "DDPKIT_LAUNCH" in os.environ else None
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        job.all_reduce_mean(1.0)
"""


@pytest.mark.matrix
def test_hung_rank_and_its_workers_end_under_every_launcher(lab: Lab) -> None:
    """All launchers at the same time: the ranks mostly wait. A run ends when nothing holds its output open."""
    program, node_file = lab.hosts.folder / "locked.py", lab.hosts.folder / "nodes"
    program.write_text(LOCKED)
    node_file.write_text("h1\nh2\n")
    train = [sys.executable, str(program)]
    job = {"PATH": f"{lab.ssh.parent}:{CLEAN_ENV['PATH']}", "PBS_JOBID": "1.lab", "PBS_NODEFILE": str(node_file)}
    by_hand = [(f"h{rank + 1}", train, {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "h1",
                                        "MASTER_PORT": "29433"}) for rank in range(2)]
    agent = [*TORCHRUN, "--nnodes=2", "--master-addr=h1", "--master-port=29434"]
    mpis = {"mpich5": "h1 h2", "openmpi5": "h2 h1", "intel": "h2 h3"}
    runs = {name: functools.partial(lab.mpi, name, hosts, train) for name, hosts in mpis.items()} | {
        "by hand": functools.partial(lab.together, by_hand),
        "torchrun": functools.partial(lab.together, [
            (f"h{node + 1}", [*agent, f"--node-rank={node}", str(program)], {}) for node in range(2)]),
        "launch.py": functools.partial(lab.run, "h1", [*LAUNCH, str(program)], env=job)}
    with ThreadPoolExecutor() as pool:
        for name, done in zip(runs, pool.map(lambda run: run(seconds=100), runs.values()), strict=True):
            cause = re.search(r"rank 1 on h\d \(pid \d+\) does not respond: .*Rank 0 waits in all_reduce", done.output)
            place = re.search(r"^Timeout \(.*\n(.*\n)*?.*locked.py\", line 14 in <module>", done.output, re.MULTILINE)
            # Launchers end it before faulthandler does.
            assert done.status != 0 and cause and (place or name != "by hand"), f"{name}:\n{done.output}"

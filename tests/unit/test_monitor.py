"""What the ranks report to each other after the start, without torch: pairs of connected sockets, one monitor each."""
from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from utils.monitor import Monitor

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[[int], list[Monitor]]


@pytest.fixture
def ranks() -> Iterator[Make]:
    """Make monitors for a launch, all of them started."""
    made: list[Monitor] = []

    def make(size: int, *, start: bool = True) -> list[Monitor]:
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        made.append(Monitor({ours: (rank, f"h{rank}") for rank, (ours, _) in pairs.items()}, rank=0, host="h0"))
        made.extend(Monitor({theirs: (0, "h0")}, rank=rank) for rank, (_, theirs) in pairs.items())
        for monitor in made if start else []:
            monitor.started()
        return made

    yield make
    for monitor in made:
        monitor.leave("")


def end(monitor: Monitor) -> None:
    """End the connections as the kernel does when a process is killed."""
    for connection in monitor.connections:
        connection.shutdown(socket.SHUT_RDWR)


def all_query(monitors: list[Monitor], kind: str) -> set[str]:
    causes: list[str] = []
    threads = [threading.Thread(target=lambda one=one: causes.append(one.query(kind)))  # type: ignore[misc]
               for one in monitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(causes) == len(monitors)
    return set(causes)


def test_the_first_failure_is_the_cause_on_all_ranks(ranks: Make) -> None:
    zero, one, two = ranks(3)
    assert one.report("rank 1 failed") == "rank 1 failed"
    assert zero.report("rank 0 failed") == two.report("rank 2 failed") == "rank 1 failed"
    assert all_query([zero, one, two], "lost") == {"rank 1 failed"}


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_rank_that_left_is_the_cause_of_a_lost_connection(ranks: Make, left: int) -> None:
    monitors = ranks(3)
    monitors[left].leave(f"rank {left} left normally")
    assert all_query([one for one in monitors if one is not monitors[left]], "lost") == {f"rank {left} left normally"}


def test_a_rank_that_left_normally_hides_no_failure(ranks: Make) -> None:
    zero, one, two = ranks(3)
    zero.leave("rank 0 left normally")
    one.leave("rank 1 left normally")
    assert two.report("rank 2 failed") == "rank 2 failed"


def test_a_victim_that_leaves_is_not_the_cause(ranks: Make) -> None:
    zero, one, two = ranks(3)
    two.report("rank 2 failed")
    one.leave("")
    two.leave("rank 2 failed")
    assert zero.query("lost") == "rank 2 failed"


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_was_killed_is_named_with_its_host(ranks: Make, dead: int) -> None:
    monitors = ranks(3)
    end(monitors[dead])
    causes = all_query([one for one in monitors if one is not monitors[dead]], "lost")
    assert len(causes) == 1 and f"rank {dead} on h{dead} died without a message" in causes.pop()


def test_the_rank_behind_is_named_with_its_place_in_the_program(ranks: Make) -> None:
    monitors = ranks(4)
    for monitor, entered in zip(monitors, (12, 12, 11, 12), strict=True):
        monitor.position = lambda entered=entered: entered  # type: ignore[misc]
    causes = all_query([monitors[0], monitors[3]], "timeout")
    assert len(causes) == 1
    cause = causes.pop()
    assert "rank 2 on h2 did not enter collective 12, in which the other ranks wait. It is at " in cause
    assert "rank 1" not in cause and "rank 3" not in cause


def test_no_rank_is_named_when_all_have_entered(ranks: Make) -> None:
    monitors = ranks(3)
    for monitor in monitors:
        monitor.position = lambda: 7
    cause = monitors[1].query("timeout")
    assert "all ranks have entered collective 7" in cause and "rank 0" not in cause


def test_a_rank_that_does_not_answer_is_named(ranks: Make) -> None:
    """Such as a process that is stopped (SIGSTOP)."""
    monitors = ranks(3)
    released = threading.Event()
    for monitor in monitors:
        monitor.position = lambda: 7

    def stopped() -> int:
        released.wait(20)
        return 7

    monitors[1].position = stopped
    try:
        assert "rank 1 on h1 does not answer" in monitors[2].query("timeout")
    finally:
        released.set()


def test_nothing_is_said_when_nothing_is_known(ranks: Make) -> None:
    assert ranks(2)[1].query("lost") == ""


def test_a_rank_that_ends_during_the_start_is_named_on_the_others(ranks: Callable[..., list[Monitor]]) -> None:
    zero, one, two = ranks(3, start=False)
    one.cause(0)  # else its monitor would end this process, as it does a rank's
    waiting = threading.Thread(target=lambda: [two.cause(10), zero.cause(10)])
    waiting.start()
    end(one)
    for monitor in (zero, two):
        assert "rank 1 on h1 died while torch was connecting the ranks" in monitor.cause(5)
    waiting.join(10)


def test_leaving_ends_the_thread(ranks: Make) -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "rank monitor"}
    for monitor in ranks(3):
        monitor.leave("")
    limit = time.monotonic() + 10
    while {thread for thread in threading.enumerate() if thread.name == "rank monitor"} - before:
        assert time.monotonic() < limit
        time.sleep(0.01)


PROGRAM = """
import socket, sys, time
from utils import monitor
monitor._END_SECONDS = 0.2
ours, theirs = socket.socketpair()
zero = monitor.Monitor({ours: (1, "h1")}, rank=0, host="h0")
one = monitor.Monitor({theirs: (0, "h0")}, rank=1)
zero.started(), one.started()
zero.position, one.position = (lambda: 3, lambda: 4) if sys.argv[1] == "0" else (lambda: 4, lambda: 3)
waiting = one if sys.argv[1] == "0" else zero
print(waiting.query("timeout"), flush=True)
waiting.leave("")
time.sleep(60)
"""


@pytest.mark.parametrize("behind", [0, 1])
def test_a_rank_that_hangs_is_ended_after_all_others(behind: int) -> None:
    """Launchers that end no rank by themselves would wait for it for ever."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(behind)], cwd=ROOT, capture_output=True, text=True,
                          timeout=50)
    assert done.returncode == 1
    assert f"rank {behind} on h{behind} did not enter collective 4" in done.stdout
    assert f"rank {behind} on " in done.stderr and "is ended, because all other ranks have stopped" in done.stderr

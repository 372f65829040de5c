"""What the ranks report to each other after the start, over socket pairs and without torch."""
from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from utils.connection import Connection
from utils.rendezvous.monitor import Monitor, Peer

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """Monitors of one launch in this process."""

    def __init__(self) -> None:
        self.monitors: list[Monitor] = []
        self._sockets: dict[int, list[socket.socket]] = {}

    def make(self, size: int, *, start: bool = True) -> list[Monitor]:
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        ends = {Connection(zero): Peer(rank, f"h{rank}") for rank, (zero, _) in pairs.items()}
        self._sockets = {0: [zero for zero, _ in pairs.values()],
                         **{rank: [other] for rank, (_, other) in pairs.items()}}
        self.monitors = [Monitor(ends, rank=0, host="h0")]
        self.monitors += [Monitor({Connection(other): Peer(0, "h0")}, rank=rank, host=f"h{rank}")
                          for rank, (_, other) in pairs.items()]
        for monitor in self.monitors if start else []:
            monitor.started()
        return self.monitors

    def kill(self, rank: int) -> None:
        """End the rank's connections as the kernel does when a process is killed."""
        for connection in self._sockets[rank]:
            connection.shutdown(socket.SHUT_RDWR)

    def causes(self, kind: str, *, without: int | None = None) -> set[str]:
        """What find_cause() returns on all ranks at the same time."""
        asking = [one for rank, one in enumerate(self.monitors) if rank != without]
        with ThreadPoolExecutor(len(asking)) as pool:
            return set(pool.map(lambda one: one.find_cause(kind), asking))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    launch = Ranks()
    yield launch
    for monitor in launch.monitors:
        monitor.leave("")


def test_first_failure_is_the_cause_on_all_ranks(ranks: Ranks) -> None:
    zero, one, two = ranks.make(3)
    assert one.report_failure("rank 1 failed") == "rank 1 failed"
    assert zero.report_failure("rank 0 failed") == "rank 1 failed"
    assert two.report_failure("rank 2 failed") == "rank 1 failed"
    assert ranks.causes("lost") == {"rank 1 failed"}


@pytest.mark.parametrize("left", [0, 1, 2])
def test_rank_that_left_is_the_cause_of_a_lost_connection(ranks: Ranks, left: int) -> None:
    ranks.make(3)[left].leave(f"rank {left} left normally")
    assert ranks.causes("lost", without=left) == {f"rank {left} left normally"}


def test_rank_that_left_normally_hides_no_failure(ranks: Ranks) -> None:
    zero, one, two = ranks.make(3)
    zero.leave("rank 0 left normally")
    one.leave("rank 1 left normally")
    assert two.report_failure("rank 2 failed") == "rank 2 failed"


def test_rank_that_another_stopped_is_not_the_cause(ranks: Ranks) -> None:
    zero, one, two = ranks.make(3)
    two.report_failure("rank 2 failed")
    one.leave("")
    two.leave("rank 2 failed")
    assert zero.find_cause("lost") == "rank 2 failed"


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_killed_rank_is_named_with_its_host(ranks: Ranks, dead: int) -> None:
    ranks.make(3)
    ranks.kill(dead)
    (cause,) = ranks.causes("lost", without=dead)
    assert f"rank {dead} on h{dead} died without a message" in cause


def test_unknown_cause_is_empty(ranks: Ranks) -> None:
    assert ranks.make(2)[1].find_cause("lost") == ""


# Collectives that time out -----------------------------------------------------------------------

def test_rank_behind_is_named_with_its_location(ranks: Ranks) -> None:
    for monitor, entered in zip(ranks.make(4), (12, 12, 11, 12), strict=True):
        monitor.entered_collectives = lambda entered=entered: entered  # type: ignore[misc]
    (cause,) = ranks.causes("timeout", without=2)
    assert ("rank 2 on h2 did not enter collective 12, in which the other ranks wait. It is at "
            in cause)
    assert "rank 1" not in cause and "rank 3" not in cause


def test_no_rank_is_named_when_all_have_entered(ranks: Ranks) -> None:
    for monitor in ranks.make(3):
        monitor.entered_collectives = lambda: 7
    cause = ranks.monitors[1].find_cause("timeout")
    assert "all ranks have entered collective 7" in cause and "rank 0" not in cause


def test_rank_that_does_not_respond_is_named(ranks: Ranks) -> None:
    """Such as a process that is stopped (SIGSTOP)."""
    resumed = threading.Event()
    for monitor in ranks.make(3):
        monitor.entered_collectives = lambda: 7
    ranks.monitors[1].entered_collectives = lambda: 7 if resumed.wait(20) else None
    try:
        assert "rank 1 on h1 does not respond" in ranks.monitors[2].find_cause("timeout")
    finally:
        resumed.set()


HANG = """
import socket, sys, time
from utils.connection import Connection
from utils.rendezvous.monitor import Monitor, Peer
behind = int(sys.argv[1])
pair = [Connection(end) for end in socket.socketpair()]
ranks = [Monitor({pair[rank]: Peer(1 - rank, f"h{1 - rank}")}, rank=rank, host=f"h{rank}",
                 hung_rank_timeout=0.2) for rank in range(2)]
for rank, monitor in enumerate(ranks):
    monitor.started()
    monitor.entered_collectives = lambda rank=rank: 3 if rank == behind else 4
print(ranks[1 - behind].find_cause("timeout"), flush=True)
ranks[1 - behind].leave("")
time.sleep(60)
"""


@pytest.mark.parametrize("behind", [0, 1])
def test_hung_rank_is_ended_after_all_others(behind: int) -> None:
    """Launchers that end no rank by themselves would wait for it for ever."""
    done = subprocess.run([sys.executable, "-c", HANG, str(behind)], cwd=ROOT, capture_output=True,
                          text=True, timeout=50)
    assert done.returncode == 1
    assert f"rank {behind} on h{behind} did not enter collective 4" in done.stdout
    assert f"rank {behind} on " in done.stderr
    assert "is ended, because all other ranks have stopped" in done.stderr


# Start and end -----------------------------------------------------------------------------------

def test_rank_that_ends_during_the_start_is_named_on_the_others(ranks: Ranks) -> None:
    zero, one, two = ranks.make(3, start=False)
    one.start_failure(0)  # else its monitor would end this process, as it does a rank's
    with ThreadPoolExecutor(2) as pool:
        causes = pool.map(lambda monitor: monitor.start_failure(10), (zero, two))
        ranks.kill(1)
    for cause in causes:
        assert "rank 1 on h1 died while torch was connecting the ranks" in cause


def test_leaving_ends_the_thread(ranks: Ranks) -> None:
    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "rank monitor"}

    before = running()
    for monitor in ranks.make(3):
        monitor.leave("")
    limit = time.monotonic() + 10
    while running() - before:
        assert time.monotonic() < limit
        time.sleep(0.01)

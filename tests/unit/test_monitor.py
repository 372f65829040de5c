"""What the ranks report to each other after the start, over socket pairs and without torch."""
from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.programs import python
from utils.connection import Connection
from utils.rendezvous.monitor import Monitor, Peer


class Ranks:
    """The monitors of three ranks in this process."""

    def __init__(self) -> None:
        self.sockets = {rank: socket.socketpair() for rank in (1, 2)}
        ends = {Connection(zero): Peer(rank, f"h{rank}") for rank, (zero, _) in self.sockets.items()}
        self.monitors = [Monitor(ends, rank=0, host="h0")]
        self.monitors += [Monitor({Connection(other): Peer(0, "h0")}, rank=rank, host=f"h{rank}")
                          for rank, (_, other) in self.sockets.items()]
        for monitor in self.monitors:
            monitor.started()

    def kill(self, rank: int) -> None:
        """End the rank's connections as the kernel does when a process is killed."""
        for zero, other in [self.sockets[rank]] if rank else self.sockets.values():
            (other if rank else zero).shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    launch = Ranks()
    yield launch
    for monitor in launch.monitors:
        monitor.leave("")
    wait_until(lambda: "rank monitor" not in [thread.name for thread in threading.enumerate()], "the threads to end")


def test_first_failure_is_the_cause_on_all_ranks(ranks: Ranks) -> None:
    zero, one, two = ranks.monitors
    assert one.report_failure("rank 1 failed") == "rank 1 failed"
    assert zero.report_failure("rank 0 failed") == "rank 1 failed"
    assert two.report_failure("rank 2 failed") == "rank 1 failed"
    assert {monitor.find_cause("lost") for monitor in ranks.monitors} == {"rank 1 failed"}


def test_rank_that_left_normally_hides_no_failure(ranks: Ranks) -> None:
    zero, one, two = ranks.monitors
    zero.leave("rank 0 left normally")
    one.leave("rank 1 left normally")
    assert two.find_cause("lost") == "rank 0 left normally"
    assert two.report_failure("rank 2 failed") == "rank 2 failed"


def test_rank_that_another_stopped_is_not_the_cause(ranks: Ranks) -> None:
    zero, one, two = ranks.monitors
    two.report_failure("rank 2 failed")
    one.leave("")
    two.leave("rank 2 failed")
    assert zero.find_cause("lost") == "rank 2 failed"


@pytest.mark.parametrize("dead", [0, 2])
def test_killed_rank_is_named_with_its_host(ranks: Ranks, dead: int) -> None:
    ranks.kill(dead)
    for rank in {0, 1, 2} - {dead}:
        assert f"rank {dead} on h{dead} died without a message" in ranks.monitors[rank].find_cause("lost")


def test_unknown_cause_is_empty(ranks: Ranks) -> None:
    assert ranks.monitors[1].find_cause("lost") == ""


@pytest.mark.parametrize(("stopped", "expected"), [
    (False, "all ranks have entered collective 7"),
    (True, "rank 1 on h1 does not respond")])  # as after SIGSTOP
def test_collective_that_all_ranks_have_entered_times_out(ranks: Ranks, stopped: bool, expected: str) -> None:
    resumed = threading.Event()
    for monitor in ranks.monitors:
        monitor.entered_collectives = lambda: 7
    if stopped:
        ranks.monitors[1].entered_collectives = lambda: 7 if resumed.wait(20) else None
    try:
        cause = ranks.monitors[2].find_cause("timeout")
    finally:
        resumed.set()
    assert expected in cause and "rank 0" not in cause


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
    done = python("-c", HANG, str(behind))
    assert done.returncode == 1
    assert f"rank {behind} on h{behind} did not enter collective 4" in done.stdout
    assert "in which the other ranks wait. It is at " in done.stdout
    assert f"rank {behind} on " in done.stderr
    assert "is ended, because all other ranks have stopped" in done.stderr

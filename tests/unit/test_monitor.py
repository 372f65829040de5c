"""What the ranks report to each other after the start, over socket pairs and without torch."""
from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.channels import opened_pair
from tests.unit.notices import served
from utils.channel import Channel, Peer
from utils.launch_protocol import REPORT, Failure, report_first_cause
from utils.monitor.hangs.positions import Collective, Group, user_frame
from utils.monitor.monitor import Monitor

Channels = list[list[Channel]]  # of each rank


@pytest.fixture
def channels() -> Channels:
    (zero_to_one, one), (zero_to_two, two) = opened_pair(), opened_pair()
    return [[zero_to_one, zero_to_two], [one], [two]]


def monitor_of(rank: int, channels: Channels) -> Monitor:
    """The monitor of one of three ranks."""
    peers = [(1, 2), (0,), (0,)][rank]
    connections = {end: Peer(peer, f"h{peer}") for end, peer in zip(channels[rank], peers, strict=True)}
    return Monitor(connections, rank=rank, host=f"h{rank}", hung_rank_timeout=0.2)


@pytest.fixture
def starting(channels: Channels) -> Iterator[list[Monitor]]:
    """The monitors of three ranks in this process."""
    monitors = [monitor_of(rank, channels) for rank in range(3)]
    yield monitors
    for monitor in monitors:
        monitor.leave(None)


@pytest.fixture
def ranks(starting: list[Monitor]) -> list[Monitor]:
    with ThreadPoolExecutor() as pool:
        assert not any(pool.map(Monitor.connected, starting))
    return starting


@pytest.mark.parametrize("last", range(3))
def test_no_rank_goes_on_before_torch_has_connected_all(starting: list[Monitor], last: int) -> None:
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(monitor.connected) for rank, monitor in enumerate(starting) if rank != last]
        assert not wait(others, timeout=0.3).done
        assert starting[last].connected() is None
        assert [other.result(20) for other in others] == [None, None]


@pytest.mark.parametrize("dead", range(3))
def test_rank_that_dies_while_others_wait_for_it_is_the_cause(channels: Channels, dead: int) -> None:
    monitors = [monitor_of(rank, channels) for rank in range(3) if rank != dead]
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(monitor.connected) for monitor in monitors]
        for end in channels[dead]:
            end.socket.shutdown(socket.SHUT_RDWR)
        for other in others:
            assert f"rank {dead} on h{dead} died while torch was connecting the ranks" in other.result(20).text
    for monitor in monitors:
        monitor.leave(None)


def test_rank_that_left_normally_hides_no_failure(ranks: list[Monitor]) -> None:
    zero, one, two = ranks
    left, failed = Failure("rank 0 left normally", "uneven", 0), Failure("rank 2 failed", "exception", 2)
    zero.leave(left)
    one.leave(Failure("rank 1 left normally", "uneven", 1))
    assert two.find_cause("lost") == left
    assert two.report_failure(failed) == failed


def test_rank_that_another_stopped_is_not_the_cause(ranks: list[Monitor]) -> None:
    zero, one, two = ranks
    failed = Failure("rank 2 failed", "exception", 2, "h2")
    two.report_failure(failed)
    one.leave(None)
    two.leave(failed)
    assert zero.find_cause("lost") == failed


@pytest.mark.parametrize("dead", [0, 2])
def test_killed_rank_is_named_with_its_host(ranks: list[Monitor], channels: Channels, dead: int) -> None:
    for end in channels[dead]:
        end.socket.shutdown(socket.SHUT_RDWR)
    for rank in {0, 1, 2} - {dead}:
        assert f"rank {dead} on h{dead} ended without a report. It was killed" in ranks[rank].find_cause("lost").text


@pytest.mark.parametrize(("dead", "reporter"), [(2, 0), (0, 1)])
def test_first_cause_reaches_launch_py(
        ranks: list[Monitor], channels: Channels, dead: int, reporter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in channels[dead]:
        end.socket.shutdown(socket.SHUT_RDWR)
    cause = ranks[reporter].find_cause("lost")
    with served() as launch_py:
        monkeypatch.setenv(REPORT, launch_py.variables[REPORT])
        ranks[reporter].report_to_launcher(cause)
        wait_until(lambda: launch_py.first_cause is not None, "the notice")
        assert launch_py.first_cause == cause == Failure(cause.text, "killed", dead, f"h{dead}")
        report_first_cause(Failure(cause.text, "hang"))  # by a rank that does not know whose it is
        assert launch_py.first_cause == cause
        report_first_cause(Failure("another", "hang"))
        assert launch_py.first_cause == Failure("another", "hang")


@pytest.mark.parametrize(("stopped", "expected"), [
    (False, "all ranks have entered collective 7"),
    (True, "rank 1 on h1 does not respond")])  # as after SIGSTOP
def test_collective_that_all_ranks_have_entered_times_out(ranks: list[Monitor], stopped: bool, expected: str) -> None:
    resumed = threading.Event()
    for monitor in ranks:
        monitor.own.entered_collectives = lambda: 7
    if stopped:
        ranks[1].own.entered_collectives = lambda: 7 if resumed.wait(20) else None
    cause = ranks[2].find_cause("timeout").text
    resumed.set()
    assert expected in cause and "rank 0" not in cause


def test_a_rank_that_has_left_hides_no_late_one(ranks: list[Monitor]) -> None:
    """In a gather, a rank that is not the root sends and goes on."""
    for entered, monitor in zip((2, 2, 1), ranks, strict=True):
        monitor.own.entered_collectives = lambda entered=entered: entered
        monitor.own.read_collectives = lambda locations, entered=entered: ([], {"": Group("0-2", entered)})
    ranks[1].leave(Failure("rank 1 left normally", "uneven", 1))
    assert "rank 2 on h2 did not enter collective 2" in ranks[0].find_cause("timeout").text


@pytest.mark.parametrize("entered", [4, 5])
def test_a_rank_that_left_too_early_ends_those_that_wait(
        entered: int, ranks: list[Monitor], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A collective of NCCL does not raise."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("utils.monitor.decisions.HOST_LOST_SECONDS", 3)
    call = Collective(group="", number=5, operation="all_reduce", sizes="", between_two=False, peer=None, location="",
                      thread=1, pending=True, blocks=True)
    for monitor in ranks:
        monitor.own.read_collectives = lambda locations: ([call], {"": Group("0-2", 5)})
    ranks[1].own.entered_collectives = lambda: entered
    ranks[1].leave(Failure(f"rank 1 left normally after {entered} collectives", "uneven", 1))
    if entered == 4:
        wait_until(lambda: len(ended) == 2, "the end of ranks 0 and 2", seconds=20)
        monkeypatch.setattr("utils.monitor.monitor._REPORT_SECONDS", 0)
        for monitor in ranks:
            monitor.leave(None)
    else:
        time.sleep(4)
        assert not ended
    printed = capfd.readouterr().err
    for line in ("A rank has ended: no collective for 1 s since then\n", "\nrank 1 left normally after 4 "):
        assert (line in printed) == (entered == 4)


def test_rank_0_that_hangs_is_ended_after_all_others(
        ranks: list[Monitor], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Launchers that end no rank by themselves would wait for it for ever."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    for entered, monitor in zip((3, 4, 4), ranks, strict=True):
        monitor.own.entered_collectives = lambda entered=entered: entered
        monitor.own.read_collectives = lambda locations, entered=entered: ([], {"": Group("0-2", entered)})
    cause = ranks[1].find_cause("timeout").text
    assert "rank 0 on h0 did not enter collective 4, in which ranks 1-2 wait. It is at " in cause
    for monitor in ranks[1:]:
        monitor.leave(None)
    assert ended.wait(20) and "rank 0 on h0 did not enter collective 4" in capfd.readouterr().err


@pytest.mark.parametrize("library", [
    os.__file__, pytest.__file__, "/sw/torch/lib/python3.12/site-packages/torch/x.py", "<string>"])
def test_a_position_is_in_the_code_of_the_user(library: str) -> None:
    """torch may be installed elsewhere: on clusters, in a module's folder."""
    frames = [(library, 3, "wait"), ("/home/me/train.py", 7, "main")]
    assert user_frame(frames) == "/home/me/train.py, line 7, in main"
    assert user_frame(frames[:1]) == f"{library}, line 3, in wait"

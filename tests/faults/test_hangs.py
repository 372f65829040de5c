"""Hangs of 8 ranks on 4 hosts, and pauses that are none. `python -m tests.faults.hangs` runs all kinds."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.faults.hangs import HangLab, problem
from utils.monitor.hang import Collective, Group, Position, ProcessState, Work, describe
from utils.monitor.positions import HangWatch, Heartbeat


@pytest.fixture(scope="module")
def hang_lab(need: Callable[[str], Path]) -> Iterator[HangLab]:
    need("hosts")
    with Hosts(4) as hosts:
        yield HangLab(hosts)


@pytest.mark.parametrize(("kind", "limit"), [
    ("skipped-collective", 1.5), ("other-shape", 1.5), ("exited", 1.5), ("stopped", 3.0), ("cut-host", 3.0),
    ("blocked-teardown", 1.5), ("pipeline-async", 4.0), ("thread", 4.0)])
def test_hang_is_explained_and_ends_the_job(hang_lab: HangLab, kind: str, limit: float) -> None:
    result = hang_lab.run(kind, limit)
    assert not problem(kind, result), result.output
    # A host counts as bad if its kernel does not respond, and not because its processes do not.
    assert result.excluded == (["h3"] if kind == "cut-host" else [])


def test_lost_host_ends_the_job_without_hang_timeout(hang_lab: HangLab) -> None:
    """Also on the lost host itself. A cut network or a switched-off host closes no connection."""
    result = hang_lab.run("cut-host", limit=0, seconds=40, lost_seconds=6)
    assert not problem("cut-host", result, limit=0), result.output
    waiting = [status for rank, status in enumerate(result.statuses) if rank != 5]  # which sleeps in no collective
    assert waiting == [1] * 7 and result.excluded == ["h3"], result.output
    assert re.search(r"rank 4 on h3 stops, because rank 0 on h1 .* does not respond to h3", result.output)
    stopped = hang_lab.run("stopped", limit=0, seconds=15, lost_seconds=6)
    assert stopped.statuses == [None] * 8 and "does not respond" not in stopped.output, stopped.output


def test_each_rank_writes_its_stacks_and_collectives(hang_lab: HangLab) -> None:
    hang_lab.run("debugger", limit=1.5)
    files = sorted(hang_lab.hosts.folder.glob("*-debugger/hang-*/rank*.txt"))
    assert [file.name for file in files] == [f"rank{rank}-h{rank // 2 + 1}.txt" for rank in range(8)]
    hung, waiting = files[5].read_text(), files[0].read_text()
    assert "hangs.py" in hung and " in go_wrong" in hung and "all_reduce of [[16]]" in hung
    assert "NOT ENDED, at " in waiting and "NOT ENDED" not in hung


@pytest.mark.parametrize(("kind", "notices"), [("evaluate", 0), ("busy", 1)])
def test_work_on_one_rank_is_no_hang(hang_lab: HangLab, kind: str, notices: int) -> None:
    result = hang_lab.run(kind, limit=3.0)
    assert result.statuses == [0] * 8 and "The ranks hang" not in result.output, result.output
    found = re.findall(r"rank 0 on h1 .* is busy \(.*core.*\) at \S*hangs.py, line \d+, in pause. .*report_progress\(\)"
                       r" there, or set a larger hang_timeout. Otherwise the job ends after 9 s", result.output)
    assert len(found) == notices, result.output


# What the watch decides, without processes ---------------------------------------------------------------------------

HOSTS = {rank: f"h{rank} (pid {rank + 100})" for rank in range(4)}


def call(number: int, pending: bool = True, group: str = "", operation: str = "all_reduce", thread: int = 1,
         peer: int | None = None) -> Collective:
    return Collective(group=group, number=number, operation=operation, sizes="[[4]]", between_two=peer is not None,
                      peer=peer, location="train.py, line 3, in step", thread=thread, pending=pending, blocks=pending)


def position(entered: int, work: float = 0.0, pending: bool = False) -> Position:
    return Position(entered, "train.py, line 7, in main", (call(entered, pending),), Work(cpu_seconds=work),
                    {"": Group("0-3", entered)})


def cause_found(*inspections: list[Position] | dict[int, Position], recorded: bool = False) -> str:
    """Return the notices and the cause that a watch with a limit of 100 s finds in inspections every 50 s."""
    now, found = [0.0], []
    watch = HangWatch(100.0, 4, recorded=recorded, clock=lambda: now[0])
    for rank in range(4):
        watch.receive(rank, Heartbeat(inspections[0][0].collectives, inspections[0][0].collectives, ""))
    assert not watch.is_due()
    for number, positions in enumerate(inspections, 1):
        now[0] = 50.0 * number
        assert watch.is_due()
        positions = positions if isinstance(positions, dict) else dict(enumerate(positions))
        found += [watch.find_cause(positions, HOSTS, {}, {}), watch.notice]
        watch.notice = ""
    return "".join(found)


def test_ranks_that_compute_do_not_hang() -> None:
    assert cause_found([position(7)] * 4, [position(7, work=30.0)] * 4) == ""


def test_idle_ranks_hang() -> None:
    cause = cause_found([position(7)] * 4, [position(7)] * 4)
    assert "rank 3 on h3 (pid 103) is idle. It is at train.py, line 7" in cause


def test_collective_that_does_not_end_is_a_hang_of_all_ranks() -> None:
    cause = cause_found([position(7, pending=True)] * 4, [position(7, 90.0, pending=True)] * 4)
    assert "all ranks have entered collective 7" in cause


def test_ranks_that_compute_after_unequal_numbers_of_transfers_do_not_hang() -> None:
    """gloo counts them with the collectives: the middle of a pipeline has sent and received."""
    counts = (3, 6, 6, 3)
    first, second = ([position(n, work)._replace(last=()) for n in counts] for work in (0.0, 30.0))
    assert "rank 0 on h0" in cause_found(first, second)
    first, second = ([p._replace(groups={"": Group("0-3", 0)}) for p in positions] for positions in (first, second))
    assert cause_found(first, second, recorded=True) == ""


WAITING = [position(7, pending=True)] * 3


@pytest.mark.parametrize(("work", "use"), [
    (Work(cpu_seconds=12.0), "24 % of a core"), (Work(megabytes=200.0), "4 MB/s"), (Work(gpu=0.5), "GPU 50 %"),
    (Work(cpu_seconds=8.0), ""), (Work(waits_for_disk=True), "")])
def test_busy_rank_is_no_hang(work: Work, use: str) -> None:
    late = position(6)
    positions = [[*WAITING, late._replace(work=start)] for start in (Work(gpu=work.gpu), work)]
    cause = cause_found(*positions, recorded=True)
    if use:
        assert cause.startswith(f"rank 3 on h3 (pid 103) is busy ({use}) at train.py, line 7, in main. "), cause
        assert "report_progress()" in cause and "after 300 s" in cause and "did not enter" not in cause
    else:
        assert cause.startswith("rank 3 on h3 (pid 103) did not enter collective 7"), cause
        assert "busy" not in cause


def test_rank_whose_first_position_came_too_late_is_looked_at_again() -> None:
    early = [dict(enumerate(WAITING)), [*WAITING, position(6, 10.0)]]
    assert cause_found(*early) == ""
    assert "rank 3 on h3 (pid 103) is busy" in cause_found(*early, [*WAITING, position(6, 40.0)])
    assert "rank 3 on h3 (pid 103) did not enter" in cause_found(*early, [*WAITING, position(6, 10.0)])


def test_busy_rank_ends_the_job_at_its_own_limit_or_when_it_becomes_idle() -> None:
    looping = [[*WAITING, position(6, 50.0 * number)] for number in range(6)]
    assert "did not enter" not in cause_found(*looping[:5])
    cause = cause_found(*looping)
    assert cause.count("report_progress()") == 1 and cause.endswith(". Rank 3 is busy (100 % of a core)"), cause
    assert "rank 3 on h3 (pid 103) did not enter" in cause_found(*looping[:3], looping[2])


def test_rank_that_is_busy_in_native_code_is_no_hang() -> None:
    """It keeps Python's lock, so it cannot respond. Another rank of its host sees what its process does."""
    now, hosts, waiting = [0.0], {0: "h0 (pid 1)", 1: "h0 (pid 2)"}, {0: position(7, pending=True)}
    watch = HangWatch(100.0, 2, recorded=True, clock=lambda: now[0])
    for rank in hosts:
        watch.receive(rank, Heartbeat(7 - rank, 7 - rank, "train.py, line 3, in tokenize"))
    busy = {1: ProcessState("busy in native code (100 % of a core)", True)}
    for now[0] in (51.0, 102.0, 153.0, 204.0, 255.0):
        assert watch.find_cause(waiting, hosts, {}, busy) == ""
    assert watch.notice.startswith("rank 1 on h0 (pid 2) is busy in native code (100 % of a core) last seen at train")
    now[0] = 306.0
    assert "does not respond: its process is busy in native code" in watch.find_cause(waiting, hosts, {}, busy)
    stopped = {1: ProcessState("stopped by a signal", False)}
    assert "does not respond: its process is stopped" in watch.find_cause(waiting, hosts, {}, stopped)


def test_busy_rank_does_not_hide_another_collective() -> None:
    other = position(7, 50.0, pending=True)
    other = other._replace(last=({**other.last[0], "operation": "barrier"},))
    loop = position(6, 50.0)
    cause = cause_found([*WAITING[:2], other, loop._replace(work=Work())], [*WAITING[:2], other, loop])
    assert "rank 2 on h2 (pid 102) entered another collective 7" in cause


def test_transfers_between_two_ranks_are_progress() -> None:
    later = position(7, pending=True)
    moved = later._replace(last=({**later.last[0], "number": 8},))
    assert cause_found([position(7, pending=True)] * 4, [moved] * 4) == ""


# Process groups --------------------------------------------------------------------------------------------------

THREE, PAIR = "1 (ranks 0-2)", "1 (ranks 0-1)"


def at(*calls: Collective, entered: int = 7, group: str = PAIR, in_group: int | None = 2, thread: int = 1) -> Position:
    """A rank that has entered so many collectives of all ranks and of a group, the latter in a thread."""
    ranks = group.partition("ranks ")[2].rstrip(")")
    return Position(entered, "train.py, line 7, in main", calls or (call(entered, pending=False),), Work(), {
        "": Group("0-3", entered, "train.py, line 7, in main", 1),
        group: Group(ranks, in_group, "train.py, line 9, in helper", thread)})


IN_PAIR, IN_THREE = (at(call(3, group=group, operation="barrier"), group=group, in_group=3) for group in (PAIR, THREE))
IN_ALL, IN_ALL_OF_PAIR = at(call(8), entered=8, group="1 (ranks 2-3)"), at(call(8), entered=8)
IN_ALL_OF_THREE = at(call(8), entered=8, group=THREE)
RECEIVES = at(call(0, operation="recv from rank 2", peer=2))
FOR = r"rank {} on h{} \(pid \d+\) waits for rank {} in {}"


@pytest.mark.parametrize(("positions", "cause"), [
    # Rank 2 has skipped a barrier of its group: or the others have entered one too many.
    ([IN_THREE, IN_THREE, IN_ALL_OF_THREE, IN_ALL], "unknown: .*" + FOR.format(0, 0, 2, "barrier") + ".*; "
     + FOR.format(1, 1, 2, "barrier") + ".*; " + FOR.format(2, 2, "0-1", "all_reduce") + "((?!rank 3).)*"),
    ([IN_PAIR, IN_ALL_OF_PAIR, IN_ALL, IN_ALL], "unknown: .*" + FOR.format(0, 0, 1, "barrier") + ".*; "
     + FOR.format(1, 1, 0, "all_reduce") + "((?!rank [23]).)*"),
    # Rank 1 is at a lock.
    ([IN_PAIR, at(), IN_ALL, IN_ALL],
     r"rank 1 on h1 \(pid 101\) did not enter collective 3 of group 1 \(ranks 0-1\), in which rank 0 waits, and "
     "collective 8, in which rank 2-3 waits. It is at train.py, line 9, in helper. Rank 0 waits in barrier of "
     r"\[\[4\]\] at train.py, line 3, in step"),
    # A thread of rank 1 should have entered, while its main thread waits.
    ([IN_PAIR, at(call(8), entered=8, thread=2), IN_ALL, IN_ALL],
     r"rank 1 on h1 \(pid 101\) did not enter collective 3 of .*It is at train.py, line 9, in helper.*"),
    # Rank 3 receives what rank 2 does not send.
    ([IN_ALL, IN_ALL, at(), RECEIVES],
     r"rank 2 on h2 \(pid 102\) did not enter collective 8, in which rank 0-1 waits. It is at train.py, line 7.*"),
    ([IN_ALL, IN_ALL, IN_ALL, RECEIVES],
     "unknown: .*" + FOR.format(2, 2, 3, "all_reduce") + ".*; " + FOR.format(3, 3, 2, "recv from rank 2") + ".*"),
    # A connection was cut between two steps: rank 1 waits in the collective before.
    ([IN_ALL, at(call(7)), IN_ALL, None], r"rank 3 on h3 \(pid 103\) does not respond: [^;]*"),
    # Two ranks of two have entered different collectives.
    ([IN_PAIR, at(call(3, group=PAIR), in_group=3), IN_ALL, IN_ALL],
     r"unknown which rank is wrong: rank 0 on h0 .*entered another collective 3 of group 1 \(ranks 0-1\): barrier.*; "
     "rank 1 on h1 .*: all_reduce((?!rank [23]).)*"),
    # The newest collective of the group on rank 1 is not known any more.
    ([IN_PAIR, at(in_group=None), IN_ALL, at()], r"rank 1 .* did not enter collective 8, .*; rank 3 .*")])
def test_cause_is_found_in_each_group(positions: list[Position | None], cause: str) -> None:
    found = describe({rank: place for rank, place in enumerate(positions) if place}, HOSTS, list(HOSTS))
    assert re.fullmatch(cause, found), found

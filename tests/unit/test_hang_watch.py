"""What the watch decides from positions and heartbeats, and the sentences that it writes."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from utils.monitor.hangs.hang_cause import describe
from utils.monitor.hangs.hang_watch import HangWatch, Heartbeat
from utils.monitor.hangs.positions import Collective, Group, Position, ProcessState, Stay, StayWatch, Work

HOSTS = {rank: f"h{rank} (pid {rank + 100})" for rank in range(4)}


def call(number: int, pending: bool = True, group: str = "", operation: str = "all_reduce") -> Collective:
    return Collective(group=group, number=number, operation=operation, sizes="[[4]]", between_two=False, peer=None,
                      location="train.py, line 3, in step", thread=1, pending=pending, blocks=pending)


def position(entered: int, work: float = 0.0, pending: bool = False) -> Position:
    return Position(entered, "train.py, line 7, in main", (call(entered, pending),), Work(cpu_seconds=work),
                    {"": Group("0-3", entered)})


def cause_found(inspections: Sequence[list[Position] | dict[int, Position]], recorded: bool) -> str:
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


def other_call(**changes: Any) -> Position:
    one = position(7, 50.0, pending=True)
    return one._replace(last=({**one.last[0], **changes},))


WAITING = [position(7, pending=True)] * 3
TOO_LATE = (dict(enumerate(WAITING)), [*WAITING, position(6, 10.0)])  # the first position of rank 3
LOOPING = [[*WAITING, position(6, 50.0 * number)] for number in range(6)]
BEHIND_3, BUSY_3 = (rf"rank 3 on h3 \(pid 103\) {words}.*" for words in ("did not enter collective 7,", "is busy "))


@pytest.mark.parametrize(("inspections", "recorded", "cause"), [
    (([position(7)] * 4, [position(7, work=30.0)] * 4), False, ""),  # they compute
    (([position(7, pending=True)] * 4, [position(7, 90.0, pending=True)] * 4), False,
     ".*all ranks have entered collective 7.*"),
    (([position(7, pending=True)] * 4, [other_call(number=8)] * 4), False, ""),  # transfers between two ranks
    (TOO_LATE, False, ""), ((*TOO_LATE, [*WAITING, position(6, 40.0)]), False, BUSY_3),
    ((*TOO_LATE, [*WAITING, position(6, 10.0)]), False, ".*" + BEHIND_3),
    # A busy rank ends the job at its own limit, or when it becomes idle. There is one notice.
    (LOOPING[:5], False, "((?!did not enter).)*"),
    (LOOPING, False, r"((?!did not enter).)*report_progress\(\)((?!report_progress).)*" + BEHIND_3
     + r"\. Rank 3 is busy \(100 % of a core\)"),
    ((*LOOPING[:3], LOOPING[2]), False, ".*" + BEHIND_3),
    # A busy rank does not hide another collective.
    ([[*WAITING[:2], other_call(operation="barrier"), position(6, work)] for work in (0.0, 50.0)], False,
     r".*rank 2 on h2 \(pid 102\) entered a different collective 7.*"),
    # What counts as busy
    *(([[*WAITING, position(6)._replace(work=one)] for one in (Work(), work)], True, cause)
      for work, cause in (
        *((work, rf"rank 3 on h3 \(pid 103\) is busy \({use}\) at train.py, line 7, in main\. ((?!did not enter).)*"
                 r"after 300 s((?!did not enter).)*") for work, use in (
            (Work(cpu_seconds=12.0), "24 % of a core"), (Work(megabytes=200.0), "4 MB/s"))),
        *((work, r"rank 3 on h3 \(pid 103\) did not enter collective 7((?!busy).)*")
          for work in (Work(cpu_seconds=8.0), Work(waits_for_disk=True))))),
])
def test_cause_in_positions(inspections: Sequence[list[Position] | dict[int, Position]], recorded: bool,
                            cause: str) -> None:
    found = cause_found(inspections, recorded)
    assert re.fullmatch(cause, found, re.DOTALL), found


def polling(seconds: float, line: int = 40, **work: Any) -> Position:
    """A rank that has looked for a file twenty times a second, for so long."""
    done = Work(**{"cpu_seconds": 0.02 * seconds, "wakeups": int(20 * seconds), **work})
    return position(7)._replace(work=done, stay=Stay(seconds, f"train.py, line {line}, in wait_for_file"))


def test_ranks_that_all_poll_have_three_limits() -> None:
    times = [50.0 * number for number in range(1, 7)]
    found = cause_found([[polling(time)] * 4 for time in times], True)
    assert found == "all ranks have been at train.py, line 40, in wait_for_file for 300 s, without a collective"
    assert cause_found([[polling(time)] * 4 for time in times[:5]], True) == ""
    found = cause_found([[polling(time), *[polling(time, 41)] * 3] for time in times], True)
    assert re.fullmatch(r"which rank is wrong cannot be told: .* none waits in a collective.*line 7, in main.*", found)


@pytest.mark.parametrize("other", [
    lambda time: polling(time, cpu_seconds=0.15 * time),  # it works a little
    lambda time: polling(time, megabytes=0.3 * time),
    lambda time: polling(time, waits_for_disk=time == 150.0),
    lambda time: polling(time)._replace(stay=Stay(90.0, "train.py, line 40, in wait_for_file")),  # it walks about
    lambda time: position(8 if time > 50.0 else 7, work=0.02 * time),  # it has entered a collective
])
def test_ranks_do_not_poll_where_one_does_more(other: Any) -> None:
    found = cause_found([[*[polling(time)] * 3, other(time)] for time in (50.0 * number for number in range(1, 7))],
                        True)
    assert found == ""


def test_a_rank_that_sleeps_is_idle_after_one_limit() -> None:
    assert "none waits in a collective" in cause_found([[position(7)] * 4] * 2, True)


def test_a_stay_is_at_few_places() -> None:
    """Of a loop that polls; an import has many at one line of the script."""
    stays = StayWatch()
    assert stays.stay(3.0) == Stay()
    for time in range(10, 20):
        stays.add(time, "train.py, line 5, in <module>", f"importlib.py:{time}")
    assert stays.stay(20.0) == Stay(7.0, "train.py, line 5, in <module>")  # since the last of the places but six
    for time in range(20, 60):
        stays.add(time, "train.py, line 40, in wait", "train.py:wait" if time % 3 else "pathlib.py:exists")
    assert stays.stay(60.0) == Stay(45.0, "train.py, line 40, in wait")


def test_rank_that_is_busy_in_native_code_is_no_hang() -> None:
    """It keeps Python's lock, so it cannot respond. Another rank of its host sees what its process does."""
    now, hosts, waiting = [0.0], {0: "h0 (pid 1)", 1: "h0 (pid 2)"}, {0: position(7, pending=True)}
    watch = HangWatch(100.0, 2, recorded=True, clock=lambda: now[0])
    for rank in hosts:
        watch.receive(rank, Heartbeat(7 - rank, 7 - rank, "train.py, line 3, in tokenize"))
    for now[0] in (51.0, 102.0, 153.0, 204.0, 255.0):
        assert watch.find_cause(waiting, hosts, {}, {1: ProcessState("", now[0])}) == ""
    assert watch.notice.startswith("rank 1 on h0 (pid 2) is busy in native code (100 % of a core) last seen at train")
    now[0] = 306.0
    late = watch.find_cause(waiting, hosts, {}, {1: ProcessState("", now[0])})
    assert "does not respond: its process is busy in native code (100 % of a core)" in late
    stopped = {1: ProcessState("stopped by a signal", now[0])}
    assert "does not respond: its process is stopped" in watch.find_cause(waiting, hosts, {}, stopped)

    alone = {**hosts, 1: "h1 (pid 2)"}  # nobody there can tell why; its host may acknowledge what is sent to it
    assert "the host is down or its network is cut" in watch.find_cause(waiting, alone, {}, {})
    watch.reachable = {1}
    assert "does not respond: it is stopped, or busy in native code. " in watch.find_cause(waiting, alone, {}, {})


# Process groups --------------------------------------------------------------------------------------------------

THREE, PAIR = "1 (ranks 0-2)", "1 (ranks 0-1)"


def at(*calls: Collective, entered: int = 7, group: str = PAIR, in_group: int | None = 2) -> Position:
    """A rank that has entered so many collectives of all ranks and of a group."""
    ranks = group.partition("ranks ")[2].rstrip(")")
    return Position(entered, "train.py, line 7, in main", calls or (call(entered, pending=False),), Work(), {
        "": Group("0-3", entered, "train.py, line 7, in main", 1),
        group: Group(ranks, in_group, "train.py, line 9, in helper", 1)})


IN_PAIR, IN_THREE = (at(call(3, group=group, operation="barrier"), group=group, in_group=3) for group in (PAIR, THREE))
IN_ALL, IN_ALL_OF_THREE = (at(call(8), entered=8, group=group) for group in ("1 (ranks 2-3)", THREE))
FOR = r"rank {} on h{} \(pid \d+\) waits for ranks? {} in {}"


@pytest.mark.parametrize(("positions", "cause"), [
    # Rank 2 has skipped a barrier of its group: or the others have entered one too many.
    ([IN_THREE, IN_THREE, IN_ALL_OF_THREE, IN_ALL],
     "which rank is wrong cannot be told: .*" + FOR.format(0, 0, 2, "barrier") + ".*; "
     + FOR.format(1, 1, 2, "barrier") + ".*; " + FOR.format(2, 2, "0-1", "all_reduce") + "((?!rank 3).)*"),
    # Rank 1 is at a lock.
    ([IN_PAIR, at(), IN_ALL, IN_ALL],
     r"rank 1 on h1 \(pid 101\) did not enter collective 3 of group 1 \(ranks 0-1\), in which rank 0 waits, and "
     "collective 8, in which ranks 2-3 wait. It is at train.py, line 9, in helper. Rank 0 waits in barrier of "
     r"\[\[4\]\] at train.py, line 3, in step"),
    # A connection was cut between two steps: rank 1 waits in the collective before.
    ([IN_ALL, at(call(7)), IN_ALL, None], r"rank 3 on h3 \(pid 103\) does not respond: [^;]*"),
    # Two ranks of two have entered different collectives.
    ([IN_PAIR, at(call(3, group=PAIR), in_group=3), IN_ALL, IN_ALL],
     r"rank 0 on h0 .*entered a different collective 3 of group 1 \(ranks 0-1\): barrier.*; "
     "rank 1 on h1 .*: all_reduce((?!rank [23]).)*"),
    # The newest collective of the group on rank 1 is not known any more.
    ([IN_PAIR, at(in_group=None), IN_ALL, at()], r"rank 1 .* did not enter collective 8, .*; rank 3 .*")])
def test_cause_is_found_in_each_group(positions: list[Position | None], cause: str) -> None:
    found = describe({rank: place for rank, place in enumerate(positions) if place}, HOSTS, list(HOSTS))
    assert re.fullmatch(cause, found), found


def test_only_members_of_the_group_that_is_waited_for_are_blamed() -> None:
    watch, left = HangWatch(100.0, 4, recorded=True), {2: "rank 2 left normally", 3: ""}
    other = at(call(3, group=PAIR), in_group=3)
    found = watch.describe({0: IN_PAIR, 1: other}, HOSTS, left)
    assert found.startswith("rank 0 on h0") and "One of these is a collective that only some ranks call" in found
    assert watch.describe({0: IN_ALL, 1: IN_ALL}, HOSTS, left) == left[2]
    for peer in (1, 2):  # in a transfer, nobody but the peer
        receiving: Any = {**call(3, operation="recv"), "between_two": True, "peer": peer}
        assert (watch.describe({0: at(receiving)}, HOSTS, left) == left[2]) == (peer == 2)


def test_thread_that_should_have_entered_makes_a_waiting_rank_late() -> None:
    waiting = at(call(8), entered=8)
    groups = {**waiting.groups, PAIR: waiting.groups[PAIR]._replace(thread=2)}
    positions = {0: IN_PAIR, 1: waiting._replace(groups=groups), 2: IN_ALL, 3: IN_ALL}
    found = describe(positions, HOSTS, list(HOSTS))
    assert found.startswith("rank 1 on h1 (pid 101) did not enter collective 3 of group 1 (ranks 0-1)"), found


def test_late_rank_is_blamed_and_not_one_that_has_left() -> None:
    watch = HangWatch(100.0, 4, recorded=True)
    found = watch.describe({0: WAITING[0], 1: position(6), 2: WAITING[0]}, HOSTS, {3: "rank 3 left normally"})
    assert found.startswith("rank 1 on h1 (pid 101) did not enter collective 7")


def test_collective_with_a_longer_time_limit_is_not_ended_before_it() -> None:
    now = [0.0]
    watch = HangWatch(100.0, 4, recorded=True, before_torch=True, clock=lambda: now[0])
    positions = {
        rank: one._replace(groups={"": Group("0-3", one.collectives, timeout=1800.0)})
        for rank, one in enumerate([*WAITING, position(6)])}
    found = []
    for now[0] in (50.0, 100.0, 900.0, 1790.0):
        found.append(watch.find_cause(positions, HOSTS, {}, {}))
    assert found[:3] == ["", "", ""] and "rank 3 on h3 (pid 103) did not enter collective 7" in found[3]


def test_heartbeats_of_many_ranks_are_rarer_than_the_limit() -> None:
    now = [0.0]
    watch = HangWatch(1.0, 1_000_000, clock=lambda: now[0])
    watch.receive(0, Heartbeat(1, 1, ""))
    now[0] = 1.5 * watch.interval
    assert watch.limit < now[0] and not watch.silent(0)
    now[0] = 2.5 * watch.interval
    assert watch.silent(0)


def test_the_first_of_the_collectives_that_a_rank_waits_in_is_shown() -> None:
    """With a GPU, a rank starts more collectives while it waits."""
    ahead = at(call(8), call(9), call(10), entered=10)
    found = describe({0: ahead, 1: at(), 2: ahead, 3: ahead}, HOSTS, list(HOSTS))
    assert "rank 1 on h1 (pid 101) did not enter collective 8, in which ranks 0,2-3 wait. It is at" in found

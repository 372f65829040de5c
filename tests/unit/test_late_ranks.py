"""Which ranks are late or at fault, from positions alone; tests/unit/test_hang_watch.py has the time that passes."""
from __future__ import annotations

from typing import Any

import pytest

from utils.monitor.hangs.hang_cause import at_fault, describe, describe_mismatch
from utils.monitor.hangs.hang_watch import HangWatch, Heartbeat, time_before
from utils.monitor.hangs.positions import Collective, Group, Position, Work

GROUP = "1 (ranks 0-2)"


def hosts(count: int) -> dict[int, str]:
    return {rank: f"h{rank} (pid {rank + 100})" for rank in range(count)}


def call(number: int, **changes: Any) -> Collective:
    one: Any = {"group": "", "number": number, "operation": "all_reduce", "sizes": "[[4]]", "between_two": False,
                "peer": None, "location": "train.py, line 3, in step", "thread": 1, "pending": True, "blocks": True}
    return Collective(**{**one, **changes})


def waiting(*calls: Collective, entered: int = 8, in_group: int = 2) -> Position:
    return Position(entered, "train.py, line 7, in main", calls, Work(), {
        "": Group("0-3", entered, "train.py, line 7, in main", 1),
        GROUP: Group("0-2", in_group, "train.py, line 9, in helper", 1)})


COMPUTES = waiting(call(7, pending=False, blocks=False), entered=7)


def test_a_rank_that_waits_in_another_thread_is_late() -> None:
    in_helper = waiting(call(3, group=GROUP, thread=2), entered=7, in_group=3)
    found = describe({0: waiting(call(8)), 1: in_helper, 2: waiting(call(8)), 3: waiting(call(8))}, hosts(4),
                     [0, 1, 2, 3])
    assert found.startswith("rank 1 on h1 (pid 101) did not enter collective 8, in which ranks 0,2-3 wait"), found


def test_of_many_late_ranks_eight_are_shown() -> None:
    found = describe({0: waiting(call(8)), **dict.fromkeys(range(1, 11), COMPUTES)}, hosts(11), list(range(11)))
    assert found.count("did not enter collective 8") == 8 and "... and 2 more ranks" in found, found


def test_a_rank_outside_the_group_that_does_not_respond_is_not_at_fault() -> None:
    in_group = waiting(call(3, group=GROUP), entered=7, in_group=3)
    positions = {0: in_group, 1: COMPUTES, 2: in_group}
    assert at_fault(positions, [0, 1, 2, 3]) == {1}
    assert "rank 3" not in describe(positions, hosts(4), [0, 1, 2, 3])


@pytest.mark.parametrize(("operation", "all_sizes", "differ"), [
    ("all_reduce", False, True), ("gather", False, False), ("gather", True, True)])
def test_sizes_that_may_differ(operation: str, all_sizes: bool, differ: bool) -> None:
    sizes = ["[[4]]", "[[4]]", "[[5]]"]
    positions = {rank: waiting(call(8, operation=operation, sizes=size)) for rank, size in enumerate(sizes)}
    found = describe_mismatch(positions, hosts(3), all_sizes=all_sizes)
    assert found.startswith("rank 2 on h2 (pid 102) entered a different collective 8" if differ else "")
    assert bool(found) == differ


@pytest.mark.parametrize(("timeout", "expected"), [(1800.0, 1770.0), (300.0, 270.0), (100.0, 90.0), (10.0, 9.0)])
def test_a_hang_is_explained_before_torch_ends_it(timeout: float, expected: float) -> None:
    assert time_before(timeout) == expected


@pytest.mark.parametrize(("work", "is_hang"), [(Work(), True), (Work(waits_for_disk=True), False)])
def test_idle_ranks_that_wait_for_a_disk_do_not_hang(work: Work, is_hang: bool) -> None:
    now = [0.0]
    watch = HangWatch(100.0, 4, recorded=True, clock=lambda: now[0])
    for rank in range(4):
        watch.receive(rank, Heartbeat(7, 7, ""))
    positions = dict.fromkeys(range(4), COMPUTES._replace(work=work))
    now[0] = 50.0
    assert watch.find_cause(positions, hosts(4), {}, {}) == ""
    now[0] = 100.0
    found = watch.find_cause(positions, hosts(4), {}, {})
    assert ("all are idle" in found) == bool(found) == is_hang, found

"""What happens during a launch, as evidence: whose end is whose doing, and how long a stop explains a failure."""
from __future__ import annotations

import signal

import pytest

from utils.tools.launch.launch_result import END_DELAY, END_DELAY_AFTER_STOP, LaunchResult


@pytest.mark.parametrize(("launcher", "launcher_ended_at", "status", "at", "by_launch"), [
    ("", None, 143, 1.0 + END_DELAY / 2, False),  # the other ranks still have a moment
    ("", None, 143, 1.0 + END_DELAY, True),
    ("", None, 0, 9.0, False),  # it has ended well, whatever was sent to it
    ("srun", None, 143, 9.0, False),  # srun itself ends the ranks
    ("srun", 3.0, 143, 2.9, False), ("srun", 3.0, 143, 3.0, True)])
def test_a_rank_that_ends_after_the_first_failure(
        launcher: str, launcher_ended_at: float | None, status: int, at: float, by_launch: bool) -> None:
    result = LaunchResult(2)
    result.launcher.name, result.launcher.ended_at = launcher, launcher_ended_at
    result.process_ended("rank 0", 1, 1.0, others=False, rank=0)
    result.process_ended("rank 1", status, at, others=False, rank=1)
    assert [end.by_launch for end in result.evidence().ends] == [False, by_launch]


@pytest.mark.parametrize(("failed_at", "is_explained"), [(0.5, False), (1.0, True), (300.0, True), (601.0, False)])
def test_a_stop_explains_failures_of_the_next_ten_minutes(failed_at: float, is_explained: bool) -> None:
    result = LaunchResult()
    assert not result.is_last_stop(signal.SIGTERM, 1.0)
    result.process_ended("rank 0", 1, failed_at, others=False, rank=0)
    assert result.evidence().stopped_by == (signal.SIGTERM if is_explained else 0)
    assert result.end_at == failed_at + (END_DELAY_AFTER_STOP if is_explained else END_DELAY)


@pytest.mark.parametrize(("numbers", "expected"), [
    ((signal.SIGTERM, signal.SIGTERM), (False, False)), ((signal.SIGINT, signal.SIGINT), (False, True)),
    ((signal.SIGTERM, signal.SIGINT), (False, False)), ((signal.SIGHUP,), (True,))])
def test_the_second_interrupt_and_a_lost_terminal_end_all_at_once(
        numbers: tuple[int, ...], expected: tuple[bool, ...]) -> None:
    result = LaunchResult()
    assert tuple(result.is_last_stop(number, 1.0) for number in numbers) == expected


def test_only_the_first_problem_counts_and_the_first_failure_starts_the_end() -> None:
    result = LaunchResult()
    result.fail("no agent has connected from n2", 2.0, host="n2")
    result.fail("srun has ended", 3.0, 7)
    result.process_ended("rank 0", 1, 4.0, others=False, rank=0)
    evidence = result.evidence()
    assert evidence.problem and (evidence.problem.text, evidence.problem_at, evidence.problem_status) == (
        "no agent has connected from n2", 2.0, 1)
    assert result.failed_at == 2.0


def test_the_end_of_a_rank_is_noted_once() -> None:
    """A launcher prints the exit status of a rank that may be known already."""
    result = LaunchResult()
    result.process_ended("rank 0 on n1", 3, 1.0, others=False, rank=0)
    result.note_end(0, 143, "n1", 2.0)
    result.note_end(1, 9, "n2", 2.0)
    assert [(end.who, end.status) for end in result.evidence().ends] == [("rank 0 on n1", 3), ("rank 1 on n2", 9)]

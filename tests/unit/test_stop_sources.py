"""What rank 0 checks for a stop: the time limit with a clock of the test, a file, a command."""
from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from utils.preemption.sources import SourceThreads, StopCommand, StopFile, TimeLimit


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)


class Clock:
    """A time limit of 1000 s, a reserve of 100 s, and the time set by the test."""

    def __init__(self, *responses: float | Exception | None) -> None:
        self.now = 0.0
        self.queries = 0
        self._responses = list(responses)
        self.limit = TimeLimit(self._time_left, lambda: 100.0, clock=lambda: self.now)

    def _time_left(self) -> float | None:
        self.queries += 1
        response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
        if isinstance(response, Exception):
            raise response
        return response

    def check(self, now: float) -> str | None:
        self.now = now
        return self.limit.check()


def test_the_time_limit_stops_the_run_in_time_for_a_save() -> None:
    clock = Clock(1000.0, 700.0, 400.0, 100.0)
    assert not any(map(clock.check, (0.0, 100.0, 300.0, 600.0, 899.0)))
    assert clock.check(900.0) == "time limit in 100 s, of which 100 s are kept for the save"


def test_a_limit_that_was_extended_is_queried_again() -> None:
    clock = Clock(1000.0, 700.0, 400.0, 5000.0)
    assert not any(map(clock.check, (0.0, 300.0, 600.0, 900.0, 1000.0)))
    assert clock.queries == 4


def test_a_scheduler_is_not_queried_at_each_check() -> None:
    clock = Clock(1000.0)
    for second in range(300):
        clock.check(float(second))
    assert clock.queries == 1


def test_a_scheduler_without_a_response_is_reported_and_stops_nothing(
        caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(None)
    assert not any(map(clock.check, (0.0, 400.0, 800.0)))
    assert caplog.text.count("does not report how much time is left") == 1


@pytest.mark.parametrize("response", [ValueError("x"), float("nan")])
def test_a_failed_query_is_tried_again(response: float | Exception) -> None:
    clock = Clock(response, response, 100.0)
    for second in (0.0, 30.0):
        with pytest.raises(ValueError):
            clock.check(second)
    assert clock.check(31.0) is None
    assert clock.check(60.0) is not None


def test_failing_queries_do_not_hide_a_known_limit() -> None:
    clock = Clock(1000.0, ValueError("x"))
    assert clock.check(0.0) is None
    with pytest.raises(ValueError):
        clock.check(900.0)
    assert clock.check(901.0) is not None


def test_a_file_stops_the_run_when_it_appears_or_is_touched(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "STOP"
    source = StopFile(path, 1)
    assert source.check() is None
    path.touch()
    assert source.check() == f"file {path}"

    again = StopFile(path, 1)
    assert "exists already" in caplog.text
    assert again.check() is None
    os.utime(path, (1, 1))
    assert again.check() == f"file {path}"


def test_a_file_system_that_fails_for_a_while_stops_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "STOP"
    path.touch()

    def fails(*arguments: object) -> None:
        raise OSError(116, "Stale file handle")

    for first in (True, False):  # from the start, or later
        with monkeypatch.context() as failing:
            if first:
                failing.setattr(os, "stat", fails)
            source = StopFile(path, 1)
            failing.setattr(os, "stat", fails)
            with pytest.raises(OSError, match="Stale"):
                source.check()
        assert source.check() is None
    os.utime(path, (1, 1))
    assert source.check()


def test_a_command_stops_the_run_when_it_succeeds(tmp_path: Path) -> None:
    source = StopCommand(["test", "-e", str(tmp_path / "x")], 1)
    assert source.check() is None
    (tmp_path / "x").touch()
    assert source.check() == "command test"


# Threads ------------------------------------------------------------------------------------------

class Other:
    """A source that does what the test says."""

    name, poll_seconds = "other", 0.001

    def __init__(self, action: Callable[[], str | None]) -> None:
        self.check = action


def fails() -> None:
    raise ZeroDivisionError("user's mistake")


def exits() -> None:
    sys.exit("user's mistake")


@pytest.mark.parametrize("action", [fails, exits, StopCommand(["/no/such/command"], 1).check])
def test_a_failing_source_is_reported_once_and_disturbs_no_other(
        action: Callable[[], str | None], caplog: pytest.LogCaptureFixture) -> None:
    failures = threading.Semaphore(0)
    reasons: list[str] = []
    requested = threading.Event()

    def fails_again() -> str | None:
        failures.release()
        return action()

    def request(reason: str) -> None:
        reasons.append(reason)
        requested.set()

    def waits_for_three_failures() -> str:
        for _ in range(3):
            failures.acquire()
        return "stop"

    threads = SourceThreads(request, [Other(fails_again), Other(waits_for_three_failures)])
    assert requested.wait(20)
    threads.close()
    assert reasons == ["stop"]
    assert caplog.text.count("'other' failed with") == 1


def test_a_hanging_source_disturbs_no_other() -> None:
    requested, end = threading.Event(), threading.Event()

    def hangs() -> None:
        end.wait()

    threads = SourceThreads(lambda reason: requested.set(), [Other(hangs), Other(lambda: "stop")])
    assert requested.wait(20)
    threads.close()
    end.set()

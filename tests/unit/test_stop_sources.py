"""What rank 0 checks for a stop: the time limit with a clock of the test, a file, a command."""
from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.preemption.sources import SourceThreads, StopCommand, StopFile, TimeLimit

FAILED = ValueError("the scheduler does not respond")
STOP = "time limit in {} s, of which 100 s are kept for the save"


@pytest.mark.parametrize(("responses", "seconds", "results", "queries"), [
    ([1000, 700, 400, 100], [0, 100, 300, 600, 899, 900], [*[None] * 5, STOP.format(100)], 4),
    ([1000, 700, 400, 5000], [0, 300, 600, 900, 1000], [None] * 5, 4),
    ([1000], range(300), [None] * 300, 1),
    ([None], [0, 400, 800], [None] * 3, 3),
    ([FAILED, FAILED, 100], [0, 30, 31, 60], ["error", "error", None, STOP.format(100)], 3),
    ([math.nan, math.nan, 100], [0, 30, 31, 60], ["error", "error", None, STOP.format(100)], 3),
    ([1000, FAILED], [0, 900, 901], [None, "error", STOP.format(99)], 2)],
    ids=["in time", "extended", "rarely queried", "unknown", "query fails", "not a number", "query fails at the end"])
def test_time_limit(responses: list[float | Exception | None], seconds: Iterable[int], results: list[str | None],
                    queries: int, caplog: pytest.LogCaptureFixture) -> None:
    """responses: of the scheduler, the last one for ever. seconds: of the checks, which have these results."""
    now, queried = 0, 0

    def time_left() -> float | None:
        nonlocal queried
        queried += 1
        response = responses[min(queried, len(responses)) - 1]
        if isinstance(response, Exception):
            raise response
        return response

    limit = TimeLimit(time_left, lambda: 100.0, clock=lambda: now)
    found: list[str | None] = []
    for second in seconds:
        now = second
        try:
            found.append(limit.check())
        except ValueError:
            found.append("error")

    assert (found, queried) == (results, queries)
    assert caplog.text.count("does not report how much time is left") == (responses == [None])


def test_a_file_stops_the_run_when_it_appears_or_is_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_file_system_that_fails_for_a_while_stops_nothing(
        from_the_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(116, "Stale file handle")

    path = tmp_path / "STOP"
    path.touch()
    with monkeypatch.context() as failing:
        if from_the_start:
            failing.setattr(os, "stat", fails)
        source = StopFile(path, 1)
        failing.setattr(os, "stat", fails)
        with pytest.raises(OSError, match="Stale"):
            source.check()
    assert source.check() is None
    os.utime(path, (1, 1))
    assert source.check()


# Threads ------------------------------------------------------------------------------------------

def source(check: Callable[[], object]) -> SimpleNamespace:
    return SimpleNamespace(name="other", poll_seconds=0.001, check=check)


@pytest.mark.parametrize("action", [lambda: 1 / 0, lambda: sys.exit("user's mistake"),
                                    StopCommand(["/no/such/command"], 1).check], ids=["error", "exit", "command"])
def test_failing_and_hanging_sources_disturb_no_other(
        action: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    failures, requested, end = threading.Semaphore(0), threading.Event(), threading.Event()
    reasons: list[str] = []

    def fails_again() -> object:
        failures.release()
        return action()

    def waits_for_three_failures() -> str:
        for _ in range(3):
            failures.acquire()
        return "stop"

    def request(reason: str) -> None:
        reasons.append(reason)
        requested.set()

    threads = SourceThreads(request, [source(fails_again), source(end.wait), source(waits_for_three_failures)])
    assert requested.wait(20)
    threads.close()
    end.set()
    assert reasons == ["stop"]
    assert caplog.text.count("'other' failed with") == 1

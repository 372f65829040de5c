"""What rank 0 checks for a stop: the time limit with a clock of the test, a file, a command."""
from __future__ import annotations

import os
import queue
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
    ([1000, FAILED], [0, 900, 901], [None, "error", STOP.format(99)], 2)],
    ids=["in time", "extended", "rarely queried", "unknown", "query fails", "query fails at the end"])
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


def test_a_file_system_that_fails_for_a_while_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.symlink_to(folder)
    source = StopFile(folder / "STOP", 1)
    with pytest.raises(OSError, match="symbolic links"):
        source.check()

    folder.unlink()
    folder.mkdir()
    (folder / "STOP").touch()
    assert source.check() is None
    os.utime(folder / "STOP", (1, 1))
    assert source.check()


def source(check: Callable[[], object]) -> SimpleNamespace:
    return SimpleNamespace(name="other", poll_seconds=0.001, check=check)


@pytest.mark.parametrize("action", [lambda: 1 / 0, lambda: sys.exit("user's mistake"),
                                    StopCommand(["/no/such/command"], 1).check], ids=["error", "exit", "command"])
def test_failing_and_hanging_sources_disturb_no_other(
        action: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    failures, end = threading.Semaphore(0), threading.Event()
    reasons: queue.Queue[str] = queue.Queue()

    def fails_again() -> object:
        failures.release()
        return action()

    def waits_for_three_failures() -> str:
        for _ in range(3):
            failures.acquire()
        return "stop"

    threads = SourceThreads(reasons.put, [source(fails_again), source(end.wait), source(waits_for_three_failures)])
    assert reasons.get(timeout=20) == "stop"
    threads.close()
    end.set()
    assert reasons.empty()
    assert caplog.text.count("'other' failed with") == 1

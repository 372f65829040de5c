"""The line that describes the error of a rank."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.unit.notices import served
from utils import early_failure
from utils.launch_protocol import REPORT, describe
from utils.tools.launch.launch_connection import RankNotices

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    raise error\n'


class ProcessRaisedException(Exception):
    """As of torch.multiprocessing."""


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("a\nb"), "ValueError: a"), (KeyError(), "KeyError"), (SystemExit(3), "SystemExit: 3"),
    (ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {TRACE}ValueError: bad\nsample"),
     "ValueError: Caught ValueError in DataLoader worker process 0: ValueError: bad"),
    (ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{TRACE}torch.Bad: no memory\n"),
     "ProcessRaisedException: Process 1 terminated with the following error: Bad: no memory"),
    (ValueError(f"no cause\n{TRACE}"), "ValueError: no cause"), (ValueError("x" * 1000), "ValueError: " + "x" * 288)])
def test_an_error_in_one_line(error: BaseException, line: str) -> None:
    """Also of one that another process has passed on: its cause is at the end of a traceback."""
    assert describe(error) == line


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankNotices]:
    with served() as notices:
        for name, value in notices.variables.items():
            monkeypatch.setenv(name, value)
        yield notices


def prints(monkeypatch: pytest.MonkeyPatch, rank: int, text: str, *, shares_output: bool = True) -> bool:
    """Whether a rank that ends with this error prints its traceback."""
    monkeypatch.setenv("RANK", str(rank))
    shown: list[None] = []
    assert early_failure.report(ValueError(text), lambda: shown.append(None), shares_output=shares_output)
    assert len(shown) < 2
    return bool(shown)


def test_equal_tracebacks_before_the_group_are_printed_once(
        launch: RankNotices, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [prints(monkeypatch, rank, "no config") for rank in range(4)] == [True, False, False, False]
    assert prints(monkeypatch, 4, "another text")
    assert prints(monkeypatch, 5, "no config", shares_output=False)
    assert launch.tracebacks.lines() == ["3 other ranks reported the same error as rank 0: ranks 1-3"]
    assert launch.first_cause is not None and launch.first_cause.text.endswith(" failed: ValueError: no config")


def test_each_rank_prints_its_traceback_into_its_own_file(
        launch: RankNotices, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.tracebacks.is_shared = False
    assert [prints(monkeypatch, rank, "no config") for rank in range(2)] == [True, True]
    assert not launch.tracebacks.lines()


def test_a_traceback_is_printed_where_the_first_rank_has_died_before(
        launch: RankNotices, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        raise BrokenPipeError

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BrokenPipeError):
        early_failure.report(ValueError("no config"), die, shares_output=True)
    begun = time.monotonic()
    assert prints(monkeypatch, 1, "no config") and time.monotonic() - begun < 5
    assert not prints(monkeypatch, 2, "no config")


def test_a_traceback_is_printed_where_no_launch_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT, raising=False)
    assert prints(monkeypatch, 0, "no config") and prints(monkeypatch, 1, "no config")
    with served() as notices:
        monkeypatch.setenv(REPORT, notices.variables[REPORT])
    assert prints(monkeypatch, 0, "no config") and prints(monkeypatch, 1, "no config")


def test_a_rank_that_is_ended_meanwhile_prints_its_traceback_first(
        launch: RankNotices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has failed before: the launch sends SIGTERM while this one asks."""
    stops: list[int] = []
    monkeypatch.setenv("RANK", "0")
    previous = signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    try:
        shown: list[list[int]] = []

        def show() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            shown.append([*stops])

        early_failure.report(ValueError("no config"), show, shares_output=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert shown == [[]] and stops == [signal.SIGTERM]

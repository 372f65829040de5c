"""What the loggers of the kit print on a terminal."""
from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from utils.log import get_logger, setup_logging

RED, END = "\x1b[1;31m", "\x1b[0m"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Those of this process afterwards as before."""
    root = logging.getLogger("ddpkit")
    kept = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = kept


@pytest.mark.parametrize(("is_terminal", "no_color", "is_red"), [
    (True, "", True), (True, "1", False), (False, "", False)])
def test_error_is_red_on_a_terminal(
        is_terminal: bool, no_color: str, is_red: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("NO_COLOR", no_color)
    setup_logging(0, 1)
    get_logger("test").error("0.weight differs on rank 1")
    get_logger("test").warning("slow")
    error = "ERROR: 0.weight differs on rank 1"
    assert stream.getvalue() == (f"{RED}{error}{END}" if is_red else error) + "\nWARNING: slow\n"

"""The line that describes the error of a rank."""
from __future__ import annotations

import pytest

from utils.launch_protocol import describe

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

"""Measure how long importing torch waits for files: minutes on a busy shared file system."""

from __future__ import annotations

import sys
import time

from .. import process

_waited: float | None = None


def import_torch() -> None:
    """Import torch and note the seconds that were spent neither running nor waiting for a CPU."""
    global _waited
    if "torch" in sys.modules:
        return
    began, busy = time.monotonic(), sum(process.thread_seconds())
    import torch  # noqa: F401

    _waited = max(0.0, time.monotonic() - began - (sum(process.thread_seconds()) - busy))


def seconds_waiting_for_torch() -> float | None:
    """Return what import_torch() has noted; None where torch had been imported before."""
    return _waited

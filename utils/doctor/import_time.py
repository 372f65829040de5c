"""Measure how long importing torch waits for files: minutes on a busy shared file system."""

from __future__ import annotations

import sys
import time

_waited: float | None = None


def import_torch() -> None:
    """Import torch and note the seconds that were spent neither running nor waiting for a CPU."""
    global _waited
    if "torch" in sys.modules:
        return
    began, busy = time.monotonic(), _seconds_busy()
    import torch  # noqa: F401

    _waited = max(0.0, time.monotonic() - began - (_seconds_busy() - busy))


def seconds_waiting_for_torch() -> float | None:
    """Return what import_torch() has noted; None where torch had been imported before."""
    return _waited


def _seconds_busy() -> float:
    """Return the seconds that this thread has run, or has waited for a CPU; see proc(5)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            running, waiting, _ = file.read().split()
        return (int(running) + int(waiting)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()

"""What rank 0 looks at to find out that the run has to stop: the time limit of the job, a file, a command.

Not here: signals, and how all ranks agree to stop (preemption.py).
"""
from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .logging import get_logger

_log = get_logger(__name__)
_ASK_SECONDS = 300.0  # between two questions to the scheduler, whose limit may be changed while the job runs
_FRESH_SECONDS = 30.0  # an answer older than this is asked for again before it ends the run
_COMMAND_SECONDS = 30.0


class Sources:
    """A thread that calls request(reason) once, when one of the sources says so. Each may hang without harm.

    reserve: how many seconds before the time limit it has to be said. The other arguments are those of StopSignal.
    Without a source there is no thread.
    """

    def __init__(self, request: Callable[[str], None], reserve: Callable[[], float],
                 time_left: Callable[[], float | None] | None, file: Path | None, command: Sequence[str],
                 poll_seconds: float) -> None:
        self.ended = threading.Event()  # set it to end the thread
        self._request, self._reserve = request, reserve
        self._time_left = time_left or _scheduler_clock()
        self._file, self._command, self._poll_seconds = file, list(command), poll_seconds
        self._deadline: float | None = None  # of time.monotonic()
        self._asked = self._looked = -_ASK_SECONDS - poll_seconds
        self._told = False
        self._state = self._state_of_file()
        if self._state:
            _log.warning("%s is there already: it stops this run when it is touched again", file)
        if self._time_left or self._file or self._command:
            threading.Thread(target=self._watch, name="stop sources", daemon=True).start()

    def _watch(self) -> None:
        while not self.ended.is_set():
            reason = self._time_is_up() or self._look()
            if reason is not None:
                return self._request(reason)
            self.ended.wait(min(1.0, self._poll_seconds))

    def _time_is_up(self) -> str | None:
        if self._time_left is None:
            return None
        now, reserve = time.monotonic(), self._reserve()
        near = self._deadline is not None and now >= self._deadline - reserve
        if now - self._asked >= (_FRESH_SECONDS if near else _ASK_SECONDS):
            self._asked = now
            left = self._time_left()
            if left is not None:
                self._deadline = now + left  # as of the question, since the answer may come late
            elif self._deadline is None and not self._told:
                self._told = True
                _log.warning("the scheduler does not say how much time is left: this run ends with its job, unless a "
                             "signal comes before")
        if self._deadline is None or time.monotonic() < self._deadline - reserve:
            return None
        return (f"time limit in {max(0.0, self._deadline - time.monotonic()):.0f} s, of which {reserve:.0f} s are kept "
                "for the save")

    def _look(self) -> str | None:
        """At the file and the command, every poll_seconds."""
        if time.monotonic() - self._looked < self._poll_seconds:
            return None
        state = self._state_of_file()
        if state and state != self._state:
            return f"file {self._file}"
        self._state = state
        reason = self._run_command() if self._command else None
        self._looked = time.monotonic()
        return reason

    def _state_of_file(self) -> tuple[int, int] | None:
        """What changes when the file is made or touched; None when it is not there."""
        if self._file is None:
            return None
        try:
            state = os.stat(self._file)
        except OSError:
            return None
        return state.st_ino, state.st_mtime_ns

    def _run_command(self) -> str | None:
        try:
            done = subprocess.run(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL, timeout=_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            _log.warning("the command that may ask for a stop cannot be run and is not tried again: %s", error)
            self._command = []
            return None
        return f"command {self._command[0]}" if done.returncode == 0 else None


def _scheduler_clock() -> Callable[[], float | None] | None:
    """What asks the scheduler for the seconds left of this job; None outside of a job."""
    from .schedulers import AllocationError, current_allocation
    try:
        allocation = current_allocation(ask=False)
    except AllocationError as error:
        _log.warning("the time limit of the job is not watched: %s", error)
        return None
    return allocation.seconds_left if allocation else None

"""What rank 0 looks at to find out that the run has to stop: the time limit of the job, a file, a command.

Not here: signals, and how all ranks agree to stop (preemption.py).
"""
from __future__ import annotations

import math
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
    """Threads, one for each source, that call request(reason) when the source asks for a stop.

    A source that hangs or fails does not affect the others. An exception is logged once and the source is tried again.

    reserve: how many seconds before the time limit a stop has to be asked for. The other arguments are those of
    StopSignal. Without a source there is no thread.
    """

    def __init__(self, request: Callable[[str], None], reserve: Callable[[], float],
                 time_left: Callable[[], float | None] | None, file: Path | None, command: Sequence[str],
                 poll_seconds: float) -> None:
        self.ended = threading.Event()  # set it to end the threads
        self._request, self._reserve = request, reserve
        self._time_left = time_left or _scheduler_clock()
        self._file, self._command = file, list(command)
        self._deadline: float | None = None  # of time.monotonic()
        self._next_query = time.monotonic()
        self._told = False
        self._state: tuple[int, int] | None = None
        self._state_known = False  # whether the file has been looked at
        if self._file:
            try:
                self._file_changed()
            except OSError:
                pass  # the thread tries again and reports it
            if self._state:
                _log.warning("%s is there already: it stops this run when it is touched again", file)
        pause = min(1.0, poll_seconds)
        for wanted, name, check, seconds in (
                (self._time_left, "time limit", self._time_is_up, pause),
                (self._file, f"file {file}", self._file_changed, poll_seconds),
                (self._command, "command", self._run_command, poll_seconds)):
            if wanted:
                threading.Thread(target=self._watch, args=(name, check, seconds), name=f"stop source: {name}",
                                 daemon=True).start()

    def _watch(self, name: str, check: Callable[[], str | None], seconds: float) -> None:
        reported = False
        while not self.ended.is_set():
            try:
                reason = check()
            except BaseException as error:  # SystemExit too: it would end this thread without a word
                reason = None
                if not reported:
                    _log.warning("the source of stop requests %r failed with %s: %s. It is tried again, and the other "
                                 "sources are watched as before; later failures of it are not reported", name,
                                 type(error).__name__, error)
                reported = True
            if reason is not None:
                return self._request(reason)
            self.ended.wait(seconds)

    def _time_is_up(self) -> str | None:
        assert self._time_left is not None
        now, reserve = time.monotonic(), self._reserve()
        near = self._deadline is not None and now >= self._deadline - reserve
        if now >= self._next_query or near and now >= self._next_query - _ASK_SECONDS + _FRESH_SECONDS:
            self._next_query = now + _FRESH_SECONDS  # unless it succeeds
            left = self._time_left()
            if left is not None and math.isnan(left):
                raise ValueError("the time left is nan; expected a number of seconds, or None")
            self._next_query = now + _ASK_SECONDS
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

    def _file_changed(self) -> str | None:
        """Whether the file was made or touched since the last look. OSError when that cannot be told."""
        assert self._file is not None
        try:
            found = os.stat(self._file)
            state = found.st_ino, found.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            state = None
        changed = self._state_known and state is not None and state != self._state
        self._state, self._state_known = state, True
        return f"file {self._file}" if changed else None

    def _run_command(self) -> str | None:
        if not self._command:
            return None
        try:
            done = subprocess.run(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL, timeout=_COMMAND_SECONDS)
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

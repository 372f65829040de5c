"""Watch everything that requests a stop: signals, the job's time limit, a file.

Signals are caught on every rank. Only rank 0 checks the other sources: clocks differ, and a file
system may show a new file later on other hosts.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from ..log import get_logger
from .workers import SIGNALS, shield_children

_log = get_logger(__name__)
_QUERY_SECONDS = 300.0  # seconds between two queries of the scheduler, which may change a limit
_STALE_SECONDS = 30.0  # seconds; an older response is queried again before it ends the run


# Signals ------------------------------------------------------------------------------------------


class WakeUpPipe:
    """Let one thread wait for signals and for other threads."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        for end in (self._read_end, self.write_end):
            os.set_blocking(end, False)  # required by set_wakeup_fd()
        self._poll = select.poll()
        self._poll.register(self._read_end, select.POLLIN)

    def wake(self) -> None:
        """End the current wait(), or the next one."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread, too
            os.write(self.write_end, b"\0")

    def wait(self, seconds: float) -> bytes:
        """Wait for wake() or a signal; return the numbers of the signals."""
        if not self._poll.poll(seconds * 1000):
            return b""
        return os.read(self._read_end, 4096).replace(b"\0", b"")

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)


class SignalCatcher:
    """Catch SIGNALS, and call request() with the name of each signal.

    A Python handler runs only when the main thread runs bytecode again, and a call into C may take
    a minute. The interpreter writes the signal number into the pipe at once, so that a thread in
    wait() can respond.
    """

    def __init__(self, request: Callable[[str], None], wake_up: WakeUpPipe) -> None:
        self._request = request
        self._wake_up = wake_up

        self._previous_handlers = {
            number: signal.signal(number, self._handle) for number in SIGNALS
        }
        self._previous_wakeup_fd = signal.set_wakeup_fd(
            wake_up.write_end, warn_on_full_buffer=False
        )
        shield_children(True)

    def wait(self, seconds: float) -> None:
        """Wait for a signal or wake(), and forward the signals."""
        numbers = self._wake_up.wait(seconds)
        for number in SIGNALS:
            if number in numbers:
                self._request(number.name)
        if numbers and self._previous_wakeup_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous_wakeup_fd, numbers)

    def restore(self) -> None:
        """Restore the previous handlers of the signals."""
        shield_children(False)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        for number, handler in self._previous_handlers.items():
            # None: the handler was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def restore_in_child(self) -> None:
        """Stop catching in a forked child, whose signals would otherwise stop its parent's run.

        SIGTERM ends the child as usual. The other signals reach all processes of a job, so the
        child ignores them if they would end it.
        """
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous_handlers.items():
            is_fatal = number != signal.SIGTERM and handler == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if is_fatal or handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._request(signal.Signals(number).name)
        previous = self._previous_handlers.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)


# What rank 0 checks -------------------------------------------------------------------------------


class Source(Protocol):
    """Something that rank 0 checks repeatedly."""

    name: str
    poll_seconds: float

    def check(self) -> str | None:
        """Return why to stop now; None to go on."""


class SourceThreads:
    """Check each source in its own thread, and call request(reason) when it wants a stop.

    A source that hangs or fails does not affect the others. Its first exception is logged.
    """

    def __init__(self, request: Callable[[str], None], sources: Sequence[Source]) -> None:
        self._request = request
        self._closed = threading.Event()
        for source in sources:
            threading.Thread(
                target=self._watch,
                args=(source,),
                name=f"stop source: {source.name}",
                daemon=True,
            ).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, source: Source) -> None:
        failed = False
        while not self._closed.is_set():
            reason = None
            try:
                reason = source.check()
            except BaseException as error:  # SystemExit would end this thread silently
                if not failed:
                    _log.warning(
                        "the source of stop requests %r failed with %s: %s. It is tried again, and "
                        "the other sources are checked as before; its later failures are not "
                        "reported",
                        source.name,
                        type(error).__name__,
                        error,
                    )
                failed = True

            if reason is not None:
                return self._request(reason)
            self._closed.wait(source.poll_seconds)


class TimeLimit:
    """Want a stop `reserve()` seconds before the time limit of the job.

    time_left: queries the seconds until the limit; returns None without a limit or a response.
    clock: the current time in seconds.
    """

    name = "time limit"

    def __init__(
        self,
        time_left: Callable[[], float | None],
        reserve: Callable[[], float],
        poll_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_seconds = min(1.0, poll_seconds)
        self._time_left, self._reserve, self._clock = time_left, reserve, clock
        self._deadline: float | None = None
        self._queried = -math.inf  # start of the last query
        self._retry_seconds = 0.0
        self._warned = False
        self.is_near = False  # whether check() has wanted a stop

    def check(self) -> str | None:
        now, reserve = self._clock(), self._reserve()
        is_near = self._deadline is not None and now >= self._deadline - reserve
        if now >= self._queried + (_STALE_SECONDS if is_near else self._retry_seconds):
            self._query(now)

        if self._deadline is None or self._clock() < self._deadline - reserve:
            return None
        self.is_near = True
        left = max(0.0, self._deadline - self._clock())
        return f"time limit in {left:.0f} s, of which {reserve:.0f} s are kept for the save"

    def _query(self, now: float) -> None:
        self._queried, self._retry_seconds = now, _STALE_SECONDS
        left = self._time_left()
        if left is not None and math.isnan(left):
            raise ValueError("the time left is nan; expected a number of seconds, or None")

        self._retry_seconds = _QUERY_SECONDS
        if left is not None:
            self._deadline = now + left  # `now` is the time of the query: a response may take long
        elif self._deadline is None and not self._warned:
            self._warned = True
            _log.warning(
                "the scheduler does not report how much time is left. This run ends with its job, "
                "unless a signal arrives first"
            )


class StopFile:
    """Want a stop when a file appears or is touched. A file that exists already must be touched."""

    def __init__(self, path: Path, poll_seconds: float) -> None:
        self.name, self.poll_seconds = f"file {path}", poll_seconds
        self._path = path
        self._state: tuple[int, int] | None = None
        self._state_known = False
        with contextlib.suppress(OSError):  # the thread tries again, and reports an error
            self.check()
        if self._state is not None:
            _log.warning("%s exists already: it stops this run when it is touched again", path)

    def check(self) -> str | None:
        try:
            found = os.stat(self._path)
            state = found.st_ino, found.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            state = None

        changed = self._state_known and state is not None and state != self._state
        self._state, self._state_known = state, True
        return self.name if changed else None


def scheduler_time_left() -> Callable[[], float | None] | None:
    """Return a function that queries this job's seconds left; None outside of a job."""
    from ..job import current_job

    job = current_job()
    return job.seconds_left if job else None

"""Wait for signals, connections, output and deadlines: the one event loop of a launch."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class CaughtSignals:
    """Catches stop signals and the ends of children, and wakes a select() on fileno().

    A context manager, in the main thread.
    """

    def __init__(self) -> None:
        self._stops: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> CaughtSignals:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # nohup ignores SIGHUP on purpose.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read_end)
        os.close(self._write_end)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._stops.append(number)

    def fileno(self) -> int:
        return self._read_end

    def take(self) -> list[int]:
        """Return the stop signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 4096):
                pass
        taken, self._stops = self._stops, []
        return taken


class EventLoop:
    """Calls a handler for each source that is ready.

    Signals only end the wait: whoever runs the loop takes them from `signals`.
    """

    def __init__(self, signals: CaughtSignals) -> None:
        self.signals = signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)

    def close(self) -> None:
        self._selector.close()

    def add(self, source: HasFileno | int, handler: Callable[[int], None]) -> None:
        """Call handler(events) whenever the source can be read, until remove()."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def set_events(self, source: HasFileno | int, events: int) -> None:
        """Wait for these events of a source, such as selectors.EVENT_WRITE."""
        key = self._selector.get_key(source)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def remove(self, source: HasFileno | int) -> None:
        self._selector.unregister(source)

    def run_once(self, *timeouts: float | None) -> None:
        """Wait for an event, at most for the shortest timeout (seconds), and call its handler."""
        timeout = min((seconds for seconds in timeouts if seconds is not None), default=None)
        for key, events in self._selector.select(timeout):
            if key.data is not None:
                key.data(events)

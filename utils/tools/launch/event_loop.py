"""Wait for signals, connections, output and deadlines: the one event loop of a launch."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from ...channel import Loop

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class EventLoop(Loop):
    """An event loop that stop signals and ends of children also wake up.

    A context manager, in the main thread only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stops: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> EventLoop:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # nohup ignores SIGHUP on purpose.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self.add(self._read_end, lambda _: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read_end)
        os.close(self._write_end)
        self.close()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._stops.append(number)

    def take_signals(self) -> list[int]:
        """Return the stop signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 4096):
                pass
        taken, self._stops = self._stops, []
        return taken

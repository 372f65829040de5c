"""How a launch goes: the first failure gives its exit status; and what launch.py says about it.

Not here: who ends the other ranks (control.py, run.py).
"""
from __future__ import annotations

import signal
import sys


def say(text: str) -> None:
    """A line of launch.py's own, on standard error."""
    print(f"launch.py: {text}", file=sys.stderr, flush=True)


def in_words(status: int) -> str:
    """139 -> "was ended by SIGSEGV (exit status 139)"."""
    if status > 128:
        try:
            return f"was ended by {signal.Signals(status - 128).name} (exit status {status})"
        except ValueError:
            pass
    return f"ended with exit status {status}"


LINGER = 0.5  # seconds after the first failure: the other ranks may say what they know of it
# The same, soon after a stop: a rank that leaves with an exit status of its own is no failure then, and another may
# still be writing its checkpoint.
LINGER_AFTER_STOP = 120.0
_SOON = 600.0


class Outcome:
    """status: that of the first process that failed, 0 while none has. failed_at: when that was."""

    def __init__(self) -> None:
        self.status = 0
        self.failed_at: float | None = None
        self._interrupts = 0
        self._at_once = False
        self._stopped_at: float | None = None

    def ended(self, who: str, status: int, now: float, *, others: bool) -> None:
        """A process has ended. others: whether more are running."""
        if status and self.failed_at is None:
            self.fail(f"{who} {in_words(status)}{', the others will be ended' if others else ''}", now, status)

    def fail(self, why: str, now: float, status: int = 1) -> None:
        if self.failed_at is None:
            say(why)
            self.status, self.failed_at = status, now

    def end_now(self, number: int, now: float) -> None:
        """All is to end at once because of a signal."""
        self._at_once = True
        self.fail(f"{signal.Signals(number).name}: all will be ended", now, 128 + number)

    @property
    def end_at(self) -> float | None:
        """When the other ranks are to be ended; None while nothing has failed."""
        if self.failed_at is None or self._at_once:
            return self.failed_at
        stopped = self._stopped_at is not None and self.failed_at < self._stopped_at + _SOON
        return self.failed_at + (LINGER_AFTER_STOP if stopped else LINGER)

    def is_last_stop(self, number: int, now: float) -> bool:
        """Note a stop. Whether it is meant to end everything now: the second ctrl-C, or the loss of the terminal."""
        self._stopped_at = now
        self._interrupts += number == signal.SIGINT
        return number == signal.SIGHUP or self._interrupts > 1

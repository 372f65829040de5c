"""Ranks that ignore a request to end: who they are, and when they are killed all the same."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection

from ...host import process

KILL_SECONDS = 30.0  # seconds from SIGTERM to SIGKILL, as Slurm's default KillWait
_LOOK_SECONDS = 1.0  # checks after this time: by default, SIGTERM has ended a rank by then


class IgnoredStops:
    """Report ranks of this host that ignore SIGTERM, and kill them after KILL_SECONDS.

    A rank with a handler may save for as long as it likes; one that ignores the signal would run
    until somebody notices.
    """

    def __init__(
        self, report: Callable[[list[int]], None], kill: Callable[[list[int]], None]
    ) -> None:
        """report, kill: called with the process ids of these ranks, when found and when due."""
        self._report, self._kill = report, kill
        self._look_at = self._kill_at = math.inf
        self._ignoring: list[int] = []

    def signalled(self, number: int, now: float) -> None:
        """Note that a signal was passed on to the ranks."""
        if number == signal.SIGTERM and self._look_at == self._kill_at == math.inf:
            self._look_at = now + _LOOK_SECONDS

    def check(self, running: Collection[int], now: float) -> float | None:
        """Report or kill what is due; return the seconds until the next call, or None.

        running: process ids of the ranks.
        """
        if now >= self._look_at:
            self._look_at = math.inf
            self._ignoring = [pid for pid in running if process.ignores_signal(pid, signal.SIGTERM)]
            if self._ignoring:
                self._kill_at = now + KILL_SECONDS - _LOOK_SECONDS
                self._report(self._ignoring)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._kill([pid for pid in self._ignoring if pid in running])
        due = min(self._look_at, self._kill_at)
        return None if due == math.inf else max(0.0, due - now)


def describe(ranks: str) -> str:
    """Return the line about ranks that ignore a stop. ranks: "ranks 0-1"."""
    is_one = ranks.startswith("rank ")
    verb, they = ("ignores", "It") if is_one else ("ignore", "They")
    return (
        f"SIGTERM was passed on, but {ranks} {verb} it. {they} will be killed in "
        f"{KILL_SECONDS - _LOOK_SECONDS:.0f} s"
    )

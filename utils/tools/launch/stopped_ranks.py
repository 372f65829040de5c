"""Report ranks that a signal has stopped, from the process that has started them.

Other ranks of the host see it, too, and report what the job waits for; see monitor/inspection.py. A
rank that is alone on its host looks, from elsewhere, like a rank that is busy in native code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ...host import process
from ...launch_protocol import HANG_TIMEOUT
from ...phrases import SILENT

_FACTOR = 1.2  # times --hang-timeout: the ranks' own monitor knows more and comes first
_LOOKS = 16  # number of looks within the limit
_LONGEST_SECONDS = 10.0  # longest interval between two looks


def hang_limit(environ: Mapping[str, str]) -> float:
    """Return --hang-timeout in seconds; 0.0 where none is given, or it is "auto"."""
    try:
        return max(0.0, float(environ.get(HANG_TIMEOUT) or 0))
    except ValueError:
        return 0.0


def describe(rank: int, host: str, pid: int, why: str, seconds: float) -> str:
    """Return the text of the failure that ends the launch. why: see process.why_stopped()."""
    return (
        f"rank {rank} on {host} (pid {pid}) {SILENT}: its process is {why}, for "
        f"{seconds:.0f} s by now"
    )


class StoppedRanks:
    """Report a rank of this host that a signal has stopped for longer than the limit of a hang."""

    def __init__(self, limit: float, report: Callable[[int, str, float], None]) -> None:
        """limit: seconds; 0 for none. report: called with process id, reason and seconds."""
        self._seconds = _FACTOR * limit
        self._pause = min(limit / _LOOKS, _LONGEST_SECONDS)
        self._report = report
        self._next_look = self._last_look = 0.0
        self._since: dict[int, float] = {}  # stopped process -> time of its first look

    def check(self, running: Collection[int], now: float) -> float | None:
        """Report what is due; return the seconds until the next call, or None.

        running: process ids of the ranks.
        """
        if not self._seconds:
            return None
        if now >= self._next_look:
            if now > self._last_look + 4 * self._pause:  # this process was stopped, too
                self._since.clear()
            self._last_look, self._next_look = now, now + self._pause
            for pid in running:
                self._look(pid, now)
        return self._next_look - now

    def _look(self, pid: int, now: float) -> None:
        why = process.why_stopped(pid)
        if not why or "debugger" in why:
            self._since.pop(pid, None)
            return
        seconds = now - self._since.setdefault(pid, now)
        if seconds >= self._seconds:
            self._seconds = 0.0  # the launch ends
            self._report(pid, why, seconds)

"""Notice that what has started the ranks of a host is gone, while they go on.

Where slurmstepd or a proxy of an MPI is killed, nobody ends its ranks, and the launcher never gets
their output and exit status. Some launchers wait for ever, and Open MPI 5 ends with status 0.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from ...host import process

_END_SECONDS = 1.0  # for ranks to end by themselves
_EXITING = 0x4  # in the flags of a process (PF_EXITING)


class Parents:
    """The processes that have started ranks of this host. pids: theirs."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """ranks: process ids."""
        self._ranks: list[tuple[int, int | None, int]] = []  # id, start time, parent
        for pid in ranks:
            if parent := process.parent(pid):
                self._ranks.append((pid, process.start_time(pid), parent))
        self.pids = sorted({parent for _, _, parent in self._ranks})
        self._names = {pid: process.name(pid) for pid in self.pids}
        self._reported = False

    def lost(self) -> tuple[int, str] | None:
        """Return the id and name of one that has left ranks alone; None for none, and not twice."""
        orphans = [] if self._reported else self._orphans()
        self._reported |= bool(orphans)
        return (orphans[0][1], self._names[orphans[0][1]]) if orphans else None

    def end_orphans(self) -> None:
        """Kill the ranks that have been left alone, if they do not end by themselves."""
        if self._orphans():
            time.sleep(_END_SECONDS)
        for pid, _ in self._orphans():
            process.kill([pid], process.session(pid))

    def _orphans(self) -> list[tuple[int, int]]:
        """Return ranks that go on and have another parent than before, and that one."""
        return [
            (pid, parent)
            for pid, started, parent in self._ranks
            if process.start_time(pid) == started
            and process.parent(pid) != parent
            and not _is_ending(pid)
        ]


def _is_ending(pid: int) -> bool:
    """Return whether a process was killed, or ends: it may take seconds to free its memory."""
    fields = process.stat(f"/proc/{pid}")[1]
    if not fields or int(fields[6]) & _EXITING:
        return True
    pending = process.status(pid).get("ShdPnd", "0")
    return bool(int(pending, 16) >> (signal.SIGKILL - 1) & 1)

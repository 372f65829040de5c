"""Read the standard error of srun: pass it on, and note which task failed first."""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
from contextlib import suppress
from typing import IO, NamedTuple

# "srun: error: n2: task 3: Exited with exit code 3", "srun: error: n2: tasks 2-3: Killed"
_TASK_FAILED = re.compile(
    rb"^srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(\w[\w /-]*\w)"
    rb"(?: \(core dumped\))?)\s*$"
)
# Why Slurm ends a step: "srun: error: Node failure on n2", "slurmstepd-n1: error: *** STEP 7.0 ON
# n1 CANCELLED AT 2026-11-21T04:04:15 DUE TO TIME LIMIT ***". srun itself ends one without a reason.
_NODE_FAILED = re.compile(rb"^srun: error: Node failure on (\S+)\s*$")
_CANCELLED = re.compile(
    rb"^slurmstepd\S*: error: \*{3} (?:JOB \S+ ON \S+ CANCELLED AT|STEP .* CANCELLED AT .* DUE TO)"
)


class TaskFailure(NamedTuple):
    """A task that failed, as srun reports it."""

    status: int  # as of a shell: 139 for a segmentation fault
    host: str
    ranks: str  # "2" or "2-3"


class LaunchReason(NamedTuple):
    """Why something other than a rank has ended the launch. lost_hosts: those that have failed."""

    text: str
    lost_hosts: tuple[str, ...] = ()


class SrunErrors:
    """The standard error of srun.

    srun itself ends with the highest status: that of a task killed because another had failed.
    first: the first task that failed before Slurm ended the step. aborted: Slurm itself is ending
    the step. waits_for_resources: another step of the job holds them.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        self.closed = False
        self.first: TaskFailure | None = None
        self.waits_for_resources = False
        self.aborted = False
        self._by_slurm: list[bytes] = []  # lines that say why Slurm ends the step
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def pass_on(self) -> None:
        """Write what srun has written so far to our standard error."""
        try:
            chunk = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self.closed = not chunk
        with suppress(OSError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-4096:]
        for line in lines:
            self._note(line)

    def drain(self) -> None:
        """Read what srun wrote before it ended; a surviving child may hold the stream open."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while not self.closed and selector.select(0.05):
                self.pass_on()

    def reason(self) -> LaunchReason | None:
        """Return why Slurm has ended the step, in its own words; None where it has not."""
        lost = [found[1].decode() for line in self._by_slurm if (found := _NODE_FAILED.match(line))]
        if not self._by_slurm:
            return None
        line = next(filter(_NODE_FAILED.match, self._by_slurm), self._by_slurm[0])
        return LaunchReason(line.decode(errors="replace").rstrip(), tuple(dict.fromkeys(lost)))

    def _note(self, line: bytes) -> None:
        if line.startswith(b"srun: Job step aborted"):
            self.aborted = True
        if b"step creation temporarily disabled" in line:
            self.waits_for_resources = True
        if _NODE_FAILED.match(line) or _CANCELLED.match(line):
            self._by_slurm.append(line)
        found = _TASK_FAILED.match(line)
        if self.first is None and not self._by_slurm and found is not None:
            status = int(found[3]) if found[3] else _status_of(found[4].decode())
            if status:
                self.first = TaskFailure(status, found[1].decode(), found[2].decode())


def _status_of(description: str) -> int:
    """Convert "Segmentation fault" to 139; 0 where no signal has this description."""
    for number in signal.valid_signals():
        if signal.strsignal(number) == description:
            return 128 + number
    return 0

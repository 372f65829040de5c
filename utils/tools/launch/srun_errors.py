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


class TaskFailure(NamedTuple):
    """A task that failed, as srun reports it."""

    status: int  # as of a shell: 139 for a segmentation fault
    host: str
    ranks: str  # "2" or "2-3"


class SrunErrors:
    """The standard error of srun.

    srun itself ends with the highest status: that of a task killed because another had failed.
    first: the first task that failed. aborted: Slurm itself is ending the step.
    waits_for_resources: another step of the job holds them.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        self.closed = False
        self.first: TaskFailure | None = None
        self.waits_for_resources = False
        self.aborted = False
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

    def _note(self, line: bytes) -> None:
        if line.startswith(b"srun: Job step aborted"):
            self.aborted = True
        if b"step creation temporarily disabled" in line:
            self.waits_for_resources = True
        found = _TASK_FAILED.match(line)
        if self.first is None and found is not None:
            status = int(found[3]) if found[3] else _status_of(found[4].decode())
            if status:
                self.first = TaskFailure(status, found[1].decode(), found[2].decode())


def _status_of(description: str) -> int:
    """Convert "Segmentation fault" to 139; 0 where no signal has this description."""
    for number in signal.valid_signals():
        if signal.strsignal(number) == description:
            return 128 + number
    return 0

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
# Why Slurm itself ended the ranks: the text, and what it means with the host in it.
_ENDED_BY_SLURM = (
    (re.compile(rb"error: Node failure on (\S+)"), "Slurm reports that {host} has failed"),
    (re.compile(rb"DUE TO NODE FAILURE"), "Slurm reports that a node has failed"),
    (re.compile(rb"DUE TO TIME LIMIT"), "the job has reached its time limit"),
    (re.compile(rb"DUE TO (?:PREEMPTION|JOB REQUEUE)"), "the job was preempted or requeued"),
    (re.compile(rb"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT [^*]*\*\*\*"), "it was cancelled"),
)

_ENDING = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


class TaskFailure(NamedTuple):
    """A task that failed, as srun reports it."""

    status: int  # as of a shell: 139 for a segmentation fault
    host: str
    ranks: str  # "2" or "2-3"


class SrunErrors:
    """The standard error of srun.

    srun itself ends with the highest status: that of a task killed because another had failed.
    first: the first task that failed. aborted: Slurm itself is ending the step. ended_by_slurm:
    why, "" where srun does not say.
    waits_for_resources: another step of the job holds them.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        self.closed = False
        self.first: TaskFailure | None = None
        self.waits_for_resources = False
        self.aborted = False
        self.ended_by_slurm = ""
        self.failed_hosts: list[str] = []
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
        for pattern, text in _ENDED_BY_SLURM:
            if reason := pattern.search(line):
                host = reason[1].decode() if pattern.groups else ""
                self.failed_hosts += [host] if host else []
                if self._is_unexplained() and (host or not self.ended_by_slurm):
                    self.ended_by_slurm = text.format(host=host)
                break
        if b"step creation temporarily disabled" in line:
            self.waits_for_resources = True
        found = _TASK_FAILED.match(line)
        if self.first is None and found is not None:
            status = int(found[3]) if found[3] else _status_of(found[4].decode())
            if status and (status not in _ENDING or not self.ended_by_slurm):
                self.first = TaskFailure(status, found[1].decode(), found[2].decode())

    def _is_unexplained(self) -> bool:
        """Return whether no task has failed by itself before Slurm ended the others."""
        return self.first is None or self.first.status in _ENDING


def _status_of(description: str) -> int:
    """Convert "Segmentation fault" to 139; 0 where no signal has this description."""
    for number in signal.valid_signals():
        if signal.strsignal(number) == description:
            return 128 + number
    return 0

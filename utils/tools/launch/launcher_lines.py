"""Read what srun, Open MPI and PALS print about the ranks: which one failed, and why a step ended.

Hydra prints such lines on standard output, among the output of the ranks; they are not read. Under
every launcher, the parent of each rank reports its end. The lines read here come earlier, or are
about ranks whose parent was killed, too.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from typing import IO, NamedTuple

from ...job.slurm_job import expand_hostlist
from .outcome import OutOfMemory

# "srun: error: n2: task 3: Exited with exit code 3", "srun: error: n2: tasks 2-3: Killed"
_TASK_FAILED = re.compile(
    rb"^srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(\w[\w /-]*\w)"
    rb"(?: \(core dumped\))?)\s*$"
)
# Why Slurm ends a step: "srun: error: Node failure on n2", "slurmstepd-n1: error: *** STEP 7.0 ON
# n1 CANCELLED AT 2026-11-21T04:04:15 DUE TO TIME LIMIT ***". srun itself ends one without a reason,
# or since 26.05 DUE TO TASK FAILURE. A line of 26.05 begins "[2026-11-28T08:43:46.113] error: ".
_NODE_FAILED = re.compile(rb"^srun: error: Node failure on (\S+)\s*$")
_BY_SLURM = rb"^(?:slurmstepd(?:-(\S+))?:|\[\d{4}-\d\d-\d\dT[\d:.]+\]) error: "
_CANCELLED = re.compile(
    _BY_SLURM + rb"\*{3} (?:JOB \S+ ON \S+ CANCELLED AT"
    rb"|STEP .* CANCELLED AT .* DUE TO (?!TASK FAILURE))"
)
# A signal from outside: a preemption, scancel, ddpkit launch itself. Before 26.05 the line has no
# reason, and srun causes the same one after a task has failed.
_SIGNALLED = re.compile(_BY_SLURM + rb"\*{3} STEP .* CANCELLED AT (?:\S+ \*{3}|.* DUE to SIGNAL )")
# Job accounting prints "StepId=41.0 exceeded memory limit (2092810240 > 629145600), being killed"
# on the host, then "Exceeded job memory limit" on any. A cgroup prints "Detected 1 oom_kill event
# in StepId=41.0. Some of the step tasks have been OOM Killed."
_OUT_OF_MEMORY = re.compile(
    _BY_SLURM + rb"(\S+ exceeded memory limit .*|Exceeded \w+ memory limit.*"
    rb"|Detected \d+ oom[-_]kill event.*)"
)
_KILLED_FOR_MEMORY = "Out Of Memory"  # srun's description of a task


class TaskFailure(NamedTuple):
    """A task that failed, as srun reports it."""

    status: int  # exit status in a shell: 139 for a segmentation fault
    host: str
    ranks: str  # "2" or "2-3"


# PRRTE: "prterun noticed that process rank 1 with PID 6013 on node n2 exited on\nsignal 9",
# "Process name: [prterun-n1-6506@1,1]\nExit code:    3"; ORTE: "[[28950,1],1]".
_MPI_SIGNAL = re.compile(
    rb"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)"
)
_MPI_STATUS = re.compile(rb"^\s*Process name: \[.*,(\d+)\]\s+Exit code:\s+(\d+)")
# "PRTE has lost communication with a remote daemon.", then "Remote daemon: [...] on node n3".
_DAEMON_LOST = re.compile(rb"^\s*Remote daemon: \S+ on node (\S+)")
# "x1001c0s3b0n0: rank 3 died from signal 9"
_PALS_SIGNAL = re.compile(rb"^(\S+): rank (\d+) died from signal (\d+)")


class LauncherErrors:
    """The standard error of a native launcher.

    srun itself ends with the highest status, which may belong to a task that was killed because
    another one failed. first: first task that failed before Slurm ended the step. failed: failed
    rank -> (exit status, host). out_of_memory: Slurm's first line about memory. signalled_before:
    something outside had signalled the step before the first task failed. aborted: Slurm itself is
    ending the step. waits_for_resources: another step of the job holds resources that srun needs.
    refused: Slurm could not create the step. daemons_lost: hosts whose MPI daemon is gone, as Open
    MPI prints it.
    """

    def __init__(self, pipe: IO[bytes] | None) -> None:
        """pipe: None for a launcher whose errors are not read."""
        self._descriptor = -1 if pipe is None else pipe.fileno()
        self._rest = b""
        self.closed = pipe is None
        self.first: TaskFailure | None = None
        self.failed: dict[int, tuple[int, str]] = {}
        self.out_of_memory: OutOfMemory | None = None
        self.waits_for_resources = False
        self.aborted = self.refused = False
        self.failed_at = 0.0  # when a node failure was printed, by time.monotonic()
        self.daemons_lost: list[str] = []
        self._line_before = b""
        self._by_slurm: list[bytes] = []  # lines that say why Slurm ends the step
        self.signalled_before = False
        self._signalled = b""  # the line that says that something outside has signalled the step
        if pipe is not None:
            os.set_blocking(self._descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def pass_on(self) -> None:
        """Write what srun has written so far to our standard error."""
        try:
            chunk = os.read(self._descriptor, 1 << 16)
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
        while not self.closed and select.select([self], [], [], 0.05)[0]:
            self.pass_on()

    def reason(self, *, stopped: bool) -> tuple[str, list[str]]:
        """Return why Slurm has ended the step, in its own words, or ""; and the failed hosts.

        stopped: whether ddpkit launch itself has signalled or ended the step.
        """
        lost = [found for line in self._by_slurm if (found := _NODE_FAILED.match(line))]
        signalled = b"" if stopped else self._signalled
        line = lost[0][0] if lost else next(iter(self._by_slurm), signalled)
        return line.decode(errors="replace").rstrip(), [found[1].decode() for found in lost]

    def _note(self, line: bytes) -> None:
        if line.startswith(b"srun: Job step aborted"):
            self.aborted = True
        if b"step creation temporarily disabled" in line:
            self.waits_for_resources = True
        if _NODE_FAILED.match(line) and not self.failed_at:
            self.failed_at = time.monotonic()
        if _NODE_FAILED.match(line) or _CANCELLED.match(line):
            self._by_slurm.append(line)
        if _SIGNALLED.match(line) and (self.first is None or b" DUE " in line):
            self._signalled = self._signalled or line
        if self.out_of_memory is None and (memory := _OUT_OF_MEMORY.match(line)):
            host = memory[1].decode() if memory[1] else None
            self.out_of_memory = OutOfMemory(memory[2].decode(errors="replace").rstrip(), host)
        if line.startswith(b"srun: error: Unable to create step"):
            self.refused = True
        if found := _TASK_FAILED.match(line):
            self._note_task(found)
        self._note_mpi(line, self._line_before + b"\n" + line)
        self._line_before = line

    def _note_mpi(self, line: bytes, lines: bytes) -> None:
        """Note what an mpiexec prints. lines: this line and the one before it."""
        if found := _MPI_SIGNAL.search(lines):
            self._note_rank(found[1], 128 + int(found[3]), found[2].decode())
        elif found := _MPI_STATUS.search(lines):
            self._note_rank(found[1], int(found[2]), "")
        elif found := _PALS_SIGNAL.match(line):
            self._note_rank(found[2], 128 + int(found[3]), found[1].decode())
        elif found := _DAEMON_LOST.match(line):
            self.daemons_lost.append(found[1].decode())

    def _note_rank(self, rank: bytes, status: int, host: str) -> None:
        self.failed.setdefault(int(rank), (status, host))

    def _note_task(self, found: re.Match[bytes]) -> None:
        host, ranks = found[1].decode(), found[2].decode()
        description = found[4].decode() if found[4] else ""
        status = int(found[3]) if found[3] else _status_of(description)
        if not status:
            return
        with suppress(ValueError):
            for rank in expand_hostlist(f"[{ranks}]"):
                self.failed.setdefault(int(rank), (status, host))
        by_memory = description == _KILLED_FOR_MEMORY
        if by_memory and self.out_of_memory is not None and self.out_of_memory.host is None:
            self.out_of_memory = self.out_of_memory._replace(host=host)
        if self.first is None and (by_memory or not self._by_slurm and not self.out_of_memory):
            self.first = TaskFailure(status, host, ranks)
            self.signalled_before = bool(self._signalled)


def _status_of(description: str) -> int:
    """Convert "Segmentation fault" to 139; 0 where no signal has this description."""
    if description == _KILLED_FOR_MEMORY:
        return 128 + signal.SIGKILL
    for number in signal.valid_signals():
        if signal.strsignal(number) == description:
            return 128 + number
    return 0

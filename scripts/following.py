"""Following submitted jobs: their states, places in the queue and output as they come, until they have ended.

Not here: asking the scheduler (utils/schedulers), where the output is (records.py).
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from utils.launch.report import EXIT_REQUEUE
from utils.schedulers import Scheduler, SchedulerError, Status

SHORTEST, LONGEST = 1.0, 10.0  # seconds between two questions to the scheduler: short while something happens
PATIENCE = 10  # failed questions in a row; a scheduler that restarts is away for a minute or so
LOG_SECONDS = 0.5  # between two looks at the output


class Log:
    """Prints what is added to the output files of a job. With several files each piece is preceded by its name."""

    def __init__(self, files: Callable[[], list[Path]], out: BinaryIO) -> None:
        self.files = files
        self.out = out
        self.read: dict[Path, int] = {}
        self.last: Path | None = None

    def print_new(self) -> bool:
        """Print what is new; True if there was something."""
        news = False
        for path in self.files():
            try:
                with path.open("rb") as file:
                    file.seek(self.read.get(path, 0))
                    piece = file.read()
            except OSError:
                continue  # the file server shows it a little later
            if piece:
                if self.last is not None and path != self.last:
                    self.out.write(f"==> {path.name}\n".encode(errors="surrogateescape"))
                self.out.write(piece)
                self.out.flush()
                self.read[path] = self.read.get(path, 0) + len(piece)
                self.last = path
                news = True
        return news


def describe(status: Status) -> str:
    """One line about a job, for people."""
    words = [f"job {status.job_id}: {status.state.replace('_', ' ')}"]
    if status.position is not None and status.state in ("queued", "held"):
        words.append(f"number {status.position} in the queue")
    if status.hosts and status.state == "running":
        words.append("on " + " ".join(status.hosts[:8]) + (" ..." if len(status.hosts) > 8 else ""))
    if status.ended and status.exit_code is not None:
        words.append(f"exit status {status.exit_code}")
    plain = status.state in ("running", "ending", "completed")  # nothing to explain
    return ", ".join(words) + (f" ({status.reason})" if status.reason and not plain else "")


def exit_status(status: Status) -> int:
    """What a job is worth to the shell: 0 for success alone, else the job's own code, or 1."""
    if status.state == "completed":
        return 0
    return status.exit_code if status.exit_code and 0 < status.exit_code < 256 else 1


def follow(scheduler: Scheduler, logs: Callable[[str], list[Path]], job_ids: Sequence[str]) -> int:
    """Print states and output of the jobs, one after the other, until all have ended; the exit status for the shell.

    logs: gives the output files of a job that are there. Of a chain, each job has to end well or by its time limit, and
    the last one well.
    """
    result = 0
    for job_id in job_ids:
        status = _follow_one(scheduler, logs, job_id)
        code = exit_status(status)
        if job_id != job_ids[-1]:
            code = code if spoils_the_chain(status) else 0
            if code:
                how = "is not known to have ended well" if status.state == "unknown" else "did not end well"
                _say(f"job {job_id} {how}, so the chain does not count as a success")
        result = result or code
    return result


def spoils_the_chain(status: Status) -> bool:
    """Whether the jobs after this one cannot make up for it: they go on where the time limit, or a stop, ended it.

    One that nobody knows any more is no success either.
    """
    return status.state == "unknown" or (
        status.ended and status.state not in ("completed", "timeout") and status.exit_code != EXIT_REQUEUE)


def _follow_one(scheduler: Scheduler, logs: Callable[[str], list[Path]], job_id: str) -> Status:
    log = Log(lambda: logs(job_id), sys.stdout.buffer)
    shown = ""
    failures = 0
    pause = SHORTEST
    while True:
        try:
            status = scheduler.status(job_id)
            failures = 0
        except SchedulerError as error:
            failures += 1
            if failures == PATIENCE:
                raise
            _say(f"{error} Asking again.")
            status = None
        if status is not None:
            line = describe(status)
            if line != shown:
                _say(line)
                shown, pause = line, SHORTEST
            if status.ended or status.state == "unknown":
                _print_rest(log)
                return status
            if status.state == "held" and "for ever" in status.reason:  # PBS, for one that waits for a deleted job
                return Status(job_id, "never_ran", reason=status.reason)
        until = time.monotonic() + pause
        pause = min(pause * 1.5, LONGEST)
        while time.monotonic() < until:
            if log.print_new():
                pause = SHORTEST
            time.sleep(LOG_SECONDS)


def _print_rest(log: Log) -> None:
    """The end of the output may reach this host's view of the file system, or be copied back, after the job's end."""
    for _ in range(4):
        log.print_new()
        time.sleep(LOG_SECONDS / 2)


def _say(line: str) -> None:
    print(f"submit: {line}", file=sys.stderr, flush=True)

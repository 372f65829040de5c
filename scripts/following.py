"""Following submitted jobs: their states, places in the queue and output as they come, until they have ended."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from records import array_index

from utils.schedulers import SchedulerError, Status

SHORTEST, LONGEST = 1.0, 10.0  # seconds between two questions to the scheduler: short while something happens
PATIENCE = 10  # failed questions in a row; a scheduler that restarts is away for a minute or so
LOG_SECONDS = 0.5  # between two looks at the output


class Log:
    """Prints what is added to the output files of a job.

    A heading names the element of an array before its lines, and the file where a job has several.
    """

    def __init__(self, files: Callable[[], list[Path]], out: BinaryIO) -> None:
        self.files = files
        self.out = out
        self.read: dict[Path, int] = {}
        self.last: Path | None = None
        self.at_line_start = True

    def print_new(self, *, to_the_end: bool = True) -> bool:
        """Print what is new; True if there was something. to_the_end: also the last line of an element that is not
        complete yet, which else waits so that lines of two elements do not run into each other."""
        news = False
        for path in self.files():
            index = array_index(path.name)
            try:
                with path.open("rb") as file:
                    file.seek(self.read.get(path, 0))
                    piece = file.read()
            except OSError:
                continue  # the file server shows it a little later
            if index and not to_the_end:
                piece = piece[:piece.rfind(b"\n") + 1]
            if piece:
                if path != self.last and (index or self.last is not None):
                    name = f"array element {index}: {path.name}" if index else path.name
                    start = "" if self.at_line_start else "\n"
                    self.out.write(f"{start}==> {name}\n".encode(errors="surrogateescape"))
                self.out.write(piece)
                self.out.flush()
                self.at_line_start = piece.endswith(b"\n")
                self.read[path] = self.read.get(path, 0) + len(piece)
                self.last = path
                news = True
        return news


def describe(status: Status) -> str:
    """One line about a job, for people."""
    state = "stopped after saving, to be continued" if status.state == "stopped" else status.state.replace("_", " ")
    words = [f"job {status.job_id}: {state}"]
    if status.position is not None and status.state in ("queued", "held"):
        words.append(f"number {status.position} in the queue")
    if status.hosts and status.state == "running":
        words.append("on " + " ".join(status.hosts[:8]) + (" ..." if len(status.hosts) > 8 else ""))
    if status.ended and status.exit_code is not None:
        words.append(f"exit status {status.exit_code}")
    plain = status.state in ("running", "ending", "completed", "stopped")  # nothing to explain
    return ", ".join(words) + (f" ({status.reason})" if status.reason and not plain else "")


def exit_status(status: Status) -> int:
    """0 for success alone; EXIT_REQUEUE for a job that stopped after saving; else the job's own status, or 1."""
    if status.state == "completed":
        return 0
    return status.exit_code if status.exit_code and 0 < status.exit_code < 256 else 1


def follow(status_of: Callable[[str], Status], logs: Callable[[str], list[Path]], job_ids: Sequence[str]) -> int:
    """Print states and output of the jobs, one after the other, until all have ended; the exit status for the shell.

    status_of: the status of a job now. logs: the output files of a job that are there. Of a chain, each job has to end
    in a way that the next one can continue, and the last one well.
    """
    result = 0
    for job_id in job_ids:
        status = _follow_one(status_of, logs, job_id)
        code = exit_status(status)
        if job_id != job_ids[-1]:
            code = code if spoils_the_chain(status) else 0
            if code:
                how = "is not known to have ended well" if status.state == "unknown" else "did not end well"
                _say(f"job {job_id} {how}, so the chain does not count as a success")
        result = result or code
    return result


def spoils_the_chain(status: Status) -> bool:
    """Whether the jobs after this one must not run: they continue it only where it completed, stopped after saving, or
    was ended by the time limit or by a preemption. A job that the scheduler no longer knows counts as failed.
    """
    return status.state == "unknown" or (
        status.ended and status.state not in ("completed", "stopped", "timeout") and status.native != "PREEMPTED")


def _follow_one(status_of: Callable[[str], Status], logs: Callable[[str], list[Path]], job_id: str) -> Status:
    log = Log(lambda: logs(job_id), sys.stdout.buffer)
    shown = ""
    failures = 0
    pause = SHORTEST
    while True:
        try:
            status = status_of(job_id)
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
            if log.print_new(to_the_end=False):
                pause = SHORTEST
            time.sleep(LOG_SECONDS)


def _print_rest(log: Log) -> None:
    """The end of the output may reach this host's view of the file system, or be copied back, after the job's end."""
    for _ in range(4):
        log.print_new()
        time.sleep(LOG_SECONDS / 2)


def _say(line: str) -> None:
    print(f"submit: {line}", file=sys.stderr, flush=True)

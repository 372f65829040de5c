"""Follow submitted jobs: print their states and output until they have ended."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from ...job.commands import SchedulerError
from ...visible_text import visible
from ..cli import defaults
from ..doctor.lines import read_restart
from ..doctor.logs import diagnose, summary
from ..schedulers.scheduler import Status
from .submissions import failure_file

# Seconds between two queries: short after a change, longer while nothing happens.
MIN_QUERY_SECONDS = 1.0
MAX_QUERY_SECONDS = 10.0
PRINTING_SECONDS = 30.0  # seconds between two queries while a running job prints
NO_RESPONSE_SECONDS = 120.0  # a scheduler that restarts is away for a minute or so
LOG_SECONDS = 0.5  # seconds between two reads of the output


class Log:
    """Print what is appended to the output files of a job."""

    def __init__(self, files: Callable[[], list[Path]], out: BinaryIO) -> None:
        self._files = files
        self._out = out
        self._offsets: dict[tuple[int, int], int] = {}  # (device, inode) -> bytes printed

    def print_new(self) -> bool:
        """Print what is new; return whether there was something."""
        found = False
        for path in self._files():
            try:
                with path.open("rb") as file:
                    found_file = os.fstat(file.fileno())
                    key = found_file.st_dev, found_file.st_ino
                    file.seek(self._offsets.get(key, 0))
                    data = file.read()
            except OSError:
                continue  # a file server may show it a little later
            self._out.write(data)
            self._out.flush()
            self._offsets[key] = self._offsets.get(key, 0) + len(data)
            found = found or bool(data)
        return found


def describe(status: Status) -> str:
    """Describe a job in one line."""
    state = status.state.replace("_", " ")
    if status.state == "stopped":
        state = "stopped after saving, to be continued"
    parts = [f"job {status.job_id}: {state}"]
    if status.hosts and status.state == "running":
        parts.append("on " + " ".join(status.hosts[:8]) + (" ..." if len(status.hosts) > 8 else ""))
    if status.ended and status.exit_code is not None:
        parts.append(f"exit status {status.exit_code}")
    text = ", ".join(parts)
    if status.reason and status.state not in ("running", "ending", "completed", "stopped"):
        text += f" ({status.reason})"
    return text


def breaks_chain(status: Status) -> bool:
    """Whether the later jobs of a chain must not run after this one.

    They continue a job that completed, stopped after saving, or was ended by the time limit, a
    preemption or the failure of a host. A job that the scheduler no longer knows counts as failed.
    """
    if status.state == "unknown":
        return True
    continuable = status.state in ("completed", "stopped", "timeout", "node_fail")
    return status.ended and not continuable and status.scheduler_state != "PREEMPTED"


def follow(
    query: Callable[[str], Status], logs: Callable[[str], list[Path]], job_ids: Sequence[str]
) -> int:
    """Print states and output of jobs, one after the other, until they end; return an exit status.

    query: returns the status of a job. logs: returns its existing output files. Each job of a chain
    has to end in a way that the next job can continue; the last job has to succeed. A job that ends
    with status 0 has completed the training: later jobs are not needed.
    Raises SchedulerError when the scheduler does not respond for some time.
    """
    result = 0
    configured = defaults.load().get("follow-seconds")
    printing_seconds = float(configured.value) if configured else PRINTING_SECONDS
    for job_id in job_ids:
        status = _follow_one(query, logs, job_id, printing_seconds)
        exit_status = status.exit_status
        if job_id != job_ids[-1]:
            if status.state == "completed":
                note("the training is complete; the rest of the chain is not needed")
                break
            exit_status = exit_status if breaks_chain(status) else 0
            if exit_status:
                how = "is not known to have ended well" if status.state == "unknown" else "failed"
                note(f"job {job_id} {how}, so the chain does not count as a success")
        result = result or exit_status
    return result


def _follow_one(
    query: Callable[[str], Status],
    logs: Callable[[str], list[Path]],
    job_id: str,
    printing_seconds: float,
) -> Status:
    log = Log(lambda: logs(job_id), sys.stdout.buffer)
    shown = ""
    failing_since: float | None = None
    silent_until = 0.0
    pause = MIN_QUERY_SECONDS
    is_running = False
    while True:
        try:
            status = query(job_id)
            failing_since = None
            is_running = status.state == "running"
        except SchedulerError as error:
            now = time.monotonic()
            failing_since = failing_since or now
            if now - failing_since >= NO_RESPONSE_SECONDS:
                raise
            if now >= silent_until:  # a server that restarts responds and fails in turns
                in_one_line = " ".join(str(error).split("\n"))
                note(f"{in_one_line} Trying again for {NO_RESPONSE_SECONDS:.0f} s.")
                silent_until = now + NO_RESPONSE_SECONDS
        else:
            line = describe(status)
            if line != shown:
                note(line)
                shown, pause = line, MIN_QUERY_SECONDS
            if status.ended or status.state == "unknown":
                _print_rest(log)
                if found := cause(status, logs(job_id), after_output=True):
                    note(found)
                return status
        queried = time.monotonic()
        until = queried + pause
        pause = min(pause * 1.5, MAX_QUERY_SECONDS)
        while (now := time.monotonic()) < until:
            if log.print_new():
                if is_running:  # the output shows that it still runs
                    until = min(queried + printing_seconds, now + MAX_QUERY_SECONDS)
                else:
                    pause = MIN_QUERY_SECONDS
            time.sleep(LOG_SECONDS)


def _print_rest(log: Log) -> None:
    """Print the rest, which file servers or PBS deliver shortly after the job's end."""
    for _ in range(4):
        log.print_new()
        time.sleep(LOG_SECONDS / 2)


def cause(status: Status, files: Sequence[Path], *, after_output: bool = False) -> str:
    """Return why a job failed and whether a restart helps; "" if its output does not show it.

    after_output: whether the output was printed before.
    """
    if status.state not in ("failed", "node_fail", "timeout"):
        return ""
    folders = {path.parent for path in files}
    records = [failure_file(folder, status.job_id) for folder in folders]
    files = [*files, *(path for path in records if path.exists())]
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        found = diagnose([(stack.enter_context(path.open("rb")), path.name) for path in files])
        return "" if found is None else summary(found, after_output=after_output)
    return ""


def restarts(status: Status, files: Sequence[Path]) -> list[str]:
    """Return a line for each restart of the ranks within a job: number, hosts left out, cause."""
    found = []
    for path in {failure_file(file.parent, status.job_id) for file in files}:
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [restart for line in lines if (restart := read_restart(line))]
    return found


def note(text: str) -> None:
    """Print a line on standard error."""
    print(f"ddpkit submit: {visible(text)}", file=sys.stderr, flush=True)

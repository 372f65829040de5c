"""Start the ranks of a submitted job and record its exit status; job.sh calls this.

In a chain, a job starts no ranks when the one before has failed or completed the training, and
cancels the later jobs when it fails or completes the training itself. They continue a job that lost
a host, without that host.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...job import current_job, exclude_file
from ...job.commands import SchedulerError
from ...job.notation import EXIT_REQUEUE, STOP_FILE, same_host
from ...job.slurm_job import unique_job_id
from ..launch import launch_cli as launch_cli
from ..schedulers import get_scheduler
from ..schedulers.scheduler import Scheduler, Status
from . import bad_hosts as exclusion
from . import preflight
from . import submissions as records
from .following import breaks_chain, describe, note

# For the state of the previous job, where that job has recorded nothing:
QUERY_TIMEOUT_SECONDS = 300.0
QUERY_PAUSE_SECONDS = 20.0
# Less is the time that a scheduler takes to end a job at its limit, not an extension of the limit.
MIN_EXTENSION_SECONDS = 60.0


def main(words: Sequence[str]) -> int:
    """Run a job: words are FOLDER, PREVIOUS_JOB_ID or "", and the command line of `launch`.

    Before the latter may come --preflight and the options of doctor as one word.
    """
    folder, previous, launch_words = Path(words[0]), words[1], words[2:]
    doctor_options: list[str] = []
    if launch_words[:1] == ["--preflight"]:
        doctor_options, launch_words = shlex.split(launch_words[1]), launch_words[2:]
    os.environ[exclude_file.VARIABLE] = str(exclusion.path(folder.parent))
    os.environ[STOP_FILE] = str(folder / records.STOP)
    scheduler, job_id = _this_job(os.environ)
    refused = refusal(scheduler, folder, previous) if previous else None
    if refused is not None:
        status, reason = refused
        note(
            f"not started, since {reason}. The jobs of a chain continue one that stopped after "
            f"saving (exit status {EXIT_REQUEUE}) or reached its time limit. To go on all the "
            f"same: ddpkit submit resubmit {job_id}"
        )
        _write_status(folder, job_id, records.NOT_STARTED if status else 0)
        return status

    _remove_status(folder, job_id)
    with contextlib.suppress(OSError):  # of the job before
        (folder / records.STOP).unlink()
    limit = JobTimeLimit(folder, job_id)
    limit.watch()
    status, started = 1, int(time.time())
    try:
        stopped = None
        if doctor_options:
            stopped = preflight.check(scheduler, folder, job_id, doctor_options, launch_words)
        status = launch_cli.main(launch_words) if stopped is None else stopped
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        limit.close()
        if status in (0, EXIT_REQUEUE) or not limit.reached:
            lost = [] if status in (0, EXIT_REQUEUE) else _lost_hosts(folder, started)
            _write_status(folder, job_id, records.HOST_LOST if lost else status)
            if lost:
                _continue_without(lost, scheduler, folder, job_id)
            elif status != EXIT_REQUEUE:
                why = "this job has failed" if status else "the training is complete"
                cancel_later_jobs(scheduler, folder, job_id, why)
    return status


def _this_job(environ: Mapping[str, str]) -> tuple[Scheduler, str]:
    if environ.get("SLURM_JOB_ID"):
        return get_scheduler("slurm"), unique_job_id(environ)
    return get_scheduler("pbs"), environ["PBS_JOBID"]


def refusal(scheduler: Scheduler, folder: Path, previous: str) -> tuple[int, str] | None:
    """Return why this job must not continue the previous one, and its exit status; None: it may.

    What that job has recorded counts where the scheduler knows it no longer.
    """
    complete = 0, f"job {previous} has completed the training"
    recorded = records.read_status(folder, previous)
    if recorded == 0:
        return complete
    if recorded in (EXIT_REQUEUE, records.TIME_LIMIT, records.HOST_LOST):
        return None
    if recorded == records.NOT_STARTED:
        return 1, f"job {previous} did not start either"
    try:
        timeout = QUERY_TIMEOUT_SECONDS if recorded is None else 0.0
        status = _query(scheduler, previous, timeout)
    except SchedulerError as error:
        found = str(error)
    else:
        if status.state == "completed":
            return complete
        if not breaks_chain(status):
            return None
        found = describe(status)
    if recorded is not None:
        return 1, f"job {previous} ended with exit status {recorded}"
    return 1, f"the job before cannot be continued: {found}"


def _query(scheduler: Scheduler, job_id: str, timeout: float) -> Status:
    """Query a job; repeat that for `timeout` seconds where the scheduler does not respond."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return scheduler.status(job_id)
        except SchedulerError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            note(f"the state of job {job_id} is not known: {error}. Trying again for {left:.0f} s")
        time.sleep(min(QUERY_PAUSE_SECONDS, max(left, 0.0)))


class JobTimeLimit:
    """Record that the time limit is reached when it is: afterwards nothing may be left to do it."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.reached = False
        self._folder, self._job_id = folder, job_id
        self._closed = threading.Event()
        self._lock = threading.Lock()  # after close() the exit status is recorded

    def watch(self) -> None:
        """Wait for the time limit in a thread."""
        seconds = _seconds_left()
        if seconds is not None:
            threading.Thread(target=self._wait, args=(seconds,), daemon=True).start()

    def close(self) -> None:
        """Record nothing more."""
        with self._lock:
            self._closed.set()

    def _wait(self, seconds: float) -> None:
        while not self._closed.wait(min(seconds, threading.TIMEOUT_MAX)):
            with self._lock:
                if self._closed.is_set():
                    return
                self.reached = True
                _write_status(self._folder, self._job_id, records.TIME_LIMIT)
            seconds = _seconds_left() or 0.0
            if seconds < MIN_EXTENSION_SECONDS:
                return
            with self._lock:  # the limit was extended meanwhile: a later failure is one again
                if not self._closed.is_set():
                    self.reached = False
                    _remove_status(self._folder, self._job_id)


def _seconds_left() -> float | None:
    job = current_job()
    return job.seconds_left() if job else None


def _write_status(folder: Path, job_id: str, status: int | str) -> None:
    try:
        records.write_status(folder, job_id, status)
    except OSError as error:  # the scheduler knows it too, for a while
        note(f"the exit status could not be recorded in {folder}: {error.strerror}")


def _remove_status(folder: Path, job_id: str) -> None:
    try:
        records.remove_status(folder, job_id)
    except OSError as error:
        note(
            f"the status of an earlier run of job {job_id} could not be removed from {folder}: "
            f"{error.strerror}. The next job of the chain may take it for this run's: remove it"
        )


def _lost_hosts(folder: Path, started: float) -> list[str]:
    """Return the hosts of this job that were found bad since then: launch.py lists lost ones."""
    file = exclusion.path(folder.parent)
    found = {one.host for one in exclude_file.read(file) if one.since and one.since >= started}
    hosts = preflight.hosts_of_job()
    return [host for host in hosts if any(same_host(host, bad) for bad in found)]


def _continue_without(lost: Sequence[str], scheduler: Scheduler, folder: Path, job_id: str) -> None:
    """Let the later jobs of the chain, which continue this one, avoid the lost hosts."""
    try:
        later = records.read(folder).after(job_id)
    except (OSError, ValueError, KeyError, TypeError):
        return
    note(f"this job has lost {', '.join(lost)}; {exclusion.path(folder.parent)} lists it")
    good = [host for host in preflight.hosts_of_job() if host not in lost]
    for later_id in later:
        preflight.exclude(scheduler, later_id, lost, good)


def cancel_later_jobs(scheduler: Scheduler, folder: Path, job_id: str, why: str) -> None:
    """Cancel the later jobs of the chain. Those that are missed refuse to start."""
    try:
        later = records.read(folder).after(job_id)
        # A job that is no longer running is being ended from outside: a preemption is no failure.
        if not later or scheduler.status(job_id).state != "running":
            return
        for later_id in reversed(later):
            scheduler.cancel(later_id)
    except (OSError, ValueError, KeyError, TypeError, SchedulerError):
        return
    note(f"{why}, so the rest of its chain was cancelled: {' '.join(later)}")

"""Start the ranks of a submitted job and record its exit status; job.sh calls this.

In a chain, a job starts no ranks if the previous job has failed or completed the training. A job
that fails or completes the training itself cancels the later jobs. If a job has lost a host, the
later jobs continue it without that host.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...job import current_job, exclude_file
from ...job.commands import SchedulerError
from ...job.notation import STOP_FILE, same_host
from ...job.slurm_job import unique_job_id
from ...launch_protocol import EXIT_REQUEUE, FAILURE_FILE
from ..launch import launch_cli as launch_cli
from ..schedulers import get_scheduler
from ..schedulers.scheduler import Scheduler, Status
from . import bad_hosts as exclusion
from . import preflight
from . import submissions as records
from .following import breaks_chain, describe, note
from .queries import query

# Limits for querying the previous job, if that job has recorded nothing:
QUERY_TIMEOUT_SECONDS = 300.0
QUERY_PAUSE_SECONDS = 20.0


def main(words: Sequence[str]) -> int:
    """Run a job: words are FOLDER, PREVIOUS_JOB_ID or "", and the command line of `launch`.

    --preflight and the options of doctor, as one word, may precede that command line.
    """
    folder, previous, launch_words = Path(words[0]), words[1], words[2:]
    doctor_options: list[str] = []
    if launch_words[:1] == ["--preflight"]:
        doctor_options, launch_words = shlex.split(launch_words[1]), launch_words[2:]
    os.environ[exclude_file.VARIABLE] = str(exclusion.path(folder.parent))
    scheduler, job_id = _this_job(os.environ)
    stop_file = records.stop_file(folder, job_id)
    os.environ[STOP_FILE] = str(stop_file)
    os.environ[FAILURE_FILE] = str(records.failure_file(folder, job_id))
    refused = refusal(scheduler, folder, previous) if previous else None
    if refused is not None:
        status, reason = refused
        note(
            f"not started, since {reason}. The jobs of a chain continue one that stopped after "
            f"saving (exit status {EXIT_REQUEUE}) or reached its time limit. To go on all the "
            f"same, submit again; {folder / records.FILE} has the command line"
        )
        _write_status(folder, job_id, records.NOT_STARTED if status else 0)
        return status

    started = time.time()
    limit = started + _seconds_left(default=math.inf)
    with contextlib.suppress(OSError):  # the folder may not be writable now
        if records.has_started(folder, job_id):  # requeued: the file was for the earlier run
            stop_file.unlink(missing_ok=True)
        records.write_limit(folder, job_id, limit)
    status, lost = 1, list[str]()
    try:
        stopped = None
        if doctor_options:
            stopped = preflight.check(scheduler, folder, job_id, doctor_options, launch_words)
        if stopped is not None:
            status, lost = stopped, _hosts_found_bad(folder, int(started))
        else:
            outcome = launch_cli.launch(launch_words)
            status, lost = outcome.status, list(outcome.lost_hosts)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        _end(scheduler, folder, job_id, status, lost, limit)
    return status


def _end(
    scheduler: Scheduler,
    folder: Path,
    job_id: str,
    status: int,
    lost: Sequence[str],
    limit: float,
) -> None:
    """Record how this job ended, and continue or cancel the rest of its chain.

    lost: hosts whose loss has ended the job; not hosts that a spare has replaced.
    """
    if status in (0, EXIT_REQUEUE):
        _write_status(folder, job_id, status)
        if status == 0:
            cancel_later_jobs(scheduler, folder, job_id, "the training is complete")
    elif _seconds_left(default=limit - time.time()) <= 0:  # the limit may have been extended
        _write_status(folder, job_id, records.TIME_LIMIT)
    elif lost:
        _write_status(folder, job_id, records.HOST_LOST)
        _continue_without(lost, scheduler, folder, job_id)
    else:
        _write_status(folder, job_id, status)
        cancel_later_jobs(scheduler, folder, job_id, "this job has failed")


def _this_job(environ: Mapping[str, str]) -> tuple[Scheduler, str]:
    if environ.get("SLURM_JOB_ID"):
        return get_scheduler("slurm"), unique_job_id(environ)
    return get_scheduler("pbs"), environ["PBS_JOBID"]


def refusal(scheduler: Scheduler, folder: Path, previous: str) -> tuple[int, str] | None:
    """Return an exit status and why this job must not continue the previous one; None if it may."""
    try:
        status = _query(scheduler, folder, previous)
    except SchedulerError as error:
        return 1, f"the job before cannot be continued: {error}"
    if status.state == "completed":
        return 0, f"job {previous} has completed the training"
    if status.state == "never_ran":
        return 1, f"job {previous} did not start either"
    if breaks_chain(status):
        return 1, f"the job before cannot be continued: {describe(status)}"
    return None


def _query(scheduler: Scheduler, folder: Path, job_id: str) -> Status:
    """Query a job; try again for a while if there is neither a response nor a record."""
    deadline = time.monotonic() + QUERY_TIMEOUT_SECONDS
    while True:
        try:
            return query(scheduler, folder, job_id)
        except SchedulerError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            note(f"the state of job {job_id} is not known: {error}. Trying again for {left:.0f} s")
        time.sleep(min(QUERY_PAUSE_SECONDS, max(left, 0.0)))


def _seconds_left(default: float) -> float:
    """Return the seconds until the time limit; `default` where that is not known."""
    job = current_job()
    left = job.seconds_left() if job else None
    return default if left is None else left


def _write_status(folder: Path, job_id: str, status: int | str) -> None:
    try:
        records.write_status(folder, job_id, status)
    except OSError as error:  # the scheduler knows it too, for a while
        note(f"the exit status could not be recorded in {folder}: {error.strerror}")


def _hosts_found_bad(folder: Path, started: float) -> list[str]:
    """Return the hosts of this job that its preflight has found bad."""
    file = exclusion.path(folder.parent)
    found = {
        entry.host for entry in exclude_file.read(file) if entry.since and entry.since >= started
    }
    hosts = preflight.hosts_of_job()
    return [host for host in hosts if any(same_host(host, bad) for bad in found)]


def _continue_without(lost: Sequence[str], scheduler: Scheduler, folder: Path, job_id: str) -> None:
    """Let the later jobs of the chain, which continue this one, avoid the lost hosts."""
    try:
        later = records.read(folder).after(job_id)
    except (OSError, ValueError, KeyError, TypeError):
        return
    note(f"this job has lost {', '.join(lost)}; {exclusion.path(folder.parent)} lists it")
    for later_id in later:
        preflight.exclude(scheduler, later_id, lost)


def cancel_later_jobs(scheduler: Scheduler, folder: Path, job_id: str, why: str) -> None:
    """Cancel the later jobs of the chain. A job that is missed here refuses to start."""
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

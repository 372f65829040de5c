"""launch.py for a job that submit.py has submitted; job.sh starts it.

launch_recorded.py FOLDER PREVIOUS_JOB [options and command of launch.py]

Keeps the exit status of the job in the folder of its submission. In a chain, starts nothing when the previous job has
failed, and cancels the later jobs when this one fails.
"""
import interpreter

if __name__ == "__main__":
    interpreter.restart_if_too_old(__file__)

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
import following
import launch
import records

from utils.schedulers import AllocationError, Scheduler, SchedulerError, Status, current_allocation, get_scheduler
from utils.schedulers.exit_status import EXIT_REQUEUE
from utils.schedulers.slurm import own_id

QUERY_SECONDS, QUERY_PAUSE_SECONDS = 300.0, 20.0  # for the state of the previous job, where nothing was kept
_EXTENSION_SECONDS = 60.0  # less is the time that a scheduler takes to end a job at its limit

def main() -> int:
    folder, previous = Path(sys.argv[1]), sys.argv[2]
    sys.argv[1:] = sys.argv[3:]
    scheduler, job_id = _job(os.environ)
    why = refusal(scheduler, folder, previous) if previous else None
    if why is not None:
        say(f"not started, since {why}. The jobs of a chain continue one that completed, stopped after saving (exit "
            f"status {EXIT_REQUEUE}) or reached its time limit. To go on all the same: submit.py resubmit {job_id}")
        return 1
    _forget(folder, job_id)
    limit = TimeLimit(folder, job_id)
    limit.watch()
    status = 1
    try:
        status = launch.main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        limit.done()
        if status in (0, EXIT_REQUEUE) or not limit.reached:
            _keep(folder, job_id, status)
            if status not in (0, EXIT_REQUEUE):
                cancel_later(scheduler, folder, job_id)
    return status


def _job(environ: Mapping[str, str]) -> tuple[Scheduler, str]:
    if environ.get("SLURM_JOB_ID"):
        return get_scheduler("slurm"), own_id(environ)
    return get_scheduler("pbs"), environ["PBS_JOBID"]


def refusal(scheduler: Scheduler, folder: Path, previous: str) -> str | None:
    """Why the job must not continue the previous one; None when it may.

    What that job has kept itself is there even where the scheduler has forgotten it.
    """
    kept = records.kept_status(folder, previous)
    if kept in (0, EXIT_REQUEUE, records.TIME_LIMIT):
        return None
    try:
        status = _status(scheduler, previous, 0.0 if kept is not None else QUERY_SECONDS)
    except SchedulerError as error:
        found = str(error)
    else:
        if not following.spoils_the_chain(status):
            return None
        found = following.describe(status)
    return f"job {previous} ended with exit status {kept}" if kept is not None else f"of the job before: {found}"


def _status(scheduler: Scheduler, job_id: str, seconds: float) -> Status:
    """Query the state of a job; where the scheduler does not respond, repeat that for so many seconds."""
    limit = time.monotonic() + seconds
    while True:
        try:
            return scheduler.status(job_id)
        except SchedulerError as error:
            left = limit - time.monotonic()
            if left <= 0:
                raise
            say(f"the state of job {job_id} is not known: {error}. Trying again for {left:.0f} s")
        time.sleep(min(QUERY_PAUSE_SECONDS, max(left, 0.0)))


class TimeLimit:
    """Keeps in the folder that the time limit was reached, from that moment on: nothing may be left to do it later."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.reached = False
        self._folder, self._job_id = folder, job_id
        self._done = threading.Event()
        self._lock = threading.Lock()  # what is kept after done() is the exit status

    def watch(self) -> None:
        left = _seconds_left()
        if left is not None:
            threading.Thread(target=self._wait, args=(left,), daemon=True).start()

    def done(self) -> None:
        with self._lock:
            self._done.set()

    def _wait(self, seconds: float) -> None:
        while not self._done.wait(min(seconds, threading.TIMEOUT_MAX)):
            with self._lock:
                if self._done.is_set():
                    return
                self.reached = True
                _keep(self._folder, self._job_id, records.TIME_LIMIT)
            seconds = _seconds_left() or 0.0
            if seconds < _EXTENSION_SECONDS:
                return
            with self._lock:  # the limit was extended meanwhile: a later failure is one again
                if not self._done.is_set():
                    self.reached = False
                    _forget(self._folder, self._job_id)


def _seconds_left() -> float | None:
    try:
        allocation = current_allocation(ask=False)
        return allocation.seconds_left() if allocation is not None else None
    except AllocationError:  # launch.py says so
        return None


def _keep(folder: Path, job_id: str, status: int | str) -> None:
    try:
        records.keep_status(folder, job_id, status)
    except OSError as error:  # the scheduler knows it too, for a while
        say(f"the exit status could not be kept in {folder}: {error.strerror}")


def _forget(folder: Path, job_id: str) -> None:
    try:
        records.forget_status(folder, job_id)
    except OSError as error:
        say(f"the status of an earlier run of job {job_id} could not be removed from {folder}: {error.strerror}. "
            "The next job of the chain may take it for this run's: remove it")


def cancel_later(scheduler: Scheduler, folder: Path, job_id: str) -> None:
    """Take the later jobs of the chain from the queue. Those that are missed refuse to start."""
    try:
        later = records.read(folder).after(job_id)
        if not later or scheduler.status(job_id).state != "running":  # ended from outside: a preemption is no failure
            return
        for one in reversed(later):
            scheduler.cancel(one)
    except (OSError, ValueError, KeyError, TypeError, SchedulerError):
        return
    say(f"this job has failed, so the rest of its chain was cancelled: {' '.join(later)}")


def say(text: str) -> None:
    print(f"submit: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Put a stopped Slurm job back into its queue. _refusal() decides whether that is allowed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping

from ..log import get_logger
from . import current_job, exclude_file, slurm_exclusion
from .commands import SchedulerError, run_command
from .notation import STOP_FILE, parse_number
from .slurm_job import Fields, records, unique_job_id

CHAIN_VARIABLE = "DDPKIT_CHAIN"  # set in a job of a chain: the chain's id

_log = get_logger(__name__)


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM, also in child processes: Slurm may end the job before scontrol returns."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return

    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


@_sigterm_ignored()
def requeue(environ: Mapping[str, str] = os.environ, *, limit: int = 1000) -> bool:
    """Put this job back into the queue with `scontrol requeue`; return whether it is there.

    Only rank 0 calls it, after all ranks have saved. After True, Slurm ends this run in a moment.
    Returns False outside of Slurm, because PBS lets only operators requeue; in a chain, because its
    next job continues; after `ddpkit submit stop`, which ends the job; and if the kit or Slurm
    refuses, with the reason logged.

    The requeued job avoids the hosts in the file DDPKIT_EXCLUDE_FILE.

    limit: number of restarts after which the job is not requeued again.
    """
    try:
        around = current_job(environ)
        if around is None or around.scheduler != "slurm":
            return False

        job_id = unique_job_id(environ)
        if environ.get(CHAIN_VARIABLE) == environ.get("SLURM_JOB_ID"):
            _log.info("job %s is not put back into the queue: it belongs to a chain", job_id)
            return False
        if os.path.exists(environ.get(STOP_FILE, "")):
            _log.info("job %s is not put back into the queue: ddpkit submit stop ends it", job_id)
            return False
        restarts = parse_number(environ.get("SLURM_RESTART_COUNT", "")) or 0
        [job, *_] = records(run_command(["scontrol", "show", "job", job_id])) or [{}]
        is_ending = job.get("JobState") in ("COMPLETING", "STAGE_OUT")
        if is_ending and (parse_number(job.get("Restarts", "")) or 0) > restarts:
            return True  # the run is requeued already, for example by scontrol
        if why := _refusal(restarts, limit, job, is_ending):
            _log.warning("job %s is not put back into the queue: %s", job_id, why)
            return False
        run_command(["scontrol", "requeue", job_id])
        _exclude_bad_hosts(job_id, environ)
    except SchedulerError as error:
        _log.warning(
            "the job is not put back into the queue: %s. It has saved: submit it again to continue",
            error,
        )
        return False

    _log.info("job %s is back in the queue", job_id)
    return True


def _exclude_bad_hosts(job_id: str, environ: Mapping[str, str]) -> None:
    """Let the requeued job avoid the listed hosts. Slurm allows that only for pending jobs."""
    hosts = [entry.host for entry in exclude_file.read(environ.get(exclude_file.VARIABLE, ""))]
    if not hosts:
        return
    try:
        problem = slurm_exclusion.exclude_hosts(job_id, hosts)
    except SchedulerError as error:
        problem = str(error)
    names = ", ".join(hosts)
    if problem:
        _log.warning("job %s may get %s again, which are bad: %s", job_id, names, problem)
    else:
        _log.info("job %s avoids %s from now on", job_id, names)


def _refusal(restarts: int, limit: int, job: Fields, is_ending: bool) -> str:
    """Return why a job that has saved may not be requeued; "" if it may.

    restarts: number of restarts before this run. job: record from scontrol.
    """
    if restarts >= limit:
        return (
            f"it has been restarted {restarts} times, and the limit is {limit}. Submit it again if "
            "it still makes progress"
        )

    # Slurm states a reason when it ends a job itself: TimeLimit, or a preemption. After scancel
    # there is none: a person wants that job to end.
    has_reason = job.get("Reason", "None") not in ("", "None")
    was_preempted = job.get("PreemptTime", "None") not in ("None", "Unknown")
    if is_ending and not has_reason and not was_preempted:
        return "it was cancelled. It has saved: submit it again to continue"

    return ""

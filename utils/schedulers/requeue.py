"""Put a stopped Slurm job back into its queue. refusal() decides whether a job may be requeued."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..log import get_logger
from . import exclude_file

if TYPE_CHECKING:
    from .slurm.jobs import Slurm
    from .status import Status

CHAIN_VARIABLE = "DDPKIT_CHAIN"  # in a job of a chain: its id

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
    False outside of Slurm, since PBS lets only operators requeue; in a chain, since its next job
    continues; and if refusal() or Slurm refuses, with the reason logged.

    The requeued job avoids the hosts that the file DDPKIT_EXCLUDE_FILE lists.

    limit: restarts after which the job is not requeued again.
    """
    from .allocation import AllocationError
    from .command import SchedulerError
    from .detect import current_allocation
    from .slurm.environment import unique_job_id
    from .slurm.jobs import Slurm

    try:
        allocation = current_allocation(environ, query=False)
        if allocation is None or allocation.scheduler != "slurm":
            return False

        job_id = unique_job_id(environ)
        if environ.get(CHAIN_VARIABLE) == environ.get("SLURM_JOB_ID"):
            _log.info("job %s is not put back into the queue: it belongs to a chain", job_id)
            return False
        restarts = allocation.restart_count or 0
        slurm = Slurm()
        status = slurm.status(job_id)

        if _is_requeued(restarts, status):
            return True
        if why := refusal(restarts, limit, status):
            _log.warning("job %s is not put back into the queue: %s", job_id, why)
            return False
        slurm.requeue(job_id)
        _exclude_bad_hosts(slurm, job_id, environ)
    except (AllocationError, SchedulerError) as error:
        _log.warning(
            "the job is not put back into the queue: %s. It has saved: submit it again to continue",
            error,
        )
        return False

    _log.info("job %s is back in the queue", job_id)
    return True


def _exclude_bad_hosts(slurm: Slurm, job_id: str, environ: Mapping[str, str]) -> None:
    """Let the requeued job avoid the listed hosts. Slurm allows that for pending jobs only."""
    from .command import SchedulerError

    hosts = [entry.host for entry in exclude_file.read(environ.get(exclude_file.VARIABLE, ""))]
    if not hosts:
        return
    try:
        problem = slurm.exclude_hosts(job_id, hosts)
    except SchedulerError as error:
        problem = str(error)
    names = ", ".join(hosts)
    if problem:
        _log.warning("job %s may get %s again, which are bad: %s", job_id, names, problem)
    else:
        _log.info("job %s avoids %s from now on", job_id, names)


def refusal(restarts: int, limit: int, status: Status) -> str:
    """Return why a job that has saved may not be requeued; "" if it may.

    restarts: how often the job was restarted before this run. status: the job now.
    """
    if restarts >= limit:
        return (
            f"it has been restarted {restarts} times, and the limit is {limit}. Submit it again if "
            "it still makes progress"
        )

    # Slurm states a reason when it ends a job itself: TimeLimit, or a preemption. scancel leaves
    # none, and somebody wants that job to end.
    if status.state == "ending" and not status.reason:
        return "it was cancelled. It has saved: submit it again to continue"

    return ""


def _is_requeued(restarts: int, status: Status) -> bool:
    """Return whether somebody has requeued this run already, for example with scontrol."""
    return status.state == "ending" and (status.restart_count or 0) > restarts

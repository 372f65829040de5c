"""requeue(): rank 0 puts its own job back into the queue, after a stop.

Not here: the stop (preemption.py), putting other jobs back (schedulers/).
"""
from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping

from .logging import get_logger

_log = get_logger(__name__)


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Here and in the commands started here: Slurm may end all processes of a job before it answers the requeue."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@_sigterm_ignored()
def requeue(environ: Mapping[str, str] = os.environ, *, limit: int = 1000) -> bool:
    """Put this job back into the queue, by `scontrol requeue`. Rank 0 alone calls it, after all ranks have saved.

    True: Slurm has it again, and ends this run in a moment. False: outside of Slurm (PBS lets only operators requeue;
    there the next job of a chain goes on), when Slurm refuses, after `limit` restarts, and for a job that was
    cancelled, which somebody wants to have ended; with the reason logged.
    """
    from .schedulers import AllocationError, SchedulerError, current_allocation, get_scheduler
    from .schedulers.slurm import own_id
    try:
        allocation = current_allocation(environ, ask=False)
        if allocation is None or allocation.scheduler != "slurm":
            return False
        job_id = own_id(environ)
        restarts = allocation.restart_count or 0
        if restarts >= limit:
            _log.warning("job %s has been restarted %d times and is not put back into the queue. At most %d were "
                         "allowed. Submit it anew if it still makes progress", job_id, restarts, limit)
            return False
        scheduler = get_scheduler("slurm")
        now = scheduler.status(job_id)
        if now.state == "ending":  # Slurm ends it already: somebody has put it back, its time is up, or it is unwanted
            if (now.restart_count or 0) > restarts:
                return True
            if not now.reason:
                _log.warning("job %s was cancelled and is not put back into the queue. It has saved: submit it anew to "
                             "go on", job_id)
                return False
        scheduler.requeue(job_id)
    except (AllocationError, SchedulerError) as error:
        _log.warning("the job was not put back into the queue. Submit it again by hand: it goes on where it has "
                     "saved. The reason: %s", error)
        return False
    _log.info("job %s is back in the queue", job_id)
    return True

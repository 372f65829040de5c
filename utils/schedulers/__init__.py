"""Batch schedulers: what was allocated to this job, and a job described, checked, submitted and watched.

Nothing is loaded here until it is used, since a rank that starts needs the node lists of slurm.py only.
  Allocation, current_allocation, AllocationError                      allocation.py
  Job, JobError, parse_walltime, format_walltime                       job.py
  Scheduler, Status, get_scheduler, SchedulerError                     scheduler.py, command.py
  Slurm, Pbs                                                           slurm_jobs.py, pbs_jobs.py
"""
from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .allocation import Allocation as Allocation
    from .allocation import AllocationError as AllocationError
    from .allocation import current_allocation as current_allocation
    from .command import SchedulerError as SchedulerError
    from .job import Job as Job
    from .job import JobError as JobError
    from .job import format_walltime as format_walltime
    from .job import parse_walltime as parse_walltime
    from .pbs_jobs import Pbs as Pbs
    from .scheduler import Scheduler as Scheduler
    from .scheduler import Status as Status
    from .scheduler import get_scheduler as get_scheduler
    from .slurm_jobs import Slurm as Slurm

_WHERE = {
    "Allocation": "allocation", "AllocationError": "allocation", "current_allocation": "allocation",
    "Job": "job", "JobError": "job", "format_walltime": "job", "parse_walltime": "job",
    "Scheduler": "scheduler", "Status": "scheduler", "get_scheduler": "scheduler", "SchedulerError": "command",
    "Pbs": "pbs_jobs", "Slurm": "slurm_jobs",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)

"""Find the allocation of this process; write, check, submit and monitor jobs.

Each module is imported when one of its names is first used: a rank that starts needs few of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .allocation import Allocation as Allocation
    from .allocation import AllocationError as AllocationError
    from .base import Queue as Queue
    from .base import Scheduler as Scheduler
    from .command import SchedulerError as SchedulerError
    from .detect import current_allocation as current_allocation
    from .detect import get_scheduler as get_scheduler
    from .job import Job as Job
    from .job import JobError as JobError
    from .job import parse_walltime as parse_walltime
    from .pbs.jobs import Pbs as Pbs
    from .slurm.jobs import Slurm as Slurm
    from .status import Status as Status
    from .units import format_walltime as format_walltime

_MODULES = {
    "Allocation": "allocation",
    "AllocationError": "allocation",
    "Queue": "base",
    "Scheduler": "base",
    "SchedulerError": "command",
    "current_allocation": "detect",
    "get_scheduler": "detect",
    "Job": "job",
    "JobError": "job",
    "parse_walltime": "job",
    "Pbs": "pbs.jobs",
    "Slurm": "slurm.jobs",
    "Status": "status",
    "format_walltime": "units",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)

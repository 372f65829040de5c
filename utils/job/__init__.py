"""The job around this process: the time left, and the way back into the queue."""

from __future__ import annotations

from .current_job import CurrentJob as CurrentJob
from .current_job import current_job as current_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .slurm_job import expand_hostlist as expand_hostlist


def __getattr__(name: str) -> object:
    if name != "expand_hostlist":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .slurm_job import expand_hostlist  # a start outside of Slurm does not need it

    return expand_hostlist

"""The job around this process: the time left, and the way back into the queue.

Modules are imported where they are used. A process needs one scheduler, and starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .slurm_job import expand_hostlist as expand_hostlist


class CurrentJob(NamedTuple):
    """A Slurm or PBS job."""

    scheduler: str  # "slurm" or "pbs"
    job_id: str  # an array element: "21" in Slurm, "79[2].server" in PBS

    def seconds_left(self) -> float | None:
        """Query the seconds until the time limit; None without a limit or a response."""
        if self.scheduler == "slurm":
            from .slurm_job import seconds_left
        else:
            from .pbs_job import seconds_left
        return seconds_left(self.job_id)


def current_job(environ: Mapping[str, str] = os.environ) -> CurrentJob | None:
    """Return the job around this process; None outside of a job."""
    # Slurm's spank_pbs plug-in sets PBS_JOBID too; PBS never sets SLURM_JOB_ID.
    for scheduler, variable in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
        if environ.get(variable):
            return CurrentJob(scheduler, environ[variable])
    return None


def __getattr__(name: str) -> object:
    if name != "expand_hostlist":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .slurm_job import expand_hostlist

    return expand_hostlist

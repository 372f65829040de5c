"""Find the allocation around this process.

Modules are imported where they are used: a launch needs those of one scheduler, and starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...job import current_job
from .allocation import Allocation


def current_allocation(
    environ: Mapping[str, str] = os.environ, *, query: bool = True
) -> Allocation | None:
    """Return what the scheduler allocated to the job around this process; None outside of a job.

    query: whether to run qstat or scontrol (tens of milliseconds) for what the variables lack: the
    hosts of a PBS job without a line in the node file, GPUs and cores per host, the restart count.
    What remains unknown is None.

    Raises AllocationError where variables or node file cannot be read or contradict each other.
    """
    job = current_job(environ)
    if job is None:
        return None
    if job.scheduler == "slurm":
        from .slurm_allocation import slurm_allocation as read
    else:
        from .pbs_allocation import pbs_allocation as read
    return read(environ, query=query)

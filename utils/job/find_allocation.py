"""Find the allocation around this process.

Modules are imported where they are used: a launch needs those of one scheduler, and starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

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
    # Slurm's spank_pbs plug-in sets PBS_JOBID too; PBS never sets SLURM_JOB_ID.
    if environ.get("SLURM_JOB_ID"):
        from .slurm_job import slurm_allocation

        return slurm_allocation(environ, query=query)
    if environ.get("PBS_JOBID"):
        from .pbs_job import pbs_allocation

        return pbs_allocation(environ, query=query)
    return None

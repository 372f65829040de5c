"""What the scheduler allocated to the job that this process belongs to.

Not here: who is which rank (launchers.py), how a job is submitted (scheduler.py).
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class AllocationError(RuntimeError):
    """The scheduler's variables or node file are there but cannot be read."""


class Allocation(NamedTuple):
    """The hosts of a job, each once, in the scheduler's order and spelling. None: the scheduler does not say.

    The tuples are of equal length, one entry for each host.
    """

    scheduler: str  # "slurm" or "pbs"
    job_id: str  # of an array element its own: Slurm "21", PBS "79[2].server"
    hosts: tuple[str, ...]
    # Slurm: tasks per node. PBS: lines of the node file; 0 for a host with none, which pbs_tmrsh and pbsdsh refuse.
    ranks_per_host: tuple[int, ...]
    gpus_per_host: tuple[int | None, ...]
    cores_per_host: tuple[int | None, ...]
    array_index: int | None = None
    restart_count: int | None = None  # 0 in the first run
    notes: tuple[str, ...] = ()  # what a user should know of it

    def seconds_left(self) -> float | None:
        """Seconds until the time limit, asked of the scheduler now. None where there is no limit or no answer."""
        if self.scheduler == "slurm":
            from .slurm import seconds_left
        else:
            from .pbs import seconds_left
        return seconds_left(self.job_id)


def current_allocation(environ: Mapping[str, str] = os.environ, *, ask: bool = True) -> Allocation | None:
    """What was allocated to the job around this process; None outside of a job.

    ask: whether a command of the scheduler may be run (qstat, scontrol: tens of milliseconds) for what the
    environment does not say: hosts of a PBS job without a line in the node file, GPUs and cores per host, the
    restart count. Without an answer these are None. AllocationError when what is there contradicts itself.
    """
    # PBS_JOBID exists under Slurm too where the site loads Slurm's spank_pbs plugin, SLURM_JOB_ID never under PBS.
    if environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID"):
        from .slurm import allocation
    elif environ.get("PBS_JOBID"):
        from .pbs import allocation
    else:
        return None
    return allocation(environ, ask=ask)

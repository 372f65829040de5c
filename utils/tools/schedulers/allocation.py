"""What a scheduler allocated to the job around this process."""

from __future__ import annotations

from typing import NamedTuple


class AllocationError(RuntimeError):
    """The scheduler's variables or node file cannot be read or contradict each other."""


class Allocation(NamedTuple):
    """The hosts of a job, each once, in the scheduler's order and spelling; None: not known.

    The tuples have one entry for each host.
    """

    scheduler: str  # "slurm" or "pbs"
    job_id: str  # array elements: Slurm "21", PBS "79[2].server"
    hosts: tuple[str, ...]
    # Slurm: tasks per node. PBS: lines of the node file. pbs_tmrsh and pbsdsh refuse a host with 0.
    ranks_per_host: tuple[int, ...]
    gpus_per_host: tuple[int | None, ...]
    cores_per_host: tuple[int | None, ...]
    restart_count: int | None = None  # 0 in the first run
    notes: tuple[str, ...] = ()  # hints for the user
    tasks_requested: bool = False  # Slurm: ranks_per_host was requested, not a default
    outlives_host: bool | None = None  # PBS: the job asks to go on when one of its hosts fails

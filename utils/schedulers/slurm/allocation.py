"""What Slurm allocated to the job around this process, from its variables and from scontrol."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ..allocation import Allocation, AllocationError
from ..command import SchedulerError, run_command
from ..units import parse_duration, parse_number
from .environment import Resources, gpus_here, in_step, number, resources
from .output import Fields, node_resources, records

_TIMEOUT_SECONDS = 10.0  # of a query; a job is waiting


class SlurmAllocation(Allocation):
    """An allocation of Slurm."""

    def seconds_left(self) -> float | None:
        """Query the seconds until the time limit; None without a limit or a response."""
        query = ["squeue", "--noheader", "--jobs", self.job_id, "--format", "%A %L"]
        try:
            output = run_command(query, timeout_seconds=_TIMEOUT_SECONDS)
        except SchedulerError:
            output = ""
        for line in output.splitlines():
            # The id of the last element of an array selects the whole array.
            found, _, left = line.partition(" ")
            if found == self.job_id:
                return parse_duration(left)

        end = parse_number(os.environ.get("SLURM_JOB_END_TIME", ""))  # since Slurm 23.02
        if end is None or os.environ.get("SLURM_JOB_ID") != self.job_id:
            return None
        return max(0.0, end - time.time())


def slurm_allocation(environ: Mapping[str, str], *, query: bool = True) -> SlurmAllocation:
    """Return what Slurm allocated to the job around this process.

    In a step these are the hosts of the whole job: a further step may use them all.
    query: whether to run scontrol for what the variables lack.

    Raises AllocationError where the variables cannot be read or contradict each other.
    """
    job_id = environ["SLURM_JOB_ID"]
    try:
        found = resources(environ)
        restarts = number(environ, "SLURM_RESTART_COUNT") or 0
        index = number(environ, "SLURM_ARRAY_TASK_ID")
        tasks_are_of_step = in_step(environ) and not environ.get("SLURM_NTASKS_PER_NODE")
    except ValueError as error:
        raise AllocationError(
            f"Slurm job {job_id}: {error}. The variables were expected as Slurm sets them. "
            "Unset those that were changed, or start from a new job."
        ) from None

    if query and (None in found.gpus or tasks_are_of_step):
        _add_from_scontrol(job_id, found)
    if found.gpus == [None]:
        found.gpus = [gpus_here(environ)]
    return SlurmAllocation(
        "slurm",
        job_id,
        tuple(found.hosts),
        tuple(count or 1 for count in found.tasks),
        tuple(found.gpus),
        tuple(found.cores),
        index,
        restarts,
        tasks_requested=found.tasks_requested,
    )


def _add_from_scontrol(job_id: str, found: Resources) -> None:
    """Replace what scontrol knows better; nothing where it does not respond."""
    query = ["scontrol", "--details", "show", "job", job_id]
    try:
        output = records(run_command(query, timeout_seconds=_TIMEOUT_SECONDS))
    except SchedulerError:
        return
    # The id of the last element of an array shows the whole array.
    jobs = [job for job in output if job_id in (job.get("JobId"), job.get("HetJobId"))]

    by_host = node_resources(jobs)
    for place, host in enumerate(found.hosts):
        if host in by_host:
            found.cores[place], found.gpus[place] = by_host[host]
    if len(jobs) == 1:
        _correct_tasks(jobs[0], found)


def _correct_tasks(job: Fields, found: Resources) -> None:
    """Replace the tasks of a step by those of the job, where their split over hosts is clear."""
    total = parse_number(job.get("NumTasks", ""))
    if total is None or total == sum(count or 0 for count in found.tasks):
        return
    cores_per_task = parse_number(job.get("CPUs/Task", ""))
    by_cores = [(cores or 0) // cores_per_task for cores in found.cores] if cores_per_task else []
    if sum(by_cores) == total:
        found.tasks = [*by_cores]
    elif total % len(found.hosts) == 0:
        found.tasks = [total // len(found.hosts)] * len(found.hosts)

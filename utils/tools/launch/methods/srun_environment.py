"""Adapt the variables in which sbatch passes the job's options to srun for a different step.

srun takes the options of sbatch and salloc from the environment (srun(1), INPUT ENVIRONMENT
VARIABLES), also where the step starts other tasks than the job requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....job.slurm_job import in_step
from ..launch_plan import Request

# What the job requested for its tasks, and how an outer step was bound, applies to those alone.
TASK_REQUESTS = (
    "SLURM_GPU_BIND",
    "SLURM_TRES_BIND",
    "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
    "SLURM_DISTRIBUTION",
    "SLURM_DIST_PLANESIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
)
GPU_REQUESTS = (
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPUS_PER_SOCKET",
)


def step_environment(
    request: Request, environ: Mapping[str, str], *, keep_task_requests: bool
) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return the variables for srun, and the GPUs of each host that a step has to request.

    The latter are empty where the step gets the GPUs of the job anyway.
    keep_task_requests: whether the step starts the same tasks that the job requested.
    """
    if not keep_task_requests:
        environ = {name: value for name, value in environ.items() if name not in TASK_REQUESTS}
    claim: tuple[int, ...] = ()
    if not _asks_for_gpus(environ):
        claim = tuple(count or 0 for count in request.hosts.gpus)
    return dict(environ), claim


def daemon_variables(environ: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables for the srun by which an mpiexec starts a daemon on each host.

    environ: of launch.py. gpus: to request on each host, because the step gets none otherwise.
    """
    found = {}
    if environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
        found["SLURM_EXPORT_ENV"] = "ALL"
    if in_step(environ):  # the surrounding step holds the cores and GPUs
        found |= {"SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none"}
    if any(gpus):
        if len(set(gpus)) == 1:
            found["SLURM_GPUS_PER_NODE"] = str(gpus[0])
        else:
            found["SLURM_GPUS"] = str(sum(gpus))
    return found


def for_part_of_job(environ: Mapping[str, str], gpus: Sequence[int | None]) -> Mapping[str, str]:
    """Return the environment for a step on some hosts of a job, which has fewer GPUs than the job.

    gpus: of each of these hosts.
    """
    if not environ.get("SLURM_GPUS"):
        return environ
    found = {name: value for name, value in environ.items() if name != "SLURM_GPUS"}
    if len(set(gpus)) == 1 and gpus[0]:
        found["SLURM_GPUS_PER_NODE"] = str(gpus[0])
    return found


def _asks_for_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether srun finds a request for GPUs there; TRES_PER_TASK may be about cores."""
    by_name = any(environ.get(name) for name in GPU_REQUESTS)
    return by_name or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")

"""What Slurm allocated to a job, from its variables and from scontrol."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...job.commands import SchedulerError, run_command
from ...job.notation import parse_number
from ...job.slurm_job import (
    Fields,
    expand_counts,
    expand_hostlist,
    fields_of,
    in_step,
    records,
)
from ...job.slurm_steps import SPECIAL_STEPS, step_name
from .allocation import Allocation, AllocationError

_TIMEOUT_SECONDS = 10.0  # time limit of a query: a user is waiting


def node_resources(jobs: Iterable[Fields]) -> dict[str, tuple[int | None, int]]:
    """Return cores and GPUs of each host, from records of `scontrol --details show job`.

    Their lines have the form "Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)".
    """
    found: dict[str, tuple[int | None, int]] = {}
    for job in jobs:
        for line in job.get("Nodes", "").split("\n"):
            fields = dict(fields_of(line))
            core_ids = fields.get("CPU_IDs")
            try:
                cores = len(expand_hostlist(f"[{core_ids}]")) if core_ids else None
                hosts = expand_hostlist(fields.get("Nodes", ""))
            except ValueError:  # a later Slurm may print another form: ignored
                continue
            for host in hosts:
                found[host] = (cores, gpu_count(fields.get("GRES", "")))
    return found


_MAX_COMPONENTS = 128  # Slurm's limit for a heterogeneous job
Counts = list[int | None]  # one number for each host; None: not known


@dataclass
class Resources:
    """The hosts of a whole job, and for each of them its tasks, cores and GPUs."""

    hosts: list[str]
    tasks: Counts
    cores: Counts
    gpus: Counts
    tasks_requested: bool = True  # every component requested tasks


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a whole number; None where it is unset or empty.

    Raises ValueError for any other text.
    """
    text = environ.get(name, "")
    value = parse_number(text)
    if text and value is None:
        raise ValueError(f"{name}={text[:80]} is not a number")
    return value


def resources(environ: Mapping[str, str]) -> Resources:
    """Return the hosts and resources of the whole job, as far as the variables hold them.

    Raises ValueError where the variables cannot be read or contradict each other.
    """
    found = Resources([], [], [], [])
    for suffix in _component_suffixes(environ) or [""]:
        name = f"SLURM_JOB_NODELIST{suffix}"
        hosts = expand_hostlist(environ.get(name, ""))
        if not hosts:
            raise ValueError(
                f"{name} is not set, expected a list of nodes. For an allocation that is held "
                f"elsewhere, give ddpkit launch --jobid {environ.get('SLURM_JOB_ID', '')}"
            )
        cores = _counts(environ, f"SLURM_JOB_CPUS_PER_NODE{suffix}", len(hosts))
        found.hosts += hosts
        found.tasks += _tasks(environ, suffix, len(hosts))
        found.tasks_requested &= _asks_for_tasks(environ, suffix)
        found.cores += cores or [None] * len(hosts)
    found.gpus = [_gpus_per_node(environ)] * len(found.hosts)
    return found


def gpus_here(environ: Mapping[str, str]) -> int | None:
    """Return the job's GPUs on this node. SLURM_GPUS_ON_NODE may count only a step's GPUs."""
    if environ.get("SLURM_JOB_GPUS"):  # "0,1"
        return len(environ["SLURM_JOB_GPUS"].split(","))
    return parse_number(environ.get("SLURM_GPUS_ON_NODE", ""))


def _component_suffixes(environ: Mapping[str, str]) -> list[str]:
    """Return the suffix of each component's variables: "_HET_GROUP_0", ..."""
    size = min(number(environ, "SLURM_HET_SIZE") or 0, _MAX_COMPONENTS)
    suffixes = [f"_HET_GROUP_{group}" for group in range(size)]
    # Without them, SLURM_JOB_NODELIST describes the whole job, or the first component.
    return suffixes if all(f"SLURM_JOB_NODELIST{suffix}" in environ for suffix in suffixes) else []


def _counts(environ: Mapping[str, str], name: str, nodes: int) -> Counts:
    """Return the numbers in a variable; [] if it is unset or about another number of nodes."""
    counts = expand_counts(environ[name]) if environ.get(name) else []
    return [*counts] if len(counts) == nodes else []


def _tasks(environ: Mapping[str, str], suffix: str, nodes: int) -> Counts:
    """Return the tasks per node of the job.

    In a step, SLURM_TASKS_PER_NODE describes the step, and SLURM_NTASKS_PER_NODE the job's request.
    If the job requested no number of tasks, SLURM_TASKS_PER_NODE counts its cores, while srun
    starts one task on each node.
    """
    per_node = number(environ, f"SLURM_NTASKS_PER_NODE{suffix}")
    name = f"SLURM_TASKS_PER_NODE{suffix}"
    counts = _counts(environ, name, nodes)
    if in_step(environ):
        return [per_node] * nodes if per_node else counts or [None] * nodes
    if not per_node and not environ.get(f"SLURM_NTASKS{suffix}"):
        return [1] * nodes
    if not counts and environ.get(name):
        raise ValueError(
            f"{name}={environ[name][:80]} does not have one number for each of the {nodes} nodes"
        )
    return counts or [per_node] * nodes


def _asks_for_tasks(environ: Mapping[str, str], suffix: str) -> bool:
    """Whether the job requested a number of tasks. In a step, SLURM_NTASKS may be the step's."""
    names = ["SLURM_NTASKS_PER_NODE"]
    if step_name(environ) in ("", *SPECIAL_STEPS):
        names.append("SLURM_NTASKS")
    return any(environ.get(f"{name}{suffix}") for name in names)


def _gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs per node if the job requested a number per node: "2", "a100:4"."""
    text = environ.get("SLURM_GPUS_PER_NODE")
    if not text or environ.get("SLURM_HET_SIZE"):
        return None
    return gpu_count(",".join(f"gpu:{part}" for part in text.split(",")))


def slurm_allocation(environ: Mapping[str, str], *, query: bool = True) -> Allocation:
    """Return what Slurm allocated to the job around this process.

    In a step these are the hosts of the whole job: a further step may use them all.
    query: whether to run scontrol for facts that the variables lack.

    Raises AllocationError where the variables cannot be read or contradict each other.
    """
    job_id = environ["SLURM_JOB_ID"]
    try:
        found = resources(environ)
        restarts = number(environ, "SLURM_RESTART_COUNT") or 0
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
    return Allocation(
        "slurm",
        job_id,
        tuple(found.hosts),
        tuple(count or 1 for count in found.tasks),
        tuple(found.gpus),
        tuple(found.cores),
        restarts,
        tasks_requested=found.tasks_requested,
    )


def enter_job(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that starts steps in a job which is held elsewhere.

    The step shares the job's resources with other steps: SLURM_OVERLAP, as srun --overlap.

    Raises AllocationError where the job does not run, and SchedulerError where Slurm does not know
    it or does not respond.
    """
    query = ["scontrol", "--details", "show", "job", job_id]
    jobs = records(run_command(query, timeout_seconds=_TIMEOUT_SECONDS))
    job = next((job for job in jobs if job.get("JobId") == job_id), {})
    state = job.get("JobState", "not known")
    if state != "RUNNING" or "HetJobId" in job:
        found = "heterogeneous" if "HetJobId" in job else state
        raise AllocationError(
            f"Slurm job {job_id} is {found}. Expected a running job, whose hosts are all alike. "
            "Check it with: squeue --me"
        )
    nodes = parse_number(job.get("NumNodes", "")) or 1
    # "NtasksPerN:B:S:C=2:0:*:*". NumTasks is 2 for two nodes even if no number was requested.
    per_node = parse_number(job.get("NtasksPerN:B:S:C", "").partition(":")[0])
    tasks = parse_number(job.get("NumTasks", "")) or nodes
    if not per_node and tasks > nodes and tasks % nodes == 0:
        per_node = tasks // nodes
    kept = {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "PBS_"))
    }
    of_job = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": job.get("NodeList", "")}
    if per_node:
        of_job["SLURM_NTASKS_PER_NODE"] = str(per_node)
        of_job["SLURM_TASKS_PER_NODE"] = f"{per_node}(x{nodes})"
    return {**kept, **of_job, "SLURM_OVERLAP": "1"}


def _add_from_scontrol(job_id: str, found: Resources) -> None:
    """Replace what scontrol knows better; change nothing if it does not respond."""
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
    """Replace a step's tasks by the job's, if their split over hosts is clear."""
    total = parse_number(job.get("NumTasks", ""))
    if total is None or total == sum(count or 0 for count in found.tasks):
        return
    cores_per_task = parse_number(job.get("CPUs/Task", ""))
    by_cores = [(cores or 0) // cores_per_task for cores in found.cores] if cores_per_task else []
    if sum(by_cores) == total:
        found.tasks = [*by_cores]
    elif total % len(found.hosts) == 0:
        found.tasks = [total // len(found.hosts)] * len(found.hosts)


def gpu_count(gres: str) -> int:
    """Count the GPUs of a list of generic resources: "gpu:a100:4(IDX:0-3),gpu:1,shard:2" -> 5."""
    total = 0
    for part in re.sub(r"\([^()]*\)", "", gres).split(","):
        name, *rest = part.removeprefix("gres/").replace("=", ":").split(":")
        if name == "gpu":
            count = parse_number(rest[-1]) if rest else None
            total += 1 if count is None else count
    return total

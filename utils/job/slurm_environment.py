"""Read Slurm's environment variables about the job around this process. Runs no command."""

from __future__ import annotations

from collections.abc import Mapping

from .slurm_hostlist import expand_counts, expand_hostlist
from .units import parse_number

_MAX_COMPONENTS = 128  # of a heterogeneous job in Slurm
# As numbered in slurm.h. Slurm 26.05 writes SLURM_STEP_ID=-5, earlier ones 4294967291 or nothing.
SPECIAL_STEPS = {"extern": -4, "batch": -5, "interactive": -6}
_STEP_NAMES = {str(id + base): name for name, id in SPECIAL_STEPS.items() for base in (0, 1 << 32)}

Counts = list[int | None]  # one for each host; None: not known


class Resources:
    """The hosts of a whole job, and for each of them its tasks, cores and GPUs."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.tasks: Counts = []
        self.cores: Counts = []
        self.gpus: Counts = []
        self.tasks_requested = True  # for every component


def unique_job_id(environ: Mapping[str, str]) -> str:
    """Return an id that no other job has: "21", of an array element "20_1".

    SLURM_JOB_ID of the last element of an array is the id of the whole array.
    """
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]


def step_name(environ: Mapping[str, str]) -> str:
    """Return the step around this process, such as "7" or one of SPECIAL_STEPS; "" without one."""
    step = environ.get("SLURM_STEP_ID", "").strip()
    return _STEP_NAMES.get(step, step)


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a step, whose variables hide some of the job's. salloc's shell may be one."""
    return step_name(environ) not in ("", "batch")


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
    found = Resources()
    for suffix in _component_suffixes(environ) or [""]:
        name = f"SLURM_JOB_NODELIST{suffix}"
        hosts = expand_hostlist(environ.get(name, ""))
        if not hosts:
            raise ValueError(f"{name} is not set, expected a list of nodes")
        cores = _counts(environ, f"SLURM_JOB_CPUS_PER_NODE{suffix}", len(hosts))
        found.hosts += hosts
        found.tasks += _tasks(environ, suffix, len(hosts))
        found.tasks_requested &= _asks_for_tasks(environ, suffix)
        found.cores += cores or [None] * len(hosts)
    found.gpus = [_gpus_per_node(environ)] * len(found.hosts)
    return found


def gpus_here(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs that the job has on this node. SLURM_GPUS_ON_NODE may be the step's."""
    if environ.get("SLURM_JOB_GPUS"):  # "0,1"
        return len(environ["SLURM_JOB_GPUS"].split(","))
    return parse_number(environ.get("SLURM_GPUS_ON_NODE", ""))


def _component_suffixes(environ: Mapping[str, str]) -> list[str]:
    """What the names of each component's variables end with: "_HET_GROUP_0", ..."""
    size = min(number(environ, "SLURM_HET_SIZE") or 0, _MAX_COMPONENTS)
    suffixes = [f"_HET_GROUP_{group}" for group in range(size)]
    # Without them SLURM_JOB_NODELIST is that of the whole job, or of the first component.
    return suffixes if all(f"SLURM_JOB_NODELIST{suffix}" in environ for suffix in suffixes) else []


def _counts(environ: Mapping[str, str], name: str, nodes: int) -> Counts:
    """The numbers of a variable; empty where it is unset or not about this number of nodes."""
    counts = expand_counts(environ[name]) if environ.get(name) else []
    return [*counts] if len(counts) == nodes else []


def _tasks(environ: Mapping[str, str], suffix: str, nodes: int) -> Counts:
    """Tasks per node of the job.

    In a step SLURM_TASKS_PER_NODE is the step's, and SLURM_NTASKS_PER_NODE what the job requested.
    In a job that requested no number of tasks SLURM_TASKS_PER_NODE counts its cores, while srun
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
    """Whether the job requested a number of tasks. SLURM_NTASKS may be that of a step."""
    names = ["SLURM_NTASKS_PER_NODE"]
    if step_name(environ) in ("", *SPECIAL_STEPS):
        names.append("SLURM_NTASKS")
    return any(environ.get(f"{name}{suffix}") for name in names)


def _gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """GPUs of every node where the job requested a number per node: "2", "a100:4"."""
    text = environ.get("SLURM_GPUS_PER_NODE")
    if not text or environ.get("SLURM_HET_SIZE"):
        return None
    total = 0
    for part in text.split(","):
        count = parse_number(part.rpartition(":")[2])
        if count is None:
            raise ValueError(f"SLURM_GPUS_PER_NODE={text[:80]} has no number of GPUs")
        total += count
    return total

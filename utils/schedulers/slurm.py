"""Slurm: the grammar of its lists, and what its variables and scontrol say was allocated. Standard library only.

Not here: its jobs (slurm_jobs.py). Ranks that start load this module, so it imports the rest only where needed.
"""
from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .allocation import Allocation

_PART = re.compile(r"([^\[\],]*)((?:\[[^\[\]]*\][^\[\],]*)*)(,|$)")
_GROUP = re.compile(r"\[([^\[\]]*)\]([^\[\],]*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?$")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_MAX_HOSTS = 1 << 17  # twice Slurm's own limit (MAX_SLURM_NODES, 65536)


def expand_hostlist(text: str) -> list[str]:
    """The host names of a Slurm node list, in order, as `scontrol show hostnames` prints them.

    For example "n[1-2,04]-ib,login1,rack[0-1]n[2-3]" (scontrol(1), hostlist expressions). ValueError when the text
    does not follow the grammar or stands for more hosts than a cluster can have.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or not match[0].strip(","):
            raise ValueError(f"node list {text[:80]!r}: cannot read it from {text[position:position + 20]!r} on; "
                             "expected the form n[1-2,04]-ib,login1")
        groups = _GROUP.findall(match[2])
        numbers = [_expand_numbers(inside, text) for inside, _ in groups]
        count = 1
        for choice in numbers:
            count *= len(choice)
        if len(hosts) + count > _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} stands for more than {_MAX_HOSTS} hosts")
        # As scontrol does: the last bracket changes fastest, then the first, the second, and so on.
        for words in itertools.product(*reversed(numbers[:-1]), *numbers[-1:]):
            ordered = [*reversed(words[:-1]), *words[-1:]]
            hosts.append(match[1] + "".join(word + after for word, (_, after) in zip(ordered, groups, strict=True)))
        position = match.end()
    return hosts


def _expand_numbers(numbers: str, text: str) -> list[str]:
    """"1-2,04" -> ["1", "2", "04"]: leading zeros give the width."""
    found: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.match(part)
        if match is None or (match[2] and int(match[1]) > int(match[2])):
            raise ValueError(f"node list {text[:80]!r}: [{numbers[:40]}] is no list of numbers and rising ranges")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} stands for more than {_MAX_HOSTS} hosts")
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """One number for each node: "2,1(x2)" -> [2, 1, 1], the form of SLURM_TASKS_PER_NODE (sbatch(1)).

    ValueError when the text does not follow the grammar or stands for more nodes than a cluster can have.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"counts per node {text[:80]!r}: cannot read {part[:40]!r}; expected a form like 2,1(x2)")
        times = int(match[2] or 1)
        if len(counts) + times > _MAX_HOSTS:
            raise ValueError(f"counts per node {text[:80]!r} stand for more than {_MAX_HOSTS} nodes")
        counts += [int(match[1])] * times
    return counts


def allocation(environ: Mapping[str, str], *, ask: bool = True) -> Allocation:
    """What Slurm allocated to the job around this process. AllocationError when its variables contradict each other.

    Inside a step these are the hosts of the whole job, since a further step may use them all.
    """
    from .allocation import Allocation, AllocationError
    job_id = environ.get("SLURM_JOB_ID") or environ["SLURM_JOBID"]
    try:
        hosts, tasks, cores = _from_environment(environ)
        restarts = _number(environ, "SLURM_RESTART_COUNT") or 0
        index = _number(environ, "SLURM_ARRAY_TASK_ID")
        gpus: list[int | None] = [_gpus_per_node(environ)] * len(hosts)
        gpus_here = _gpus_here(environ)
        of_step = _in_step(environ) and not environ.get("SLURM_NTASKS_PER_NODE")
    except ValueError as error:
        raise AllocationError(f"Slurm job {job_id}: {error}. The variables of Slurm are expected as Slurm set them. "
                              "Unset those that were changed, or start from a new job.") from None
    if ask and (None in gpus or of_step):
        gpus, tasks, cores = _ask_resources(job_id, hosts, gpus, tasks, cores)
    if len(hosts) == 1 and gpus == [None]:
        gpus = [gpus_here]
    return Allocation("slurm", job_id, tuple(hosts), tuple(count or 1 for count in tasks), tuple(gpus), tuple(cores),
                      index, restarts)


def own_id(environ: Mapping[str, str]) -> str:
    """The id of the job around this process and of no other: "21", of an array element "20_1".

    SLURM_JOB_ID of the last element of an array is that of the whole array.
    """
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environ.get("SLURM_JOB_ID") or environ["SLURM_JOBID"]


def _from_environment(environ: Mapping[str, str]) -> tuple[list[str], list[int | None], list[int | None]]:
    """Hosts, tasks and cores per host of the whole job; None where the variables say nothing, or only of a step."""
    hosts: list[str] = []
    tasks: list[int | None] = []
    cores: list[int | None] = []
    for group in _groups(environ) or [""]:
        name = f"SLURM_JOB_NODELIST{group}"
        text = environ.get(name) or environ.get("SLURM_NODELIST")
        found = expand_hostlist(text) if text else []
        if not found:
            raise ValueError(f"{name} is not set, expected a list of nodes")
        hosts += found
        tasks += _tasks(environ, group, len(found))
        cores += _counts(environ, f"SLURM_JOB_CPUS_PER_NODE{group}", len(found)) or [None] * len(found)
    return hosts, tasks, cores


def components(environ: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The hosts of each component of a heterogeneous job, in order; empty in any other job. ValueError: see above."""
    return tuple(tuple(expand_hostlist(environ[f"SLURM_JOB_NODELIST{group}"])) for group in _groups(environ))


def _groups(environ: Mapping[str, str]) -> list[str]:
    """What the names of the variables of each component end with."""
    size = min(_number(environ, "SLURM_HET_SIZE") or 0, 128)  # 128: the most that Slurm takes
    groups = [f"_HET_GROUP_{group}" for group in range(size)]
    # Else the variables of the whole job hold every component, or only the first is known here.
    return groups if all(f"SLURM_JOB_NODELIST{group}" in environ for group in groups) else []


def _counts(environ: Mapping[str, str], name: str, nodes: int) -> list[int | None]:
    """The numbers of a variable, empty when it is not set or not of this many nodes."""
    counts = expand_counts(environ[name]) if environ.get(name) else []
    return [*counts] if len(counts) == nodes else []


def _tasks(environ: Mapping[str, str], group: str, nodes: int) -> list[int | None]:
    """Tasks per node of the job, as far as the variables tell.

    In a step SLURM_TASKS_PER_NODE is the step's, and SLURM_NTASKS_PER_NODE what the job asked for. In a job that asked
    for no number of tasks SLURM_TASKS_PER_NODE counts its cores, while srun would start one task on each node.
    """
    each = _number(environ, f"SLURM_NTASKS_PER_NODE{group}")
    counts = _counts(environ, f"SLURM_TASKS_PER_NODE{group}", nodes)
    if _in_step(environ):
        return [each] * nodes if each else counts or [None] * nodes
    if each or environ.get(f"SLURM_NTASKS{group}"):
        if not counts and environ.get(f"SLURM_TASKS_PER_NODE{group}"):
            raise ValueError(f"SLURM_TASKS_PER_NODE{group}={environ[f'SLURM_TASKS_PER_NODE{group}'][:80]} does not "
                             f"have one number for each of the {nodes} nodes")
        return counts or [each] * nodes
    return [1] * nodes


def _in_step(environ: Mapping[str, str]) -> bool:
    """Whether a step surrounds us, also the interactive one of salloc: its variables hide some of the job's."""
    return _number(environ, "SLURM_STEP_ID") is not None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable that is a whole number; None when it is not set or empty."""
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise ValueError(f"{name}={text[:80]} is no number")
    return int(text) if text else None


def _gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """GPUs of every node where the job asked for a number per node: "2", "a100:4"."""
    if environ.get("SLURM_HET_SIZE") or not environ.get("SLURM_GPUS_PER_NODE"):
        return None
    counts = [part.rpartition(":")[2] for part in environ["SLURM_GPUS_PER_NODE"].split(",")]
    if not all(count.isdecimal() for count in counts):
        raise ValueError(f"SLURM_GPUS_PER_NODE={environ['SLURM_GPUS_PER_NODE'][:80]} has no number of GPUs")
    return sum(map(int, counts))


def _gpus_here(environ: Mapping[str, str]) -> int | None:
    """GPUs of this node: SLURM_JOB_GPUS="0,1", those of the job; SLURM_GPUS_ON_NODE may be those of the step."""
    if environ.get("SLURM_JOB_GPUS"):
        return len(environ["SLURM_JOB_GPUS"].split(","))
    return int(environ["SLURM_GPUS_ON_NODE"]) if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal() else None


def _ask_resources(job_id: str, hosts: list[str], gpus: list[int | None], tasks: list[int | None],
                   cores: list[int | None]) -> tuple[list[int | None], list[int | None], list[int | None]]:
    """The same with what scontrol adds; unchanged where it does not answer."""
    from .command import SchedulerError
    from .command import ask as ask_scheduler
    from .slurm_answers import node_resources, records
    try:
        answer = records(ask_scheduler(["scontrol", "--details", "show", "job", job_id], seconds=10))
    except SchedulerError:
        return gpus, tasks, cores
    jobs = [job for job in answer if job_id in (job.get("JobId"), job.get("HetJobId"))]  # not of the whole array
    found = node_resources(jobs)
    gpus = [found[host][1] if host in found else known for host, known in zip(hosts, gpus, strict=True)]
    cores = [found[host][0] if host in found else known for host, known in zip(hosts, cores, strict=True)]
    if len(jobs) == 1 and jobs[0].get("NumTasks", "").isdecimal():
        total = int(jobs[0]["NumTasks"])
        if total != sum(count or 0 for count in tasks):  # what was known were the tasks of a step
            each = jobs[0].get("CPUs/Task", "")
            by_cores = [(count or 0) // int(each) for count in cores] if each.isdecimal() and int(each) else []
            if sum(by_cores) == total:
                tasks = [*by_cores]
            elif total % len(hosts) == 0:
                tasks = [total // len(hosts)] * len(hosts)
    return gpus, tasks, cores


def seconds_left(job_id: str) -> float | None:
    """Seconds until the time limit of a job; None where there is no limit or no answer."""
    import time

    from .command import SchedulerError, ask
    from .slurm_answers import parse_duration
    try:
        # The id of the last element of an array names the whole array too.
        for line in ask(["squeue", "--noheader", "--jobs", job_id, "--format", "%A %L"], seconds=10).splitlines():
            found, _, left = line.partition(" ")
            if found == job_id:
                return parse_duration(left)
    except SchedulerError:
        pass
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # since Slurm 23.02
    mine = os.environ.get("SLURM_JOB_ID") == job_id
    return max(0.0, int(end) - time.time()) if mine and end.isdecimal() else None

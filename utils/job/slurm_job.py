"""The job around this process as Slurm describes it: host lists, variables, the allocation."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .allocation import Allocation, AllocationError, parse_duration, parse_number
from .commands import SchedulerError, run_command

Fields = dict[str, str]  # one record: field name or column -> text as printed

# Between the columns of squeue, sinfo and sacct: a job name may hold "|" and blanks.
SEPARATOR = "\x1f"
_RECORD_START = re.compile(r"(?:JobId|NodeName|PartitionName)=")
_FIELD_LINE = re.compile(r" +[A-Za-z][A-Za-z0-9_./:-]*=")
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_./:-]*)=")
# Texts that people choose. scontrol prints each as the last field of a line.
_FREE_TEXT = frozenset(
    "JobName Command WorkDir StdErr StdIn StdOut SubmitLine Comment AdminComment SystemComment "
    "Extra OS Power".split()
)


def records(text: str) -> list[Fields]:
    """Return the records of `scontrol show job|node|partition` (without --oneliner), in order.

    `scontrol --details show job` prints a line for each group of equal nodes; they are kept as the
    lines of the field "Nodes". "(null)" and "N/A" stay as printed.
    """
    found: list[Fields] = []
    last_field = ""
    for line in text.split("\n"):
        if _RECORD_START.match(line):
            found.append({})
        elif not _FIELD_LINE.match(line):
            if found and last_field in _FREE_TEXT and line.strip():  # a line break in a name
                found[-1][last_field] += "\n" + line
            continue
        if not found:
            continue

        record = found[-1]
        for name, value in _fields(line.lstrip(" ")):
            if name == "Nodes" and line.startswith("     "):
                groups = [record["Nodes"]] if record.get("Nodes") else []
                record["Nodes"] = "\n".join([*groups, line.strip()])
                break
            record[name] = value
            last_field = name
    return found


def _fields(line: str) -> Iterator[tuple[str, str]]:
    """Split "A=1 JobName=two words" into ("A", "1"), ("JobName", "two words")."""
    marks = list(_FIELD.finditer(line))
    for place, mark in enumerate(marks):
        name = mark[1]
        if name in _FREE_TEXT or (place == 0 and name in ("Reason", "Features")):
            yield name, line[mark.end() :]
            return
        end = marks[place + 1].start() if place + 1 < len(marks) else len(line)
        yield name, line[mark.end() : end].rstrip(" ")


def table(text: str, columns: Sequence[str]) -> list[Fields]:
    """Return the rows of a table without a header, whose columns SEPARATOR divides.

    A line break in a value stays in it.
    """
    found: list[Fields] = []
    row: list[str] = []
    for line in text.split("\n"):
        parts = line.split(SEPARATOR)
        if row:  # not complete: the line goes on with its last value
            row[-1] += "\n" + parts[0]
            row += parts[1:]
        elif line:
            row = parts
        if len(row) >= len(columns):
            found.append(dict(zip(columns, row, strict=False)))
            row = []
    return found


def node_resources(jobs: Iterable[Fields]) -> dict[str, tuple[int | None, int]]:
    """Return cores and GPUs of each host, from records of `scontrol --details show job`.

    Their lines have the form "Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)".
    """
    found: dict[str, tuple[int | None, int]] = {}
    for job in jobs:
        for line in job.get("Nodes", "").split("\n"):
            fields = dict(_fields(line))
            core_ids = fields.get("CPU_IDs")
            try:
                cores = len(expand_hostlist(f"[{core_ids}]")) if core_ids else None
                hosts = expand_hostlist(fields.get("Nodes", ""))
            except ValueError:  # a form of a later Slurm: ignored
                continue
            for host in hosts:
                found[host] = (cores, gpu_count(fields.get("GRES", "")))
    return found


def gpu_count(gres: str) -> int:
    """Count the GPUs of a list of generic resources: "gpu:a100:4(IDX:0-3),gpu:1,shard:2" -> 5."""
    total = 0
    for part in re.sub(r"\([^()]*\)", "", gres).split(","):
        name, *rest = part.removeprefix("gres/").replace("=", ":").split(":")
        if name == "gpu":
            count = parse_number(rest[-1]) if rest else None
            total += 1 if count is None else count
    return total


_MAX_HOSTS = 1 << 17  # twice Slurm's own limit (MAX_SLURM_NODES, 65536)
_PART = re.compile(r"([^\[\],]*)((?:\[[^\[\]]*\][^\[\],]*)*)(,|$)")
_BRACKET = re.compile(r"\[([^\[\]]*)\]([^\[\],]*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?$")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of a Slurm node list, in the order of `scontrol show hostnames`.

    For example "n[1-2,04]-ib,login1,rack[0-1]n[2-3]" (scontrol(1), hostlist expressions).

    Raises ValueError where the text does not follow the grammar or means more hosts than a cluster
    can have.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or not part[0].strip(","):
            raise ValueError(
                f"node list {text[:80]!r}: cannot read it from "
                f"{text[position : position + 20]!r} on; expected the form n[1-2,04]-ib,login1"
            )
        prefix = part[1]
        brackets = _BRACKET.findall(part[2])
        suffixes = [suffix for _, suffix in brackets]
        numbers = [_expand_numbers(inside, text) for inside, _ in brackets]

        count = 1
        for choices in numbers:
            count *= len(choices)
        if len(hosts) + count > _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} means more than {_MAX_HOSTS} hosts")

        # scontrol changes the last bracket fastest, then the first, the second, and so on:
        # r[1-2]c[0,3]n[1-2] starts with r1c0n1, r1c0n2, r2c0n1.
        for choice in itertools.product(*reversed(numbers[:-1]), *numbers[-1:]):
            in_order = [*reversed(choice[:-1]), *choice[-1:]]
            pairs = zip(in_order, suffixes, strict=True)
            hosts.append(prefix + "".join(number + suffix for number, suffix in pairs))
        position = part.end()
    return hosts


def _expand_numbers(numbers: str, text: str) -> list[str]:
    """Expand "1-2,04" to ["1", "2", "04"]: leading zeros give the width."""
    found: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.match(part)
        if match is None or (match[2] and int(match[1]) > int(match[2])):
            raise ValueError(
                f"node list {text[:80]!r}: [{numbers[:40]}] is not a list of numbers and rising "
                "ranges"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} means more than {_MAX_HOSTS} hosts")
        width = len(match[1])
        found += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Return one number for each node: "2,1(x2)" -> [2, 1, 1], the form of SLURM_TASKS_PER_NODE.

    Raises ValueError where the text does not follow the grammar or means more nodes than a cluster
    can have.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(
                f"counts per node {text[:80]!r}: cannot read {part[:40]!r}; expected a form like "
                "2,1(x2)"
            )
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MAX_HOSTS:
            raise ValueError(f"counts per node {text[:80]!r} mean more than {_MAX_HOSTS} nodes")
        counts += [int(match[1])] * repeats
    return counts


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

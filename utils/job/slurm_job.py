"""Parse Slurm's records, host lists and variables of a job; query the time left."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping

from .commands import SchedulerError, run_command
from .notation import parse_duration, parse_number
from .slurm_steps import step_name

Fields = dict[str, str]  # one record: field name or column -> text as printed

_RECORD_START = re.compile(r"(?:JobId|NodeName|PartitionName)=")
_FIELD_LINE = re.compile(r" +[A-Za-z][A-Za-z0-9_./:-]*=")
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_./:-]*)=")
# Fields with text that people choose. scontrol prints each of them as the last field of a line.
_FREE_TEXT = frozenset(
    "JobName Command WorkDir StdErr StdIn StdOut SubmitLine Comment AdminComment SystemComment "
    "Extra OS Power".split()
)


def records(text: str) -> list[Fields]:
    """Return the records of `scontrol show job|node|partition` (without --oneliner), in order.

    `scontrol --details show job` prints a line for each group of equal nodes. These lines become
    the lines of the field "Nodes". "(null)" and "N/A" stay as printed.
    """
    found: list[Fields] = []
    last_field = ""
    for line in text.split("\n"):
        if _RECORD_START.match(line):
            found.append({})
        elif not _FIELD_LINE.match(line):
            if found and last_field in _FREE_TEXT and line.strip():  # a name contains a line break
                found[-1][last_field] += "\n" + line
            continue
        if not found:
            continue

        record = found[-1]
        for name, value in fields_of(line.lstrip(" ")):
            if name == "Nodes" and line.startswith("     "):
                groups = [record["Nodes"]] if record.get("Nodes") else []
                record["Nodes"] = "\n".join([*groups, line.strip()])
                break
            record[name] = value
            last_field = name
    return found


def fields_of(line: str) -> Iterator[tuple[str, str]]:
    """Split "A=1 JobName=two words" into ("A", "1"), ("JobName", "two words")."""
    marks = list(_FIELD.finditer(line))
    for place, mark in enumerate(marks):
        name = mark[1]
        if name in _FREE_TEXT or (place == 0 and name in ("Reason", "Features")):
            yield name, line[mark.end() :]
            return
        end = marks[place + 1].start() if place + 1 < len(marks) else len(line)
        yield name, line[mark.end() : end].rstrip(" ")


_MAX_HOSTS = 1 << 17  # twice Slurm's own limit (MAX_SLURM_NODES, 65536)
_PART = re.compile(r"([^\[\],]*)((?:\[[^\[\]]*\][^\[\],]*)*)(,|$)")
_BRACKET = re.compile(r"\[([^\[\]]*)\]([^\[\],]*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?$")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of a Slurm node list, in the order of `scontrol show hostnames`.

    For example "n[1-2,04]-ib,login1,rack[0-1]n[2-3]" (scontrol(1), hostlist expressions).

    Raises ValueError if the text breaks the grammar, or means more hosts than a cluster can have.
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
    """Expand "1-2,04" to ["1", "2", "04"]; a leading zero sets the width."""
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
    """Return a number for each node: "2,1(x2)" -> [2, 1, 1]. SLURM_TASKS_PER_NODE has this form.

    Raises ValueError if the text breaks the grammar, or means more nodes than a cluster can have.
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


def unique_job_id(environ: Mapping[str, str]) -> str:
    """Return an id that no other job has: "21"; "20_1" for an array element.

    The SLURM_JOB_ID of an array's last element is the id of the whole array.
    """
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a step: its variables hide some of the job's. salloc's shell may be one."""
    return step_name(environ) not in ("", "batch")


_TIMEOUT_SECONDS = 10.0  # seconds per query; a job is waiting


def seconds_left(job_id: str) -> float | None:
    """Query the seconds until the time limit; None without a limit or a response."""
    query = ["squeue", "--noheader", "--jobs", job_id, "--format", "%A %L"]
    try:
        output = run_command(query, timeout_seconds=_TIMEOUT_SECONDS)
    except SchedulerError:
        output = ""
    for line in output.splitlines():
        # An array's id, which is also the id of its last element, selects the whole array.
        found, _, left = line.partition(" ")
        if found == job_id:
            return parse_duration(left)

    end = parse_number(os.environ.get("SLURM_JOB_END_TIME", ""))  # Slurm 23.02 and newer
    if end is None or os.environ.get("SLURM_JOB_ID") != job_id:
        return None
    return max(0.0, end - time.time())

"""Parse what Slurm's commands print. Runs no command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from .slurm_hostlist import expand_hostlist
from .units import parse_number

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

"""What the commands of Slurm print, as records of text. Pure functions; nothing is run here.

Not here: what follows from it for a job (slurm.py, slurm_jobs.py).
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .slurm import expand_hostlist

Record = dict[str, str]
SEPARATOR = "\x1f"  # between the columns that we ask of squeue, sinfo and sacct: a name may hold "|" and spaces
_START = re.compile(r"(?:JobId|NodeName|PartitionName)=")
_LINE = re.compile(r" +[A-Za-z][A-Za-z0-9_./:-]*=")
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_./:-]*)=")
# Chosen by people, and printed at the end of a line by scontrol: such a value goes on to the end of the line.
_FREE = frozenset(("JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "SubmitLine",
                   "Comment", "AdminComment", "SystemComment", "Extra", "OS", "Power"))


def records(text: str) -> list[Record]:
    """What `scontrol show job|node|partition` printed (not --oneliner), one record for each, in order.

    "Nodes" of `scontrol --details show job` comes once for each group of equal nodes: its lines are kept, one a line.
    "(null)" and "N/A" stay as they are.
    """
    found: list[Record] = []
    last = ""
    for line in text.split("\n"):
        if _START.match(line):
            found.append({})
        elif not _LINE.match(line):
            if found and last in _FREE and line.strip():
                found[-1][last] += "\n" + line  # a line break in a name
            continue
        if not found:
            continue
        for name, value in _fields(line.lstrip(" ")):
            if name == "Nodes" and line.startswith("     "):
                found[-1]["Nodes"] = "\n".join(filter(None, (found[-1].get("Nodes"), line.strip())))
                break
            found[-1][name] = value
            last = name
    return found


def _fields(line: str) -> Iterable[tuple[str, str]]:
    """"A=1 JobName=two words" -> ("A", "1"), ("JobName", "two words")."""
    marks = list(_FIELD.finditer(line))
    for place, mark in enumerate(marks):
        if mark[1] in _FREE or (mark[1] in ("Reason", "Features") and place == 0):
            yield mark[1], line[mark.end():]
            return
        end = marks[place + 1].start() if place + 1 < len(marks) else len(line)
        yield mark[1], line[mark.end():end].rstrip(" ")


def table(text: str, columns: Sequence[str]) -> list[Record]:
    """Rows printed with SEPARATOR between the columns, without a header. A line break in a value stays in it."""
    found: list[Record] = []
    row: list[str] = []
    for line in text.split("\n"):
        parts = line.split(SEPARATOR)
        if row and len(row) < len(columns):
            row[-1] += "\n" + parts[0]
            row += parts[1:]
        elif line:
            row = parts
        if len(row) >= len(columns):
            found.append(dict(zip(columns, row, strict=False)))
            row = []
    return found


def node_resources(jobs: Iterable[Record]) -> dict[str, tuple[int | None, int]]:
    """Host -> (cores, GPUs) of `scontrol --details show job`.

    Its lines have the form "Nodes=node[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)".
    """
    found: dict[str, tuple[int | None, int]] = {}
    for job in jobs:
        for line in job.get("Nodes", "").split("\n"):
            fields = dict(_fields(line))
            try:
                cores = len(expand_hostlist(f"[{fields['CPU_IDs']}]")) if fields.get("CPU_IDs") else None
                for host in expand_hostlist(fields.get("Nodes", "")):
                    found[host] = (cores, gpu_count(fields.get("GRES", "")))
            except ValueError:
                continue  # a form of a later Slurm: as if it had not been printed
    return found


def gpu_count(gres: str) -> int:
    """GPUs of a list of generic resources: "gpu:a100:4(IDX:0-3),gpu:1(S:0),shard:2" -> 5."""
    total = 0
    for part in re.sub(r"\([^()]*\)", "", gres).split(","):
        words = part.removeprefix("gres/").replace("=", ":").split(":")
        if words[0] == "gpu":
            total += int(words[-1]) if words[-1].isdecimal() else 1
    return total


def parse_duration(text: str) -> float | None:
    """Seconds of "1-02:03:04", "02:03:04", "03:04"; None of UNLIMITED, NOT_SET, INVALID and the like."""
    match = re.fullmatch(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

"""What the commands of PBS print, as records of text. Pure functions; nothing is run here.

Not here: what follows from it for a job (pbs.py, pbs_jobs.py).
"""
from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from .command import SchedulerError

Record = dict[str, Any]  # attribute -> text, or a Record: Resource_List, Variable_List, resources_available
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DATE = re.compile(r"\w+ +(\w{3}) +([0-9]+) +([0-9]+):([0-9]+):([0-9]+) +([0-9]{4})")


def objects(text: str, kind: str) -> dict[str, Record]:
    """Name -> record of what `qstat -f -F json` ("Jobs"), `qstat -Qf -F json` ("Queue"), `qstat -Bf -F json`
    ("Server") or `pbsnodes -a -F json` ("nodes") printed, in its order.

    PBS writes every value that looks like a number as a JSON number (a job named 0123 as 123, -v B=1e5 as 100000):
    numbers stay the text that was printed, so that a value has one type. Control characters are accepted as they are.
    SchedulerError when the text is no JSON of this form.
    """
    import json  # here, since launch.py needs this file often and this function seldom
    try:
        found = json.loads(text, strict=False, parse_int=str, parse_float=str, parse_constant=str)
        members = found.get(kind, {})
        if all(isinstance(record, dict) for record in members.values()):
            return {name: _as_text(record) for name, record in members.items()}
    except (ValueError, AttributeError, RecursionError):
        pass
    raise SchedulerError(f"PBS printed {text.strip()[:80]!r}, expected a JSON object of {kind}. "
                         "Run the command by hand to see whether the server answers.")


def listing(text: str) -> dict[str, Record]:
    """The same of `qstat -f ID`, without "-F json": the JSON of versions before 2024 is invalid for values such as 005.

    Variable_List stays one text. A line break in a value is lost. SchedulerError when the text names no job.
    """
    found: dict[str, Record] = {}
    record: Record = {}
    for line in text.split("\n"):
        if match := re.match(r"Job Id: (\S+)$", line):
            record = found.setdefault(match[1], {})
            within, name = record, ""
        elif match := re.match(r"    (\w+)(?:\.(\w+))? = (.*)$", line):
            within, name = (record.setdefault(match[1], {}), match[2]) if match[2] else (record, match[1])
            if isinstance(within, str) or name in within:  # a line of a value that looks like one of these
                within = {}
            within[name] = match[3]
        elif line.startswith("\t") and found and name:  # a long value goes on
            within[name] += line[1:]
    if found:
        return found
    raise SchedulerError(f"PBS printed {text.strip()[:80]!r}, expected a job. Run qstat -f by hand to see whether the "
                         "server answers.")


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_text(member) for name, member in value.items()}
    if isinstance(value, list):
        return ",".join(map(str, map(_as_text, value)))
    return value if isinstance(value, str) else {True: "true", False: "false", None: "null"}[value]


def chunk_resources(exec_host: str, exec_vnode: str) -> list[tuple[str, dict[str, str]]]:
    """Host and resources of every chunk, in order.

    "n1/0*2+n2/0" and "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1+n2[1]:ncpus=1)" -> [("n1", {"ncpus": "2", "ngpus": "1"}),
    ("n2", {"ncpus": "2"})]: chunk by chunk the two lists are parallel, while a vnode need not be named as its host.
    """
    hosts = [part.partition("/")[0] for part in exec_host.split("+") if part]
    chunks = re.findall(r"\(([^()]*)\)|([^()+]+)", exec_vnode)
    found = []
    for place, host in enumerate(hosts):
        sums: dict[str, str] = {}
        if len(chunks) == len(hosts):
            for vnode in "".join(chunks[place]).split("+"):
                for resource in vnode.split(":")[1:]:
                    name, _, value = resource.partition("=")
                    if value.isdecimal():
                        sums[name] = str(int(sums.get(name, "0")) + int(value))
        found.append((host, sums))
    return found


def seconds_of(duration: object) -> int | None:
    """"02:00:00", "30:00" or "90" (seconds) -> seconds. None for anything else."""
    parts = str(duration).split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in parts):
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return total


def moment_of(text: object) -> float | None:
    """"Sat Nov 21 03:56:14 2026", local time whatever the language -> seconds since 1970. None for anything else."""
    match = _DATE.fullmatch(str(text))
    if match is None or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(match[group]) for group in range(2, 7))
    return time.mktime((year, _MONTHS.index(match[1]) + 1, day, hour, minute, second, 0, 0, -1))


def number(record: Mapping[str, Any], *path: str) -> int | None:
    """A whole number in a record: number(job, "Resource_List", "ncpus"). None when it is not there."""
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    text = str(value)
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def text(record: Mapping[str, Any], *path: str) -> str:
    """A text in a record, "" when it is not there."""
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""

"""Parse what the commands of PBS print. Runs no command."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from .commands import SchedulerError

# One record: attribute -> text as printed. The members of an attribute have names such as
# "Resource_List.walltime", as in `qstat -f`.
Fields = dict[str, str]

_JOB_LINE = re.compile(r"Job Id: (\S+)$")
_ATTRIBUTE_LINE = re.compile(r"    ((\w+)(?:\.\w+)?) = (.*)$")
_CHUNK = re.compile(r"\(([^()]*)\)|([^()+]+)")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME = re.compile(r"\w+ +(\w{3}) +([0-9]+) +([0-9]+):([0-9]+):([0-9]+) +([0-9]{4})")


def objects(text: str, kind: str) -> dict[str, Fields]:
    """Return the records in the JSON output of qstat or pbsnodes, by name and in its order.

    kind: "Jobs" of `qstat -f -F json`, "Queue" with -Qf, "Server" with -Bf, "nodes" of
    `pbsnodes -a -F json`.

    PBS prints every value that looks like a number as a JSON number (a job named 0123 as 123, the
    variable B=1e5 as 100000). Numbers stay the text that was printed. Control characters are
    accepted.

    Raises SchedulerError where the text is not JSON of this form.
    """
    import json  # a launch needs the rest of this file often and this function seldom

    try:
        printed = json.loads(text, strict=False, parse_int=str, parse_float=str, parse_constant=str)
        return {name: dict(_flatten(record)) for name, record in printed.get(kind, {}).items()}
    except (ValueError, AttributeError):
        raise SchedulerError(
            f"PBS printed {text.strip()[:80]!r}. Expected a JSON object of {kind}. "
            "Run the command by hand to see whether the server responds."
        ) from None


def _flatten(record: dict[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _as_text(value)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(_as_text, value))
    return "null" if value is None else str(value).lower()  # True, False


def listing(text: str) -> dict[str, Fields]:
    """Return the jobs in the output of `qstat -f`, without "-F json".

    The JSON of versions before 2024 is invalid for values such as 005. Here Variable_List is one
    text, and a line break in a value is lost.

    Raises SchedulerError where the text names no job.
    """
    jobs: dict[str, Fields] = {}
    job: Fields = {}
    attribute = ""
    for line in text.split("\n"):
        if match := _JOB_LINE.match(line):
            job = jobs.setdefault(match[1], {})
        elif match := _ATTRIBUTE_LINE.match(line):
            attribute = match[1]
            if attribute in job or match[2] in job:  # a line of a value that looks like this
                attribute = ""
            else:
                job[attribute] = match[3]
        elif line.startswith("\t") and attribute in job:  # a long value goes on
            job[attribute] += line[1:]
    if jobs:
        return jobs
    raise SchedulerError(
        f"PBS printed {text.strip()[:80]!r}. Expected a job. Run qstat -f by hand to see whether "
        "the server responds."
    )


def members(record: Fields, attribute: str) -> Fields:
    """Return the members of an attribute: "Resource_List" -> {"walltime": "01:00:00", ...}."""
    prefix = attribute + "."
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def chunk_resources(exec_host: str, exec_vnode: str) -> list[tuple[str, dict[str, int]]]:
    """Return host and resources of every chunk of a job, in order.

    "n1/0*2+n2/0" and "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1+n2[1]:ncpus=1)" ->
    [("n1", {"ncpus": 2, "ngpus": 1}), ("n2", {"ncpus": 2})]. The two lists have one part for each
    chunk. A virtual node need not be named after its host.
    """
    hosts = [part.partition("/")[0] for part in exec_host.split("+") if part]
    chunks = [inner or single for inner, single in _CHUNK.findall(exec_vnode)]
    if len(chunks) != len(hosts):
        chunks = [""] * len(hosts)
    return [(host, _sum_vnodes(chunk)) for host, chunk in zip(hosts, chunks, strict=True)]


def _sum_vnodes(chunk: str) -> dict[str, int]:
    """Sum the resources of "n2[0]:ncpus=1:mem=5kb+n2[1]:ncpus=1" -> {"ncpus": 2}."""
    sums: dict[str, int] = {}
    for vnode in chunk.split("+"):
        for resource in vnode.split(":")[1:]:
            name, _, value = resource.partition("=")
            if value.isdecimal():
                sums[name] = sums.get(name, 0) + int(value)
    return sums


def parse_time(text: str) -> float | None:
    """Return the seconds since 1970 of "Sat Nov 21 03:56:14 2026", local time in English.

    None for any other text.
    """
    match = _TIME.fullmatch(text)
    if match is None or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(match[group]) for group in range(2, 7))
    month = _MONTHS.index(match[1]) + 1
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))

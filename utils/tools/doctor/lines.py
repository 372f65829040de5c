"""Parse one line of output: the cause that it shows, and the rank and host that it names."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ...launch_report import FAILURE, Failure
from .causes import CAUSES, CauseLevel, FailureCause

_WORD = r"[A-Za-z0-9_][\w.-]{0,252}"  # at most as long as a host name
_PLACEHOLDERS = {
    "...": ".*?",
    "{host}": rf"(?P<host>{_WORD}|[^\s,]+)",
    "{name}": r"[A-Za-z_][\w.]*",
    "{status}": r"\s*[:=]?\s*-?[1-9]",
}

_HOST_NAME = re.compile(rf"(?!localhost){_WORD}")

# "[rank3]: ", "3: " (srun --label), "[1,3]<stderr>:", "(Worker pid=7) ", "rank 3 on n2 failed: "
_LABELS = re.compile(
    r"(?:\x1b\[[\d;]*m|\[(?:rank ?|default)\d+\]:? ?|\d+: |\[\d+,\d+\]<std(?:err|out)>: ?"
    r"|\([\w ]+ pid=\d+[^)]*\) |rank \d+ on \S+ failed: )+"
)
# What the kit says to people it also writes as a Failure. What it logs may not end the job.
_FOR_PEOPLE = re.compile(
    r"rank \d+ on \S+ (?:failed: |stops|is ended)|ddpkit launch: |LaunchError: "
)
_LOGGED = re.compile(r"\[rank \d+/\d+ \S+\] ERROR: ")
# The rows of the kinds of failures, where the cause matches no other row, or always.
_ALWAYS = ("left", "uneven", "preflight", "bad host")
_ROWS = {
    "command": "command_error",
    "start": "launch_error",
    "launch": "launch_error",
    "exception": "python_exception",
    "status": "unknown",
    "stop": "terminated",
    "uneven": "uneven_work",
    "left": "left_early",
    "preflight": "preflight",
    "bad host": "bad_host",
}

_RANK_AND_HOST = tuple(
    re.compile(pattern.format(rank=r"(?P<rank>\d+)", host=rf"(?P<host>{_WORD})"))
    for pattern in (
        " on rank {rank} on {host}: ",  # in a message that the kit has logged
        r"\[rank {rank}/\d+ {host}\] ",
        "srun: error: {host}: task {rank}:",
        r"process rank {rank} with PID \S+ on node {host}",  # Open MPI
        "{host}: rank {rank} (?:died|exited)",  # PALS
        r"RANK {rank} PID \d+ RUNNING AT {host}",  # MPICH
    )
)
_RANK = re.compile(
    r"\[[Rr]ank ?(\d+)\]|^(\d+): |^\[\d+,(\d+)\]<std|Process name: \[\S+,(\d+)\]"
    r"|[Rr]ank (\d+) failed to pass|\(rank (\d+) in comm|^  rank +: (\d+)"
)
# "n2:41:97 [0] NCCL", "[n2:41] *** Process received signal", torchrun's summary, LSF's report
_HOST = re.compile(
    rf"(?<![\w.-])({_WORD}):\d+:\d+ \[\d+\] |\[([A-Za-z][\w.-]*)(?<!\.py):\d+[]: ]"
    rf"|srun: error: ({_WORD}): tasks|  ?ON ({_WORD}) CANCELLED|^  host +: ({_WORD})"
    rf"|PID \d+ RUNNING AT ({_WORD})|executed on host\(s\) <(?:\d+\*)?({_WORD})>, in queue"
)
# Lines of launchers about the end of one process.
_EXIT = re.compile(
    r"srun: error: \S+: tasks? |process rank \d+ with PID|PID \d+ RUNNING AT"
    r"|: rank \d+ (?:died|exited)|Process name: \["
)
# Lines that say no cause, but where the job ran or which process failed.
CONTEXT = ("Job was executed on host(s) <", " NCCL ", "Root Cause (first", "  time  ", "  host  ",
           "  rank  ", "Process name: [", "RUNNING AT", FAILURE)  # fmt: skip

_GPU_MEMORY = re.compile(
    r"(?P<total>\S+ \wiB) total capacity; (?P<used>\S+ \w+) already allocated; (?P<free>\S+ \w+)"
    r" free|capacity of (?P<total_2>\S+ \wiB) of which (?P<free_2>\S+ \w+) is free.*"
    r"allocated memory (?P<used_2>\S+ \w+) is allocated by PyTorch"
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_GPU_HELD, _GPU_FULL = (cause for cause in CAUSES if cause.name == "cuda_oom")


class _Signature(NamedTuple):
    keyword: str  # each line that matches contains it
    regex: re.Pattern[str]
    at_start: bool
    cause: FailureCause


@cache
def _signatures() -> tuple[_Signature, ...]:
    found = []
    for cause in CAUSES:
        for pattern in cause.patterns:
            parts = re.split(r"(\.\.\.|\{\w+\})", pattern.removeprefix("^"))
            regex = "".join(_PLACEHOLDERS.get(part, re.escape(part)) for part in parts)
            keyword = max((part for part in parts if part not in _PLACEHOLDERS), key=len)
            found.append(_Signature(keyword, re.compile(regex), pattern[0] == "^", cause))
    return tuple(found)


@cache
def keywords() -> tuple[str, ...]:
    """Return texts one of which is in every line of interest."""
    return *(one.keyword for one in _signatures()), *CONTEXT


def match(line: str) -> tuple[FailureCause, str | None] | None:
    """Return the cause that a line shows, and the host in the place of its pattern's {host}."""
    labels = _LABELS.match(line)
    message = line[labels.end() :] if labels else line
    for keyword, regex, at_start, cause in _signatures():
        found = keyword in line and (regex.match(message) if at_start else regex.search(line))
        if found:
            if cause is _GPU_FULL and _held_by_another_process(line):
                cause = _GPU_HELD
            if _LOGGED.search(line):
                level = max(cause.level, CauseLevel.HINT)
                cause = replace(cause, meaning=line.partition("ERROR: ")[2][:300], level=level)
                cause = replace(cause, reporter="kit")
            host = found["host"].rstrip(".") if "host" in regex.groupindex else None
            return cause, host if host and _HOST_NAME.fullmatch(host) else None
    return None


def read_failure(line: str) -> Failure | None:
    """Return what the kit has written about a failure; None for other lines."""
    _, marker, text = line.partition(FAILURE)
    if marker:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(text)
            cause, kind, rank, host = (fields[name] for name in ("cause", "kind", "rank", "host"))
            if isinstance(rank, int | None) and all(isinstance(one, str) for one in (cause, kind)):
                return Failure(cause, kind, rank, host if isinstance(host, str) else None)
    return None


def is_for_people(line: str) -> bool:
    """Whether a line repeats what the kit has written as a Failure."""
    labels = _LABELS.match(line)
    return any(map(_FOR_PEOPLE.match, (line, line[labels.end() :] if labels else line)))


def cause_of(failure: Failure) -> FailureCause:
    """Return the row for what the kit says, with its words where they say more than the row."""
    found = match(failure.text)
    cause = found[0] if found else None
    if cause is None or cause.name == "unknown" or failure.kind in _ALWAYS:
        name = _ROWS.get(failure.kind, "kit_message")
        cause = next(row for row in CAUSES if row.name == name)
    if failure.kind in ("exception", "status"):
        return cause
    cause = replace(cause, meaning=failure.text[:300], reporter="kit")
    if failure.kind == "killed":  # the launcher's report of its end says more
        cause = replace(cause, level=CauseLevel.CONSEQUENCE, explained_by=("killed", "crash"))
    return cause


def rank_and_host(line: str) -> tuple[int | None, str | None]:
    """Return the rank and the host that a line is about, or that its label names."""
    for pattern in _RANK_AND_HOST:
        both = pattern.search(line)
        if both:
            return int(both["rank"]), both["host"]
    rank, host = _RANK.search(line), _HOST.search(line)
    return int(rank[rank.lastindex or 0]) if rank else None, host and host[host.lastindex or 0]


def reports_exit(line: str) -> bool:
    """Whether a launcher reports the end of a process in this line."""
    return _EXIT.search(line) is not None


def _held_by_another_process(line: str) -> bool:
    """Whether more than half of a GPU's memory is in use, but not by this process."""
    found = _GPU_MEMORY.search(line)
    if not found:
        return False
    sizes = {}
    for name, text in found.groupdict().items():
        if text:
            number, unit = text.split()
            sizes[name.removesuffix("_2")] = float(number) * _UNITS[unit]
    return sizes["total"] - sizes["free"] - sizes["used"] > sizes["total"] / 2

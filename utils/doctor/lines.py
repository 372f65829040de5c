"""Parse one line of output: the cause that it shows, and the rank and host that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from .causes import CAUSES, Cause, Level

_WORD = r"[A-Za-z0-9_][\w.-]*"
_PLACEHOLDERS = {
    "...": ".*?",
    "{host}": rf"(?P<host>{_WORD}|[^\s,]+)",
    "{name}": r"[A-Za-z_][\w.]*",
    "{status}": r"\s*[:=]?\s*-?[1-9]",
}

_HOST_NAME = re.compile(rf"(?!localhost){_WORD}")

# "[rank3]: ", "3: " (srun --label), "[1,3]<stderr>:", "(Worker pid=7) ", "rank 3 on n2 failed: "
_SURVIVOR = (
    rf"rank \d+ on {_WORD} (?:stops, because |is ended, because all other ranks have stopped: )"
    r"|launch\.py: the ranks report what failed first: "
)
_LABELS = re.compile(
    r"(?:\x1b\[[\d;]*m|\[(?:rank ?|default)\d+\]:? ?|\d+: |\[\d+,\d+\]<std(?:err|out)>: ?"
    rf"|\([\w ]+ pid=\d+[^)]*\) |(?:{_SURVIVOR})?rank \d+ on \S+ failed: )+"
)

_KIT_ERRORS = tuple(
    pattern.removesuffix(": ")
    for cause in CAUSES
    if cause.reporter == "kit"
    for pattern in cause.patterns
    if re.fullmatch(r"\w+: ", pattern)
)
# The kit's messages. After one of these beginnings comes a sentence: what was found; what was
# expected; what to do. What was found names the rank or host at fault, as "rank 3 on n2" or "on
# n2". A rank that only reports is "rank 1 of 8 on n1", or in parentheses.
_KIT = re.compile(
    rf"(?P<beginning>(?:{_SURVIVOR}|rank \d+ on {_WORD} failed: |  (?=rank \d+ on \S+ \(pid )"
    rf"|launch\.py: error: |\[rank \d+/\d+ {_WORD}\] ERROR: |[\w.]*(?:{'|'.join(_KIT_ERRORS)}): )+)"
    r"(?P<sentence>.+)"
)
_WITNESS = re.compile(rf" ?\([^()]*\)|rank \d+ of \d+(?: on {_WORD})?")
_NAMED_RANKS = tuple(
    re.compile(rf"\brank (?P<rank>\d+)\b(?!')" + host)
    for host in (rf" (?:on|at) (?P<host>{_WORD})", "(?P<host>)")
)
_NAMED_HOST = re.compile(rf"^on (?P<host>{_WORD})|\b(?:on|from|to) (?P<other>[A-Za-z][\w.-]*\d[\w.-]*)")
_SPEAKER = re.compile(
    rf"rank (\d+) on ({_WORD}) failed: |\[rank (\d+)/\d+ ({_WORD})\] ERROR: "
)
# Another process's message, or the launcher's report of an exit status, says more than a sentence
# that only supposes, or that refers to it.
_POINTER = re.compile(
    r"(?:[Ll]ook for|[Ss]ee) (?:[\w']+ ){0,4}messages?\b|launcher's output|\bprobably\b"
)
_ENDED = re.compile(r"launch\.py: error: (?:SIG|.*\bexit status [1-9])")

_RANK_AND_HOST = tuple(
    re.compile(pattern.format(rank=r"(?P<rank>\d+)", host=rf"(?P<host>{_WORD})"))
    for pattern in (
        r"rank {rank} on {host}(?: \(pid \d+\))? (?:failed|was ended|ended)",
        "srun: error: {host}: task {rank}:",
        r"process rank {rank} with PID \S+ on node {host}",  # Open MPI
        "{host}: rank {rank} (?:died|exited)",  # PALS
        r"RANK {rank} PID \d+ RUNNING AT {host}",  # MPICH
    )
)
_RANK = re.compile(
    r"launch.py: (?:error: )?rank (\d+) (?:was|ended)|\[[Rr]ank ?(\d+)\]|^(\d+): |^\[\d+,(\d+)\]<std"
    r"|Process name: \[\S+,(\d+)\]"
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
    r"srun: error: \S+: tasks? |launch.py: (?:error: )?rank \d+ (?:on \S+ )?(?:was|ended)|process rank \d+ with PID|PID \d+ RUNNING AT"
    r"|: rank \d+ (?:died|exited)|Process name: \["
)
# Lines that say no cause, but where the job ran or which process failed.
CONTEXT = ("Job was executed on host(s) <", " NCCL ", "Root Cause (first", "  time  ", "  host  ",
           "  rank  ", "Process name: [", "RUNNING AT", " ranks on ", "closing signal SIGTERM",
           "others will be ended")  # fmt: skip

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
    cause: Cause


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


def match(line: str) -> tuple[Cause, str | None] | None:
    """Return the cause that a line shows, and the host in the place of its pattern's {host}."""
    labels = _LABELS.match(line)
    message = line[labels.end() :] if labels else line
    for keyword, regex, at_start, cause in _signatures():
        if keyword in line:
            found = regex.match(message) if at_start else regex.search(line)
            if found and not (cause.reporter == "kit" and _only_ended(line)):
                if cause is _GPU_FULL and _held_by_another_process(line):
                    cause = _GPU_HELD
                if cause.reporter == "kit":
                    return _as_said(cause, line), None
                host = found["host"] if "host" in regex.groupindex else None
                return cause, host if host and _HOST_NAME.fullmatch(host) else None
    return None


def _as_said(cause: Cause, line: str) -> Cause:
    """Return the cause that a message of the kit states, in its own words."""
    kit = _KIT.search(line)
    if kit is None:
        return cause
    cause = replace(cause, meaning=kit["sentence"][:300])
    if _POINTER.search(kit["sentence"]) and cause.level < Level.CONSEQUENCE:
        return replace(cause, level=Level.CONSEQUENCE, explained_by=("killed", "crash"))
    return cause


def _only_ended(line: str) -> bool:
    """Whether launch.py reports only how a process ended."""
    return _ENDED.search(line) is not None and not _POINTER.search(line)


def named_by_kit(line: str) -> tuple[int | None, str | None] | None:
    """Return the rank and the host at fault in a message of the kit; None for other lines."""
    kit = _KIT.search(line)
    if kit is None:
        return None
    speakers = _SPEAKER.findall(kit["beginning"])
    if kit["beginning"].endswith(" failed: "):  # what follows is the user's
        return int(speakers[-1][0]), speakers[-1][1]
    found = re.split(r"\. |; ", _WITNESS.sub("", kit["sentence"]), maxsplit=1)[0].rstrip(".")
    for pattern in _NAMED_RANKS:
        if rank := pattern.search(found):
            return int(rank["rank"]), rank["host"] or None
    if host := _NAMED_HOST.search(found):
        return None, host["host"] or host["other"]
    if not speakers:
        return None, None
    rank_failed, host_failed, rank_logged, host_logged = speakers[-1]
    return int(rank_failed or rank_logged), host_failed or host_logged


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


def reports_abort(line: str) -> bool:
    """Whether this line says only that a process called abort()."""
    return re.search(r"\bAborted\b|SIGABRT|[Ss]ignal 6\b|\b134\b|: -6\b", line) is not None


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

"""Parse one line of output: the cause that it shows, and the rank and host that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

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
_SURVIVOR = (
    rf"rank \d+ on {_WORD} (?:stops, because |is ended, because all other ranks have stopped: )"
    r"|ddpkit launch: the ranks report what failed first: "
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
    rf"(?P<beginning>(?:{_SURVIVOR}|rank \d+ on {_WORD} failed: "
    r"|  (?=rank \d+ on \S+ (?:\(pid |left |failed: )|unknown)|ddpkit launch: error: "
    rf"|\[rank \d+/\d+ {_WORD}\] ERROR: |(?:{'|'.join(_KIT_ERRORS)}): )+)"
    r"(?P<sentence>.+)"
)
_WITNESS = re.compile(
    rf"rank \d+ on {_WORD} \(pid \d+\) has found| ?\([^()]*\)|rank \d+ of \d+(?: on {_WORD})?"
)
_AT_FAULT = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\brank (?P<rank>\d+) on (?P<host>{_WORD})",
        r"\brank (?P<rank>\d+)\b(?!')(?P<host>x)?",
        rf"(?P<rank>\d)?^on (?P<host>{_WORD})",
        r"(?P<rank>\d)?\b(?:on|from|to) (?P<host>[A-Za-z][\w.-]*\d[\w.-]*)",
    )
)
_SPEAKER = re.compile(rf"rank (\d+) on ({_WORD}) failed: |\[rank (\d+)/\d+ ({_WORD})\] ERROR: ")
# Another process's message, or the launcher's report of an exit status, says more than a sentence
# that only supposes, or that refers to it.
_REFERS = re.compile(
    r"(?:[Ll]ook for|[Ss]ee) (?:[\w']+ ){0,4}messages?\b|launcher's output|\bprobably\b"
    "|has found that the job must end"
)
_ENDED = re.compile(r"ddpkit launch: error: (?:SIG|.*\bexit status [1-9])")

_RANK_AND_HOST = tuple(
    re.compile(pattern.format(rank=r"(?P<rank>\d+)", host=rf"(?P<host>{_WORD})"))
    for pattern in (
        "before that, rank {rank} on {host}",
        r"rank {rank} on {host}(?: \(pid \d+\))? (?:failed|was ended|ended)",
        "srun: error: {host}: task {rank}:",
        r"process rank {rank} with PID \S+ on node {host}",  # Open MPI
        "{host}: rank {rank} (?:died|exited)",  # PALS
        r"RANK {rank} PID \d+ RUNNING AT {host}",  # MPICH
    )
)
_RANK = re.compile(
    r"ddpkit launch: (?:error: |before that, )?rank (\d+) (?:was|ended|had)"
    r"|\[[Rr]ank ?(\d+)\]|^(\d+): |^\[\d+,(\d+)\]<std|Process name: \[\S+,(\d+)\]"
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
    r"srun: error: \S+: tasks? |ddpkit launch: (?:error: )?rank \d+ (?:on \S+ )?(?:was|ended)"
    r"|process rank \d+ with PID|PID \d+ RUNNING AT|: rank \d+ (?:died|exited)|Process name: \["
)
AGENT_ENDED = re.compile(rf"ddpkit launch: error: torchrun on ({_WORD}) (?:was|ended)")
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


class KitMessage(NamedTuple):
    """A message of the kit.

    sentence: "" where it is the message of an exception in the user's program. rank, host: at
    fault, as far as it says. refers: to a message that says more. is_logged: the job may go on.
    """

    sentence: str
    rank: int | None
    host: str | None
    refers: bool = False
    is_logged: bool = False


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


def match(line: str, kit: KitMessage | None = None) -> tuple[FailureCause, str | None] | None:
    """Return the cause that a line shows, and the host in the place of its pattern's {host}.

    kit: of kit_message().
    """
    labels = _LABELS.match(line)
    message = line[labels.end() :] if labels else line
    is_exception = kit is not None and not kit.sentence
    for keyword, regex, at_start, cause in _signatures():
        if keyword in line and not (is_exception and cause.name == "unknown"):
            found = regex.match(message) if at_start else regex.search(line)
            if found and (kit or cause.reporter != "kit"):
                if cause is _GPU_FULL and _held_by_another_process(line):
                    cause = _GPU_HELD
                if kit and kit.sentence and cause.level <= CauseLevel.HINT:
                    return _as_said(cause, kit), None
                host = found["host"].rstrip(".") if "host" in regex.groupindex else None
                return cause, host if host and _HOST_NAME.fullmatch(host) else None
    return None


def _as_said(cause: FailureCause, kit: KitMessage) -> FailureCause:
    """Return the cause that a message of the kit states, in its own words."""
    level = max(cause.level, CauseLevel.HINT) if kit.is_logged else cause.level
    said = replace(cause, meaning=kit.sentence[:300], level=level, reporter="kit")
    if kit.refers and cause.reporter == "kit" and level < CauseLevel.CONSEQUENCE:
        return replace(said, level=CauseLevel.CONSEQUENCE, explained_by=("killed", "crash"))
    return said


def kit_message(line: str) -> KitMessage | None:
    """Return what a message of the kit says; None for other lines."""
    found = _KIT.search(line)
    if found is None or (_ENDED.search(line) and not _REFERS.search(line)):
        return None
    beginning, sentence = found["beginning"], found["sentence"]
    refers, is_logged = _REFERS.search(sentence) is not None, beginning.endswith("] ERROR: ")
    speaker: tuple[int | None, str | None] = None, None
    if speakers := _SPEAKER.findall(beginning):
        rank_failed, host_failed, rank_logged, host_logged = speakers[-1]
        speaker = int(rank_failed or rank_logged), host_failed or host_logged
    if beginning.endswith(" failed: "):
        return KitMessage("", *speaker)

    if sentence.startswith("unknown"):  # which of the ranks that it shows
        return KitMessage(sentence, None, None)
    what = re.split(r"\. |; ", _WITNESS.sub("", sentence), maxsplit=1)[0].rstrip(".")
    for pattern in _AT_FAULT:
        if named := pattern.search(what):
            rank, host = named["rank"], named["host"]
            return KitMessage(sentence, int(rank) if rank else None, host, refers, is_logged)
    return KitMessage(sentence, *((None, None) if refers else speaker), refers, is_logged)


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

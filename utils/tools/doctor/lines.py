"""Parse one line of output: the cause that it shows, and the rank and host in it."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ...launch_protocol import FAILURE, Failure
from ...phrases import KIND_OF, NO_RANK_0
from .causes import CAUSES
from .failure_cause import CauseLevel, FailureCause
from .labels import HOST, split_labels

_PLACEHOLDERS = {
    "...": ".*?",
    "{host}": rf"(?P<host>{HOST}|[^\s,]+)",
    "{name}": r"[A-Za-z_][\w.]*",
    "{status}": r"\s*[:=]?\s*-?[1-9]",
}

_HOST_NAME = re.compile(rf"(?!localhost){HOST}")

_RESTARTED = re.compile(
    r"ddpkit launch: restart \d+ (?:on the same hosts|without )"
    r"|.*attempts left; will restart worker group"  # torchrun
)
_NO_RESTART = re.compile(r"ddpkit launch: no restart: (.*)")
_RESTART = re.compile(r"ddpkit launch: (restart \d+ .*)")
# Messages for people, which the kit also writes as a Failure. Its log lines may not end the job.
_FOR_PEOPLE = re.compile(
    r"rank \d+ on \S+ (?:failed: |stops|is ended)|ddpkit launch: |LaunchError: "
)
_LOGGED = re.compile(r"\[rank \d+/\d+ \S+\] ERROR: ")
# Kinds of failures whose row is used always, or if the cause matches no other row.
_ALWAYS = ("left", "uneven", "preflight", "bad host", "hang")
_ROWS = {
    "command": "command_error",
    "start": "launch_error",
    "launch": "launch_error",
    "exception": "python_exception",
    "status": "unknown",
    "stop": "terminated",
    "hang": "hang",
    "uneven": "uneven_work",
    "left": "left_early",
    "preflight": "preflight",
    "bad host": "bad_host",
}

# A launcher's report of the end of one process.
_EXIT = re.compile(
    r"srun: error: \S+: tasks? |process rank \d+ with PID|PID \d+ RUNNING AT"
    r"|: rank \d+ (?:died|exited)|Process name: \["
)
# Lines without a cause, which say where the job ran or which process failed.
_BY_SLURM = re.compile(
    r"slurmstepd|StepId=|Exceeded \w+ memory limit|oom[-_]kill event|Slurm reports"
)
# Closing line of ddpkit launch. "error: " is missing before a rank's report.
_CLOSING = re.compile(
    r"ddpkit launch: (?P<error>error: )?(?P<text>.*?)(?:, the others will be ended)?$"
)
_CLOSING_RANK = re.compile(
    rf"rank (\d+)(?: on ({HOST}))?(?: \([^)]*\))?(?:, rank \d+(?: on {HOST})?)*"
    r"(?: and \d+ more)? (.*)"
)
# The closing line of a rank without ddpkit launch, which prints the cause once or repeats it.
_REPORTED = re.compile(
    rf"(?:^|: )(?:rank \d+ on {HOST} (?:stops|is ended), because )?(rank \d+ on {HOST}\b.*)"
)
# The host in an error of the launch: "on n2 /data is missing", "torchrun on n7 ended".
_HOST_AT_FAULT = re.compile(
    rf"^on ({HOST}) |\bconnection to ({HOST}) was lost|\bconnected from ({HOST})(?: within|\. )"
    rf"|^[\w./-]+ on ({HOST}) (?:ended|was|has|did)|^a process \w* ?on ({HOST}) "
)
# "rank 3 of 8 (local rank 1) on n2"; "sees no CUDA device on n2"
_RANK_AT_START = re.compile(rf"\brank (\d+)(?: of \d+)?(?: \([^)]*\))? on ({HOST})")
_HOST_AT_START = re.compile(r"\bon ([A-Za-z][\w.-]*\d[\w-]*)")
_ABOUT_OPTION = re.compile(r"(?:^|\s)--[a-z][\w-]*|^no such (?:file|program)|is not a command")
_ABOUT_RANKS = re.compile(
    r"\bhang\b|\bis lost\b|\blost contact\b|\bdisagree\b|\bwait for\b|\bwait in\b|\bdid not enter\b"
    r"|\bdoes not respond\b|\bno collective for\b|\ball ranks wait\b"
)
_DETAIL = re.compile(
    r"Parameter\w* (?:indices )?which did not receive grad for rank .*|\bRank \d+ has .* params.*"
)
CONTEXT = (
    "ddpkit launch: ", "LaunchError: ", "Job was executed on host(s) <", " NCCL ",
    "Root Cause (first", "  time  ", "  host  ", "  rank  ", "Process name: [", "RUNNING AT",
    "torch/distributed/", "torch.distributed.elastic", "local_rank: ", "bin/torchrun", "[default",
    "srun: error: ", "will restart worker group", " stops, because rank ", " failed: ", FAILURE,
)  # fmt: skip

_GPU_MEMORY = re.compile(
    r"(?P<total>\S+ \wiB) total capacity; (?P<used>\S+ \w+) already allocated; (?P<free>\S+ \w+)"
    r" free|capacity of (?P<total_2>\S+ \wiB) of which (?P<free_2>\S+ \w+) is free.*"
    r"allocated memory (?P<used_2>\S+ \w+) is allocated by PyTorch"
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_GPU_HELD, _GPU_FULL = (cause for cause in CAUSES if cause.name == "cuda_oom")


class _Signature(NamedTuple):
    keyword: str  # text that every matching line contains
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
    """Return texts such that every line of interest contains at least one of them."""
    return *(signature.keyword for signature in _signatures()), *CONTEXT


def match(line: str) -> tuple[FailureCause, str | None] | None:
    """Return the cause that a line shows, and the host at its pattern's {host}."""
    message = split_labels(line).message
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
    """Return the failure in a line written by the kit; None for other lines.

    Returns None also for a failure after which the launch has restarted the ranks.
    """
    _, marker, text = line.partition(FAILURE)
    if marker:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(text)
            if "restart" in fields:
                return None
            cause, kind, rank, host = (fields[name] for name in ("cause", "kind", "rank", "host"))
            if isinstance(rank, int | None) and all(
                isinstance(text, str) for text in (cause, kind)
            ):
                found = Failure(cause, kind, rank, host if isinstance(host, str) else None)
                return _blame_memory(found)
    return None


def read_restart(line: str) -> str:
    """Return "restart 1 without n2: CAUSE" from a line about a failure; "" for other lines."""
    _, marker, text = line.partition(FAILURE)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if marker and "restart" in (fields := json.loads(text)):
            without = ", ".join(fields["without"])
            place = f"without {without}" if without else "on the same hosts"
            return f"restart {fields['restart']} {place}: {fields['cause']}"
    return ""


def is_restart(line: str) -> bool:
    """Whether ddpkit launch restarts the ranks in this line, so that earlier failures are over."""
    return _RESTARTED.match(split_labels(line).message) is not None


def read_restart_line(line: str) -> tuple[str, str]:
    """Return ddpkit launch's words about a restart, and the reason for none; "" if missing."""
    message = split_labels(line).message
    restart, none = _RESTART.match(message), _NO_RESTART.match(message)
    return restart[1] if restart else "", none[1] if none else ""


def _blame_memory(failure: Failure) -> Failure:
    """Return a failure with the host that had no memory left, according to Slurm.

    Slurm then ends the ranks of all hosts, so the first one that ends may be on another host.
    """
    found = re.search(rf"out of memory(?: on ({HOST}))?: ", failure.text)
    if "Slurm reports: " not in failure.text or found is None or found[1] == failure.host:
        return failure
    return failure._replace(rank=None, host=found[1])


def read_closing_line(line: str, *, has_started: bool = True) -> Failure | None:
    """Return the failure in ddpkit launch's closing line for people; None for its other lines.

    Used if the output has no line for programs. has_started: whether the launch has printed which
    ranks it starts; otherwise it may have refused its command line.
    """
    found = _CLOSING.match(split_labels(line).message)
    if found is None:
        return None
    text = found["text"].removesuffix("\x1b[0m")
    if of_ranks := _read_cause(text):
        return of_ranks
    if not found["error"]:
        return None
    if place := re.match(rf"preflight: the training is not started on ({HOST})", text):
        return Failure(text, "bad host", host=place[1].rstrip("."))
    if text.startswith("preflight: "):
        return Failure(text, "preflight")
    if re.match("SIG[A-Z]+: |Slurm has ended the ranks: ", text):
        return _blame_memory(Failure(text, "stop"))
    if not has_started and _ABOUT_OPTION.search(text):
        return Failure(text, "command")
    named = _HOST_AT_FAULT.search(text)
    host = named[named.lastindex or 0].rstrip(".") if named else None
    is_status = "ended with exit status" in text and text.startswith("torchrun on ")
    return _blame_memory(Failure(text, "status" if is_status else "launch", None, host))


def read_reported_cause(line: str) -> Failure | None:
    """Return the first failure that a rank without ddpkit launch reports to people."""
    found = _REPORTED.search(line)
    return _read_cause(found[1]) if found else None


def _read_cause(text: str) -> Failure | None:
    """Return the cause in the words of ranks; None for other texts."""
    if "cannot be told" in text:  # "which one is wrong cannot be told"
        return Failure(text, "hang")
    if re.search("only some ranks call|different numbers of steps", text):
        of_rank = _CLOSING_RANK.match(text)
        if of_rank and of_rank[3].startswith("left "):
            return Failure(text, "uneven", int(of_rank[1]), of_rank[2])
        return Failure(text, "uneven")
    if of_rank := _CLOSING_RANK.match(text):
        kinds = [kind for words, kind in KIND_OF if of_rank[3].startswith(words)]
        if kinds:
            return _blame_memory(Failure(text, kinds[0], int(of_rank[1]), of_rank[2]))
    return Failure(text, "lost") if _ABOUT_RANKS.search(text) else None


def read_launch_error(line: str) -> Failure | None:
    """Return the failure of a rank that could not start; None if it follows another failure."""
    message = split_labels(line).message
    name, marker, text = message.partition("LaunchError: ")
    if not marker or name or text.startswith("this rank ("):
        return None
    if NO_RANK_0 in text:
        return Failure(text, "start", 0)
    ranks = set(_RANK_AT_START.findall(text))
    if ranks:
        rank, host = ranks.pop() if len(ranks) == 1 else ("", "")
        return Failure(text, "start", int(rank) if rank else None, host or None)
    hosts = set(_HOST_AT_START.findall(text))
    return Failure(text, "start", host=hosts.pop() if len(hosts) == 1 else None)


def detail(line: str) -> str:
    """Return the parameters that a DDP message names; "" for other lines."""
    found = _DETAIL.search(line)
    return found[0].strip()[:200] if found else ""


def is_by_slurm(line: str) -> bool:
    """Whether Slurm reports a host without memory, and therefore ends the ranks of all hosts."""
    return _BY_SLURM.search(line) is not None


def is_for_people(line: str) -> bool:
    """Whether a line repeats a Failure of the kit for people."""
    return any(map(_FOR_PEOPLE.match, (line, split_labels(line).message)))


def cause_of(failure: Failure) -> FailureCause:
    """Return the row for a failure of the kit, with its words if they say more than the row."""
    found = match(failure.text)
    cause = found[0] if found else None
    if cause is None or cause.name == "unknown" or failure.kind in _ALWAYS:
        name = _ROWS.get(failure.kind, "kit_message")
        cause = next(row for row in CAUSES if row.name == name)
    if cause.name == "unknown" and (status := re.search(r"exit status (\d+)", failure.text)):
        if 1 < int(status[1]) < 128:  # every exception exits with status 1
            cause = next(row for row in CAUSES if row.name == "exit_status")
    if failure.kind in ("exception", "status") or cause.name == "exit_status":
        return cause
    cause = replace(cause, meaning=failure.text[:600], reporter="kit")
    if failure.kind == "killed":  # the launcher's report of its end has more details
        cause = replace(cause, level=CauseLevel.CONSEQUENCE, explained_by=("killed", "crash"))
    return cause


def reports_exit(line: str) -> bool:
    """Whether a launcher reports the end of a process in this line."""
    return _EXIT.search(line) is not None


def _held_by_another_process(line: str) -> bool:
    """Whether other processes use more than half of a GPU's memory."""
    found = _GPU_MEMORY.search(line)
    if not found:
        return False
    sizes = {}
    for name, text in found.groupdict().items():
        if text:
            number, unit = text.split()
            sizes[name.removesuffix("_2")] = float(number) * _UNITS[unit]
    return sizes["total"] - sizes["free"] - sizes["used"] > sizes["total"] / 2

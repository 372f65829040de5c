"""Find in the output of a job which rank failed first, on which host and why.

The output is read as a stream. Lines without a sign of a failure are skipped; the others are
compared with the table of causes.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import BinaryIO

from ...launch_report import Failure
from .causes import CauseLevel, FailureCause
from .lines import (
    cause_of,
    detail,
    is_by_slurm,
    is_for_people,
    is_restart,
    keywords,
    match,
    rank_and_host,
    read_closing_line,
    read_failure,
    read_launch_error,
    reports_exit,
    split_labels,
)

EXIT_RESTART = 1
EXIT_NO_RESTART = 3
EXIT_UNKNOWN = 4
_RESTART = {
    True: "helps",
    False: "does not help: the job would fail again",
    None: "may help; the output does not show whether it does",
}
_LONGEST_LINE = 1 << 16  # bytes
_RECENT_LINES = 50  # a line without a time has the last one printed in so many lines before it

_VARYING = b"0123456789.-+# "  # what differs between the lines that each step prints
_MOST_SHAPES = 100_000
# "2024-07-24 12:01:00,5", c10's "E724 08:34:00.94", "08:34:00"
_TIME = re.compile(
    rb"(?:\d{4}-(\d\d)-(\d\d)[T _]|\b[IWEF](\d{1,2})(\d\d) |\b)(\d\d):(\d\d):(\d\d(?:[.,]\d+)?)"
)
_LINES_AFTER_HINT = 200  # a job that prints more after a warning has survived it
_FILE_RANK = re.compile(r"rank[-_.]?(\d+)")
_HOST_NAME = re.compile(r"[a-z][a-z-]*\d+[\w.-]*")  # what `hostname` prints at the top of a job


@dataclass
class LogFinding:
    """The lines of one file that show one cause. named: their ranks and hosts, in order."""

    cause: FailureCause
    file: str
    line_number: int  # of the first line, as what follows
    line: str
    last_line_number: int
    position: tuple[int, int]  # number of the file, line
    date: tuple[int, int] | None  # month and day
    seconds: float | None  # since midnight
    named: list[tuple[int | None, str | None]] = field(default_factory=list)
    detail: str = ""  # which parameters the message names

    @property
    def key(self) -> tuple[str, CauseLevel, str]:
        return _key(self.cause)


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed. rank, host: which failed first; None where the output does not show it."""

    finding: LogFinding
    rank: int | None
    host: str | None
    others: tuple[LogFinding, ...]  # what else was found, in the order of the files

    @property
    def cause(self) -> FailureCause:
        """The row, and what the output says beyond it."""
        row, detail = self.finding.cause, self.finding.detail
        return replace(row, meaning=f"{row.meaning} {detail.rstrip('.')}.") if detail else row


def _key(cause: FailureCause) -> tuple[str, CauseLevel, str]:
    """Identify a cause. The kit's messages are cut at different lengths."""
    return cause.name, cause.level, cause.meaning[:150]


def diagnose(files: Sequence[tuple[BinaryIO, str]]) -> Diagnosis | None:
    """Return why a job failed, from its output files and their names; None: it did not fail."""
    reader = _Reader()
    for number, (stream, name) in enumerate(files):
        reader.read(stream, name, number)
    return reader.diagnose()


@dataclass
class _Exit:
    """The end of a process, as a launcher reports it."""

    rank: int | None = None
    host: str | None = None
    time: str = ""  # "2026-07-24_08:33:05"


@dataclass(frozen=True)
class _Line:
    """A line, its file and number, and the lines up to it."""

    text: str
    name: str
    position: tuple[int, int]
    context: bytes


class _Reader:
    def __init__(self) -> None:
        self._findings: dict[tuple[object, int], LogFinding] = {}  # by cause and file
        self._hosts: set[str] = set()  # that any line names
        self._host_of_rank: dict[int, str] = {}
        self._first_exit: _Exit | None = None
        self._root_causes: list[_Exit] = []  # of torchrun's agents
        self._first_agent = ""  # the host of the agent that ended first
        self._num_lines: list[int] = []  # of each file
        self._has_failure = False  # a line that the kit has written for programs
        self._local_ranks: set[int] = set()  # known by their number on their host only
        # The last line of launch.py, or else the first one of a rank that could not start: what it
        # says, and a line to be noted.
        self._closing: tuple[Failure, _Line] | None = None
        self._launch_error: tuple[Failure, _Line] | None = None

    def read(self, stream: BinaryIO, name: str, number: int) -> None:
        label = _FILE_RANK.search(os.path.basename(name))
        file_rank = int(label[1]) if label else None
        line_number = 0
        for line_number, line, context in _lines_of_interest(stream):
            if line_number == 1 and _HOST_NAME.fullmatch(line):
                self._hosts.add(line)
            if is_restart(line):
                self._forget(number)
                continue
            log_line = _Line(line, name, (number, line_number), context)
            self._note_for_people(log_line)
            self._note(log_line, read_failure(line), file_rank)
        self._num_lines.append(line_number)

    def _forget(self, number: int) -> None:
        """Forget what the lines of a file have shown until now."""
        self._findings = {
            key: previous for key, previous in self._findings.items() if key[1] != number
        }
        self._first_exit, self._root_causes, self._first_agent = None, [], ""
        self._closing = self._launch_error = None
        self._has_failure = False

    def _note_for_people(self, line: _Line) -> None:
        """Note what the kit says to people, in case the line for programs is not in the output."""
        if "ddpkit launch: " in line.text:
            said = read_closing_line(line.text)
            self._closing = (said, line) if said else None
        elif self._launch_error is None and (said := read_launch_error(line.text)):
            self._launch_error = said, line

    def _note(self, line: _Line, failure: Failure | None, file_rank: int | None) -> None:
        """Note what a line shows. failure: what the kit has written or said in it."""
        text, number = line.text, line.position[0]
        rank, host = (failure.rank, failure.host) if failure else rank_and_host(text)
        if failure is None and rank is None and (rank := split_labels(text).local) is not None:
            self._local_ranks.add(rank)
        self._has_failure |= failure is not None
        if host:
            self._hosts.add(host)
            if rank is not None:
                self._host_of_rank.setdefault(rank, host)
        if failure and failure.kind == "status":
            self._first_exit = self._first_exit or _Exit(rank, host)
            self._first_agent = self._first_agent or (host or "" if rank is None else "")
        self._note_exit(text, rank, host)

        if failure:
            cause, named_host = cause_of(failure), host
        elif (found := match(text)) is None or is_for_people(text):
            return
        else:
            cause, named_host = found
        key = _key(cause), number
        if key not in self._findings:
            date, seconds = _last_time(line.context)
            self._findings[key] = LogFinding(
                cause, line.name, line.position[1], text, line.position[1], line.position,
                date, seconds,
            )  # fmt: skip
        self._findings[key].last_line_number = line.position[1]
        self._findings[key].detail = self._findings[key].detail or detail(text)
        if cause.reporter == "survivor":
            rank, host = None, named_host
        elif failure is None and cause.reporter != "kit":
            rank, host = file_rank if rank is None else rank, host or named_host
        if (rank, host) not in self._findings[key].named:
            self._findings[key].named.append((rank, host))

    def _note_exit(self, line: str, rank: int | None, host: str | None) -> None:
        """Note the ends of processes that launchers report; torchrun does so in several lines."""
        in_torchrun_summary = re.match("  (time|host|rank)  ", line) is not None
        if "Root Cause (first" in line:
            self._root_causes.append(_Exit())
        elif in_torchrun_summary and self._root_causes:
            latest = self._root_causes[-1]
            if line.startswith("  time") and not latest.time:
                latest.time = line.partition(":")[2].strip()
            latest.rank = rank if latest.rank is None else latest.rank
            latest.host = latest.host or host
        elif reports_exit(line) and not in_torchrun_summary and self._first_exit is None:
            self._first_exit = _Exit(rank, host)

    def diagnose(self) -> Diagnosis | None:
        said = self._closing or self._launch_error
        if said and not self._has_failure:
            self._note(said[1], said[0], None)
        findings = [
            candidate for candidate in self._findings.values() if not self._went_on_after(candidate)
        ]
        if any(candidate.cause.reporter == "kit" for candidate in findings):  # it explains the hang
            findings = [each for each in findings if not each.line.startswith("The ranks hang")]
        if not findings:
            return None
        finding = _first(findings)
        while reasons := [candidate for candidate in findings if _explains(candidate, finding)]:
            finding = _first(reasons)
        same = [candidate for candidate in findings if candidate.key == finding.key]
        if finding.cause.name == "host_oom" and is_by_slurm(finding.line):
            rank, host = self._of_memory(findings)
        else:
            rank, host = self._rank_and_host(finding, same)
        if rank in self._local_ranks and len(self._hosts) > 1:
            rank = None  # each host has a rank with that number
        others = (
            candidate
            for candidate in findings
            if candidate not in same and candidate.cause.name != "unknown"
        )
        return Diagnosis(finding, rank, host, tuple(others))

    def _went_on_after(self, finding: LogFinding) -> bool:
        """Whether a job went on after a warning."""
        num_lines = self._num_lines[finding.position[0]] - finding.last_line_number
        is_hint = finding.cause.level in (CauseLevel.HINT, CauseLevel.WORD)
        return is_hint and num_lines > _LINES_AFTER_HINT

    def _of_memory(self, findings: Sequence[LogFinding]) -> tuple[int | None, str | None]:
        """Return which rank and host had no memory left, by all lines that say so."""
        of_memory = [finding for finding in findings if finding.cause.name == "host_oom"]
        named = [pair for finding in of_memory for pair in finding.named]
        host = next((host for _, host in named if host), None)
        rank = next(
            (rank for rank, named_host in named if rank is not None and named_host == host), None
        )
        return rank, host

    def _rank_and_host(
        self, finding: LogFinding, same: Sequence[LogFinding]
    ) -> tuple[int | None, str | None]:
        """Return which rank and host failed first. same: the findings of the cause in all files."""
        named = finding.named
        if len(same) > 1 and any(finding.seconds is None for finding in same):
            named = [pair for finding in same for pair in finding.named]
            if len({rank for rank, _ in named} - {None}) > 1:
                return None, _only({host for _, host in named if host})

        hosts = [host for _, host in named if host]
        if finding.cause.reporter == "survivor":
            return None, next(iter(hosts), None)
        if finding.cause.reporter == "kit":
            rank, host = next((pair for pair in named if pair != (None, None)), (None, None))
            return rank, host or self._host_of_rank.get(-1 if rank is None else rank)
        if finding.cause.reporter == "scheduler":
            return None, _only(set(hosts) or self._hosts)

        rank = next((rank for rank, _ in named if rank is not None), None)
        host = next(
            (host for named_rank, host in named if host and named_rank in (rank, None)), None
        )
        first_exit = min(
            self._root_causes,
            # torchrun counts seconds: of equal times, its first agent's
            key=lambda cause: (cause.time, cause.host != self._first_agent),
            default=self._first_exit,
        )
        exit_rank, exit_host = (first_exit.rank, first_exit.host) if first_exit else (None, None)
        if rank is None and (host is None or exit_host in (None, host)):
            rank, host = exit_rank, host or exit_host
        if host is None and rank is not None:
            host = self._host_of_rank.get(rank)
        return rank, host or _only(self._hosts)


def _only(hosts: set[str]) -> str | None:
    return next(iter(hosts)) if len(hosts) == 1 else None


def _explains(finding: LogFinding, other: LogFinding) -> bool:
    """Whether a finding is the reason of another one.

    A crash may also be how a rank ends after it has lost another one.
    """
    if finding.cause.name not in other.cause.explained_by:
        return False
    is_by_rank = finding.cause.reporter == "failed" and not reports_exit(finding.line)
    may_follow = is_by_rank and finding.cause.level == CauseLevel.FAILURE
    return not may_follow or _in_order([finding, other])[0] is finding


def _first(findings: Sequence[LogFinding]) -> LogFinding:
    """Return the finding of the lowest level that is the first in time, or else in the files."""
    level = min(finding.cause.level for finding in findings)
    return _in_order([finding for finding in findings if finding.cause.level == level])[0]


def _in_order(findings: Sequence[LogFinding]) -> list[LogFinding]:
    """Sort findings by time where all have one, else by their place in the files."""
    timed = all(finding.seconds is not None for finding in findings)
    dated = all(finding.date for finding in findings)

    def order(finding: LogFinding) -> tuple[tuple[int, int], float, tuple[int, int]]:
        date = finding.date if dated and finding.date else (0, 0)
        return date, finding.seconds if timed and finding.seconds else 0.0, finding.position

    return sorted(findings, key=order)


def _last_time(text: bytes) -> tuple[tuple[int, int] | None, float | None]:
    """Return the date (month and day) and the seconds of the day of the last time in a text."""
    times = list(_TIME.finditer(text))
    if not times:
        return None, None
    year_month, year_day, month, day, hour, minute, second = times[-1].groups()
    seconds = int(hour) * 3600 + int(minute) * 60 + float(second.replace(b",", b"."))
    month, day = year_month or month, year_day or day
    return ((int(month), int(day)) if month else None), seconds


# The report --------------------------------------------------------------------------------------


def exit_status(found: Diagnosis | None) -> int:
    """Return the exit status of `doctor logs`."""
    if found is None:
        return 0
    if found.cause.restart is False:
        return EXIT_NO_RESTART
    return EXIT_UNKNOWN if found.cause.level >= CauseLevel.EXIT else EXIT_RESTART


def summary(found: Diagnosis, *, after_output: bool = False) -> str:
    """Describe a diagnosis in one line. after_output: the kit's own words are just above it."""
    where, cause = _where(found), found.cause
    sentences = [f"{where + ': ' if where else ''}{cause.name}"]
    if not (after_output and cause.reporter == "kit"):
        sentences.append(cause.meaning)
    sentences += [cause.remedy, f"A restart {_RESTART[cause.restart]}"]
    return " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences)


def _where(found: Diagnosis) -> str:
    """Return "rank 3 on n2", "rank 3", "n2" or ""."""
    rank = "" if found.rank is None else f"rank {found.rank}"
    return " on ".join(text for text in (rank, found.host) if text)


def describe(found: Diagnosis | None) -> str:
    if found is None:
        return "No failure was found. No line matches a symptom in the table of causes."
    first, cause = found.finding, found.cause
    unknown = "the output does not show which rank or host failed first"
    if cause.name == "command_error":
        unknown = "no rank was started"
    lines = [
        f"Cause:    {cause.name}",
        f"Failed:   {_where(found) or unknown}",
        f"Line:     {first.file}:{first.line_number}: {first.line.strip()[:300]}",
        f"Meaning:  {cause.meaning}",
        f"Check:    {cause.check}",
        f"Remedy:   {cause.remedy}",
        f"Restart:  {_RESTART[cause.restart]}",
    ]
    also = [f"{other.cause.name} ({other.file}:{other.line_number})" for other in found.others]
    if also:
        lines.append(f"Also:     {', '.join(dict.fromkeys(also))}")
    return "\n".join(lines)


def as_dict(found: Diagnosis | None) -> dict[str, object]:
    if found is None:
        return {"cause": None}
    first, cause = found.finding, found.cause
    return {
        "cause": cause.name,
        "rank": found.rank,
        "host": found.host,
        "restart": cause.restart,
        "meaning": cause.meaning,
        "check": cause.check,
        "remedy": cause.remedy,
        "file": first.file,
        "line_number": first.line_number,
        "line": first.line,
        "others": [
            {"cause": other.cause.name, "file": other.file, "line_number": other.line_number}
            for other in found.others
        ],
    }


# Lines -------------------------------------------------------------------------------------------


def _lines_of_interest(stream: BinaryIO) -> Iterator[tuple[int, str, bytes]]:
    """Yield line number, line, and the lines up to it, for lines that hold a keyword.

    The last item is an empty line with the number of lines. Most lines differ only by their numbers
    from an earlier one without a keyword.
    """
    keywords, number = _digitless_keywords(), 0
    recent, dull = deque[bytes](maxlen=_RECENT_LINES), set[bytes]()  # dull: without what varies
    for lines in stream:
        for line in lines.rstrip(b"\r\n").split(b"\r"):  # progress bars
            number += 1
            recent.append(line)
            shape = line.translate(None, _VARYING)
            if number == 1 or shape not in dull and any(keyword in line for keyword in keywords):
                yield number, line[:_LONGEST_LINE].decode(errors="replace"), b"\n".join(recent)
            elif len(dull) < _MOST_SHAPES:
                dull.add(shape)
    yield number, "", b""


@cache
def _digitless_keywords() -> tuple[bytes, ...]:
    """Return texts one of which is in each line of interest, whatever its numbers are."""
    parts = (max(re.split(r"\d", keyword), key=len) for keyword in keywords())
    encoded = {part.encode() for part in parts}
    return tuple(part for part in encoded if not any(other in part for other in encoded - {part}))

"""Find in a job's output which rank failed first, on which host and why.

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

from ...job.notation import same_host
from ...launch_protocol import FAILURE, Failure
from . import endings
from .causes import CAUSES
from .causes_general import EMPTY, EXCEPTION, UNFINISHED
from .failure_cause import CauseLevel, FailureCause
from .labels import split_labels
from .lines import (
    cause_of,
    detail,
    is_by_slurm,
    is_for_people,
    is_restart,
    keywords,
    match,
    read_closing_line,
    read_failure,
    read_launch_error,
    read_reported_cause,
    read_restart_line,
    reports_exit,
)
from .places import Place, Places, place_of

EXIT_RESTART = 1
EXIT_NO_RESTART = 3
EXIT_UNKNOWN = 4
_RESTART = {
    True: "helps",
    False: "does not help: the job would fail again",
    None: "may help; the output does not show whether it does",
}
_LONGEST_LINE = 1 << 16  # bytes that are read of a line
_RECENT_LINES = 50  # a line without a time takes the latest time in so many lines before it

_VARYING = b"0123456789.-+# "  # characters that vary between lines printed by each step
_MOST_SHAPES = 100_000
# "2024-07-24 12:01:00,5", c10's "E724 08:34:00.94", "08:34:00"
_TIME = re.compile(
    rb"(?:\d{4}-(\d\d)-(\d\d)[T _]|\b[IWEF](\d{1,2})(\d\d) |\b)(\d\d):(\d\d):(\d\d(?:[.,]\d+)?)"
)
_FILE_RANK = re.compile(r"rank[-_.]?(\d+)")
_TRACEBACK = "Traceback (most recent call last)"
_LINES_OF_CHAIN = 100  # lines between two exceptions of one failure
_LONGEST_TRACEBACK = 500  # lines of a traceback, including other ranks' lines in between
# Words of ddpkit launch about a restart that would fail, too.
_FAILS_AGAIN = re.compile(r"the same failure twice|\d+ failures without a new checkpoint")
_HOST_NAME = re.compile(r"[a-z][a-z-]*\d+[\w.-]*")  # line of `hostname` at the top of a job


@dataclass
class LogFinding:
    """The lines of one file that show one cause. named: ranks and hosts in them, in order."""

    cause: FailureCause
    file: str
    line_number: int  # number of the first line; later fields refer to it, too
    line: str
    last_line_number: int
    position: tuple[int, int]  # (number of the file, line)
    date: tuple[int, int] | None  # (month, day)
    seconds: float | None  # seconds since midnight
    named: list[Place] = field(default_factory=list)
    detail: str = ""  # parameters that the message names

    @property
    def key(self) -> tuple[str, CauseLevel, str]:
        return _key(self.cause)


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed. rank, host: the first to fail; None if the output does not show it."""

    finding: LogFinding
    rank: int | None
    host: str | None
    others: tuple[LogFinding, ...]  # other findings, in the order of the files
    restarts: tuple[str, ...] = ()  # restarts by ddpkit launch: "restart 1 without n2, ..."
    no_restart: str = ""  # why ddpkit launch did not restart the ranks

    @property
    def cause(self) -> FailureCause:
        """The row, with additions from the output."""
        row, detail = self.finding.cause, self.finding.detail
        if row.restart is None and _FAILS_AGAIN.match(self.no_restart):
            row = replace(row, restart=False)
        return replace(row, meaning=f"{row.meaning} {detail.rstrip('.')}.") if detail else row


_WORD_ROW = next(row for row in reversed(CAUSES) if row.level is CauseLevel.WORD)
_EXCEPTION_ROW = next(row for row in CAUSES if row.name == EXCEPTION)


def _key(cause: FailureCause) -> tuple[str, CauseLevel, str]:
    """Return a key for a cause. The kit's messages may be cut at different lengths."""
    return cause.name, cause.level, cause.meaning[:150]


def diagnose(files: Sequence[tuple[BinaryIO, str]]) -> Diagnosis | None:
    """Return why a job failed, from its output files and their names.

    None: no line shows a failure, and one line shows the end of the job.
    """
    reader = _Reader()
    for number, (stream, name) in enumerate(files):
        reader.read(stream, name, number)
    return reader.diagnose()


@dataclass
class _Exit:
    """A launcher's report of a process's end."""

    place: Place = Place()
    time: str = ""  # "2026-07-24_08:33:05"


@dataclass(frozen=True)
class _Line:
    """A line with its file and number, and the lines up to it.

    is_exception: whether it ends a traceback.
    """

    text: str
    name: str
    position: tuple[int, int]
    context: bytes
    is_exception: bool = False


@dataclass(frozen=True)
class _Ending:
    """The end of a file. own_end: number of the line where the job reports its own end; 0: none.

    last: the last line that is not empty; None in an empty file.
    """

    num_lines: int
    own_end: int
    last: _Line | None


class _Reader:
    def __init__(self) -> None:
        self._findings: dict[tuple[object, int], LogFinding] = {}  # (cause, file) -> finding
        self._endings: list[_Ending] = []  # one for each file
        self._places = Places()
        self._first_exit: _Exit | None = None
        self._root_causes: list[_Exit] = []  # reported by torchrun's agents
        self._first_agent = ""  # host of the torchrun agent that ended first
        self._has_failure = False  # whether the kit has written a line for programs
        self._restarts: list[str] = []
        self._no_restart = ""
        # (failure, line to note): the launch's closing line, or else the first line of a rank that
        # could not start.
        self._closing: tuple[Failure, _Line] | None = None
        self._launch_error: tuple[Failure, _Line] | None = None
        self._reported: tuple[Failure, _Line] | None = None  # from a rank without ddpkit launch
        self._has_started = False  # whether ddpkit launch has started ranks

    def read(self, stream: BinaryIO, name: str, number: int) -> None:
        label = _FILE_RANK.search(os.path.basename(name))
        file_rank = int(label[1]) if label else None
        last_lines = deque[tuple[int, bytes]](maxlen=endings.NUM_LINES)
        for line_number, line, context, is_exception in _lines_of_interest(stream, last_lines):
            if line_number == 1 and _HOST_NAME.fullmatch(line):
                self._places.hosts.add(line)
            restart, why_not = read_restart_line(line)
            self._no_restart = why_not or self._no_restart
            if is_restart(line):
                self._restarts += [restart] if restart else []
                self._forget(number)
                last_lines.clear()
                continue
            log_line = _Line(line, name, (number, line_number), context, is_exception)
            self._note_for_people(log_line)
            self._note(log_line, read_failure(line), file_rank)
        self._note_ending(last_lines, name, number, file_rank)

    def _note_ending(
        self,
        last_lines: Sequence[tuple[int, bytes]],
        name: str,
        number: int,
        file_rank: int | None,
    ) -> None:
        """Record the end of a file, and a line near it that mentions an error."""
        lines = [(at, line[:_LONGEST_LINE].decode(errors="replace")) for at, line in last_lines]
        written = {at: line for at, line in lines if line.strip()}
        num_lines, last = lines[-1][0] if lines else 0, None
        if written:
            at = max(written)
            last = _Line(written[at], name, (number, at), b"")
        own_end = endings.own_end(lines)
        self._endings.append(_Ending(num_lines, own_end, last))
        for at, line in lines:
            if match(line) is None and endings.is_exception(
                split_labels(line).message, in_traceback=False
            ):
                self._note(_Line(line, name, (number, at), b"", True), None, file_rank)
        known = self._findings.get((_key(_WORD_ROW), number))
        if known is None or self._went_on_after(known):
            unread = [each for each in lines if each[0] > own_end and FAILURE not in each[1]]
            if at := endings.mentions_error(unread):
                self._findings.pop((_key(_WORD_ROW), number), None)
                self._add(_WORD_ROW, _Line(written[at], name, (number, at), b""))

    def _forget(self, number: int) -> None:
        """Forget what the lines of a file have shown so far."""
        self._findings = {
            key: previous for key, previous in self._findings.items() if key[1] != number
        }
        self._first_exit, self._root_causes, self._first_agent = None, [], ""
        self._closing = self._launch_error = self._reported = None
        self._has_failure, self._no_restart = False, ""

    def _note_for_people(self, line: _Line) -> None:
        """Record the kit's messages for people, in case the output lacks the line for programs."""
        if "ddpkit launch: " in line.text:
            said = read_closing_line(line.text, has_started=self._has_started)
            self._has_started = self._has_started or " ranks on " in line.text
            self._closing = (said, line) if said else None
        elif self._launch_error is None and (said := read_launch_error(line.text)):
            self._launch_error = said, line
        elif self._reported is None and (said := read_reported_cause(line.text)):
            self._reported = said, line

    def _note(self, line: _Line, failure: Failure | None, file_rank: int | None) -> None:
        """Record what a line shows. failure: the kit's own failure in it, if any."""
        text = line.text
        place = Place(failure.rank, failure.host) if failure else place_of(text)
        self._has_failure |= failure is not None
        self._places.note(text, place)
        if failure and failure.kind == "status":
            self._first_exit = self._first_exit or _Exit(place)
            self._first_agent = self._first_agent or (
                place.host or "" if place.rank is None else ""
            )
        self._note_exit(text, place)

        if failure:
            cause, named_host = cause_of(failure), place.host
        elif is_for_people(text):
            return
        elif found := match(text):
            cause, named_host = found
            if line.is_exception and cause.level is CauseLevel.WORD:
                cause = _EXCEPTION_ROW
        elif line.is_exception:
            cause, named_host = _EXCEPTION_ROW, None
        else:
            return
        finding = self._add(cause, line)
        finding.detail = finding.detail or detail(text)
        if cause.reporter == "survivor":
            place = Place(None, named_host)
        elif failure is None and cause.reporter != "kit":
            is_known = place.rank is not None or place.task is not None or place.local is not None
            place = place._replace(
                rank=place.rank if is_known else file_rank, host=place.host or named_host
            )
        if place not in finding.named:
            finding.named.append(place)

    def _add(self, cause: FailureCause, line: _Line) -> LogFinding:
        """Return a cause's finding in a file, extended by this line."""
        key = _key(cause), line.position[0]
        number = line.position[1]
        if key not in self._findings:
            date, seconds = _last_time(line.context)
            self._findings[key] = LogFinding(
                cause, line.name, number, line.text, number, line.position, date, seconds
            )
        self._findings[key].last_line_number = max(number, self._findings[key].last_line_number)
        return self._findings[key]

    def _note_exit(self, text: str, place: Place) -> None:
        """Record ends of processes that launchers report; torchrun uses several lines for one."""
        message = split_labels(text).message
        in_torchrun_summary = re.match("  (time|host|rank)  ", message) is not None
        if "Root Cause (first" in text:
            self._root_causes.append(_Exit())
        elif in_torchrun_summary and self._root_causes:
            latest = self._root_causes[-1]
            if message.startswith("  time") and not latest.time:
                latest.time = message.partition(":")[2].strip()
            elif message.startswith("  rank") and latest.place.rank is None:
                latest.place = latest.place._replace(rank=place.rank)
            elif message.startswith("  host"):
                latest.place = latest.place._replace(host=latest.place.host or place.host)
        elif reports_exit(text) and not in_torchrun_summary and self._first_exit is None:
            self._first_exit = _Exit(place)

    def diagnose(self) -> Diagnosis | None:
        said = self._closing or self._launch_error or self._reported
        if said and not self._has_failure:
            self._note(said[1], said[0], None)
        findings = [
            candidate for candidate in self._findings.values() if not self._went_on_after(candidate)
        ]
        if any(candidate.cause.reporter == "kit" for candidate in findings):  # it explains the hang
            findings = [each for each in findings if not each.line.startswith("The ranks hang")]
        if not findings:
            return None if any(ending.own_end for ending in self._endings) else self._unfinished()
        finding = _first(findings)
        while reasons := [candidate for candidate in findings if _explains(candidate, finding)]:
            finding = _first(reasons)
        same = [candidate for candidate in findings if candidate.key == finding.key]
        if finding.cause.name == "host_oom" and is_by_slurm(finding.line):
            rank, host = self._of_memory(findings)
        else:
            rank, host = self._rank_and_host(finding, same)
        others = (
            candidate
            for candidate in findings
            if candidate not in same and candidate.cause.name != "unknown"
        )
        return Diagnosis(
            finding, rank, host, tuple(others), tuple(self._restarts), self._no_restart
        )

    def _unfinished(self) -> Diagnosis:
        """Return the diagnosis for an output that shows neither a failure nor the job's end."""
        last = next((ending.last for ending in reversed(self._endings) if ending.last), None)
        text, name, position = (
            (last.text, last.name, last.position) if last else ("", "the output", (0, 0))
        )
        cause = UNFINISHED if last else EMPTY
        finding = LogFinding(cause, name, position[1], text, position[1], position, None, None)
        return Diagnosis(finding, None, None, (), tuple(self._restarts), self._no_restart)

    def _went_on_after(self, finding: LogFinding) -> bool:
        """Whether a job went on after a warning, or reports its own end later."""
        if finding.position[0] >= len(self._endings):
            return False
        ending, level = self._endings[finding.position[0]], finding.cause.level
        if level not in (CauseLevel.HINT, CauseLevel.WORD, CauseLevel.CONSEQUENCE):
            return False
        if finding.last_line_number < ending.own_end:
            return True
        is_far = ending.num_lines - finding.last_line_number > endings.NUM_LINES
        return is_far and level is not CauseLevel.CONSEQUENCE

    def _of_memory(self, findings: Sequence[LogFinding]) -> tuple[int | None, str | None]:
        """Return the rank and host without memory, from all lines about it."""
        of_memory = [finding for finding in findings if finding.cause.name == "host_oom"]
        named = [self._places.resolve(place) for finding in of_memory for place in finding.named]
        host = next((host for _, host in named if host), None)
        rank = next(
            (rank for rank, named_host in named if rank is not None and named_host == host), None
        )
        exit_rank, exit_host = self._exit()
        if rank is None and host and exit_host and same_host(host, exit_host):
            rank = exit_rank
        return rank, host

    def _exit(self) -> tuple[int | None, str | None]:
        """Return rank and host of the process that ended first, as launchers report it."""
        first_exit = min(
            self._root_causes,
            # torchrun's times are whole seconds; if equal, its first agent's process counts
            key=lambda cause: (cause.time, cause.place.host != self._first_agent),
            default=self._first_exit,
        )
        return self._places.resolve(first_exit.place) if first_exit else (None, None)

    def _rank_and_host(
        self, finding: LogFinding, same: Sequence[LogFinding]
    ) -> tuple[int | None, str | None]:
        """Return the rank and host that failed first. same: the cause's findings in all files."""
        resolve = self._places.resolve
        named = [resolve(place) for place in finding.named]
        if len(same) > 1 and any(finding.seconds is None for finding in same):
            named = [resolve(place) for finding in same for place in finding.named]
            if len({rank for rank, _ in named} - {None}) > 1:
                return None, _only({host for _, host in named if host})

        hosts = [host for _, host in named if host]
        if finding.cause.reporter == "survivor":
            return None, next(iter(hosts), None)
        if finding.cause.reporter == "kit":
            return next((pair for pair in named if pair != (None, None)), (None, None))
        if finding.cause.reporter == "scheduler":
            return None, _only(set(hosts) or self._places.hosts)

        rank, host = next((pair for pair in named if pair[0] is not None), (None, None))
        if rank is None:
            host = next(iter(hosts), None)
        elif host is None and len({named_rank for named_rank, _ in named} - {None}) == 1:
            host = _only(set(hosts) & self._places.hosts_without_rank)
        exit_rank, exit_host = self._exit()
        if rank is None and (host is None or exit_host in (None, host)):
            rank, host = exit_rank, host or exit_host
        if host is None and rank is None:
            host = _only(self._places.hosts)
        return rank, host


def _only(hosts: set[str]) -> str | None:
    return next(iter(hosts)) if len(hosts) == 1 else None


def _explains(finding: LogFinding, other: LogFinding) -> bool:
    """Whether a finding is the reason for another one.

    A rank may end with a crash after it has lost another rank. An exception may also be raised
    because of another one, which the traceback shows before or after it.
    """
    if finding.cause.name not in other.cause.explained_by:
        return False
    if other.cause.name == EXCEPTION:
        distance = abs(finding.position[1] - other.position[1])
        is_near = finding.position[0] == other.position[0] and distance < _LINES_OF_CHAIN
        return is_near and any(place in other.named for place in finding.named)
    is_by_rank = finding.cause.reporter == "failed" and not reports_exit(finding.line)
    may_follow = is_by_rank and finding.cause.level == CauseLevel.FAILURE
    return not may_follow or _in_order([finding, other])[0] is finding


def _first(findings: Sequence[LogFinding]) -> LogFinding:
    """Return the earliest finding of the lowest level, by time or else by place in the files."""
    level = min(finding.cause.level for finding in findings)
    return _in_order([finding for finding in findings if finding.cause.level == level])[0]


def _in_order(findings: Sequence[LogFinding]) -> list[LogFinding]:
    """Sort findings by time if all have one, else by their place in the files."""
    timed = all(finding.seconds is not None for finding in findings)
    dated = all(finding.date for finding in findings)

    def order(finding: LogFinding) -> tuple[tuple[int, int], float, tuple[int, int]]:
        date = finding.date if dated and finding.date else (0, 0)
        return date, finding.seconds if timed and finding.seconds else 0.0, finding.position

    return sorted(findings, key=order)


def _last_time(text: bytes) -> tuple[tuple[int, int] | None, float | None]:
    """Return the latest time in a text, as a date (month, day) and seconds since midnight."""
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
    """Describe a diagnosis in one line. after_output: the kit's own message is just above it."""
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
        return "No failure was found, and the output shows the end of the job."
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
    if found.restarts or found.no_restart:
        lines[-1] += f". {_describe_restarts(found)}"
    also = [f"{other.cause.name} ({other.file}:{other.line_number})" for other in found.others]
    if also:
        lines.append(f"Also:     {', '.join(dict.fromkeys(also))}")
    return "\n".join(lines)


def _describe_restarts(found: Diagnosis) -> str:
    """Return what ddpkit launch itself has done before and after the last failure."""
    count = len(found.restarts)
    times = f"The ranks were started again {count} time{'s' * (count > 1)}"
    before = f"{times} before it ({'; '.join(found.restarts)})" if count else ""
    after = f"ddpkit launch did not start them again: {found.no_restart}" * bool(found.no_restart)
    return ". ".join(text for text in (before, after) if text)


def as_dict(found: Diagnosis | None) -> dict[str, object]:
    if found is None:
        return {"cause": None}
    first, cause = found.finding, found.cause
    return {
        "cause": cause.name,
        "rank": found.rank,
        "host": found.host,
        "restart": cause.restart,
        "restarts": list(found.restarts),
        "no_restart": found.no_restart,
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


def _lines_of_interest(
    stream: BinaryIO, last_lines: deque[tuple[int, bytes]]
) -> Iterator[tuple[int, str, bytes, bool]]:
    """Yield for lines of interest: number, text, the lines up to it, whether it ends a traceback.

    These are the first line, each line with a keyword, and the exception at the end of a
    traceback. Most lines differ only in their numbers from an earlier line without a keyword.
    last_lines: receives the latest lines, each with its number.
    """
    keywords, number = _digitless_keywords(), 0
    dull = set[bytes]()  # shapes of lines without a keyword
    tracebacks = _OpenTracebacks()
    are_open, note_last = tracebacks.lines_left, last_lines.append  # attributes cost time per line
    for lines in stream:
        for line in lines.rstrip(b"\r\n").split(b"\r"):  # parts of a progress bar
            number += 1
            note_last((number, line))
            shape = line.translate(None, _VARYING)
            has_keyword = shape not in dull and any(keyword in line for keyword in keywords)
            if has_keyword or are_open or number == 1:
                text = line[:_LONGEST_LINE].decode(errors="replace")
                is_exception = tracebacks.ends_one(text)
                if has_keyword or number == 1 or is_exception:
                    recent = list(last_lines)[-_RECENT_LINES:]
                    yield number, text, b"\n".join(each for _, each in recent), is_exception
            if not has_keyword and len(dull) < _MOST_SHAPES:
                dull.add(shape)


class _OpenTracebacks:
    """Tracebacks whose last line, the exception, is still missing; identified by line labels."""

    def __init__(self) -> None:
        self.lines_left: dict[str, int] = {}  # label -> lines until the traceback is given up

    def ends_one(self, text: str) -> bool:
        """Read a line; return whether it is the exception at the end of a traceback."""
        message = split_labels(text).message
        label = text[: len(text) - len(message)]
        if message.startswith(_TRACEBACK):
            self.lines_left[label] = _LONGEST_TRACEBACK
            return False
        for other in [*self.lines_left]:
            self.lines_left[other] -= 1
            if not self.lines_left[other]:
                del self.lines_left[other]
        if label not in self.lines_left or not message or message[0].isspace():
            return False
        if not endings.is_exception(message, in_traceback=True):
            return False
        del self.lines_left[label]
        return True


@cache
def _digitless_keywords() -> tuple[bytes, ...]:
    """Return texts such that every line of interest has one of them, whatever its numbers are."""
    parts = (max(re.split(r"\d", keyword), key=len) for keyword in keywords())
    encoded = {part.encode() for part in parts}
    return tuple(part for part in encoded if not any(other in part for other in encoded - {part}))

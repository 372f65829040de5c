"""Find the ranks for which the others wait in a collective, from reported positions. No torch."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

from ..topology import format_ranges

_SHOWN_RANKS = 8
# Sizes that have to be equal on all ranks. Those of a gather or an all-to-all may differ.
_EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")


class Collective(TypedDict):
    """One collective that a rank has entered."""

    group: str
    number: int  # within the group, and equal on its ranks
    operation: str  # "all_reduce"
    sizes: str  # of its inputs: "[[4]]"
    between_two: bool  # a send or a receive
    location: str
    pending: bool  # it has not ended


class Work(NamedTuple):
    """What a rank and its child processes have used since they were started."""

    cpu_seconds: float = 0.0
    megabytes: float = 0.0  # read and written
    waits_for_disk: bool = False  # now
    gpu: float = 0.0  # how much of the last second its GPU was in use, 0 to 1


class ProcessState(NamedTuple):
    """What another rank of its host sees of a rank that does not respond."""

    text: str  # "stopped by a signal (SIGSTOP or SIGTSTP)"
    is_busy: bool


class Position(NamedTuple):
    """How far a rank has progressed."""

    collectives: int  # that it has entered
    location: str  # of its main thread: "/home/me/train.py, line 40, in main"
    last: tuple[Collective, ...] = ()  # the last collectives, oldest first; empty if unknown
    work: Work = Work()


def main_thread_location() -> str:
    """Return the innermost frame of the main thread that is in user code."""
    # faulthandler shows the same frames, but only as text in a file.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return user_frame(frames) or "an unknown location"


def user_frame(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the first frame that is in no library; the very first if all are; "" without frames.

    frames: file, line and function, innermost first.
    """
    folders = ("stdlib", "platstdlib", "purelib", "platlib")
    kit = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    libraries = (*(sysconfig.get_path(name) for name in folders), os.path.join(kit, ""), "<")
    found = list(frames)
    chosen = next((frame for frame in found if not frame[0].startswith(libraries)), None)
    file, line, function = chosen or (found[0] if found else ("", 0, ""))
    return f"{file}, line {line}, in {function}" if file else ""


def unreported(positions: Mapping[int, Position], running: Iterable[int]) -> list[int]:
    """Return the running ranks that have not reported their position."""
    return [rank for rank in running if rank not in positions]


def behind(positions: Mapping[int, Position], running: Iterable[int]) -> list[int]:
    """Return the running ranks that have entered fewer collectives than another rank."""
    last = _last_collective(positions)
    return [rank for rank in running if rank in positions and positions[rank].collectives < last]


def waiting(positions: Mapping[int, Position]) -> list[int]:
    """Return the ranks that have entered a collective which has not ended."""
    return [
        rank for rank, position in positions.items() if any(c["pending"] for c in position.last)
    ]


def describe(
    positions: Mapping[int, Position],
    hosts: Mapping[int, str],
    running: list[int],
    silent: Mapping[int, str] | None = None,
) -> str:
    """Return the cause of a collective's time-out, as far as the positions show it.

    hosts: the host of each rank. running: the ranks that have not left. silent: what is known of
    ranks that do not respond.
    """
    silent = silent or {}
    last = _last_collective(positions)
    causes = [mismatch] if (mismatch := describe_mismatch(positions, hosts)) else []
    missing = behind(positions, running)
    causes += [
        f"rank {rank} on {hosts[rank]} did not enter collective {last}, in which the other ranks "
        f"wait. It is at {positions[rank].location}"
        for rank in missing
    ]
    no_response = unreported(positions, running)
    causes += [
        f"rank {rank} on {hosts[rank]} does not respond: "
        f"{silent.get(rank, 'it is stopped, or busy in native code')}"
        for rank in no_response
    ]
    if len(causes) > _SHOWN_RANKS:
        causes[_SHOWN_RANKS:] = [f"... and {len(causes) - _SHOWN_RANKS} more ranks"]
    if (missing or no_response) and not mismatch:
        causes[-1] += _describe_collective(positions, last)

    return "; ".join(causes) or (
        f"a collective timed out although all ranks have entered collective {last} by now: "
        "one was late, or a connection between the hosts is interrupted"
    )


def describe_mismatch(positions: Mapping[int, Position], hosts: Mapping[int, str]) -> str:
    """Return which ranks entered another collective than the majority; "" where none did."""
    calls: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, position in positions.items():
        for call in position.last:
            if not call["between_two"]:
                calls.setdefault((call["group"], call["number"]), {})[rank] = call

    for (_, number), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        count = Counter(map(_signature, by_rank.values()))
        if len(count) > 1:
            usual, _ = count.most_common(1)[0]
            usual_rank, example = next(
                (rank, call) for rank, call in by_rank.items() if _signature(call) == usual
            )
            causes = [
                f"rank {rank} on {hosts[rank]} entered another collective {number}: "
                f"{_show(call, positions[rank])}"
                for rank, call in sorted(by_rank.items())
                if _signature(call) != usual
            ]
            return (
                f"{'; '.join(causes[:_SHOWN_RANKS])}. The other ranks entered "
                f"{_show(example, positions[usual_rank])}"
            )
    return ""


def summary(positions: Mapping[int, Position], hosts: Mapping[int, str]) -> str:
    """Return a line for each group of ranks that are at the same place."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, position in sorted(positions.items()):
        pending = next((call for call in reversed(position.last) if call["pending"]), None)
        doing = (
            f"in collective {position.collectives}, {_name(pending)}"
            if pending
            else (f"{position.collectives} collectives entered, in none")
        )
        places.setdefault((doing, position.location), []).append(rank)
    lines = []
    for (doing, location), ranks in places.items():
        names = ", ".join(dict.fromkeys(hosts[rank].partition(" ")[0] for rank in ranks[:64]))
        lines.append(f"  rank {format_ranges(ranks)} on {names}: {doing}; at {location}\n")
    silent = unreported(positions, sorted(hosts))
    if silent:
        lines.append(f"  rank {format_ranges(silent)}: no position\n")
    return "".join(lines)


def _describe_collective(positions: Mapping[int, Position], number: int) -> str:
    """Return what collective `number` is, on the ranks that wait in it; "" if unknown."""
    for rank in sorted(positions):
        for call in reversed(positions[rank].last):
            if call["pending"]:
                return f". Rank {rank} waits in {_show(call, positions[rank])}"
    for rank in sorted(positions):
        if positions[rank].collectives == number:
            return f". Rank {rank} is at {positions[rank].location}"
    return ""


def _signature(call: Collective) -> tuple[str, str]:
    return call["operation"], call["sizes"] if call["operation"] in _EQUAL_SIZES else ""


def _name(call: Collective) -> str:
    return f"{call['operation']} of {call['sizes']}"


def _show(call: Collective, position: Position) -> str:
    """Return what a collective is, and where it was called: where it waits, if not recorded."""
    return f"{_name(call)} at {call['location'] or position.location}"


def _last_collective(positions: Mapping[int, Position]) -> int:
    return max((position.collectives for position in positions.values()), default=0)

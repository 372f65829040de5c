"""Find the ranks for which the others wait in a collective, from reported positions."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_SHOWN_RANKS = 8


class Position(NamedTuple):
    """How far a rank has progressed."""

    collectives: int  # that it has entered
    location: str  # of its main thread: "/home/me/train.py, line 40, in main"


def main_thread_location() -> str:
    """Return the innermost frame of the main thread that is in user code."""
    # faulthandler shows the same frames, but only as text in a file.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    folders = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = tuple(sysconfig.get_path(name) for name in folders)
    innermost = frame

    while frame is not None and frame.f_code.co_filename.startswith((*libraries, "<")):
        frame = frame.f_back
    frame = frame or innermost

    if frame is None:
        return "an unknown location"
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def unreported(positions: Mapping[int, Position], running: Iterable[int]) -> list[int]:
    """Return the running ranks that have not reported their position."""
    return [rank for rank in running if rank not in positions]


def behind(positions: Mapping[int, Position], running: Iterable[int]) -> list[int]:
    """Return the running ranks that have entered fewer collectives than another rank."""
    last = _last_collective(positions)
    return [rank for rank in running if rank in positions and positions[rank].collectives < last]


def describe(
    positions: Mapping[int, Position], hosts: Mapping[int, str], running: list[int]
) -> str:
    """Return the cause of a collective's time-out, as far as the positions show it.

    hosts: the host of each rank. running: the ranks that have not left.
    """
    last = _last_collective(positions)
    causes = [
        f"rank {rank} on {hosts[rank]} did not enter collective {last}, in which the other ranks "
        f"wait. It is at {positions[rank].location}"
        for rank in behind(positions, running)
    ]
    causes += [
        f"rank {rank} on {hosts[rank]} does not respond: it is stopped, or busy in native code"
        for rank in unreported(positions, running)
    ]
    if len(causes) > _SHOWN_RANKS:
        causes[_SHOWN_RANKS:] = [f"... and {len(causes) - _SHOWN_RANKS} more ranks"]

    return "; ".join(causes) or (
        f"a collective timed out although all ranks have entered collective {last} by now: "
        "one was late, or a connection between the hosts is interrupted"
    )


def _last_collective(positions: Mapping[int, Position]) -> int:
    return max((position.collectives for position in positions.values()), default=0)

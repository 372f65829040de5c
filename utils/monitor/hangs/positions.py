"""Where a rank is: its main thread, its collectives, its process and its workers. No torch."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypedDict


class Collective(TypedDict):
    """One collective or transfer that a rank has entered."""

    group: str  # "" for all ranks, else its name and ranks: "1 (ranks 0-2)"
    number: int  # position in the group's sequence, equal on all its ranks
    operation: str  # "all_reduce"
    sizes: str  # input sizes: "[[4]]"
    between_two: bool  # True for a send or a receive
    peer: int | None  # the other rank of a transfer; None where unknown
    location: str
    thread: int  # threading's ident of the thread that entered it
    pending: bool  # True until the collective has ended
    blocks: bool  # True while the thread waits for the end


class Group(NamedTuple):
    """A process group, as one of its ranks sees it."""

    ranks: str  # "0-3"
    entered: int | None  # the number of its newest collective; None where unknown
    location: str = ""  # where the thread that entered it is now
    thread: int = 0
    timeout: float | None = None  # limit of its collectives in seconds; None where unknown


class Work(NamedTuple):
    """Resources used by a rank and its child processes since their start."""

    cpu_seconds: float = 0.0
    megabytes: float = 0.0  # megabytes read and written
    waits_for_disk: bool = False  # whether it waits for a disk now
    wakeups: int = 0  # how often the main thread was woken up


class ProcessState(NamedTuple):
    """The state of a rank that does not respond, as another rank of its host sees it."""

    why_stopped: str  # "stopped by a signal (SIGSTOP or SIGTSTP)"; "" where it runs
    cpu_seconds: float  # CPU time of the main thread


class Stay(NamedTuple):
    """How long a main thread has been at the same few lines."""

    seconds: float = 0.0
    location: str = ""  # its most frequent line


class Position(NamedTuple):
    """How far a rank has progressed."""

    collectives: int  # number of collectives entered
    location: str  # line of the main thread: "/home/me/train.py, line 40, in main"
    last: tuple[Collective, ...] = ()  # the last collectives, oldest first; empty if unknown
    work: Work = Work()
    groups: Mapping[str, Group] = {}  # group name in Collective -> group
    # Lines of the DataLoader workers that the main thread waits for, "" if a line is unknown; empty
    # if it waits for no worker.
    workers: tuple[str, ...] = ()
    stay: Stay = Stay()


class Wait(NamedTuple):
    """A collective or transfer that a rank waits in, and the ranks that it waits for."""

    call: Collective
    awaited: tuple[int, ...]  # empty where unknown


def main_thread_location() -> str:
    """Return the innermost frame of the main thread in user code."""
    main = threading.main_thread().ident or 0
    return thread_location(sys._current_frames().get(main)) or "an unknown location"


def thread_location(frame: FrameType | None) -> str:
    """Return a thread's innermost frame in user code; "" if there is none."""
    # faulthandler shows the same frames, but only as text in a file.
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return user_frame(frames)


def user_frame(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the first frame in no library, else the very first frame; "" without frames.

    frames: file, line and function, innermost first.
    """
    found = list(frames)
    chosen = next((frame for frame in found if is_in_user_code(frame[0])), None)
    file, line, function = chosen or (found[0] if found else ("", 0, ""))
    return f"{file}, line {line}, in {function}" if file else ""


def is_in_user_code(file: str) -> bool:
    """Whether a file belongs to no library: not to Python, torch or the kit."""
    # torch may come from a cluster module's site-packages instead of this Python's.
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    return not is_installed and not file.startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    kit = Path(__file__).absolute().parents[2]
    return (*folders, os.path.join(kit, ""), "<")


_MOST_PLACES = 6  # a polling loop sleeps at one place, and tests its condition at a few others


class StayWatch:
    """The places of a thread in its last samples, at most six different ones.

    A place is a line of the script, with the innermost function that runs there. An import or a
    training step has many places, even if the script stays at one line.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # place -> last seen, how often
        self._since = 0.0  # monotonic seconds: since then, all samples were at these places

    def add(self, now: float, location: str, running: str) -> None:
        """Take a sample. location: thread_location(). running: the innermost function."""
        place = location, running
        if not self._seen:
            self._since = now
        _, count = self._seen.pop(place, (now, 0))
        self._seen[place] = now, count + 1
        if len(self._seen) > _MOST_PLACES:
            self._since, _ = self._seen.pop(next(iter(self._seen)))  # evict the oldest place

    def stay(self, now: float) -> Stay:
        """Return how long the thread has been at these places, and its most frequent line."""
        counts: dict[str, int] = {}
        for (location, _), (_, count) in self._seen.items():
            counts[location] = counts.get(location, 0) + count
        if not counts:
            return Stay()
        return Stay(now - self._since, max(counts, key=lambda location: counts[location]))


def sample(frame: FrameType | None) -> tuple[str, str]:
    """Return a thread's line in the script, and the innermost function that it runs."""
    running = f"{frame.f_code.co_filename}:{frame.f_code.co_name}" if frame else ""
    return thread_location(frame), running

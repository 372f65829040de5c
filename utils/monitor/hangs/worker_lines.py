"""Find where DataLoader workers are while a rank waits for them, from their stacks. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from types import FrameType

from ...host import process
from ..worker_stacks import FILE
from .positions import is_in_user_code, user_frame

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_START_OF_WORKER = os.path.join("multiprocessing", "process.py"), "_bootstrap"
_QUEUE = os.path.join("multiprocessing", "queues.py"), "get"
_WAIT_SECONDS = 1.0  # seconds to wait for the stacks of all workers
_SHOWN_LINES = 3

Frame = tuple[str, int, str]  # file, line, function

_unanswered: dict[int, int] = {}  # pid of a worker that was asked -> size of its file before


def worker_lines() -> tuple[str, ...]:
    """Return the lines of the workers that the main thread waits for in a DataLoader.

    The most frequent line comes first; "" is an unknown line. Empty if the main thread waits for
    no worker. A worker that waits for work is left out if another one is busy.
    """
    pids = _awaited_workers(sys._current_frames().get(threading.main_thread().ident or 0))
    if not pids:
        return ()
    stacks = list(_read_stacks(pids).values())
    busy = [stack for stack in stacks if not waits_for_work(stack)]
    lines = Counter(user_frame(stack) for stack in busy or stacks)
    return tuple(line for line, _ in lines.most_common(_SHOWN_LINES))


def _awaited_workers(frame: FrameType | None) -> list[int]:
    """Return the pids of the workers that a thread waits for. Private API of torch."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_try_get_data" and code.co_filename.endswith(_LOADER):
            workers = getattr(frame.f_locals.get("self"), "_workers", ())
            return [worker.pid for worker in workers if worker.pid]
        frame = frame.f_back
    return []


def _read_stacks(pids: Iterable[int]) -> dict[int, list[Frame]]:
    """Ask workers for their stacks; return them, innermost frame first, empty where unknown."""
    stacks: dict[int, list[Frame]] = {pid: [] for pid in pids}
    asked = {pid: file for pid in stacks if (file := _file_of(pid))}
    for pid, (path, number) in asked.items():
        if pid not in _unanswered:  # ask once: it may be in an uninterruptible system call
            with contextlib.suppress(OSError):
                _unanswered[pid] = os.stat(path).st_size
                os.kill(pid, number)
    end = time.monotonic() + _WAIT_SECONDS
    while asked and (now := time.monotonic()) < end + 0.1:
        for pid, (path, _) in list(asked.items()):
            frames, is_whole = read_stack(process.read(path)[_unanswered.get(pid, 0) :])
            if is_whole or (frames and now > end):
                stacks[pid] = frames
                del asked[pid], _unanswered[pid]
        time.sleep(0.01)
    return stacks


def _file_of(pid: int) -> tuple[str, int] | None:
    """Return the file to which a worker writes its stack, and the signal that triggers it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):  # the file descriptor was closed meanwhile
                if found := FILE.search(os.readlink(path)):
                    return path, int(found[1])
    return None


def read_stack(content: bytes) -> tuple[list[Frame], bool]:
    """Return the frames of a worker in faulthandler's output, and whether they are complete.

    The frames below them belong to the rank that forked the worker.
    """
    text = content.decode(errors="replace")
    frames: list[Frame] = []
    for file, line, function in _FRAME.findall(text):
        if _is(_START_OF_WORKER, file, function):
            return frames, True
        frames.append((file, int(line), function))
    return frames, "\n  ...\n" in text  # faulthandler cuts a stack after 100 frames


def waits_for_work(stack: list[Frame]) -> bool:
    """Whether a worker is idle: it waits for its rank to send it work."""
    in_queue = any(_is(_QUEUE, file, function) for file, _, function in stack)
    return in_queue and not any(is_in_user_code(file) for file, _, _ in stack)


def _is(place: tuple[str, str], file: str, function: str) -> bool:
    return file.endswith(place[0]) and function.rpartition(".")[2] == place[1]

"""End one rank, from a separate process, when the job has ended and the rank cannot run Python.

A rank that is stopped, or that holds the GIL in native code, does not read its connections. The
guard peeks at them (MSG_PEEK) for the message that ends the job, and ends a rank that has been
stopped for too long. When the rank dies, the guard ends its child processes, such as DataLoader
workers that wait for a disk: they keep the output open, and `| tee` would not end. Standard library
only.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ..host import process

_INTERVAL = 0.5  # seconds
_CLOSED_INTERVAL = 0.05  # the same once the rank's end of the pipe is closed: it is ending
_UNREAD_SECONDS = 5.0  # in which a rank must read that the job has ended
_UNREAD_BYTES = 1 << 20
_END = re.compile(rb'"kind":"(?:hang|end)"')  # messages of channel.py


class Guard:
    """The guard of this process."""

    def __init__(self, sockets: Iterable[int], longest_stop: float = math.inf) -> None:
        """Start the guard.

        sockets: descriptors of the connections to the other ranks. longest_stop: seconds for which
        a signal may stop this process.
        """
        descriptors = list(sockets)
        root = Path(__file__).resolve().parents[__name__.count(".")]
        path = f"import sys; sys.path.insert(0, {str(root)!r})"
        code = f"{path}; from {__name__} import run; run()"
        self._process = subprocess.Popen(
            # No child of this process: the user's program may wait for all of its children.
            [sys.executable, "-I", "-c", f"import os; os.fork() and os._exit(0); {code}"]
            + [str(number) for number in (longest_stop, os.getpid(), *descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # it outlives what ends the rank
        )
        self._process.wait()

    def dismiss(self) -> None:
        """End the guard: this rank leaves by itself."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"x")
                self._process.stdin.close()

    def close(self) -> None:
        """Close the pipe in a child process: its end tells the guard that the rank has ended."""
        if self._process.stdin:
            self._process.stdin.close()


def run() -> None:
    """Be the guard of a process; the arguments are longest_stop, its id and the descriptors."""
    longest_stop = float(sys.argv[1])
    rank, *descriptors = map(int, sys.argv[2:])
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    children: dict[int, int | None] = {}
    ended_at: float | None = None
    stopped = 0  # intervals; a guard that is suspended with its rank counts none
    born, session = process.start_time(rank), process.session(rank)
    while process.start_time(rank) == born:
        if _is_dismissed(_INTERVAL):
            return
        found = _children(rank)
        if process.start_time(rank) == born:  # else they have another parent now
            children = found
        stopped = stopped + 1 if process.is_stopped(rank) else 0
        if stopped * _INTERVAL > longest_stop:
            process.kill([rank], session)
        if not any(map(_END.search, map(_peek, sockets))):
            ended_at = None
        elif time.monotonic() - (ended_at := ended_at or time.monotonic()) > _UNREAD_SECONDS:
            process.kill([rank], session)
    if _is_dismissed(0):
        return
    orphans = [pid for pid in children if process.parent(pid) not in (None, rank)]
    process.kill([pid for pid in orphans if process.start_time(pid) == children[pid]], session)


def _is_dismissed(seconds: float) -> bool:
    """Wait that long for the rank's byte.

    The kernel closes the rank's end of the pipe some time before its children have another parent.
    """
    if not select.select([0], [], [], seconds)[0]:
        return False
    dismissed = bool(os.read(0, 1))
    if not dismissed:
        time.sleep(min(seconds, _CLOSED_INTERVAL))
    return dismissed


def _peek(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_UNREAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _children(pid: int) -> dict[int, int | None]:
    """Return the start times of the processes that a process has started, by their ids."""
    folders = [f"/proc/{pid}/task/{thread}" for thread in process.thread_ids(pid)]
    words = b" ".join(process.read(f"{folder}/children") for folder in folders).split()
    return {int(child): process.start_time(int(child)) for child in words}

"""Watch one rank from a separate process, which responds when the rank cannot run Python.

A rank that is stopped, or that holds the GIL in native code, does not read its connections. The
guard peeks at them (MSG_PEEK). It responds in place of the rank with the state of the process, and
ends the rank when the job has ended. When the rank dies, the guard ends its child processes, such
as DataLoader workers that wait for a disk: they keep the output open, and `| tee` would not end.
Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..channel import Channel, guarded_frame
from ..host import process
from .hang import ProcessState, user_frame

BUSY_CPU = 0.2  # of a core
_INTERVAL = 0.5  # seconds
_CLOSED_INTERVAL = 0.05  # the same once the rank's end of the pipe is closed: it is ending
_UNREAD_SECONDS = 5.0  # in which a rank must read that the job has ended
_UNREAD_BYTES = 1 << 20
_ASK = re.compile(rb'"about":"position","ends":(true|false)}')  # messages of channel.py
_END = re.compile(rb"(?:^|})(?:hang|end) \d+ [0-9a-f]{32}\n")
_SIGNAL = signal.SIGRTMIN + 5  # dumps the stacks


class Guard:
    """The guard of this process."""

    def __init__(self, connections: list[Channel]) -> None:
        """Start the guard. connections: to the other ranks."""
        sockets = [one.fileno() for one in connections]
        root = Path(__file__).resolve().parents[__name__.count(".")]
        path = f"import sys; sys.path.insert(0, {str(root)!r})"
        code = f"{path}; from {__name__} import run; run()"
        stacks = os.memfd_create("ddpkit-stacks")
        if signal.getsignal(_SIGNAL) == signal.SIG_DFL:
            faulthandler.register(_SIGNAL, stacks)
        words = [str(number) for number in (os.getpid(), stacks, *sockets)]
        self._process = subprocess.Popen(
            # No child of this process: the user's program may wait for all of its children.
            [sys.executable, "-I", "-c", f"import os; os.fork() and os._exit(0); {code}", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[stacks, *sockets],
            start_new_session=True,  # it outlives what ends the rank
        )
        self._process.wait()
        sessions = [one.session for one in connections]
        lines = "".join(f"{session.name} {session.key.hex()}\n" for session in sessions)
        if self._process.stdin:
            self._process.stdin.write(f"{lines}\n".encode())
            self._process.stdin.flush()

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
    """Be the guard of the process whose id is the first argument."""
    rank, stacks, *descriptors = map(int, sys.argv[1:])
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    keys = list(_read_keys())
    if len(keys) < len(sockets):
        return
    sent = [0] * len(sockets)
    children: dict[int, int | None] = {}
    requests = [0] * len(sockets)  # that have been responded to
    seen = list(requests)
    ended_at: float | None = None
    born, session = process.start_time(rank), process.session(rank)
    while process.start_time(rank) == born:
        if _is_dismissed(_INTERVAL):
            return
        found = _children(rank)
        if process.start_time(rank) == born:  # else they have another parent now
            children = found
        now = time.monotonic()
        unread = [_peek(connection) for connection in sockets]
        for number, content in enumerate(unread):
            asked = _ASK.findall(content)
            count = len(asked)
            if count and count == seen[number] > requests[number]:  # for two intervals
                ends = b"true" in asked
                message = {"state": _state(rank, stacks if ends else None), "ends": ends}
                name, key = keys[number]
                sent[number] += 1
                with contextlib.suppress(OSError):
                    sockets[number].send(guarded_frame(key, name, sent[number], message))
                requests[number] = count
            requests[number] = min(requests[number], count)
            seen[number] = count
        if not any(map(_END.search, unread)):
            ended_at = None
        elif now - (ended_at := ended_at or now) > _UNREAD_SECONDS:
            process.kill([rank], session)
    if _is_dismissed(0):
        return
    orphans = [pid for pid in children if process.parent(pid) not in (None, rank)]
    process.kill([pid for pid in orphans if process.start_time(pid) == children[pid]], session)


def _read_keys() -> Iterator[tuple[str, bytes]]:
    """Yield the name of the rank's end of each connection and its key, until an empty line."""
    line = bytearray()
    while byte := os.read(0, 1):
        if byte != b"\n":
            line += byte
        elif not line:
            return
        else:
            name, _, key = line.decode().partition(" ")
            yield name, bytes.fromhex(key)
            line.clear()


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


def _state(rank: int, stacks: int | None) -> ProcessState:
    """Return the state of a rank that does not respond.

    stacks: the file to which the rank writes its stacks; None to send no signal. The signal may
    interrupt a system call of the rank, so it is sent only if the job ends.
    """
    status = process.status(rank)
    if stopped := _stopped_state(status):
        return ProcessState(stopped, False)
    use = cpu_use(rank)
    is_busy = use > BUSY_CPU
    text = f"busy in native code ({100 * use:.0f} % of a core)" if is_busy else "in native code"
    caught = int(status.get("SigCgt", "0"), 16)  # a bit mask: signal 1 is bit 0
    if stacks is None or not caught >> (_SIGNAL - 1) & 1:
        return ProcessState(text, is_busy)
    os.ftruncate(stacks, 0)
    os.lseek(stacks, 0, os.SEEK_SET)
    os.kill(rank, _SIGNAL)
    time.sleep(_INTERVAL / 2)
    dump = os.pread(stacks, _UNREAD_BYTES, 0).decode(errors="replace")
    # The main thread is the last: '  File "/home/me/train.py", line 40 in main'
    main = dump.rpartition("hread 0x")[2]
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    location = user_frame((file, int(line), name) for file, line, name in frames)
    return ProcessState(text, is_busy, location)


def _children(pid: int) -> dict[int, int | None]:
    """Return the start times of the processes that a process has started, by their ids."""
    folders = [f"/proc/{pid}/task/{thread}" for thread in process.thread_ids(pid)]
    words = b" ".join(process.read(f"{folder}/children") for folder in folders).split()
    return {int(child): process.start_time(int(child)) for child in words}


def _stopped_state(status: dict[str, str]) -> str:
    """Return why a process does not run: "stopped by a signal" or that of a debugger, else ""."""
    tracer = int(status.get("TracerPid", "0"))
    if tracer:
        return f"held by a debugger ({process.name(tracer)}, pid {tracer})"
    return "stopped by a signal (SIGSTOP or SIGTSTP)" if status.get("State", "")[:1] == "T" else ""


def cpu_use(pid: int) -> float:
    """Return how much of the next quarter of a second a main thread runs, or is ready to run."""
    start, before = time.monotonic(), process.schedule(pid, pid)
    time.sleep(0.25)
    after, seconds = process.schedule(pid, pid), time.monotonic() - start
    return (sum(after[:2]) - sum(before[:2])) / seconds

"""Pass on the output of ranks in whole lines, or collect it in one file per rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from .event_loop import EventLoop

_PARTIAL_LINE_SECONDS = 0.2  # waits this long for the rest of a line
_MAXIMUM_LINE_BYTES = 1 << 16  # a longer line is passed on in parts


def open_file(folder: str, rank: int | str) -> int:
    """Open FOLDER/rank-3.log for both streams of a rank, to append; return its descriptor."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank-{rank}.log")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def labelled(text: bytes, rank: int) -> bytes:
    """Put "[rank 3] " before each line; the last line gets an end if it has none."""
    lines = text.removesuffix(b"\n").split(b"\n")
    return b"".join(b"[rank %d] %s\n" % (rank, line) for line in lines)


def write_output(stream: int, text: bytes) -> None:
    """Write to our standard output (stream 1) or standard error (2), if it is still read."""
    with suppress(OSError):
        target = (sys.stdout if stream == 1 else sys.stderr).buffer
        target.write(text)
        target.flush()


class _Stream:
    """One stream of one process, passed on in whole lines so that lines do not mix."""

    def __init__(self, pipe: IO[bytes], number: int, index: int) -> None:
        """number: 1 or 2, as its descriptor. index: index of the process on its host."""
        self.pipe, self.number, self.index = pipe, number, index
        self.partial = b""  # a line that is not complete yet
        self.since = 0.0  # time.monotonic() when it arrived
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self.pipe.fileno()


class Outputs:
    """The output of the processes of this host, passed on as it arrives.

    While `paused`, nothing is read: the processes wait once their pipes are full.
    """

    def __init__(self, loop: EventLoop, write: Callable[[int, bytes, int], None]) -> None:
        """write(stream, text, index): passes on what the process with this index has written."""
        self._loop, self._write = loop, write
        self._streams: list[_Stream] = []
        self.paused = False

    def add(self, child: subprocess.Popen[bytes], index: int) -> None:
        """Pass on what a child process writes into its pipes, if it has any."""
        for number, pipe in ((1, child.stdout), (2, child.stderr)):
            if pipe is not None:
                stream = _Stream(pipe, number, index)
                self._streams.append(stream)
                if not self.paused:
                    self._watch(stream)

    def pause(self, paused: bool) -> None:
        if paused == self.paused:
            return
        self.paused = paused
        for stream in self._streams:
            if paused:
                self._loop.remove(stream)
            else:
                self._watch(stream)

    def flush_partial_lines(self) -> float | None:
        """Pass on lines that were begun a while ago; return the seconds until the next call."""
        begun_before = time.monotonic() - _PARTIAL_LINE_SECONDS
        for stream in self._streams:
            if stream.since <= begun_before:
                self._pass_on(stream)
        return _PARTIAL_LINE_SECONDS if any(stream.partial for stream in self._streams) else None

    def drain(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Pass on the last output of processes that have ended.

        seconds: time limit, because their children may still run and hold the streams open.
        wait(seconds): runs the loop once.
        """
        limit = time.monotonic() + seconds
        while self._streams and (left := limit - time.monotonic()) > 0:
            wait(left)
        for stream in list(self._streams):
            self._read(stream)
            self._pass_on(stream)

    def _watch(self, stream: _Stream) -> None:
        self._loop.add(stream, lambda events: self._read(stream))

    def _read(self, stream: _Stream) -> None:
        """Pass on the whole lines that have arrived; at the end of the stream, also the rest."""
        try:
            chunk = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._pass_on(stream)
            self._streams.remove(stream)
            if not self.paused:
                self._loop.remove(stream)
            stream.pipe.close()
            return
        if not stream.partial:
            stream.since = time.monotonic()
        lines, end, rest = (stream.partial + chunk).rpartition(b"\n")
        if len(rest) >= _MAXIMUM_LINE_BYTES:
            lines, end, rest = lines + end + rest, b"", b""
        stream.partial = lines + end
        self._pass_on(stream)
        stream.partial = rest

    def _pass_on(self, stream: _Stream) -> None:
        text, stream.partial = stream.partial, b""
        if text:
            self._write(stream.number, text, stream.index)

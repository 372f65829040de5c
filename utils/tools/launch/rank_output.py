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

_PARTIAL_LINE_SECONDS = 0.2  # the start of a line waits so long for its end
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
    """One stream of one process, cut into whole lines so that processes do not mix theirs."""

    def __init__(self, pipe: IO[bytes], number: int, index: int) -> None:
        """number: 1 or 2. index: of the process on its host."""
        self._pipe, self.number, self.index = pipe, number, index
        self._partial = b""
        self._since = 0.0
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def close(self) -> None:
        self._pipe.close()

    def read(self) -> bytes | None:
        """Return the whole lines that have arrived; None at the end of the stream."""
        try:
            chunk = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        if not chunk:
            return None

        if not self._partial:
            self._since = time.monotonic()
        lines, end, self._partial = (self._partial + chunk).rpartition(b"\n")
        if len(self._partial) >= _MAXIMUM_LINE_BYTES:
            lines, end, self._partial = lines + end + self._partial, b"", b""
        return lines + end

    def take_partial(self, min_age: float = 0.0) -> bytes:
        """Return the start of a line that has waited for its end for `min_age` seconds."""
        if not self._partial or time.monotonic() - self._since < min_age:
            return b""
        taken, self._partial = self._partial, b""
        return taken

    @property
    def has_partial(self) -> bool:
        return bool(self._partial)


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
        for stream in self._streams:
            self._pass_on(stream, stream.take_partial(_PARTIAL_LINE_SECONDS))
        waiting = any(stream.has_partial for stream in self._streams)
        return _PARTIAL_LINE_SECONDS if waiting else None

    def drain(self, seconds: float, wait: Callable[[float], None]) -> None:
        """Pass on the last output of processes that have ended.

        What they have started may still run and hold the streams open, hence the limit.
        wait(seconds): runs the loop once.
        """
        limit = time.monotonic() + seconds
        while self._streams and (left := limit - time.monotonic()) > 0:
            wait(left)
        for stream in list(self._streams):
            self._read(stream)
            self._pass_on(stream, stream.take_partial())

    def _watch(self, stream: _Stream) -> None:
        self._loop.add(stream, lambda events: self._read(stream))

    def _read(self, stream: _Stream) -> None:
        text = stream.read()
        if text is not None:
            self._pass_on(stream, text)
            return
        self._pass_on(stream, stream.take_partial())
        self._streams.remove(stream)
        if not self.paused:
            self._loop.remove(stream)
        stream.close()

    def _pass_on(self, stream: _Stream, text: bytes) -> None:
        if text:
            self._write(stream.number, text, stream.index)

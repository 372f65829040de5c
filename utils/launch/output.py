"""The output of ranks: a file for each, whole lines out of a stream, and the rank before each line."""
from __future__ import annotations

import os
import time
from typing import IO


def open_file(folder: str, rank: int | str) -> int:
    """A descriptor of the file that gets both streams of a rank: FOLDER/rank-3.log, continued where it exists."""
    os.makedirs(folder, exist_ok=True)
    return os.open(os.path.join(folder, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def prefixed(text: bytes, rank: int) -> bytes:
    """Lines with "[rank 3] " before each; text that does not end a line gets an end."""
    return b"".join(b"[rank %d] %s\n" % (rank, line) for line in text.removesuffix(b"\n").split(b"\n"))


class Output:
    """One stream of one rank, cut into whole lines so that ranks do not write into each other's.

    stream: 1 or 2. index: of the process on its host.
    """

    def __init__(self, pipe: IO[bytes], stream: int, index: int) -> None:
        self._pipe, self.stream, self.index = pipe, stream, index
        self._rest = b""
        self._since = 0.0
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def close(self) -> None:
        self._pipe.close()

    def read(self) -> bytes | None:
        """The whole lines that can be passed on now; None at the end, after which rest() may still hold something."""
        try:
            chunk = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        if not chunk:
            return None
        if not self._rest:
            self._since = time.monotonic()
        lines, end, self._rest = (self._rest + chunk).rpartition(b"\n")
        if len(self._rest) >= 1 << 16:  # so long a line is none
            lines, end, self._rest = lines + end + self._rest, b"", b""
        return lines + end

    def rest(self, older_than: float = 0.0) -> bytes:
        """The start of a line that has waited for its end for so many seconds."""
        if self._rest and time.monotonic() - self._since >= older_than:
            taken, self._rest = self._rest, b""
            return taken
        return b""

    @property
    def waits(self) -> bool:
        return bool(self._rest)

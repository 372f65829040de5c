"""Checksums of checkpoint files: CRC-32 of blocks."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable

from torch import Tensor

BLOCK_BYTES = 4 << 20


def checksum(block: memoryview) -> str:
    """Return the CRC-32 of some bytes as 8 hexadecimal digits."""
    return f"{zlib.crc32(block):08x}"


def checksums(data: memoryview) -> str:
    """Return the checksums of all blocks, one after the other."""
    starts = range(0, len(data), BLOCK_BYTES)
    return "".join(checksum(data[start : start + BLOCK_BYTES]) for start in starts)


class BackgroundChecksums:
    """Computes the checksums of some memory in a thread, from start() on.

    The main thread makes this object: no other thread can start threads while the interpreter
    shuts down.
    """

    def __init__(self, data: Callable[[], Tensor]) -> None:
        self._data = data
        self._result: str | Exception = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="checksums")
        self._thread.start()

    def start(self) -> None:
        """Begin. Later calls do nothing."""
        self._started.set()

    def result(self) -> str:
        """Wait, and return the checksums of all blocks. start() must have been called."""
        self._thread.join()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _run(self) -> None:
        self._started.wait()
        try:
            self._result = checksums(memory(self._data()))
        except Exception as error:
            self._result = error


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without numpy."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(array).cast("B")

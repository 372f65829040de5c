"""Checksums of checkpoint files: CRC-32 of blocks."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable

from torch import Tensor

BLOCK_BYTES = 4 << 20


def checksum(block: Tensor) -> str:
    """Return the CRC-32 of some bytes, a uint8 tensor on the CPU, as 8 hexadecimal digits."""
    return f"{zlib.crc32(memory(block)):08x}"


def checksums(data: Tensor) -> list[tuple[int, str]]:
    """Return (bytes, checksum) of each block."""
    starts = range(0, data.numel(), BLOCK_BYTES)
    blocks = (data[start : start + BLOCK_BYTES] for start in starts)
    return [(block.numel(), checksum(block)) for block in blocks]


class BackgroundChecksums:
    """Computes the checksums of some memory in a thread, from start() on.

    The main thread makes this object: no other thread can start threads while the interpreter
    shuts down.
    """

    def __init__(self, data: Callable[[], Tensor]) -> None:
        self._data = data
        self._result: list[tuple[int, str]] | Exception = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="checksums")
        self._thread.start()

    def start(self) -> None:
        """Begin. Later calls do nothing."""
        self._started.set()

    def result(self) -> list[tuple[int, str]]:
        """Wait, and return (bytes, checksum) of each block. start() must have been called."""
        self._thread.join()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _run(self) -> None:
        self._started.wait()
        try:
            self._result = checksums(self._data())
        except Exception as error:
            self._result = error


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without numpy."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(array).cast("B")

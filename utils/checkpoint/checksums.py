"""Checksums of checkpoint files: CRC-32 of blocks."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Mapping

from torch import Tensor

from .format import TensorPlace

BLOCK_BYTES = 4 << 20


def checksum(block: memoryview) -> str:
    """Return the CRC-32 of some bytes as 8 hexadecimal digits."""
    return f"{zlib.crc32(block):08x}"


def checksums(data: memoryview) -> list[str]:
    """Return the checksum of each block."""
    starts = range(0, len(data), BLOCK_BYTES)
    return [checksum(data[start : start + BLOCK_BYTES]) for start in starts]


class BackgroundChecksums:
    """Computes the checksums of tensors in some memory in a thread, from start() on.

    The main thread makes this object: no other thread can start threads while the interpreter
    shuts down.
    """

    def __init__(self, places: Mapping[str, TensorPlace], data: Callable[[], Tensor]) -> None:
        self._places, self._data = places, data
        self._result: dict[str, list[str]] | Exception = {}
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="checksums")
        self._thread.start()

    def start(self) -> None:
        """Begin. Later calls do nothing."""
        self._started.set()

    def result(self) -> dict[str, list[str]]:
        """Wait, and return the checksums of the blocks of each tensor. After start()."""
        self._thread.join()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _run(self) -> None:
        self._started.wait()
        try:
            data = memory(self._data())
            self._result = {
                key: checksums(data[place.start : place.end]) for key, place in self._places.items()
            }
        except Exception as error:
            self._result = error


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without numpy."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(array).cast("B")

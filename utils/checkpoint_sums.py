"""The checksum of checkpoints, made by torch, because there is no fast one in the standard library.

Not here: which bytes it is made of (checkpoint_files.py).
"""
from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 4 << 20  # bytes
_COLUMNS = 1024  # 32-bit words in a row


def _odd(count: int, dtype: torch.dtype) -> Tensor:
    size = count * dtype.itemsize
    return torch.frombuffer(bytearray(hashlib.shake_128(f"checkpoint {dtype}".encode()).digest(size)), dtype=dtype) | 1


_BY_ROW, _BY_COLUMN = _odd(BLOCK // _COLUMNS // 4, torch.int32), _odd(_COLUMNS // 2, torch.int64)


def checksum(block: Tensor) -> str:
    """The checksum of up to BLOCK bytes, a uint8 tensor on the CPU: three to four times as fast as zlib's CRC-32.

    The bytes are rows of 4096. Two sets of sums are made: of each column of 32-bit words, weighted by the row, modulo
    2^32; of each row of 64-bit words, weighted by the column, modulo 2^64. BLAKE2b makes 16 bytes of all these sums.
    As all weights are odd, a sum in which one word alone has changed is another one. So what is found for certain (but
    for a collision of BLAKE2b) is: every change within 4096 bytes in a row, wherever they begin (each column has at
    most one changed word); every change of up to three words, such as three flipped bits (a row or a column has just
    one of them). Only a change of several words in several rows, whose differences cancel in all rows and all columns
    that they touch at once, is missed: for random ones by a chance of 2^-32 in each column and 2^-64 in each row.
    """
    size = block.numel()
    rest = -size % (4 * _COLUMNS)
    if rest:
        block = torch.cat([block, torch.zeros(rest, dtype=torch.uint8)])  # the number of bytes is known without it
    by_column = _BY_ROW[:block.numel() // _COLUMNS // 4] @ block.view(torch.int32).view(-1, _COLUMNS)
    by_row = block.view(torch.int64).view(-1, _COLUMNS // 2) @ _BY_COLUMN
    digest = hashlib.blake2b(memory(by_column), digest_size=16)
    digest.update(memory(by_row))
    return digest.hexdigest()


def checksums(data: Tensor) -> list[tuple[int, str]]:
    """(bytes, checksum) of each block."""
    blocks = (data[start:start + BLOCK] for start in range(0, data.numel(), BLOCK))
    return [(block.numel(), checksum(block)) for block in blocks]


class Sums:
    """The checksums of some memory, made by a thread of its own from when `go` is set.

    An object to be made by the main thread: others cannot start threads when the interpreter is about to end.
    """

    def __init__(self, data: Callable[[], Tensor]) -> None:
        self._data = data
        self._answer: list[tuple[int, str]] | Exception = []
        self.go = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="checksums")
        self._thread.start()

    def _run(self) -> None:
        self.go.wait()
        try:
            self._answer = checksums(self._data())
        except Exception as error:
            self._answer = error

    def result(self) -> list[tuple[int, str]]:
        """(bytes, checksum) of each block; go has to be set."""
        self._thread.join()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without numpy."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(array).cast("B")

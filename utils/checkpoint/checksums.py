"""The checksum of checkpoint files, computed by torch."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20
_ROW_WORDS = 1024  # 32-bit words in a row of a block


def _odd_weights(count: int, dtype: torch.dtype) -> Tensor:
    """Return the weights of a checksum, the same in every release: odd and all different."""
    size = count * dtype.itemsize
    random_bytes = hashlib.shake_128(f"checkpoint {dtype}".encode()).digest(size)
    return torch.frombuffer(bytearray(random_bytes), dtype=dtype) | 1


ROW_WEIGHTS = _odd_weights(BLOCK_BYTES // _ROW_WORDS // 4, torch.int32)
COLUMN_WEIGHTS = _odd_weights(_ROW_WORDS // 2, torch.int64)


def checksum(block: Tensor) -> str:
    """Return the checksum of up to BLOCK_BYTES bytes, a uint8 tensor on the CPU.

    It takes about half the time of zlib.crc32 (6.6 against 3.6 GB/s on one core).

    The bytes form rows of 4096. Two sets of sums are computed: for each column of 32-bit words,
    weighted by row, modulo 2^32; for each row of 64-bit words, weighted by column, modulo 2^64.
    BLAKE2b makes 16 bytes of all sums. All weights are odd, so a sum changes if one of its words
    changes. Therefore, but for a collision of BLAKE2b, these changes are always found:

    - every change within 4096 consecutive bytes: each column has at most one changed word;
    - every change of up to three words, such as three flipped bits: some row or some column has
      exactly one of them.

    A change of several words in several rows is missed only if its differences cancel in all rows
    and all columns that they touch. For random changes the probability is 2^-32 per column and
    2^-64 per row.
    """
    size = block.numel()
    padding = -size % (4 * _ROW_WORDS)
    if padding:  # unambiguous, because the size is stored with the checksum
        block = torch.cat([block, torch.zeros(padding, dtype=torch.uint8)])

    row_count = block.numel() // _ROW_WORDS // 4
    column_sums = ROW_WEIGHTS[:row_count] @ block.view(torch.int32).view(-1, _ROW_WORDS)
    row_sums = block.view(torch.int64).view(-1, _ROW_WORDS // 2) @ COLUMN_WEIGHTS

    digest = hashlib.blake2b(memory(column_sums), digest_size=16)
    digest.update(memory(row_sums))
    return digest.hexdigest()


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

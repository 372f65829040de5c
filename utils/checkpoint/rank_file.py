"""Write and read one rank's file in safetensors format; the manifest has its checksums."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import disk
from .format import (
    SAFETENSORS_TYPES,
    Damaged,
    FileEntry,
    TensorPlace,
    Unreadable,
    place_tensors,
    render_header,
)

_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
_DIGITS = 8  # hexadecimal digits of a checksum
_KEY = "ddpkit"  # key of the kit's entry in a file's metadata


@dataclass(frozen=True)
class Header:
    """The contents of a rank file's header."""

    metadata: Any
    places: dict[str, TensorPlace]


def write_rank_file(
    path: Path,
    places: dict[str, TensorPlace],
    data: Tensor,
    data_checksums: BackgroundChecksums,
    metadata: Mapping[str, object],
) -> FileEntry:
    """Write one rank's file, sync it, and return its entry for the manifest.

    places: positions of the tensors in `data`, without gaps.
    data: all bytes, as uint8 on the CPU.
    """
    header = memoryview(render_header(places, {_KEY: json.dumps(metadata)}))
    try:
        # The CPU is free while the disk syncs. Earlier, checksums would slow down the writes.
        disk.write_file(path, header, memory(data), written=data_checksums.start)
        disk.sync_folder(path.parent)
    finally:
        data_checksums.start()
    return {
        "name": path.name,
        "size": len(header) + data.numel(),
        "header_size": len(header),
        "checksums": checksum(header) + data_checksums.result(),
    }


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a safetensors file; a complete file replaces an older one.

    Raises ValueError for a type that safetensors lacks.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_TYPES:
            known = ", ".join(str(dtype) for dtype in SAFETENSORS_TYPES)
            raise ValueError(
                f"{name} is of type {tensor.dtype}; expected one of {known}. Convert it"
            )
    places = place_tensors(tensors)
    header = memoryview(render_header(places, {"format": "pt"}))
    disk.replace_file(path, header, *(memory(tensors[name].contiguous()) for name in places))


def read_header(folder: Path, entry: FileEntry) -> Header:
    """Return the header of a file, checked. Raises Damaged, Unreadable or OSError."""
    raw = memoryview(bytearray(entry["header_size"]))
    with _opened(folder, entry) as file:
        _read_block(file, entry, 0, [raw], entry["checksums"][:_DIGITS])
    fields = json.loads(bytes(raw[8:]))
    metadata = json.loads(fields.pop("__metadata__")[_KEY])
    places = {
        name: TensorPlace(_TYPES[field["dtype"]], field["shape"], *field["data_offsets"])
        for name, field in fields.items()
    }
    return Header(metadata, places)


def read_tensors(folder: Path, entry: FileEntry) -> dict[str, Tensor]:
    """Return all tensors of a file, checked. Types that safetensors lacks are returned as bytes.

    Raises Damaged, Unreadable or OSError.
    """
    places = read_header(folder, entry).places
    tensors = {name: allocate(place.shape, place.dtype) for name, place in places.items()}
    read_data(
        folder, entry, [(places[name].start, memory(tensor)) for name, tensor in tensors.items()]
    )
    return tensors


def check_file(folder: Path, entry: FileEntry) -> None:
    """Read a whole file, a block at a time. Raises Damaged, Unreadable or OSError."""
    read_header(folder, entry)
    data_bytes = entry["size"] - entry["header_size"]
    block = memoryview(bytearray(min(BLOCK_BYTES, data_bytes)))
    with _opened(folder, entry) as file:
        for number, start in enumerate(range(0, data_bytes, BLOCK_BYTES), start=1):
            expected = entry["checksums"][number * _DIGITS :][:_DIGITS]
            view = block[: data_bytes - start]
            _read_block(file, entry, entry["header_size"] + start, [view], expected)


def allocate(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor. Raises Unreadable if there is not enough."""
    try:
        return torch.empty(tuple(sizes), dtype=dtype)
    except (RuntimeError, MemoryError):
        raise Unreadable(
            f"a tensor of size {list(sizes)} needs more memory than this host has. Use a larger "
            "host, or more hosts"
        ) from None


def read_data(folder: Path, entry: FileEntry, pieces: Collection[tuple[int, memoryview]]) -> None:
    """Fill each piece of memory with a file's data, from the given offset on.

    Each block that contains a piece is read once, and checked. Raises Damaged or OSError.
    """
    pieces_by_block: dict[int, list[tuple[int, memoryview]]] = {}
    for start, view in sorted(pieces, key=lambda piece: piece[0]):
        for number in range(start // BLOCK_BYTES, -(-(start + len(view)) // BLOCK_BYTES)):
            pieces_by_block.setdefault(number, []).append((start, view))
    data_bytes = entry["size"] - entry["header_size"]

    def read_and_check(number: int) -> None:
        begin = position = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, data_bytes)
        views = []
        for start, view in [*pieces_by_block[number], (end, memoryview(b""))]:
            if start > position:  # bytes read only for the checksum
                views.append(memoryview(bytearray(start - position)))
            piece = view[max(begin - start, 0) : max(end - start, 0)]
            views.append(piece)
            position = max(start, begin) + len(piece)
        expected = entry["checksums"][(number + 1) * _DIGITS :][:_DIGITS]
        _read_block(file, entry, entry["header_size"] + begin, views, expected)

    with _opened(folder, entry) as file, ThreadPoolExecutor(2) as readers:
        # Two threads: one computes a checksum while the other reads.
        for _ in readers.map(read_and_check, pieces_by_block):
            pass


@contextlib.contextmanager
def open_regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """Open a file; yield its descriptor and its size in bytes.

    Raises Damaged for a link, which may lead out of the folder, and for a pipe, which may block.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path.name, f"{path.name} is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Damaged(
                path.name, f"{path.name} is a link or a socket; expected a file"
            ) from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(path.name, f"{path.name} is a folder or a device; expected a file")
        yield file, found.st_size
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(path.name, f"{path.name} cannot be read: {error.strerror}") from None
        raise
    finally:
        os.close(file)


@contextlib.contextmanager
def _opened(folder: Path, entry: FileEntry) -> Iterator[int]:
    """Open a rank's file; yield its descriptor."""
    with open_regular_file(folder / entry["name"]) as (file, size):
        if size != entry["size"]:
            raise Damaged(
                entry["name"], f"{entry['name']} has {size} bytes instead of {entry['size']}"
            )
        yield file


def _read_block(
    file: int, entry: FileEntry, start: int, views: Sequence[memoryview], expected: str
) -> None:
    """Fill memory with one block of a file, which starts at `start`, and check its checksum."""
    position, crc = start, 0
    for view in views:
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], position)
            if count == 0:
                raise Damaged(entry["name"], f"{entry['name']} ends after {position} bytes")
            done, position = done + count, position + count
        crc = zlib.crc32(view, crc)
    if f"{crc:08x}" != expected:
        place = f"bytes {start} to {position - 1}"
        raise Damaged(entry["name"], f"{entry['name']}: {place} do not match their checksum")


BLOCK_BYTES = 4 << 20


def checksum(block: memoryview) -> str:
    """Return the CRC-32 of a block as 8 hexadecimal digits."""
    return f"{zlib.crc32(block):08x}"


def checksums(data: memoryview) -> str:
    """Return the checksums of all blocks, joined."""
    starts = range(0, len(data), BLOCK_BYTES)
    return "".join(checksum(data[start : start + BLOCK_BYTES]) for start in starts)


class BackgroundChecksums:
    """Computes the checksums of a piece of memory in a thread.

    The main thread must create it: while the interpreter shuts down, no other thread can start
    one.
    """

    def __init__(self, data: Callable[[], Tensor]) -> None:
        self._data = data
        self._result: str | Exception = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="checksums")
        self._thread.start()

    def start(self) -> None:
        """Start the computation. Later calls do nothing."""
        self._started.set()

    def result(self) -> str:
        """Wait, and return the checksums of all blocks. Call start() first."""
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

"""Write and read one rank's file: safetensors, whose tensors and checksums the manifest lists."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from . import disk
from .checksums import BLOCK_BYTES, BackgroundChecksums, checksum, checksums, memory
from .entries import DTYPES
from .format import (
    SAFETENSORS_TYPES,
    Damaged,
    FileEntry,
    StoredTensor,
    TensorPlace,
    Unreadable,
    place_tensors,
    render_header,
)

_KEY = "ddpkit"  # of the kit's part in the metadata of a file


def write_rank_file(
    path: Path,
    places: dict[str, TensorPlace],
    data: Tensor,
    data_checksums: BackgroundChecksums,
    metadata: Mapping[str, object],
    *,
    local: list[str],
    slices: Mapping[str, tuple[str, tuple[int, ...]]],
) -> FileEntry:
    """Write one rank's file, sync it, and return its entry for the manifest.

    places: the tensors in `data`, without gaps.
    data: uint8 on the CPU.
    slices: of the keys that are slices, the tensor and the offsets in it.
    """
    header = render_header(places, {_KEY: json.dumps(metadata)})
    try:
        # The CPU is free while the disk syncs. Earlier, checksums would slow down the writes.
        disk.write_file(path, memoryview(header), memory(data), written=data_checksums.start)
        disk.sync_folder(path.parent)
    finally:
        data_checksums.start()
    found, tensors = data_checksums.result(), {}
    for key, place in places.items():
        name, offsets = slices.get(key, (key, (0,) * len(place.shape)))
        dtype, start = str(place.dtype).removeprefix("torch."), len(header) + place.start
        tensors[key] = StoredTensor(name, dtype, offsets, place.shape, start, found[key])
    return {
        "name": path.name,
        "size": len(header) + data.numel(),
        "header": (len(header), checksums(memoryview(header))),
        "tensors": tensors,
        "local": local,
    }


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into one safetensors file, which replaces an older one when it is complete.

    Raises ValueError for a type that safetensors does not have.
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


def read_metadata(folder: Path, entry: FileEntry) -> dict[str, object]:
    """Return the metadata of a file, checked. Raises Damaged, Unreadable or OSError."""
    size, expected = entry["header"]
    header = _allocate(entry, (size,), torch.uint8)
    _read(folder, entry, [(0, memory(header), expected)])
    metadata: dict[str, object] = json.loads(
        json.loads(bytes(memory(header)[8:]))["__metadata__"][_KEY]
    )
    return metadata


def read_tensors(
    folder: Path, entry: FileEntry, keys: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return tensors of a file, each in memory of its own; default: all, after the metadata.

    Every byte that is read is checked. Raises Damaged, Unreadable or OSError.
    """
    if keys is None:
        read_metadata(folder, entry)
        keys = entry["tensors"].keys()
    tensors, pieces = {}, []
    for key in keys:
        stored = StoredTensor(*entry["tensors"][key])
        tensors[key] = _allocate(entry, stored.sizes, DTYPES[stored.dtype])
        pieces.append((stored.start, memory(tensors[key]), stored.checksums))
    _read(folder, entry, pieces)
    return tensors


@contextlib.contextmanager
def open_regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """Open a file; yield its descriptor and its size in bytes.

    Raises Damaged for a link, which may lead out of the folder, and for a pipe, which may block.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Damaged(f"{path.name} is a link or a socket; expected a file") from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path.name} is a folder or a device; expected a file")
        yield file, found.st_size
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
        raise
    finally:
        os.close(file)


def _allocate(entry: FileEntry, sizes: Collection[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(tuple(sizes), dtype=dtype)
    except (RuntimeError, MemoryError):
        raise Unreadable(
            f"{entry['name']} needs more memory than this host has. Use a larger host"
        ) from None


def _read(
    folder: Path, entry: FileEntry, pieces: Collection[tuple[int, memoryview, Collection[str]]]
) -> None:
    """Fill each piece of memory with the bytes from a place on, and check them."""

    def read_and_check(block: tuple[int, memoryview, str]) -> None:
        start, view, expected = block
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], start + done)
            if count == 0:
                raise Damaged(f"{path.name} ends after {start + done} bytes")
            done += count
        if checksum(view) != expected:
            place = f"bytes {start} to {start + len(view) - 1}"
            raise Damaged(f"{path.name}: {place} do not match their checksum")

    blocks = [
        (start + begin, view[begin : begin + BLOCK_BYTES], expected)
        for start, view, all_expected in pieces
        for begin, expected in zip(range(0, len(view), BLOCK_BYTES), all_expected, strict=True)
    ]
    path = folder / entry["name"]
    with open_regular_file(path) as (file, size), ThreadPoolExecutor(2) as readers:
        if size != entry["size"]:
            raise Damaged(f"{path.name} has {size} bytes instead of {entry['size']}")
        # One thread computes a checksum while the other reads.
        for _ in readers.map(read_and_check, blocks):
            pass

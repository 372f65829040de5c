"""Write and read one rank's file: safetensors, with a checksum for each block in the manifest."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import disk
from .checksums import BackgroundChecksums, checksum, checksums, memory
from .format import (
    SAFETENSORS_TYPES,
    Damaged,
    FileEntry,
    SliceEntry,
    TensorPlace,
    Unreadable,
    parse_header,
    place_tensors,
    render_header,
)

Choose = Callable[[dict[str, str]], Collection[str]]


@dataclass(frozen=True)
class _Block:
    start: int  # byte in the file
    end: int
    checksum: str


def write_rank_file(
    path: Path,
    places: dict[str, TensorPlace],
    data: Tensor,
    data_checksums: BackgroundChecksums,
    metadata: dict[str, str],
    *,
    replicated: bool,
    slices: dict[str, SliceEntry],
) -> FileEntry:
    """Write one rank's file, sync it, and return its entry for the manifest.

    places: the tensors in `data`, without gaps.
    data: uint8 on the CPU.
    """
    header = torch.frombuffer(bytearray(render_header(places, metadata)), dtype=torch.uint8)
    try:
        # The CPU is free while the disk syncs. Earlier, checksums would slow down the writes.
        disk.write_file(path, memory(header), memory(data), written=data_checksums.start)
        disk.sync_folder(path.parent)
    finally:
        data_checksums.start()
    return {
        "name": path.name,
        "size": header.numel() + data.numel(),
        "blocks": checksums(header) + data_checksums.result(),
        "replicated": replicated,
        "slices": slices,
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


def read_rank_file(
    folder: Path, entry: FileEntry, choose: Choose | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors of one file. Every byte that is read is checked.

    The tensors are views of one block of memory.

    entry: from the manifest.
    choose: returns the names of the tensors to read, given the metadata; default: all.
    Raises Damaged, Unreadable or OSError.
    """
    path = folder / entry["name"]
    file, size = open_regular_file(path)
    try:
        if size != entry["size"]:
            raise Damaged(f"{path.name} has {size} bytes instead of {entry['size']}")
        data = _allocate(path, size)
        metadata, places, start = _read_blocks_of(path, file, data, entry, choose)
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
        raise
    finally:
        os.close(file)

    tensors = {}
    for name, place in places.items():
        raw = data[start + place.start : start + place.end]
        if (start + place.start) % place.dtype.itemsize:
            raw = raw.clone()  # another program wrote the file; torch needs aligned memory
        tensors[name] = raw.view(place.dtype).view(place.shape)
    return metadata, tensors


def open_regular_file(path: Path) -> tuple[int, int]:
    """Open a file and return its descriptor and its size in bytes.

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
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise Damaged(f"{path.name} is a folder or a device; expected a file")
    return file, found.st_size


def _allocate(path: Path, size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8)  # pages that are not read take no memory
    except (RuntimeError, MemoryError):
        raise Unreadable(
            f"{path.name} needs {size} bytes of memory, which this host does not have. "
            "Use a larger host"
        ) from None


def _read_blocks_of(
    path: Path, file: int, data: Tensor, entry: FileEntry, choose: Choose | None
) -> tuple[dict[str, str], dict[str, TensorPlace], int]:
    """Read all blocks, or those of the chosen tensors, into `data`.

    Returns the metadata, the tensors and the first byte behind the header.
    """
    ends = itertools.accumulate(length for length, _ in entry["blocks"])
    blocks = [
        _Block(end - length, end, expected)
        for end, (length, expected) in zip(ends, entry["blocks"], strict=True)
    ]
    _read_blocks(path, file, data, blocks[:1] if choose else blocks)

    start = 8 + int.from_bytes(memory(data[:8]), "little")
    if choose:
        rest_of_header = [block for block in blocks[1:] if block.start < start]
        _read_blocks(path, file, data, rest_of_header)
    metadata, places = parse_header(bytes(memory(data[8:start])))

    if choose:
        chosen = choose(metadata)
        places = {name: place for name, place in places.items() if name in chosen}
        ranges = sorted((start + place.start, start + place.end) for place in places.values())
        unread = [block for block in blocks[1:] if block.start >= start]
        _read_blocks(path, file, data, _overlapping(unread, ranges))
    return metadata, places, start


def _overlapping(blocks: Sequence[_Block], ranges: Sequence[tuple[int, int]]) -> list[_Block]:
    """Return the blocks that have bytes of any range. Both are sorted."""
    found, number = [], 0
    for block in blocks:
        while number < len(ranges) and ranges[number][1] <= block.start:
            number += 1
        if number < len(ranges) and ranges[number][0] < block.end:
            found.append(block)
    return found


def _read_blocks(path: Path, file: int, data: Tensor, blocks: Sequence[_Block]) -> None:
    view = memory(data)

    def read_and_check(block: _Block) -> None:
        done = block.start
        while done < block.end:
            count = os.preadv(file, [view[done : block.end]], done)
            if count == 0:
                raise Damaged(f"{path.name} ends after {done} bytes instead of {len(view)}")
            done += count
        if checksum(data[block.start : block.end]) != block.checksum:
            place = f"bytes {block.start} to {block.end - 1}"
            raise Damaged(f"{path.name}: {place} do not match their checksum")

    with ThreadPoolExecutor(2) as readers:  # one computes a checksum while the other reads
        for _ in readers.map(read_and_check, blocks):
            pass

"""Checkpoints as folders on disk: written so that a power cut leaves none torn, read only where every byte is right.

Not here: what the bytes mean (checkpoint_state.py), when and by whom they are written (checkpoint.py).
"""
from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .checkpoint_sums import Sums, checksum, checksums, memory

# Every call that changes the disk goes through this name, so that a test can replay a power cut after each of them.
disk: Any = os

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")  # step-000001200; step-000001200-2 when that step was saved once more
_SAVING, _DELETING, _DAMAGED = ".saving-", ".deleting-", ".damaged"
_WRITE = 16 << 20  # bytes per call

# What safetensors knows; tensors of all other types are stored as bytes, their type is in the tree of the state.
_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}

_CAUSES = {
    errno.ENOSPC: "no space is left on its file system. Free some",
    errno.EDQUOT: "the disk quota is used up. Free some space, or ask for more",
    errno.EROFS: "its file system is read-only. Choose another folder",
    errno.EACCES: "this user may not write there. Change the permissions, or choose another folder",
    errno.EPERM: "this user may not write there. Change the permissions, or choose another folder",
    errno.ENOENT: "it, or the save's temporary folder in it, is not there. Was it removed, does another job clean it "
                  "up, or do not all hosts share it?",
}


class Damaged(Exception):
    """A checkpoint whose files are not what was written; the message names the file and the reason."""


class Unreadable(Exception):
    """A checkpoint that may be whole, but cannot be used from here."""


def cause(error: OSError) -> str:
    """What the system refused, and what to do."""
    return _CAUSES.get(error.errno or 0, f"{error.strerror or error}. Look for the cause on that host")


# --- names

def names(folder: Path) -> list[str]:
    """The committed checkpoints, oldest first."""
    found = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2] or 1)))]


def step_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1])


def part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


# --- writing

def begin(folder: Path) -> Path:
    """A new, empty folder for the files of one checkpoint, under a name that no reader takes."""
    temporary = folder / f"{_SAVING}{secrets.token_hex(8)}"
    disk.mkdir(temporary)
    return temporary


def write_part(path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]], data: torch.Tensor,
               sums: Sums, metadata: dict[str, str]) -> dict[str, Any]:
    """Write one rank's file and sync it; returns its entry for the manifest.

    tensors: (name, type, shape, first byte, bytes) of each, without gaps. data: those bytes, uint8 on the CPU.
    The file is in the safetensors format: 8 bytes with the length of the header, the header as JSON, the data.
    """
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, dtype, shape, start, size in tensors:
        known = _SAFETENSORS.get(dtype)
        fields[name] = {"dtype": known or "U8", "shape": shape if known else [size],
                        "data_offsets": [start, start + size]}
    text = json.dumps(fields).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so that every tensor is aligned when the file is in memory as a whole
    header = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    try:
        # While the disk works there is nothing else to do; earlier, the sums would slow down the copy to the system.
        _write_file(path, memory(header), memory(data), written=sums.go.set)
        _sync_folder(path.parent)
    finally:
        sums.go.set()
    return {"name": path.name, "size": header.numel() + data.numel(), "blocks": checksums(header) + sums.result()}


def commit(temporary: Path, step: int, world_size: int, entries: Sequence[dict[str, Any]]) -> str:
    """Make the files in `temporary` the newest checkpoint of that step, durably; returns its name."""
    for entry in entries:
        there = os.stat(temporary / entry["name"]).st_size
        if there != entry["size"]:
            raise OSError(errno.EIO, f"{entry['name']} has {there} bytes after {entry['size']} were written")
    fields = {"format": FORMAT, "step": step, "world_size": world_size, "files": list(entries)}
    _write_file(temporary / MANIFEST, memoryview(_render(fields)))
    _sync_folder(temporary)
    folder = temporary.parent
    name, count = f"step-{step:09d}", 1
    while (folder / name).exists():
        count += 1
        name = f"step-{step:09d}-{count}"
    disk.rename(temporary, folder / name)
    _sync_folder(folder)
    return name


def _render(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields)
    return f'{{"manifest": {text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _write_file(path: Path, *pieces: memoryview, written: Callable[[], None] = lambda: None) -> None:
    """Write and sync a new file. written: called when the system has all bytes and the disk not yet."""
    file = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += disk.write(file, piece[done:done + _WRITE])
        written()
        disk.fsync(file)
    finally:
        disk.close(file)  # network file systems may say only here that a quota is used up


def _sync_folder(folder: Path) -> None:
    file = disk.open(folder, os.O_RDONLY)
    try:
        disk.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing for folders
            raise
    finally:
        disk.close(file)


# --- reading

def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, whose every byte is checked. Raises Damaged, Unreadable or OSError."""
    if not folder.is_dir():
        raise Unreadable(f"{folder} is not there, although rank 0 sees it; expected a folder on a file system that all "
                         "hosts share. Choose one")
    raw = _read(folder / MANIFEST, None)
    try:
        fields = json.loads(raw)["manifest"]
        whole = _render(fields) == raw
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{MANIFEST}: its text does not agree with its checksum")
    if fields["format"] != FORMAT:
        raise Unreadable(f"{folder} has format {fields['format']}; expected {FORMAT}. Use the version of the kit that "
                         "wrote it")
    answer: dict[str, Any] = fields
    return answer


def _read(path: Path, size: int | None) -> bytes:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    if size is not None and len(raw) != size:
        raise Damaged(f"{path.name} has {len(raw)} bytes instead of {size}")
    return raw


def read_part(folder: Path, entry: dict[str, Any]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of one file, after every byte was checked. The tensors are parts of one block of memory.

    Raises Damaged or OSError.
    """
    data = _read_checked(folder / entry["name"], entry)
    start = 8 + int.from_bytes(memory(data[:8]), "little")
    fields = json.loads(bytes(memory(data[8:start])))
    metadata: dict[str, str] = fields.pop("__metadata__")
    dtypes = {name: dtype for dtype, name in _SAFETENSORS.items()}
    tensors = {}
    for name, field in fields.items():
        first, end = field["data_offsets"]
        tensors[name] = data[start + first:start + end].view(dtypes[field["dtype"]]).view(field["shape"])
    return metadata, tensors


def _read_checked(path: Path, entry: dict[str, Any]) -> torch.Tensor:
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    try:
        size = os.fstat(file).st_size
        if size != entry["size"]:
            raise Damaged(f"{path.name} has {size} bytes instead of {entry['size']}")
        data = torch.empty(size, dtype=torch.uint8)
        view = memory(data)
        starts = [0, *itertools.accumulate(length for length, _ in entry["blocks"])]

        def check(start: int, end: int, expected: str) -> None:
            done = start
            while done < end:
                count = os.preadv(file, [view[done:end]], done)
                if count == 0:
                    raise Damaged(f"{path.name} ends after {done} bytes instead of {size}")
                done += count
            if checksum(data[start:end]) != expected:
                raise Damaged(f"{path.name}: bytes {start} to {end - 1} do not agree with their checksum")

        with ThreadPoolExecutor(2) as readers:  # one makes a sum while the other reads
            for _ in readers.map(check, starts[:-1], starts[1:], [expected for _, expected in entry["blocks"]]):
                pass
        return data
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
        raise
    finally:
        os.close(file)


# --- removing

def set_aside(folder: Path, name: str) -> Path:
    """Rename a damaged checkpoint so that no reader takes it; returns where it is now."""
    aside, count = folder / f"{name}{_DAMAGED}", 1
    while aside.exists():
        count += 1
        aside = folder / f"{name}{_DAMAGED}-{count}"
    disk.rename(folder / name, aside)
    _sync_folder(folder)
    return aside


def retire(folder: Path, keep: int, keep_every: int | None) -> None:
    """Delete all checkpoints but the last `keep` and those whose step is a multiple of `keep_every`."""
    newest = {step_of(name): name for name in names(folder)}  # of a step that was saved twice, the second
    kept = {newest[step] for step in sorted(newest)[-keep:]}
    kept |= {name for step, name in newest.items() if keep_every and step % keep_every == 0}
    for name in names(folder):
        if name not in kept:
            leaving = folder / f"{_DELETING}{secrets.token_hex(8)}"  # no reader shall meet half of it
            disk.rename(folder / name, leaving)
            remove(leaving)


def remove_leftovers(folder: Path) -> None:
    """Delete what saves and deletions that were cut off have left."""
    for name in os.listdir(folder):
        if name.startswith((_SAVING, _DELETING)):
            remove(folder / name)


def remove(folder: Path) -> None:
    """Delete a folder of files; what is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(folder / name)
        disk.rmdir(folder)

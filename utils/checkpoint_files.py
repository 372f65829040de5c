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
import stat
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from . import checkpoint_owner
from .checkpoint_format import FORMAT, SAFETENSORS, parse_header, parse_manifest, render_manifest
from .checkpoint_format import MANIFEST as MANIFEST
from .checkpoint_format import Damaged as Damaged
from .checkpoint_format import Unreadable as Unreadable
from .checkpoint_format import part_name as part_name
from .checkpoint_sums import Sums, checksum, checksums, memory

# Every call that changes the disk goes through this name, so that a test can replay a power cut after each of them.
disk: Any = os

_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")  # step-000001200; step-000001200-2 when that step was saved once more
_SAVING, _DELETING, _DAMAGED = ".saving-", ".deleting-", ".damaged"
_WRITE = 16 << 20  # bytes per call

_open: set[Path] = set()  # the temporary folders that this process is writing
_LARGEST_MANIFEST = 1 << 30  # bytes

Block = tuple[int, int, str]  # first byte, end, checksum
Layout = Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]  # name, type, shape, first byte, bytes

_CAUSES = {
    errno.ENOSPC: "no space is left on its file system. Free some",
    errno.EDQUOT: "the disk quota is used up. Free some space, or ask for more",
    errno.EROFS: "its file system is read-only. Choose another folder",
    errno.EACCES: "this user may not write there. Change the permissions, or choose another folder",
    errno.EPERM: "this user may not write there. Change the permissions, or choose another folder",
    errno.ENOENT: "it, or the save's temporary folder in it, is not there. Was it removed, does another job clean it "
                  "up, or do not all hosts share it?",
}


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


# --- writing

def begin(folder: Path) -> Path:
    """A new, empty folder for the files of one checkpoint, under a name that no reader takes."""
    temporary = folder / f"{_SAVING}{checkpoint_owner.owner()}.{secrets.token_hex(8)}"
    disk.mkdir(temporary)
    _open.add(temporary)
    return temporary


def write_part(path: Path, tensors: Layout, data: torch.Tensor,
               sums: Sums, metadata: dict[str, str]) -> dict[str, Any]:
    """Write one rank's file and sync it; returns its entry for the manifest.

    tensors: (name, type, shape, first byte, bytes) of each, without gaps. data: those bytes, uint8 on the CPU.
    The file is in the safetensors format: 8 bytes with the length of the header, the header as JSON, the data.
    """
    header = _render_header(tensors, metadata)
    try:
        # While the disk works there is nothing else to do; earlier, the sums would slow down the copy to the system.
        _write_file(path, memory(header), memory(data), written=sums.go.set)
        _sync_folder(path.parent)
    finally:
        sums.go.set()
    return {"name": path.name, "size": header.numel() + data.numel(), "blocks": checksums(header) + sums.result()}


def _render_header(tensors: Layout, metadata: dict[str, str]) -> torch.Tensor:
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, dtype, shape, start, size in tensors:
        known = SAFETENSORS.get(dtype)
        fields[name] = {"dtype": known or "U8", "shape": shape if known else [size],
                        "data_offsets": [start, start + size]}
    text = json.dumps(fields).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so that every tensor is aligned when the file is in memory as a whole
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)


def write_plain(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors into one safetensors file, whole or not at all. Raises ValueError for what it cannot hold."""
    layout, first = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in SAFETENSORS:
            known = ", ".join(str(dtype) for dtype in SAFETENSORS)
            raise ValueError(f"{name} is of type {tensor.dtype}; expected one of {known}. Convert it")
        layout.append((name, tensor.dtype, tuple(tensor.shape), first, tensor.nbytes))
        first += tensor.nbytes
    temporary = path.with_name(f".export-{secrets.token_hex(8)}")
    try:
        _write_file(temporary, memory(_render_header(layout, {"format": "pt"})),
                    *(memory(tensors[name].contiguous()) for name, *_ in layout))
        disk.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    _sync_folder(path.parent)


def commit(temporary: Path, step: int, world_size: int, entries: Sequence[dict[str, Any]],
           metric: float | None = None) -> str:
    """Make the files in `temporary` the newest checkpoint of that step, durably; returns its name."""
    for entry in entries:
        there = os.stat(temporary / entry["name"]).st_size
        if there != entry["size"]:
            raise OSError(errno.EIO, f"{entry['name']} has {there} bytes after {entry['size']} were written")
    fields = {"format": FORMAT, "step": step, "world_size": world_size, "metric": metric, "files": list(entries)}
    _write_file(temporary / MANIFEST, memoryview(render_manifest(fields)))
    _sync_folder(temporary)
    folder = temporary.parent
    name, count = f"step-{step:09d}", 1
    while os.path.lexists(folder / name):
        count += 1
        name = f"step-{step:09d}-{count}"
    disk.rename(temporary, folder / name)
    _open.discard(temporary)
    _sync_folder(folder)
    return name


def abandon(temporary: Path) -> None:
    """Note that this process no longer writes into a temporary folder: the next remove_leftovers() deletes it."""
    _open.discard(temporary)


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
    """The manifest, whose every byte and field is checked. Raises Damaged, Unreadable or OSError."""
    if not os.path.lexists(folder):
        raise Unreadable(f"{folder} is not there, although rank 0 sees it; expected a folder on a file system that all "
                         "hosts share. Choose one")
    file, size = _open_file(folder / MANIFEST)
    try:
        if size > _LARGEST_MANIFEST:
            raise Damaged(f"{MANIFEST} has {size} bytes; expected at most {_LARGEST_MANIFEST}")
        with open(file, "rb", closefd=False) as opened:
            raw = opened.read(size + 1)
    finally:
        os.close(file)
    fields = parse_manifest(raw)
    if _NAME.fullmatch(folder.name) and fields["step"] != step_of(folder.name):
        raise Unreadable(f"{MANIFEST}: step is {fields['step']}; expected {step_of(folder.name)}, as in the name of "
                         "its folder. Give the folder its name again")
    return fields


def _open_file(path: Path) -> tuple[int, int]:
    """An open file and its size. Neither a link out of the folder nor a pipe, which would block, is opened."""
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


def read_part(folder: Path, entry: dict[str, Any], choose: Callable[[dict[str, str]], Collection[str]] | None = None,
              ) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of one file, after every byte was checked. The tensors are parts of one block of memory.

    entry: of the manifest. choose: given the metadata, the names of the tensors to read; default: all.
    Raises Damaged, Unreadable or OSError.
    """
    path = folder / entry["name"]
    file, size = _open_file(path)
    try:
        if size != entry["size"]:
            raise Damaged(f"{path.name} has {size} bytes instead of {entry['size']}")
        try:
            data = torch.empty(size, dtype=torch.uint8)  # what is not read takes no memory
        except (RuntimeError, MemoryError):
            raise Unreadable(f"{path.name} needs {size} bytes of memory, which are not to be had. Use a larger host"
                             ) from None
        ends = list(itertools.accumulate(length for length, _ in entry["blocks"]))
        blocks = [(end - length, end, expected) for end, (length, expected) in zip(ends, entry["blocks"], strict=True)]
        _read_blocks(path, file, data, blocks[:1] if choose else blocks)
        start = 8 + int.from_bytes(memory(data[:8]), "little")
        if start > size:
            raise Damaged(f"{path.name}: its header has {start - 8} bytes; expected at most {size - 8}")
        if choose:
            _read_blocks(path, file, data, [block for block in blocks[1:] if block[0] < start])
        metadata, fields = parse_header(bytes(memory(data[8:start])), path.name, size - start)
        if choose:
            chosen = choose(metadata)
            fields = {name: field for name, field in fields.items() if name in chosen}
            wanted = sorted((start + field.first, start + field.end) for field in fields.values())
            _read_blocks(path, file, data, [block for block in _overlapping(blocks[1:], wanted) if block[0] >= start])
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
        raise
    finally:
        os.close(file)
    tensors = {}
    for name, field in fields.items():
        raw = data[start + field.first:start + field.end]
        if (start + field.first) % field.dtype.itemsize:
            raw = raw.clone()  # of another program: torch wants it aligned
        tensors[name] = raw.view(field.dtype).view(field.shape)
    return metadata, tensors


def _overlapping(blocks: Sequence[Block], ranges: Sequence[tuple[int, int]]) -> list[Block]:
    """The blocks that have bytes of any range; both are sorted."""
    found, number = [], 0
    for block in blocks:
        while number < len(ranges) and ranges[number][1] <= block[0]:
            number += 1
        if number < len(ranges) and ranges[number][0] < block[1]:
            found.append(block)
    return found


def _read_blocks(path: Path, file: int, data: torch.Tensor, blocks: Sequence[Block]) -> None:
    view = memory(data)

    def check(block: Block) -> None:
        start, end, expected = block
        done = start
        while done < end:
            count = os.preadv(file, [view[done:end]], done)
            if count == 0:
                raise Damaged(f"{path.name} ends after {done} bytes instead of {len(view)}")
            done += count
        if checksum(data[start:end]) != expected:
            raise Damaged(f"{path.name}: bytes {start} to {end - 1} do not agree with their checksum")

    with ThreadPoolExecutor(2) as readers:  # one makes a sum while the other reads
        for _ in readers.map(check, blocks):
            pass


# --- removing: links are removed, and what they point to is left alone

def set_aside(folder: Path, name: str) -> Path:
    """Rename a damaged checkpoint so that no reader takes it; returns where it is now."""
    aside, count = folder / f"{name}{_DAMAGED}", 1
    while os.path.lexists(aside):
        count += 1
        aside = folder / f"{name}{_DAMAGED}-{count}"
    disk.rename(folder / name, aside)
    _sync_folder(folder)
    return aside


def retire(folder: Path, keep: int, keep_every: int | None, best: Collection[str] = ()) -> None:
    """Delete all checkpoints but the last `keep`, those whose step is a multiple of `keep_every`, and `best`.

    What one that stays links to stays too. Goes on after an OSError, and raises it at the end.
    """
    newest = {step_of(name): name for name in names(folder)}  # of a step that was saved twice, the second
    kept = {newest[step] for step in sorted(newest)[-keep:]} | set(best)
    kept |= {name for step, name in newest.items() if keep_every and step % keep_every == 0}
    kept |= {Path(os.path.realpath(folder / name)).name for name in kept if (folder / name).is_symlink()}
    failure = None
    for name in names(folder):
        if name not in kept:
            try:
                leaving = folder / f"{_DELETING}{secrets.token_hex(8)}"  # no reader shall meet half of it
                disk.rename(folder / name, leaving)
                remove(leaving)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


def remove_leftovers(folder: Path, reference: Path | None = None, timeout: float = 0.0) -> list[str]:
    """Delete what saves and deletions that were cut off have left. Returns what processes that still run are writing.

    What a process on another host began is left alone, unless `reference` is given: a new file in that folder, by
    whose time of change, which is the file server's, the other one has not changed for `timeout` seconds.
    """
    running = []
    for name in os.listdir(folder):
        path = folder / name
        if name.startswith(_DELETING):
            remove(path)
        elif name.startswith(_SAVING) and path not in _open:
            owner = name.removeprefix(_SAVING)
            alive = checkpoint_owner.is_running(owner) and not checkpoint_owner.is_own(owner)
            if alive is None and reference is not None:
                alive = os.lstat(reference).st_mtime - _last_change(path) <= timeout
            if alive:
                running.append(name)
            elif alive is False:
                remove(path)
    return running


def _last_change(folder: Path) -> float:
    times = [0.0]
    with contextlib.suppress(OSError):  # it may be gone by now
        times.append(os.lstat(folder).st_mtime)
        times += [os.lstat(folder / name).st_mtime for name in os.listdir(folder)]
    return max(times)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with all that is in it; what is gone already is no error."""
    _open.discard(path)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for name in os.listdir(path):
                remove(path / name)
            disk.rmdir(path)
        else:
            disk.unlink(path)

"""Checkpoint folders on disk: begin, commit, find, quarantine and delete them.

A power cut at any moment leaves a checkpoint complete under its name, or not there at all.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

from . import disk
from .format import FORMAT, MANIFEST, FileEntry, Manifest, parse_manifest, render_manifest
from .format import Damaged as Damaged
from .format import Unreadable as Unreadable
from .rank_file import open_regular_file

# step-000001200, and step-000001200-2 when that step was saved a second time
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")
_SAVING, _DELETING, _QUARANTINED = ".saving-", ".deleting-", ".damaged"
_MAX_MANIFEST_BYTES = 1 << 30

_open_folders: set[Path] = set()  # temporary folders that this process writes into


# --- names


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints, oldest step first."""
    matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), int(match[2] or 1)))
    return [match[0] for match in matches]


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1])


def newest_by_step(names: Sequence[str]) -> dict[int, str]:
    """Return the name for each step; if a step was saved twice, the second.

    names: from checkpoint_names().
    """
    return {step_of(name): name for name in names}


# --- writing


def begin(folder: Path) -> Path:
    """Make an empty folder for the files of one checkpoint. Its name is temporary."""
    temporary = folder / f"{_SAVING}{secrets.token_hex(8)}"
    disk.system.mkdir(temporary)
    _open_folders.add(temporary)
    return temporary


def commit(
    temporary: Path, step: int, files: Sequence[FileEntry], metric: float | None = None
) -> str:
    """Make the files in `temporary` the newest checkpoint of that step; return its name.

    files: the entry of each rank's file, by rank. All files are on disk already.
    """
    for entry in files:
        size = os.stat(temporary / entry["name"]).st_size
        if size != entry["size"]:
            what = f"{entry['name']} has {size} bytes after {entry['size']} were written"
            raise OSError(errno.EIO, what)

    manifest: Manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": len(files),
        "metric": metric,
        "files": list(files),
    }
    disk.write_file(temporary / MANIFEST, memoryview(render_manifest(manifest)))
    disk.sync_folder(temporary)

    folder = temporary.parent
    name = _next_name(folder, step)
    disk.system.rename(temporary, folder / name)
    _open_folders.discard(temporary)
    disk.sync_folder(folder)
    return name


def close(temporary: Path) -> None:
    """Note that this process no longer writes into a temporary folder.

    If it is still there, the next remove_leftovers() deletes it.
    """
    _open_folders.discard(temporary)


# --- reading


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, fully checked.

    Raises Damaged, Unreadable or OSError.
    """
    if not os.path.lexists(folder):
        raise Unreadable(
            f"{folder} is missing, although rank 0 sees it; expected a folder on a file system "
            "that all hosts share. Choose one"
        )
    with open_regular_file(folder / MANIFEST) as (file, size):
        if size > _MAX_MANIFEST_BYTES:
            raise Damaged(f"{MANIFEST} has {size} bytes; expected at most {_MAX_MANIFEST_BYTES}")
        with open(file, "rb", closefd=False) as opened:
            manifest = parse_manifest(opened.read(size + 1))

    if _NAME.fullmatch(folder.name) and manifest["step"] != step_of(folder.name):
        raise Unreadable(
            f"{MANIFEST}: step is {manifest['step']}; expected {step_of(folder.name)}, as in the "
            "name of its folder. Restore the folder's name"
        )
    return manifest


# --- removing: links are removed, and their targets stay


def quarantine(folder: Path, name: str) -> Path:
    """Rename a damaged checkpoint so that it is not read again; return its new path."""
    quarantined = folder / _free_name(folder, f"{name}{_QUARANTINED}")
    disk.system.rename(folder / name, quarantined)
    disk.sync_folder(folder)
    return quarantined


def delete_old(
    folder: Path, keep: int, keep_every: int | None, keep_names: Collection[str] = ()
) -> None:
    """Delete all checkpoints that need not be kept.

    Kept are the last `keep`, those whose step is a multiple of keep_every, those in keep_names,
    and the targets of links among these. Continues after an OSError, and raises it at the end.
    """
    newest = newest_by_step(checkpoint_names(folder))
    kept = {newest[step] for step in sorted(newest)[-keep:]} | set(keep_names)
    kept |= {name for step, name in newest.items() if keep_every and step % keep_every == 0}
    links = [folder / name for name in kept if (folder / name).is_symlink()]
    kept |= {Path(os.path.realpath(link)).name for link in links}

    failure = None
    for name in checkpoint_names(folder):
        if name in kept:
            continue
        try:
            # Under this name no reader meets a checkpoint that is half deleted.
            deleting = folder / f"{_DELETING}{secrets.token_hex(8)}"
            disk.system.rename(folder / name, deleting)
            disk.remove(deleting)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def remove_leftovers(folder: Path, with_saves: bool) -> None:
    """Delete what interrupted deletions left and, where no other process saves, what saves left."""
    for name in os.listdir(folder):
        path = folder / name
        is_save = with_saves and name.startswith(_SAVING) and path not in _open_folders
        if is_save or name.startswith(_DELETING):
            disk.remove(path)


def _next_name(folder: Path, step: int) -> str:
    """Return the name of a checkpoint that comes after all others of its step."""
    matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    count = max((int(match[2] or 1) for match in matches if int(match[1]) == step), default=0) + 1
    return f"step-{step:09d}" + (f"-{count}" if count > 1 else "")


def _free_name(folder: Path, name: str) -> str:
    """Return the name, or with -2, -3, ... at its end where that exists."""
    free, count = name, 1
    while os.path.lexists(folder / free):
        count += 1
        free = f"{name}-{count}"
    return free

"""Check that a copy on a node still has all its files, by the numbers in a marker file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from . import ALSO, PACKAGES, Archive

MARKER = ".ddpkit-complete"  # its time is the last use of the copy by a launch
_SHALLOW = ""  # the copy's top folder; its subfolders do not count, as ranks write there
_COUNTED = ("bin", "lib", PACKAGES, ALSO, _SHALLOW)


def is_complete(copy: str) -> bool:
    """Whether no folder of a copy has lost files. A node may clean its /tmp.

    Only folders that have changed since the marker was written are read again.
    """
    lines, changed = [], False
    try:
        with open(os.path.join(copy, MARKER), encoding="utf-8", errors="surrogateescape") as file:
            recorded = file.read().split("\0")
        for line in recorded:
            modified, count, name = line.split(" ", 2)
            folder = os.path.join(copy, name)
            now = os.lstat(folder).st_mtime_ns
            if now != int(modified):  # Python may have compiled a module in it
                if len(_files_in(folder)[0]) < int(count):
                    return False
                if name != _SHALLOW:  # writing a new marker changes this one
                    line, changed = f"{now} {count} {name}", True
            lines.append(line)
    except (OSError, ValueError):
        return False
    if changed:
        with suppress(OSError):  # the disk may be full
            _write_marker(copy, lines)
    return os.access(os.path.join(copy, "bin", "python"), os.X_OK)  # a link out of the copy


def write_marker(copy: str) -> None:
    """Record each folder of a copy: its time of change, and the number of files in it."""
    lines, folders = [], list(_COUNTED)
    while folders:
        name = folders.pop()
        path = os.path.join(copy, name)
        modified = os.lstat(path).st_mtime_ns
        files, inner = _files_in(path)
        lines.append(f"{modified} {len(files)} {name}")
        if name != _SHALLOW:
            folders.extend(f"{name}/{each}" for each in inner)
    _write_marker(copy, lines)


def _write_marker(copy: str, lines: Sequence[str]) -> None:
    path = os.path.join(copy, MARKER)
    with open(f"{path}-new", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\0".join(lines))
    os.rename(f"{path}-new", path)


def _files_in(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of files and links in a folder, and of folders except __pycache__."""
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(MARKER):
                    files.append(entry.name)
            elif entry.name != "__pycache__":
                folders.append(entry.name)
    return files, folders


def moved_folders(copy: str, archive: Archive) -> dict[str, str]:
    """Return each folder of --stage-also, and its path in a copy."""
    return {folder: f"{copy}/{ALSO}/{number}" for number, folder in enumerate(archive.also)}

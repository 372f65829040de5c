"""Change the disk, and explain the system's errors to a user."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Every call that changes the disk uses this name: tests simulate power cuts and full disks.
system: Any = os

_BYTES_PER_WRITE = 16 << 20

_MAY_NOT_WRITE = "Change the permissions, or choose another folder"
_REMEDIES = {
    errno.ENOSPC: "Free some space on its file system",
    errno.EDQUOT: "Free some space, or request a larger quota",
    errno.EROFS: "Choose another folder",
    errno.EACCES: _MAY_NOT_WRITE,
    errno.EPERM: _MAY_NOT_WRITE,
    errno.ENOENT: "The folder, or the save's temporary folder in it, is missing. Was it removed, "
    "does another job clean it up, or do not all hosts share it?",
}


def explain(error: OSError) -> str:
    """Return the system's reason and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "Look for the cause on that host")
    return f"{error.strerror or error}. {remedy}"


def write_file(path: Path, *pieces: memoryview, written: Callable[[], None] | None = None) -> None:
    """Write a new file and sync it to disk.

    written: called when the system has received all bytes, before the sync to disk.
    """
    file = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += system.write(file, piece[done : done + _BYTES_PER_WRITE])
        if written is not None:
            written()
        system.fsync(file)
    finally:
        system.close(file)  # a network file system may only now report a full quota


def replace_file(path: Path, *pieces: memoryview) -> None:
    """Write a file under a temporary name, then rename it, so that it is never incomplete."""
    temporary = path.with_name(f".export-{secrets.token_hex(8)}")
    try:
        write_file(temporary, *pieces)
        system.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            system.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    file = system.open(folder, os.O_RDONLY)
    try:
        system.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by some file systems
            raise
    finally:
        system.close(file)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with its content; a missing one is no error.

    A link is deleted, and its target stays.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for name in os.listdir(path):
                remove(path / name)
            system.rmdir(path)
        else:
            system.unlink(path)

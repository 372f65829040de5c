"""Lock a folder of checkpoints, so that one job at a time saves into it.

This is a record lock (fcntl(2)). The kernel or the file server releases it when the process or its
host ends, so a dead job's lock blocks nobody. It belongs to the open file (F_OFD_SETLK) if the file
system has such locks. A lock of the process (F_SETLK) would be lost when this process closes any
descriptor of the file, as a backup of the folder does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import socket
import struct
import time
from pathlib import Path

NAME = ".lock"
_WAIT_SECONDS = 10.0  # seconds; the previous job may be ending
_PAUSE_SECONDS = 0.2

# path -> (file descriptor, number of Checkpointers in this process that use it)
_held: dict[Path, tuple[int, int]] = {}


class FolderInUse(Exception):
    """Another job saves into the folder."""


def acquire(folder: Path) -> bool:
    """Lock a folder for this process; return False if its file system has no locks.

    Raises FolderInUse after some seconds.
    """
    path = folder / NAME
    if (held := _find(path)) is not None:
        file, users = _held[held]
        _held[held] = file, users + 1
        return True
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:  # nobody can save into a read-only folder
            return False
        try:
            _lock(file)
            if _is_file(path, file):  # the owner has not removed it meanwhile
                break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > end:
                owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(file)
                raise FolderInUse(
                    f"{folder} is in use by {owner}; expected one job for a folder of checkpoints. "
                    "Wait until that one has ended, or choose another folder"
                ) from None
            time.sleep(_PAUSE_SECONDS)
        except OSError:  # ENOLCK, ENOSYS: NFS without lockd, Lustre with noflock
            os.close(file)
            return False
        os.close(file)
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    text = f"pid {os.getpid()} on {socket.gethostname()}{f', job {job}' if job else ''}\n"
    with contextlib.suppress(OSError):  # the disk may be full
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)
    if path in _held:  # the folder was removed and made again
        os.close(_held[path][0])
    _held[path] = file, 1
    _close_in_forked_children()
    return True


def is_held(folder: Path) -> bool:
    """Whether this process has locked the folder, and nobody has replaced the folder since."""
    return _find(folder / NAME) is not None


def release(folder: Path) -> None:
    """Release the lock of a folder; call it once for each acquire()."""
    path = folder / NAME
    held = _find(path) or path
    file, users = _held.pop(held, (-1, 0))
    if users > 1:
        _held[held] = file, users - 1
    elif users:
        if _is_file(path, file):
            os.unlink(path)
        os.close(file)


def _find(path: Path) -> Path | None:
    """Return the path under which this process has locked a file; a file may have several."""
    return next((held for held, (file, _) in _held.items() if _is_file(path, file)), None)


def _lock(file: int) -> None:
    """Lock an open file without waiting. Raises OSError."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole_file)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@functools.cache
def _close_in_forked_children() -> None:
    """Close locks in forked children: a DataLoader worker may outlive this process."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for file, _ in _held.values():
        os.close(file)
    _held.clear()


def _is_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False

"""The lock of a folder of checkpoints: one job at a time saves into it.

A POSIX record lock (fcntl(2), F_SETLK): the kernel or the file server releases it when the process
or its host ends, so that the lock of a dead job does not stand in the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

NAME = ".lock"
_WAIT_SECONDS = 10.0  # the job before may be ending
_PAUSE_SECONDS = 0.2

# By path: the descriptor, and the Checkpointers of this process that use it. The kernel releases
# the lock when this process closes any descriptor of the file.
_held: dict[Path, tuple[int, int]] = {}


class FolderInUse(Exception):
    """Another job saves into the folder."""


def acquire(folder: Path) -> bool:
    """Lock a folder for this process; return False where its file system has no locks.

    Raises FolderInUse after some seconds.
    """
    path = folder / NAME
    if is_held(folder):
        file, users = _held[path]
        _held[path] = file, users + 1
        return True
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:  # in a folder that may only be read, nobody saves
            return False
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(path, file):  # not removed by its owner meanwhile
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
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)
    if path in _held:  # the folder was removed and made again
        os.close(_held[path][0])
    _held[path] = file, 1
    return True


def is_held(folder: Path) -> bool:
    """Return whether this process has locked the folder, and it is still the same one."""
    path = folder / NAME
    return path in _held and _is_file(path, _held[path][0])


def release(folder: Path) -> None:
    """Release the lock of a folder, once for each acquire()."""
    path = folder / NAME
    file, users = _held.pop(path, (-1, 0))
    if users > 1:
        _held[path] = file, users - 1
    elif users:
        if _is_file(path, file):
            os.unlink(path)
        os.close(file)


def _is_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False

"""Keep things in a folder by key: one process makes a thing under a lock, later ones use it.

KEY.lock is locked by the process that makes, checks or removes KEY. A folder KEY-... or .KEY-... is
incomplete, or is being removed. A folder with the name KEY is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import NoReturn

from . import ALSO, CACHES, PACKAGES


@contextmanager
def locked(folder: str, key: str, *, kind: str = "lock", wait: bool = True) -> Iterator[int]:
    """Hold the lock of a key; yield the descriptor of its file.

    The process that removes KEY removes its lock file, too. A lock on a file without a name
    excludes nobody, and is taken again.

    kind: suffix of the file's name. wait: False raises OSError if another process has the lock.
    Raises OSError if the file system has no locks.
    """
    path = os.path.join(folder, f"{key}.{kind}")
    is_locked = False
    while not is_locked:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                is_locked = os.path.samestat(os.fstat(descriptor), os.lstat(path))
            if is_locked:
                os.utime(descriptor)  # keeps the lock file from being removed as old
                yield descriptor
        finally:
            os.close(descriptor)


def remove_leftovers(folder: str, own: str) -> None:
    """Remove leftovers of killed processes. own: the key that this process has locked.

    A process that still works on a key holds its lock.
    """
    for name in os.listdir(folder):
        key, hyphen, _ = name.removeprefix(".").partition("-")
        path = os.path.join(folder, name)
        if not hyphen or not os.path.isdir(path):
            continue
        with suppress(OSError), ExitStack() as stack:
            if key != own:
                stack.enter_context(locked(folder, key, wait=False))
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def cleanup_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise, so that temporary files are removed; then end the process."""
    received = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise SystemExit

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])


SYSTEM = ("/", "/usr", "/usr/local")  # prefixes that are not an environment's own folder
_OWN = ("bin", "lib", "lib64", "pyvenv.cfg", PACKAGES, ALSO, CACHES)  # a copy has its own of these


def names_beside(prefix: str) -> list[str]:
    """Return the entries of an environment, its bin and its lib, as paths relative to it."""
    if prefix in ("", *SYSTEM):
        return []
    found = [
        folder + entry
        for folder in ("", "bin/", "lib/")
        for entry in sorted(_names(os.path.join(prefix, folder)))
        if not entry.startswith(".ddpkit")
    ]
    return [name for name in found if name not in _OWN]


def add_links(copy: str, prefix: str) -> bool:
    """Link to entries added to an environment after it was packed; return whether any was."""
    added = False
    for name in names_beside(prefix):
        path = os.path.join(copy, name)
        if not os.path.lexists(path):
            os.symlink(os.path.join(prefix, name), path)
            added = True
    return added


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []

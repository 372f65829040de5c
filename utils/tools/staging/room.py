"""Remove copies on a node that are old, or whose room another copy needs; none that a rank uses."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from . import Archive, StagingError
from .free_space import free_bytes, is_in_memory
from .marker import MARKER

_OLD_SECONDS = 7 * 24 * 3600.0
_SHARE = 0.5  # of the disk: what all copies may use
_SPARE_BYTES = 64 << 20  # besides the files themselves: for their inodes, and for caches
_BLOCK_BYTES = 4096


def needed_bytes(archive: Archive) -> int:
    """Return what a copy takes on a disk."""
    return archive.size + archive.files * _BLOCK_BYTES // 2 + _SPARE_BYTES


def make_room(root: str, archive: Archive) -> None:
    """Remove unused copies until there is room for another. StagingError where there is none."""
    needed = needed_bytes(archive)
    for _, key in [(0.0, ""), *_others(root, archive.key)]:
        if key:
            _remove(root, key)
        free = free_bytes(root)
        if free >= needed:
            return
    where = " (a part of the memory: the ranks need the rest)" if is_in_memory(root) else ""
    raise StagingError(f"{free / 1e6:.0f} MB are free{where}, and {needed / 1e6:.0f} MB are needed")


def remove_old(root: str, copy: str) -> None:
    """Remove copies that were not used for long, then the oldest beyond their share of the disk.

    copy: the one that this process has locked.
    """
    own = os.path.basename(copy)
    _remove_halves(root, own)
    others = _others(root, own)
    for used, key in list(others):
        if used < time.time() - _OLD_SECONDS:
            _remove(root, key)
            others.remove((used, key))
    if not others:
        return
    disk = shutil.disk_usage(root)
    while others and disk.used > _SHARE * disk.total and len(others) > 1:
        _remove(root, others.pop(0)[1])
        disk = shutil.disk_usage(root)


def _others(root: str, key: str) -> list[tuple[float, str]]:
    """Return when each other copy was used, and its key, the oldest first."""
    found = []
    for name in os.listdir(root):
        marker = os.path.join(root, name, MARKER)
        if name != key and os.path.isdir(os.path.join(root, name)) and "-" not in name:
            used = os.stat(marker).st_mtime if os.path.exists(marker) else 0.0
            found.append((used, name))
    return sorted(found)


def _remove_halves(root: str, own: str) -> None:
    """Remove what a killed process has left of a copy that it made or removed."""
    for name in os.listdir(root):
        key, hyphen, _ = name.partition("-")
        if not hyphen:
            continue
        with suppress(OSError), ExitStack() as stack:
            if key != own:
                stack.enter_context(_locked_at_once(root, f"{key}.lock"))
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _remove(root: str, key: str) -> None:
    """Remove a copy that no rank uses, and none is about to."""
    names = (f"{key}.lock", f"{key}.used")
    with suppress(OSError), _locked_at_once(root, names[0]), _locked_at_once(root, names[1]):
        os.rename(os.path.join(root, key), os.path.join(root, f"{key}-removed"))
        shutil.rmtree(os.path.join(root, f"{key}-removed"), ignore_errors=True)
        for name in names:
            os.unlink(os.path.join(root, name))


@contextmanager
def _locked_at_once(root: str, name: str) -> Iterator[None]:
    """Hold a lock. OSError where another process has it."""
    descriptor = os.open(os.path.join(root, name), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)

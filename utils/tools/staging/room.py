"""Remove copies on a node that are old, or whose room another copy needs; none that a rank uses."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress

from . import Archive, StagingError
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
        free = shutil.disk_usage(root).free
        if free >= needed:
            return
    raise StagingError(f"{free / 1e6:.0f} MB are free, and {needed / 1e6:.0f} MB are needed")


def remove_old(root: str, copy: str) -> None:
    """Remove copies that were not used for long, then the oldest beyond their share of the disk."""
    _remove_halves(root)
    others = _others(root, os.path.basename(copy))
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


def _remove_halves(root: str) -> None:
    """Remove what a killed process has left of a copy that it made or removed."""
    for name in os.listdir(root):
        key, hyphen, _ = name.partition("-")
        if not hyphen:
            continue
        with suppress(OSError):
            lock = os.open(os.path.join(root, f"{key}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)
            finally:
                os.close(lock)


def _remove(root: str, key: str) -> None:
    """Remove a copy that no rank uses."""
    with suppress(OSError):
        used = os.open(os.path.join(root, f"{key}.used"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(os.path.join(root, key), os.path.join(root, f"{key}-removed"))
            shutil.rmtree(os.path.join(root, f"{key}-removed"), ignore_errors=True)
            for end in ("used", "lock"):
                os.unlink(os.path.join(root, f"{key}.{end}"))
        finally:
            os.close(used)

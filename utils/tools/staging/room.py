"""Find how much room a node has for copies, and remove copies that no rank uses.

Old copies are removed, and copies whose room another one needs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress

from ...host import process
from . import Archive, StagingError
from .kept import locked, remove_leftovers
from .marker import MARKER

_OLD_SECONDS = 7 * 24 * 3600.0
_SHARE = 0.5  # share of the disk that all copies may use
_SPARE_BYTES = 64 << 20  # bytes besides the files, for inodes and caches
_BLOCK_BYTES = 4096


def needed_bytes(archive: Archive) -> int:
    """Return the bytes that a copy takes on a disk."""
    return archive.size + archive.files * _BLOCK_BYTES // 2 + _SPARE_BYTES


def make_room(root: str, archive: Archive) -> None:
    """Remove unused copies until there is room for another; StagingError if there is none."""
    needed = needed_bytes(archive)
    for _, key in [(0.0, ""), *copies_in(root, archive.key)]:
        if key:
            remove_copy(root, key)
        free = free_bytes(root)
        if free >= needed:
            return
    where = " (a part of the memory: the ranks need the rest)" if is_in_memory(root) else ""
    raise StagingError(f"{free / 1e6:.0f} MB are free{where}, and {needed / 1e6:.0f} MB are needed")


def remove_old(root: str, own: str) -> None:
    """Remove copies unused for long, then the oldest while all exceed their share of the disk.

    own: key of the copy that this process has locked.
    """
    remove_leftovers(root, own)
    others = copies_in(root, own)
    for used, key in list(others):
        if used < time.time() - _OLD_SECONDS:
            remove_copy(root, key)
            others.remove((used, key))
    if not others:
        return
    disk = shutil.disk_usage(root)
    while others and disk.used > _SHARE * disk.total and len(others) > 1:
        remove_copy(root, others.pop(0)[1])
        disk = shutil.disk_usage(root)


def copies_in(root: str, key: str = "") -> list[tuple[float, str]]:
    """Return for each copy but `key` when it was used, and its key, the oldest first."""
    found = []
    for name in os.listdir(root):
        marker = os.path.join(root, name, MARKER)
        if name != key and os.path.isdir(os.path.join(root, name)) and "-" not in name:
            used = os.stat(marker).st_mtime if os.path.exists(marker) else 0.0
            found.append((used, name))
    return sorted(found)


def remove_copy(root: str, key: str) -> bool:
    """Remove a copy, unless a rank uses it or is about to; return whether it was removed."""
    with (
        suppress(OSError),
        locked(root, key, wait=False),
        locked(root, key, kind="used", wait=False),
    ):
        os.rename(os.path.join(root, key), os.path.join(root, f"{key}-removed"))
        shutil.rmtree(os.path.join(root, f"{key}-removed"), ignore_errors=True)
        for kind in ("lock", "used"):
            os.unlink(os.path.join(root, f"{key}.{kind}"))
        return True
    return False


_IN_MEMORY = ("tmpfs", "ramfs")
_SHARE_OF_MEMORY = 0.25  # the ranks need the rest, also for files that they write
_NO_LIMIT = 1 << 60  # cgroups version 1 shows a number like this for "no limit"


def free_bytes(folder: str) -> int:
    """Return how many bytes a copy may take in a folder. Raises OSError if there is no folder.

    /dev/shm is in memory, and /tmp on nodes without a disk. Using more than the node has, or than
    the job may use, would end the ranks.
    """
    free = shutil.disk_usage(folder).free
    if not is_in_memory(folder):
        return free
    limits = [*_memory_limits(), _available_bytes()]
    return min(free, int(_SHARE_OF_MEMORY * min(limits)))


def is_in_memory(folder: str) -> bool:
    """Whether a folder's file system is in memory. Raises OSError."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mount = next((mount for mount in process.mounts() if mount.device == number), None)
    return mount is not None and mount.file_system in _IN_MEMORY


def _available_bytes() -> int:
    for line in process.read("/proc/meminfo").decode().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return _NO_LIMIT


def _memory_limits() -> Iterator[int]:
    """Yield this process's memory limits, from its cgroup and all cgroups above it."""
    for line in process.read("/proc/self/cgroup").decode(errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        while True:
            limit = process.read(f"{folder}{path}/{name}").strip()
            if limit.isdigit():
                yield int(limit)
            if path in ("", "/"):
                break
            path = os.path.dirname(path)

"""How much a copy may take in a folder: less than is free where the file system is in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from ...host import process

_IN_MEMORY = ("tmpfs", "ramfs")
_SHARE_OF_MEMORY = 0.25  # the ranks need the rest; what they write there counts as theirs
_NO_LIMIT = 1 << 60  # version 1 of cgroups shows a number like this


def free_bytes(folder: str) -> int:
    """Return how many bytes a copy may take in a folder. Raises OSError where there is none.

    /dev/shm and, on nodes without a disk, /tmp are in memory: more than the node has, or than the
    job may use, would end its ranks.
    """
    free = shutil.disk_usage(folder).free
    if not is_in_memory(folder):
        return free
    limits = [*_memory_limits(), _available_bytes()]
    return min(free, int(_SHARE_OF_MEMORY * min(limits)))


def is_in_memory(folder: str) -> bool:
    """Return whether the file system of a folder is in memory. Raises OSError."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in process.read("/proc/self/mountinfo").decode(errors="replace").splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == number:
            return file_system.split()[0] in _IN_MEMORY
    return False


def _available_bytes() -> int:
    for line in process.read("/proc/meminfo").decode().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return _NO_LIMIT


def _memory_limits() -> Iterator[int]:
    """Yield the limits of the memory of this process: those of its cgroup and of all above it."""
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

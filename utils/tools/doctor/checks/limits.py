"""Check the limits of each host: locked memory, open files, shared memory, memory, time left."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....job import current_job
from ..check import Check, Finding, Level, Ranks, Reported

_MIB, _GIB = 1 << 20, 1 << 30
_UNLIMITED = -1
_FABRICS = ("sys/class/infiniband", "sys/class/cxi", "sys/class/infiniband_verbs")
# Containers of Docker have 64 MiB, which is enough for a training without many workers.
_SHARED_MEMORY_BYTES = 48 * _MIB
_MEMORY_BYTES_PER_RANK = 512 * _MIB  # Python with torch, and a small model
_PROCESSES_PER_RANK = 64  # with its threads
_SECONDS_LEFT = 180


@dataclass(frozen=True)
class LimitFacts:
    """The limits of a host. -1 is unlimited, None is unknown.

    ranks: on this host. world_size: of all hosts. fabric: the device that needs locked memory, such
    as "mlx5_0", or "". memory_bytes: the smallest limit of a control group, or the memory of the
    host. free_bytes: what is left of it. processes: the limit of the user.
    """

    ranks: int
    world_size: int
    fabric: str
    locked_bytes: int
    open_files: int
    shared_bytes: int | None
    shared_free_bytes: int | None
    memory_bytes: int | None
    free_bytes: int | None
    processes: int
    seconds_left: float | None


class Limits(Check[LimitFacts]):
    """Limits of memory, files, processes and time."""

    name = "limits"
    per = "host"
    quick = True
    seconds = 15.0
    facts = LimitFacts

    def collect(self, ranks: Ranks) -> LimitFacts:
        shared, shared_free = _file_system("/dev/shm")
        memory, free = memory_limit()
        return LimitFacts(
            ranks=sum(one.node == ranks.me.node for one in ranks.everyone),
            world_size=len(ranks.everyone),
            fabric=_fabric(),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            open_files=_soft(resource.RLIMIT_NOFILE),
            shared_bytes=shared,
            shared_free_bytes=shared_free,
            memory_bytes=memory,
            free_bytes=free,
            processes=_soft(resource.RLIMIT_NPROC),
            seconds_left=_seconds_left() if ranks.me.rank == 0 else None,
        )

    def conclude(self, reported: Sequence[Reported[LimitFacts]]) -> Iterator[Finding]:
        findings: list[Finding] = []
        for one in reported:
            findings += _check_host(one)
            findings += _check_memory(one)
        left = next((one.facts.seconds_left for one in reported if one.place.rank == 0), None)
        if left is not None and left < _SECONDS_LEFT:
            findings.append(
                Finding(
                    Level.WARNING,
                    f"the job has {left:.0f} s left until its time limit. Expected at least "
                    f"{_SECONDS_LEFT} s",
                    "Request more time",
                )
            )
        if not findings and reported:
            findings = [Finding(Level.GOOD, _describe([one.facts for one in reported], left))]
        yield from findings


# Facts of this host -------------------------------------------------------------------------------


def memory_limit(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return the bytes of memory that this process may use, and how many of them are free.

    The smallest limit among the control groups of this process counts. root: the folder with proc
    and sys.
    """
    total, free = _host_memory(root)
    for folder in _control_groups(root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is None or (total is not None and limit > total):
            continue
        total = limit
        # The kernel drops cached files when a group needs memory.
        left = limit - (used or 0) + _cached(folder)
        free = left if free is None else min(free, left)
    return total, free


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        # Version 2: "0::/user.slice"; version 1: "4:memory:/slurm/uid_0/job_7"
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = base / "memory" if controllers else base
        folder = top / path.lstrip("/")
        # In a container the path may be that of the host, while its group is mounted at the top.
        while folder != top and top in folder.parents:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield top


def _host_memory(root: Path) -> tuple[int | None, int | None]:
    values: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")  # "MemAvailable:   12345 kB"
            values[name] = int(rest.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None, None
    return values.get("MemTotal"), values.get("MemAvailable")


def _cached(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    names = ("total_inactive_file", "inactive_file")  # of version 1, of version 2
    return next((int(values[name]) for name in names if name in values), 0)


def _number(path: Path) -> int | None:
    """Return the number in a file; None for "max", or where it cannot be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _file_system(path: str) -> tuple[int | None, int | None]:
    """Return the bytes of a file system, and how many of them are free."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _fabric() -> str:
    for folder in _FABRICS:
        try:
            names = sorted(os.listdir(f"/{folder}"))
        except OSError:
            continue
        names = [name for name in names if name != "abi_version"]
        if names:
            return names[0]
    return ""


def _soft(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _seconds_left() -> float | None:
    job = current_job()
    return job.seconds_left() if job else None


# What rank 0 concludes ----------------------------------------------------------------------------


def _check_host(one: Reported[LimitFacts]) -> Iterator[Finding]:
    facts, host = one.facts, one.place.host
    if facts.fabric and facts.locked_bytes != _UNLIMITED and facts.locked_bytes < _GIB:
        yield _of_host(
            one,
            Level.BAD,
            f"{host} may lock {size_of(facts.locked_bytes)} of memory (ulimit -l), but "
            f"{facts.fabric} needs it for its buffers. Expected: unlimited",
            "Start from a login shell with ulimit -l unlimited, or ask the centre to raise memlock "
            "for the daemons of the scheduler",
        )
    # gloo has a connection to each rank; workers send tensors as files. Rank 0, which has more,
    # raises its own limit when it starts.
    needed = 256 + 4 * facts.world_size
    if facts.open_files != _UNLIMITED and facts.open_files < needed:
        yield _of_host(
            one,
            Level.BAD if facts.open_files < 64 + facts.world_size else Level.WARNING,
            f"a process on {host} may open {facts.open_files} files (ulimit -n). Expected at least "
            f"{needed} for {facts.world_size} ranks",
            "Run ulimit -n 65536 in the job script, or ask the centre to raise the hard limit",
        )
    shared, free = facts.shared_bytes, facts.shared_free_bytes
    if shared is not None and free is not None and free < _SHARED_MEMORY_BYTES:
        yield _of_host(
            one,
            Level.WARNING,
            f"/dev/shm of {host} has {size_of(free)} free of {size_of(shared)}. Expected at least "
            f"{size_of(_SHARED_MEMORY_BYTES)}: DataLoader workers and NCCL exchange data there",
            "Delete leftovers there, or enlarge it (containers: --shm-size=8g or --ipc=host)",
        )


def _check_memory(one: Reported[LimitFacts]) -> Iterator[Finding]:
    facts, host = one.facts, one.place.host
    needed = _MEMORY_BYTES_PER_RANK * facts.ranks
    if facts.memory_bytes is not None and facts.memory_bytes < needed:
        yield _of_host(
            one,
            Level.BAD,
            f"the processes on {host} may use {size_of(facts.memory_bytes)} of memory in all. "
            f"Expected at least {size_of(needed)} for {facts.ranks} ranks",
            "Request more memory (--mem)",
        )
    elif facts.free_bytes is not None and facts.free_bytes < needed / 2:
        yield _of_host(
            one,
            Level.WARNING,
            f"{host} has {size_of(facts.free_bytes)} of memory free. Expected at least "
            f"{size_of(needed / 2)} for {facts.ranks} ranks",
            "End what uses it, or request whole hosts",
        )
    if facts.processes != _UNLIMITED and facts.processes < _PROCESSES_PER_RANK * facts.ranks:
        yield _of_host(
            one,
            Level.WARNING,
            f"{host} allows {facts.processes} processes and threads of a user (ulimit -u). "
            f"Expected at least {_PROCESSES_PER_RANK * facts.ranks} for {facts.ranks} ranks",
            "Raise the limit of processes (ulimit -u)",
        )


def _of_host(one: Reported[LimitFacts], level: Level, message: str, remedy: str) -> Finding:
    return Finding(level, message, remedy, hosts=(one.place.host,))


def _describe(hosts: Sequence[LimitFacts], left: float | None) -> str:
    """Return the smallest limits."""
    parts = []
    files = [one.open_files for one in hosts if one.open_files != _UNLIMITED]
    parts.append(f"{min(files)} open files" if files else "open files unlimited")
    for name, values in (
        ("/dev/shm", [one.shared_bytes for one in hosts if one.shared_bytes is not None]),
        ("memory", [one.memory_bytes for one in hosts if one.memory_bytes is not None]),
    ):
        if values:
            parts.append(f"{name} {size_of(min(values))}")
    if left is not None:
        parts.append(f"{left / 60:.0f} min left")
    return ("at least " if len(hosts) > 1 else "") + ", ".join(parts)


def size_of(count: float) -> str:
    """Return "64.0 MiB" or "2.0 GiB"."""
    if count == math.inf:
        return "unlimited"
    for unit, factor in (("TiB", 1 << 40), ("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"

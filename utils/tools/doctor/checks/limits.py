"""Check the limits of each host: locked memory, open files, shared memory, time left."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....job import current_job
from ..check import Check, Finding, Level, Ranks, Reported

_MIB, _GIB = 1 << 20, 1 << 30
_UNLIMITED = -1
_FABRICS = ("sys/class/infiniband", "sys/class/cxi", "sys/class/infiniband_verbs")
# Docker containers have 64 MiB, which is enough for a training without many workers.
_SHARED_MEMORY_BYTES = 48 * _MIB
_SECONDS_LEFT = 180
_STOPS = (signal.SIGTERM, signal.SIGINT)  # sent by schedulers, launchers and people to end programs


@dataclass(frozen=True)
class LimitFacts:
    """The limits of a host. -1: unlimited; None: unknown.

    world_size: ranks on all hosts. fabric: device that needs locked memory, "mlx5_0", or "".
    """

    world_size: int
    fabric: str
    locked_bytes: int
    open_files: int
    shared_bytes: int | None
    shared_free_bytes: int | None
    seconds_left: float | None
    ignored_signals: list[str] = field(default_factory=list)  # "SIGTERM"; inherited


class Limits(Check[LimitFacts]):
    """Limits of memory, files and time."""

    name = "limits"
    per = "host"
    quick = True
    seconds = 15.0
    facts = LimitFacts

    def collect(self, ranks: Ranks) -> LimitFacts:
        shared, shared_free = _file_system("/dev/shm")
        return LimitFacts(
            world_size=len(ranks.everyone),
            fabric=_fabric(),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            open_files=_soft(resource.RLIMIT_NOFILE),
            shared_bytes=shared,
            shared_free_bytes=shared_free,
            seconds_left=_seconds_left() if ranks.me.rank == 0 else None,
            ignored_signals=_ignored_signals(),
        )

    def conclude(self, reported: Sequence[Reported[LimitFacts]]) -> Iterator[Finding]:
        findings: list[Finding] = []
        for report in reported:
            findings += _check_host(report)
        left = next(
            (report.facts.seconds_left for report in reported if report.place.rank == 0), None
        )
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
            findings = [Finding(Level.GOOD, _describe([report.facts for report in reported], left))]
        yield from findings


# Facts of this host -------------------------------------------------------------------------------


def _file_system(path: str) -> tuple[int | None, int | None]:
    """Return a file system's bytes, and its free bytes."""
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


def _ignored_signals() -> list[str]:
    """Return the stop signals that this process ignores or blocks since its start."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return [
        number.name
        for number in _STOPS
        if signal.getsignal(number) is signal.SIG_IGN or number in blocked
    ]


def _seconds_left() -> float | None:
    job = current_job()
    return job.seconds_left() if job else None


# What rank 0 concludes ----------------------------------------------------------------------------


def _check_host(report: Reported[LimitFacts]) -> Iterator[Finding]:
    facts, host = report.facts, report.place.host
    if facts.fabric and facts.locked_bytes != _UNLIMITED and facts.locked_bytes < _GIB:
        yield _of_host(
            report,
            Level.BAD,
            f"{host} may lock {size_of(facts.locked_bytes)} of memory (ulimit -l), but "
            f"{facts.fabric} needs it for its buffers. Expected: unlimited",
            "Start from a login shell with ulimit -l unlimited, or ask the centre to raise memlock "
            "for the daemons of the scheduler",
        )
    # gloo has a connection to each rank, and workers send tensors as files. Rank 0 needs more, and
    # raises its own limit when it starts.
    needed = 256 + 4 * facts.world_size
    if facts.open_files != _UNLIMITED and facts.open_files < needed:
        yield _of_host(
            report,
            Level.BAD if facts.open_files < 64 + facts.world_size else Level.WARNING,
            f"a process on {host} may open {facts.open_files} files (ulimit -n). Expected at least "
            f"{needed} for {facts.world_size} ranks",
            "Run ulimit -n 65536 in the job script, or ask the centre to raise the hard limit",
        )
    if signal.SIGTERM.name in facts.ignored_signals:
        yield _of_host(
            report,
            Level.WARNING,
            f"processes on {host} are started to ignore SIGTERM. Expected that it ends a program: "
            "the scheduler sends it before it kills a job",
            "Remove trap '' TERM from the job script, and nohup or setsid before the command; in a "
            "subshell, trap - TERM restores it",
        )
    shared, free = facts.shared_bytes, facts.shared_free_bytes
    if shared is not None and free is not None and free < _SHARED_MEMORY_BYTES:
        yield _of_host(
            report,
            Level.WARNING,
            f"/dev/shm of {host} has {size_of(free)} free of {size_of(shared)}. Expected at least "
            f"{size_of(_SHARED_MEMORY_BYTES)}: DataLoader workers and NCCL exchange data there",
            "Delete leftovers there, or enlarge it (containers: --shm-size=8g or --ipc=host)",
        )


def _of_host(report: Reported[LimitFacts], level: Level, message: str, remedy: str) -> Finding:
    return Finding(level, message, remedy, hosts=(report.place.host,))


def _describe(hosts: Sequence[LimitFacts], left: float | None) -> str:
    """Return the smallest limits."""
    parts = []
    files = [facts.open_files for facts in hosts if facts.open_files != _UNLIMITED]
    parts.append(f"{min(files)} open files" if files else "open files unlimited")
    shared = [facts.shared_bytes for facts in hosts if facts.shared_bytes is not None]
    if shared:
        parts.append(f"/dev/shm {size_of(min(shared))}")
    if left is not None:
        parts.append(f"{left / 60:.0f} min left")
    return ("at least " if len(hosts) > 1 else "") + ", ".join(parts)


def size_of(count: float) -> str:
    """Return "64.0 MiB" or "2.0 GiB"."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", _GIB), ("MiB", _MIB), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"

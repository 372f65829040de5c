"""How long does importing torch wait for files on each host? Minutes on a busy file system."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..check import Check, Finding, Level, Ranks, Reported

LONGEST_SECONDS = 30.0  # then the check ends, and the import goes on
# Of the time that an import waits for files:
LONG_SECONDS = 20.0
SLOW_FACTOR, SLOW_SECONDS = 3.0, 5.0  # times the median of the other hosts, and more than it


@dataclass(frozen=True)
class ImportFacts:
    """Of one host. seconds: how long the import waited for files; None if that is unknown."""

    seconds: float | None


class TorchImportCheck(Check[ImportFacts]):
    """Import torch on every host at the same time, as a training does."""

    name = "import"
    per = "host"
    seconds = LONGEST_SECONDS + 10
    facts = ImportFacts

    def collect(self, ranks: Ranks) -> ImportFacts:
        if "torch" in sys.modules:
            return ImportFacts(None)
        waited: list[float] = []
        began = time.monotonic()
        thread = threading.Thread(target=lambda: waited.append(_import_torch()), daemon=True)
        thread.start()
        thread.join(LONGEST_SECONDS)
        if thread.is_alive():
            return ImportFacts(time.monotonic() - began)
        return ImportFacts(waited[0] if waited else None)

    def conclude(self, reported: Sequence[Reported[ImportFacts]]) -> Iterator[Finding]:
        seconds = {
            one.place.host: one.facts.seconds for one in reported if one.facts.seconds is not None
        }
        slow = list(_slow_hosts(seconds))
        for host, usual in slow:
            yield Finding(
                Level.WARNING,
                f"Importing torch waited {seconds[host]:.0f} s for files on {host}; the median of "
                f"the other hosts is {usual:.0f} s",
                "Exclude the host if that happens again, and report it. See there: iostat -x",
                hosts=(host,),
            )
        longest = max(seconds.values(), default=0.0)
        if not slow and longest > LONG_SECONDS:
            yield Finding(
                Level.WARNING,
                f"Importing torch waited up to {longest:.0f} s for files. Expected at most "
                f"{LONG_SECONDS:.0f} s",
                "Copy the Python environment to a local disk of each host, or use a container",
            )
        elif seconds and not slow:
            yield Finding(Level.GOOD, f"Importing torch waited at most {longest:.1f} s for files")


def _slow_hosts(seconds: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield hosts that are much slower than the others, and the median of the others."""
    for host, value in seconds.items():
        others = [other for name, other in seconds.items() if name != host]
        usual = statistics.median(others) if others else value
        if value > SLOW_FACTOR * usual and value > usual + SLOW_SECONDS:
            yield host, usual


def _import_torch() -> float:
    """Import torch; return the seconds in which this thread neither ran nor waited for a CPU."""
    began, busy = time.monotonic(), _seconds_busy()
    with contextlib.suppress(ImportError, OSError):  # another check reports that
        import torch  # noqa: F401
    return max(0.0, time.monotonic() - began - (_seconds_busy() - busy))


def _seconds_busy() -> float:
    """Return the seconds that this thread has run, or has waited for a CPU; see proc(5)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            running, waiting, _ = file.read().split()
        return (int(running) + int(waiting)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()

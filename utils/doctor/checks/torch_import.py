"""How long does importing torch wait for files on each host? Minutes on a busy file system."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..check import Check, Finding, Level, Ranks, Reported
from ..import_time import import_torch, seconds_waiting_for_torch

LONGEST_SECONDS = 60.0  # then the check ends without a result: the cores may be busy
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
        thread = threading.Thread(target=_import_torch, daemon=True)
        thread.start()
        thread.join(LONGEST_SECONDS)
        return ImportFacts(seconds_waiting_for_torch())

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


def _import_torch() -> None:
    with contextlib.suppress(ImportError, OSError):  # another check reports that
        import_torch()

"""Check that torch can be imported, and how long that waits for a possibly busy file system."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....host import process
from ..check import Check, Finding, Level, Ranks, Reported

LONGEST_SECONDS = 60.0  # the check then ends without a result, as the cores may be busy
# Seconds that an import waits for files:
LONG_SECONDS = 20.0
SLOW_FACTOR, SLOW_SECONDS = 3.0, 5.0  # times the other hosts' median, and seconds above it


@dataclass(frozen=True)
class ImportFacts:
    """The result of one host. seconds: how long the import waited for files; None if unknown.

    error: why torch cannot be imported; "" if it can.
    """

    seconds: float | None
    error: str = ""


_outcome: ImportFacts | None = None


def import_torch() -> ImportFacts:
    """Import torch, and measure the seconds spent neither running nor waiting for a CPU."""
    global _outcome
    if _outcome is None and "torch" in sys.modules:
        _outcome = ImportFacts(None)
    if _outcome is None:
        began, busy = time.monotonic(), _busy_seconds()
        error = ""
        try:
            import torch  # noqa: F401
            import torch.distributed  # noqa: F401
        except Exception as reason:  # torch's modules may raise anything
            error = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"[:300]
        waited = time.monotonic() - began - (_busy_seconds() - busy)
        _outcome = ImportFacts(max(0.0, waited), error)
    return _outcome


def _busy_seconds() -> float:
    """Return the seconds in which this thread ran, or was ready but had no core."""
    return time.thread_time() + process.schedule(threading.get_native_id()).ready_seconds


class TorchImportCheck(Check[ImportFacts]):
    """Import torch on every host at the same time, as a training does."""

    name = "import"
    per = "host"
    quick = True
    seconds = LONGEST_SECONDS + 10
    facts = ImportFacts

    def collect(self, ranks: Ranks) -> ImportFacts:
        thread = threading.Thread(target=import_torch, daemon=True)
        thread.start()
        thread.join(LONGEST_SECONDS)
        return _outcome or ImportFacts(None)

    def conclude(self, reported: Sequence[Reported[ImportFacts]]) -> Iterator[Finding]:
        failed = [report for report in reported if report.facts.error]
        for report in failed:
            yield Finding(
                Level.BAD,
                f"torch cannot be imported on {report.place.host}: {report.facts.error}",
                "Reinstall the package or library that the message names. Unset PYTHONPATH if it "
                "contains packages of another Python",
                hosts=(report.place.host,),
            )
        if failed:
            return
        seconds = {report.place.host: report.facts.seconds for report in reported}
        slow = list(_outliers(seconds, SLOW_FACTOR, SLOW_SECONDS))
        for host, waited, usual in slow:
            yield Finding(
                Level.WARNING,
                f"Importing torch waited {waited:.0f} s for files on {host}; the median of "
                f"the other hosts is {usual:.0f} s",
                "Exclude the host if that happens again, and report it. See there: iostat -x",
                hosts=(host,),
            )
        known = [duration for duration in seconds.values() if duration is not None]
        longest = max(known, default=0.0)
        if not slow and longest > LONG_SECONDS:
            yield Finding(
                Level.WARNING,
                f"Importing torch waited up to {longest:.0f} s for files. Expected at most "
                f"{LONG_SECONDS:.0f} s",
                "Copy the Python environment to a local disk of each host, or use a container",
            )
        elif known and not slow:
            yield Finding(Level.GOOD, f"Importing torch waited at most {longest:.1f} s for files")


def _outliers(
    values: dict[str, float | None], factor: float, margin: float
) -> Iterator[tuple[str, float, float]]:
    """Yield hosts that are much slower than the others: host, its seconds, median of the others."""
    known = {host: value for host, value in values.items() if value is not None}
    for host, value in known.items():
        others = [other for name, other in known.items() if name != host]
        if others:
            usual = statistics.median(others)
            if value > factor * usual and value > usual + margin:
                yield host, value, usual

"""Measure collectives over a range of sizes; print them like nccl-tests."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .collective_operations import (
    OPERATIONS,
    Operation,
    Participants,
    barrier,
    gather,
    percentile,
    time_iterations,
)

_FACTOR = 4
HEADER = f"""\
# {"operation":>14} {"size":>12} {"count":>12} \
{"time":>10} {"algbw":>7} {"busbw":>7} {"#wrong":>6} {"p50":>10} {"p99":>10}
# {"":>14} {"(B)":>12} {"(elements)":>12} \
{"(us)":>10} {"(GB/s)":>7} {"(GB/s)":>7} {"":>6} {"(us)":>10} {"(us)":>10}"""


@dataclass(frozen=True)
class Sweep:
    """The sizes and iterations to measure: nccl-tests' -b, -e and -n.

    Each size is four times the previous one; the last is the largest size.
    """

    smallest_bytes: int
    largest_bytes: int
    iterations: int

    def sizes(self) -> Iterator[int]:
        size = self.smallest_bytes
        while size < self.largest_bytes:
            yield size
            size *= _FACTOR
        yield self.largest_bytes


@dataclass(frozen=True)
class CollectiveResult:
    """One operation at one size. Times in seconds; bandwidths in bytes per second."""

    kind: type[Operation]
    size: int
    count: int
    factor: float
    wrong: int  # wrong elements over all ranks
    rank_seconds: list[list[float]] = field(repr=False)  # [rank][iteration]

    @property
    def operation(self) -> str:
        return self.kind.name

    @property
    def seconds(self) -> float:
        """Seconds of one iteration: the mean over iterations and ranks."""
        return statistics.fmean(statistics.fmean(times) for times in self.rank_seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * self.factor

    @property
    def slowest_seconds(self) -> list[float]:
        """Seconds of each iteration on its slowest rank."""
        return [max(times) for times in zip(*self.rank_seconds, strict=True)]


def measure(
    kind: type[Operation], size: int, sweep: Sweep, ranks: Participants
) -> CollectiveResult:
    """Check and time one operation at one size. All ranks of the group call it together."""
    operation = kind(ranks, size)
    wrong = int(sum(count for (count,) in gather([operation.count_wrong()], ranks)))
    operation.input.fill_(1)
    operation.run()  # warm-up
    barrier(ranks)  # before the measurement starts
    every = gather(time_iterations(operation.run, sweep.iterations, ranks.device), ranks)
    size, count, factor = operation.size, operation.count, operation.factor
    return CollectiveResult(kind, size, count, factor, wrong, every)


def measure_all(
    names: Sequence[str],
    sweep: Sweep,
    ranks: Participants,
    report: Callable[[CollectiveResult], None],
) -> list[str]:
    """Measure the operations at all sizes, and report each result at once.

    Returns sentences about missing results, if the backend refuses an operation.
    """
    missing: list[str] = []
    for name in names:
        for size in sweep.sizes():
            try:
                report(measure(OPERATIONS[name], size, sweep, ranks))
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                if "upport" not in reason and "mplement" not in reason:
                    raise
                missing.append(f"{name}: the backend refuses it ({reason})")
                break
    return missing


# The output -------------------------------------------------------------------------------------


def show(result: CollectiveResult) -> str:
    """Return one line of the table."""
    slowest = result.slowest_seconds
    bandwidths = _gigabytes(result.algorithm_bandwidth), _gigabytes(result.bus_bandwidth)
    return (
        f"  {result.operation:>14} {result.size:>12} {result.count:>12} "
        f"{result.seconds * 1e6:>10.1f} "
        f"{bandwidths[0]} {bandwidths[1]} {result.wrong:>6} "
        f"{percentile(slowest, 50) * 1e6:>10.1f} {percentile(slowest, 99) * 1e6:>10.1f}"
    )


def _gigabytes(bandwidth: float) -> str:
    gigabytes = bandwidth / 1e9
    return f"{gigabytes:>7.2f}" if gigabytes >= 1 else f"{gigabytes:>7.4f}"


def as_dict(result: CollectiveResult) -> dict[str, Any]:
    """Return a result as JSON values: seconds, and bytes per second."""
    slowest = result.slowest_seconds
    return {
        "operation": result.operation,
        "size_bytes": result.size,
        "seconds": result.seconds,
        "algorithm_bandwidth": result.algorithm_bandwidth,
        "bus_bandwidth": result.bus_bandwidth,
        "wrong": result.wrong,
        "p50_seconds": percentile(slowest, 50),
        "p99_seconds": percentile(slowest, 99),
    }


def summary(results: Sequence[CollectiveResult], missing: Sequence[str]) -> str:
    """Return the last line, a summary of bandwidth, latency and correctness."""
    if not results:
        return f"Nothing was measured: {'; '.join(missing)}."
    best = max(results, key=lambda result: (result.operation == "all_reduce", result.bus_bandwidth))
    first = min(
        (result for result in results if result.operation == best.operation),
        key=lambda result: result.size,
    )
    wrong = [result for result in results if result.wrong]
    correct = (
        f"WRONG RESULTS in {', '.join(sorted({result.operation for result in wrong}))}"
        if wrong
        else "all results are correct"
    )
    sentence = (
        f"{best.operation} reaches {best.bus_bandwidth / 1e9:.3g} GB/s of bus bandwidth, "
        f"and takes {first.seconds * 1e6:.0f} us for {first.size} bytes; {correct}"
    )
    return f"{'; '.join([sentence, *missing])}."


def write(path: Path, text: str) -> None:
    """Write a file atomically, so that no reader ever finds an incomplete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)

"""Measure collectives over a range of sizes; print and save them as nccl-tests does."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..operations import (
    OPERATIONS,
    Operation,
    Participants,
    barrier,
    gather,
    percentile,
    time_iterations,
)

_FACTOR = 4
_TIME = "%Y-%m-%d %H:%M:%S"
HEADER = f"""\
# {"operation":>14} {"size":>12} {"count":>12} {"type":>8} {"redop":>6} {"root":>5} \
{"time":>10} {"algbw":>7} {"busbw":>7} {"#wrong":>6} {"p50":>10} {"p99":>10}
# {"":>14} {"(B)":>12} {"(elements)":>12} {"":>8} {"":>6} {"":>5} \
{"(us)":>10} {"(GB/s)":>7} {"(GB/s)":>7} {"":>6} {"(us)":>10} {"(us)":>10}"""


@dataclass(frozen=True)
class Sweep:
    """What to measure: nccl-tests' -b, -e and -n. Each size is four times the one before."""

    smallest_bytes: int
    largest_bytes: int
    iterations: int

    def sizes(self) -> Iterator[int]:
        size = self.smallest_bytes
        while size <= self.largest_bytes:
            yield size
            size *= _FACTOR


@dataclass(frozen=True)
class CollectiveResult:
    """One operation at one size. Times in seconds; bandwidths in bytes per second."""

    kind: type[Operation]
    size: int
    count: int
    factor: float
    wrong: int  # elements, over all ranks
    rank_seconds: list[list[float]] = field(repr=False)  # of each rank, each iteration

    @property
    def operation(self) -> str:
        return self.kind.name

    @property
    def seconds(self) -> float:
        """The time of one iteration: the mean over the iterations and the ranks."""
        return statistics.fmean(statistics.fmean(times) for times in self.rank_seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * self.factor

    @property
    def slowest_seconds(self) -> list[float]:
        """The time of each iteration on the rank where it took longest."""
        return [max(times) for times in zip(*self.rank_seconds, strict=True)]


class StopRequest:
    """Ctrl-C or SIGTERM on any rank ends the measurement on all of them, between two sizes."""

    def __init__(self, ranks: Participants) -> None:
        self._ranks = ranks
        self._received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = 1
        signal.signal(number, signal.SIG_DFL)  # a second one ends this process at once

    def agreed(self) -> bool:
        """Return whether a rank has received a signal. All ranks call it together."""
        flag = torch.tensor([self._received], device=self._ranks.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._ranks.group)
        return bool(flag.item())


def measure(
    kind: type[Operation], size: int, sweep: Sweep, ranks: Participants
) -> CollectiveResult:
    """Check and time one operation at one size. All ranks of the group call it together."""
    operation = kind(ranks, size)
    wrong = int(sum(count for (count,) in gather([operation.count_wrong()], ranks)))
    operation.input.fill_(1)
    operation.run()  # warm-up
    barrier(ranks)  # outside of the time
    every = gather(time_iterations(operation.run, sweep.iterations, ranks.device), ranks)
    size, count, factor = operation.size, operation.count, operation.factor
    return CollectiveResult(kind, size, count, factor, wrong, every)


def measure_all(
    names: Sequence[str],
    sweep: Sweep,
    ranks: Participants,
    stop: StopRequest,
    report: Callable[[CollectiveResult], None],
) -> list[str]:
    """Measure the operations at all sizes, and report each result at once.

    Returns sentences about results that are missing: the backend refuses an operation, or a signal
    stopped the measurement.
    """
    missing: list[str] = []
    for name in names:
        for size in sweep.sizes():
            if stop.agreed():
                return [*missing, f"stopped by a signal before {name} at {size} bytes"]
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
        f"  {result.operation:>14} {result.size:>12} {result.count:>12} {'float':>8} "
        f"{result.kind.redop:>6} {result.kind.root:>5} {result.seconds * 1e6:>10.1f} "
        f"{bandwidths[0]} {bandwidths[1]} {result.wrong:>6} "
        f"{percentile(slowest, 50) * 1e6:>10.1f} {percentile(slowest, 99) * 1e6:>10.1f}"
    )


def _gigabytes(bandwidth: float) -> str:
    gigabytes = bandwidth / 1e9
    return f"{gigabytes:>7.2f}" if gigabytes >= 1 else f"{gigabytes:>7.4f}"


def as_json(
    results: Sequence[CollectiveResult], sweep: Sweep, devices: object, start: float
) -> str:
    """Return the results with the field names of nccl-tests (-J); times in us, bandwidth in GB/s.

    Not from nccl-tests: "collective" in each result, because one file holds several.
    """
    wrong = sum(result.wrong for result in results)
    mean = statistics.fmean([result.bus_bandwidth for result in results] or [0.0])
    content = {
        "version": 1,
        "start_time": time.strftime(_TIME, time.localtime(start)),
        "args": sys.argv,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": sweep.smallest_bytes,
            "maximum_bytes": sweep.largest_bytes,
            "step_factor": _FACTOR,
            "warmup_iters": 1,
            "iterations": sweep.iterations,
            "aggregated_iterations": 1,
            "validation": 1,
            "devices": devices,
        },
        "results": [_result_json(result) for result in results],
        "out_of_bounds": {"count": wrong, "okay": str(wrong == 0).lower()},
        "average_bus_bandwidth": {"bandwidth": mean / 1e9, "okay": "unchecked"},
        "end_time": time.strftime(_TIME),
    }
    return json.dumps(content, indent=1) + "\n"


def _result_json(result: CollectiveResult) -> dict[str, Any]:
    times = result.slowest_seconds
    mean, deviation = statistics.fmean(times), statistics.pstdev(times)
    measured = {
        "time": result.seconds * 1e6,
        "alg_bw": result.algorithm_bandwidth / 1e9,
        "bus_bw": result.bus_bandwidth / 1e9,
        "nwrong": result.wrong,
    }
    iterations = {
        "skipped_iterations": 0,
        "min_us": min(times) * 1e6,
        "max_us": max(times) * 1e6,
        "avg_us": mean * 1e6,
        **{f"p{percent}_us": percentile(times, percent) * 1e6 for percent in (50, 95, 99)},
        "stdev_us": deviation * 1e6,
        "cv_pct": 100 * deviation / mean,
        "times_us": [seconds * 1e6 for seconds in times],
        "per_process_max_times_us": [
            [seconds * 1e6 for seconds in times] for times in result.rank_seconds
        ],
    }
    places = ("in_place", "out_of_place")
    place, other = places if result.kind.in_place else reversed(places)
    return {
        "collective": result.operation,
        "size": result.size,
        "count": result.count,
        "type": "float",
        "redop": result.kind.redop,
        "root": str(result.kind.root),
        other: None,
        place: measured,
        f"{place}_per_iter": iterations,
        "actual_iterations": len(times),
        "experiment_name": result.operation,
    }


def describe_rank(ranks: Participants) -> dict[str, Any]:
    """Return what nccl-tests writes about a rank under "devices"."""
    device = ranks.device
    info = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return {
        "rank": ranks.rank,
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "device": device.index or 0,
        "device_info": info,
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

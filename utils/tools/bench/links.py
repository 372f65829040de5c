"""Measure links: as a ring for ddpkit plan, and between each pair of hosts.

A ring has 2 (n - 1) steps with one latency each, and 2 (n - 1) / n of the bytes go through its
slowest connection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ...gather import gather_json
from .collective_bench import CollectiveResult, Sweep, measure, write
from .collective_operations import AllReduce, Participants, barrier, exchange, time_iterations
from .host_pairs import Pair, rounds, slow_pairs

_ATTEMPTS = 3  # measurements of a slow pair


@dataclass(frozen=True)
class MeasuredLink:
    """A connection, as an all-reduce over a ring sees it."""

    bandwidth_bytes_per_second: float
    latency_seconds: float  # seconds per step of the ring


def fit(results: Sequence[tuple[int, float]], ranks: int) -> MeasuredLink:
    """Return the link that explains the all-reduces best: least squares of the relative error.

    results: (bytes, seconds). ranks: number in the ring, at least 2.
    """
    rows = [
        (2 * (ranks - 1) / seconds, 2 * (ranks - 1) / ranks * size / seconds)
        for size, seconds in results
    ]
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, a1, b1 = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency = (a1 * bb - b1 * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
    latency = max(0.0, latency)
    per_byte = (b1 - latency * ab) / bb
    if per_byte <= 0:  # only latency shows: the sizes were too small for a bandwidth
        latency, per_byte = a1 / aa, min(seconds / size for size, seconds in results)
    return MeasuredLink(1 / per_byte, latency)


def measure_links(
    sweep: Sweep, ranks: Participants, node_rank: int, results: Sequence[CollectiveResult]
) -> tuple[MeasuredLink | None, MeasuredLink | None]:
    """Return the links inside and between hosts; None if there is only one rank or host.

    Inside: the slowest host, while all hosts measure at once. Between: the ring of all ranks.
    node_rank: this rank's host. results: of all ranks, if they are measured already.
    """
    node_ranks = gather_json(node_rank)
    hosts = sorted(set(node_ranks))
    inside = None
    for host in hosts:
        members = [rank for rank, node in enumerate(node_ranks) if node == host]
        group = dist.new_group(members)  # every rank calls new_group()
        if node_rank == host:
            # Other ranks get GroupMember.NON_GROUP_MEMBER, which some versions of torch type as
            # int.
            own = Participants(
                members.index(ranks.rank),
                len(members),
                ranks.device,
                group,  # type: ignore[arg-type, unused-ignore]
            )
    if own.size > 1:
        inside = fit(_all_reduces(sweep, own), own.size)
    found = [MeasuredLink(**link) for link in gather_json(inside and asdict(inside)) if link]
    slowest = min(found, key=lambda link: link.bandwidth_bytes_per_second, default=None)
    if len(hosts) == 1:
        return slowest, None
    measured = [
        (result.size, result.seconds) for result in results if result.operation == AllReduce.name
    ]
    return slowest, fit(measured if len(measured) > 1 else _all_reduces(sweep, ranks), ranks.size)


def _all_reduces(sweep: Sweep, ranks: Participants) -> list[tuple[int, float]]:
    measured = [measure(AllReduce, size, sweep, ranks) for size in sweep.sizes()]
    return [(result.size, result.seconds) for result in measured]


def write_links(
    path: Path, backend: str, hosts: int, inside: MeasuredLink | None, between: MeasuredLink | None
) -> None:
    """Write the file that `ddpkit plan --links` reads."""
    content = {
        "format": 1,
        "date": time.strftime("%Y-%m-%d"),
        "backend": backend,
        "hosts": hosts,
        "inside": asdict(inside) if inside else None,
        "between": asdict(between) if between else None,
    }
    write(path, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class PairResult:
    """Two hosts that send to each other at the same time: bytes per second each way, seconds."""

    bandwidth: float
    latency: float


def measure_pairs(
    node_ranks: Sequence[int], ranks: Participants, size: int, iterations: int
) -> dict[Pair, PairResult]:
    """Measure all pairs of hosts, with one rank on each host. All ranks call it together.

    node_ranks: the host of each rank. size: bytes that each of the two sends.
    The best iteration counts, and seemingly slow pairs are measured again: a slow link slows all
    iterations.
    """
    best: dict[Pair, PairResult] = {}
    for attempt in range(_ATTEMPTS):
        bandwidths = {pair: result.bandwidth for pair, result in best.items()}
        again = slow_pairs(bandwidths) if attempt else None
        for pairs in rounds(len(set(node_ranks))):
            chosen = [pair for pair in pairs if again is None or pair in again]
            if chosen:
                for pair, result in _measure_round(chosen, node_ranks, ranks, size, iterations):
                    before = best.get(pair, result)
                    best[pair] = max(before, result, key=lambda result: result.bandwidth)
    return dict(sorted(best.items()))


def _measure_round(
    pairs: Sequence[Pair],
    node_ranks: Sequence[int],
    ranks: Participants,
    size: int,
    iterations: int,
) -> list[tuple[Pair, PairResult]]:
    """Return the slower of the two directions of each pair."""
    own = node_ranks[ranks.rank]
    measured: tuple[Pair, tuple[float, float]] | None = None
    barrier(ranks)
    pair = next((pair for pair in pairs if own in pair), None)
    if pair and ranks.rank == node_ranks.index(own):
        other = node_ranks.index(pair[0] if pair[1] == own else pair[1])
        seconds = _best(other, size, iterations, ranks.device)
        latency = _best(other, 8, iterations, ranks.device)
        measured = (pair, (size / seconds, latency))
    pair_results = [
        ((first, second), PairResult(*result))
        for (first, second), result in filter(None, gather_json(measured))
    ]
    return [
        min(
            (pair_result for pair_result in pair_results if pair_result[0] == pair),
            key=lambda pair_result: pair_result[1].bandwidth,
        )
        for pair in pairs
    ]


def _best(other: int, size: int, iterations: int, device: torch.device) -> float:
    sent, received = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    exchange(sent, other, received, other)  # the first exchange connects
    return min(time_iterations(lambda: exchange(sent, other, received, other), iterations, device))

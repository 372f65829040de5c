"""Measure the link between each pair of hosts; distinguish a slow link from a slow host.

The pairs are measured in rounds, as in a round-robin tournament. In one round each host has at most
one partner, so that no two pairs share a host's connection. The pairs of a round run concurrently.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .operations import Ranks, exchange
from .timing import barrier, gather_objects, time_iterations

_ATTEMPTS = 3
SLOW = 0.6  # share of the usual bandwidth below which a link is slow
Pair = tuple[int, int]  # two hosts, the lower one first


@dataclass(frozen=True)
class PairResult:
    """Two hosts that send to each other at the same time: bytes per second each way, seconds."""

    bandwidth: float
    latency: float


def rounds(hosts: int) -> list[list[Pair]]:
    """Return the rounds of a round-robin tournament: each pair of hosts once (circle method)."""
    places = list(range(hosts + hosts % 2))  # with an odd number, the partner of the last waits
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        both = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in both if max(a, b) < hosts])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_pairs(
    node_ranks: Sequence[int], ranks: Ranks, size: int, iterations: int
) -> dict[Pair, PairResult]:
    """Measure all pairs of hosts, with one rank of each. All ranks call it together.

    node_ranks: the host of each rank. size: bytes that each of the two sends.
    The best iteration counts, and pairs that seem slow are measured again: a slow link slows all
    iterations.
    """
    best: dict[Pair, PairResult] = {}
    for attempt in range(_ATTEMPTS):
        bandwidths = {pair: one.bandwidth for pair, one in best.items()}
        again = _slow(bandwidths) if attempt else None
        for pairs in rounds(len(set(node_ranks))):
            chosen = [pair for pair in pairs if again is None or pair in again]
            if chosen:
                for pair, one in _measure_round(chosen, node_ranks, ranks, size, iterations):
                    before = best.get(pair, one)
                    best[pair] = max(before, one, key=lambda result: result.bandwidth)
    return dict(sorted(best.items()))


def _measure_round(
    pairs: Sequence[Pair], node_ranks: Sequence[int], ranks: Ranks, size: int, iterations: int
) -> list[tuple[Pair, PairResult]]:
    """Return the slower of the two directions of each pair."""
    own = node_ranks[ranks.rank]
    measured = None
    barrier(ranks)
    pair = next((pair for pair in pairs if own in pair), None)
    if pair and ranks.rank == node_ranks.index(own):
        other = node_ranks.index(pair[0] if pair[1] == own else pair[1])
        seconds = _best(other, size, iterations, ranks.device)
        latency = _best(other, 8, iterations, ranks.device)
        measured = (pair, PairResult(size / seconds, latency))
    found = [one for one in gather_objects(measured) if one]
    return [
        min((one for one in found if one[0] == pair), key=lambda one: one[1].bandwidth)
        for pair in pairs
    ]


def _best(other: int, size: int, iterations: int, device: torch.device) -> float:
    sent, received = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    exchange(sent, other, received, other)  # connects
    return min(time_iterations(lambda: exchange(sent, other, received, other), iterations, device))


def find_slow(bandwidths: Mapping[Pair, float]) -> tuple[list[int], list[Pair]]:
    """Return the slow hosts, and the slow links between hosts that are not slow.

    A host is slow where all of its links are: a link is slow below SLOW times the upper quartile
    of all. With two hosts there is nothing to compare.
    """
    slow = _slow(bandwidths)
    hosts = sorted({host for pair in bandwidths for host in pair})
    links = {host: [pair for pair in bandwidths if host in pair] for host in hosts}
    slow_hosts = [host for host in hosts if slow.issuperset(links[host])]
    return slow_hosts, sorted(pair for pair in slow if not set(pair) & set(slow_hosts))


def _slow(bandwidths: Mapping[Pair, float]) -> set[Pair]:
    if len(bandwidths) < 3:
        return set()
    usual = statistics.quantiles(bandwidths.values(), n=4, method="inclusive")[2]
    return {pair for pair, bandwidth in bandwidths.items() if bandwidth < SLOW * usual}


def describe(bandwidths: Mapping[Pair, float], names: Sequence[str]) -> str:
    """Return the summary: which hosts or links are slow, and by how much."""
    slow_hosts, slow_links = find_slow(bandwidths)
    usual = [
        bandwidth
        for pair, bandwidth in bandwidths.items()
        if pair not in slow_links and not set(pair) & set(slow_hosts)
    ] or list(bandwidths.values())
    median = statistics.median(usual)
    sentences = []
    for host in slow_hosts:
        own = [bandwidth for pair, bandwidth in bandwidths.items() if host in pair]
        times = median / statistics.median(own)
        sentences.append(
            f"{names[host]} is {times:.1f} times slower than the rest in all its links"
        )
    for a, b in slow_links:
        times = median / bandwidths[a, b]
        sentences.append(
            f"the link {names[a]} - {names[b]} is {times:.1f} times slower than the rest; "
            "both hosts are as fast as the others elsewhere"
        )
    if not sentences:
        alike = min(bandwidths.values()) / max(bandwidths.values())
        return (
            f"No slow link among {len(bandwidths)}: the median is {median / 1e9:.3g} GB/s, the "
            f"slowest has {alike:.0%} of the fastest."
        )
    return f"{'; '.join(sentences)}. The median of the others is {median / 1e9:.3g} GB/s."

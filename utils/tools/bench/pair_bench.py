"""Measure the link between each pair of hosts, in the rounds of host_pairs.

The pairs of a round run concurrently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..host_pairs import Pair, rounds, slow_pairs
from .operations import Ranks, exchange
from .timing import barrier, gather_objects, time_iterations

_ATTEMPTS = 3


@dataclass(frozen=True)
class PairResult:
    """Two hosts that send to each other at the same time: bytes per second each way, seconds."""

    bandwidth: float
    latency: float


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
        again = slow_pairs(bandwidths) if attempt else None
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

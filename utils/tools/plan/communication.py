"""Predict the time of an all-reduce from latency and bandwidth (the alpha-beta model).

A ring all-reduce of S bytes over N ranks sends 2 (N-1)/N S bytes from each rank in 2 (N-1) messages
(Thakur, Rabenseifner, Gropp 2005, https://doi.org/10.1177/1094342005051521). The bandwidth is
the "busbw" of nccl-tests, in which this factor is already taken out:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PlanError(ValueError):
    """Something needed for a prediction is missing or wrong; the message says what to do."""


@dataclass(frozen=True)
class Link:
    """A class of links, in one direction."""

    bandwidth: float  # bytes per second
    latency: float  # seconds per message


@dataclass(frozen=True)
class Network:
    """The links of a job.

    inside: each GPU's bandwidth to the others of its node. between: the bandwidth of a whole node
    to the others, over all its network ports. tree: the library may also use trees, as NCCL does;
    gloo uses rings only, and overlaps latency with transfers.
    """

    inside: Link
    between: Link
    gpus_per_node: int
    tree: bool = True

    def all_reduce_seconds(self, size: float, gpus: int) -> float:
        """Return the time of one all-reduce of `size` bytes."""
        if gpus <= 1:
            return 0.0
        latency, transfer = self._latency(gpus), sent_bytes(size, gpus) / self.bandwidth(gpus)
        if self.tree:
            return latency + transfer
        # gloo reduces the blocks, then gathers them. In each of the two passes it sends one half of
        # a block while the other half is on its way, and waits for the first half.
        steps = gpus - 1
        return max(transfer + latency / steps, transfer / 2 * (1 + 1 / steps) + latency)

    def bandwidth(self, gpus: int) -> float:
        """Return the bandwidth of the slowest link on the ring."""
        nodes = math.ceil(gpus / self.gpus_per_node)
        if nodes == 1:
            return self.inside.bandwidth
        if self.gpus_per_node == 1:
            return self.between.bandwidth
        return min(self.inside.bandwidth, self.between.bandwidth)

    def _latency(self, gpus: int) -> float:
        nodes = math.ceil(gpus / self.gpus_per_node)
        inside = (gpus - nodes) * self.inside.latency
        ring = 2 * (inside + (nodes - 1) * self.between.latency)
        if not self.tree:
            return ring
        # A tree of nodes, each with a chain of its GPUs.
        depth = math.ceil(math.log2(nodes))
        chain = (min(gpus, self.gpus_per_node) - 1) * self.inside.latency
        return min(ring, 2 * (chain + depth * self.between.latency))


def sent_bytes(size: float, ranks: int) -> float:
    """Return how many bytes each rank sends for one ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def read_links(path: Path, gpus_per_node: int) -> tuple[Link, Link]:
    """Read the links inside and between nodes that `bench.py collectives --links FILE` wrote.

    The file has the mean latency of all messages of a ring through `hosts` nodes. Those within the
    nodes are subtracted from it. Raises PlanError.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != 1:
            raise PlanError(
                f"{path} has format {found['format']!r}. Expected 1. Measure the links again with "
                "`bench.py collectives --links FILE`."
            )
        inside, between = (_link(found.get(name)) for name in ("inside", "between"))
        hosts = int(found["hosts"])
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"{path} is not a file of measured links: {error!r}. Write one with "
            "`bench.py collectives --links FILE`."
        ) from None
    measured = inside or between
    if measured is None:
        raise PlanError(f"{path} has neither 'inside' nor 'between'. Measure the links again.")
    if inside and between and hosts > 1:
        ranks = hosts * gpus_per_node
        sum_between = (ranks - 1) * between.latency - (ranks - hosts) * inside.latency
        latency = max(between.latency, sum_between / (hosts - 1))
        between = Link(between.bandwidth, latency)
    return inside or measured, between or measured


def _link(entry: dict[str, float] | None) -> Link | None:
    if entry is None:
        return None
    return Link(float(entry["bandwidth_bytes_per_second"]), float(entry["latency_seconds"]))

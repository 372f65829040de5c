"""Define the measured collectives: buffers, call, factor of bus bandwidth, check, time.

Sizes, factors and "in place" have the same meaning as in nccl-tests:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

Every operation is checked against values that each rank can compute alone. They are small whole
numbers, so that sums are exact in any order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 and newer have other names, and warn about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ITEM_BYTES = torch.float32.itemsize
_PERIOD = 97  # a prime, so that a block in the wrong place is noticed


@dataclass
class Participants:
    """The ranks that take part: their group, and this rank's number in it."""

    rank: int
    size: int
    device: torch.device
    group: ProcessGroup | None = None  # None: all ranks


class Operation:
    """One collective with buffers of `count` elements; each collective is a subclass.

    size: bytes as nccl-tests counts them, the larger of what a rank sends and receives. input and
    output have `count` elements, or that number divided by the ranks if they hold one block.
    """

    name = ""
    in_place = False
    sends_block = receives_block = False
    passes = 1  # passes of all data through the ring

    def __init__(self, ranks: Participants, size: int) -> None:
        self.ranks = ranks
        count = max(1, size // _ITEM_BYTES)
        if self.sends_block or self.receives_block:
            count = -(-count // ranks.size) * ranks.size
        self.count, self.size = count, count * _ITEM_BYTES
        block = count // ranks.size
        self.input = self.ones(block if self.sends_block else count)
        self.output = self.input
        if not self.in_place:
            self.output = self.ones(block if self.receives_block else count)
        # Bus bandwidth divided by algorithm bandwidth.
        self.factor = self.passes * (ranks.size - 1) / ranks.size

    def run(self) -> None:
        """Run the collective once."""
        raise NotImplementedError

    def fill(self) -> None:
        """Write this rank's values into the input."""
        self.input.copy_(self.sequence(len(self.input), self.ranks.rank))

    def expected(self) -> Tensor:
        """Return the output that this rank should have."""
        raise NotImplementedError

    def count_wrong(self) -> int:
        """Run the collective once on known values; return the number of wrong elements."""
        self.output.fill_(-1)
        self.fill()
        self.run()
        return int((self.output != self.expected()).sum())

    def ones(self, count: int) -> Tensor:
        return torch.ones(count, device=self.ranks.device)

    def sequence(self, count: int, start: int) -> Tensor:
        """Return whole numbers from 0 to _PERIOD - 1 in turn, starting at `start`."""
        period = (torch.arange(_PERIOD, device=self.ranks.device) + start) % _PERIOD
        return period.float().repeat(-(-count // _PERIOD))[:count]


class AllReduce(Operation):
    name = "all_reduce"
    in_place = True
    passes = 2

    def run(self) -> None:
        dist.all_reduce(self.input, group=self.ranks.group)

    def fill(self) -> None:
        self.input.copy_(self.sequence(self.count, 3 * self.ranks.rank))

    def expected(self) -> Tensor:
        period = sum(self.sequence(_PERIOD, 3 * rank) for rank in range(self.ranks.size))
        assert isinstance(period, Tensor)
        return period.repeat(-(-self.count // _PERIOD))[: self.count]


class ReduceScatter(AllReduce):
    name = "reduce_scatter"
    in_place = False
    receives_block = True
    passes = 1

    def run(self) -> None:
        _reduce_scatter(self.output, self.input, group=self.ranks.group)

    def expected(self) -> Tensor:
        return super().expected().chunk(self.ranks.size)[self.ranks.rank]


class AllGather(Operation):
    name = "all_gather"
    sends_block = True

    def run(self) -> None:
        _all_gather(self.output, self.input, group=self.ranks.group)

    def expected(self) -> Tensor:
        return torch.cat([self.sequence(len(self.input), rank) for rank in range(self.ranks.size)])


OPERATIONS: dict[str, type[Operation]] = {
    kind.name: kind for kind in (AllReduce, AllGather, ReduceScatter)
}


def exchange(
    sent: Tensor, to: int, received: Tensor, sender: int, group: ProcessGroup | None = None
) -> None:
    """Send a tensor to one rank and receive one from another at the same time."""
    both = [
        dist.P2POp(dist.isend, sent, to, group),
        dist.P2POp(dist.irecv, received, sender, group),
    ]
    for request in dist.batch_isend_irecv(both):
        request.wait()


def time_iterations(run: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `count` runs, by the clock or by an accelerator's events.

    Their sum is the time of the whole loop.
    """
    if device.type == "cpu":
        clock = time.perf_counter
        stamps = [clock()]
        for _ in range(count):
            run()
            stamps.append(clock())
        return [end - start for start, end in zip(stamps, stamps[1:], strict=False)]
    events = [torch.Event(device=device.type, enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    pairs = zip(events, events[1:], strict=False)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def barrier(ranks: Participants) -> None:
    """Wait for all ranks of the group; on an accelerator, wait until its work is done, too."""
    tensor = torch.zeros(1, device=ranks.device)
    dist.all_reduce(tensor, group=ranks.group)
    tensor.item()


def gather(values: Sequence[float], ranks: Participants) -> list[list[float]]:
    """Return the values of each rank; all ranks pass the same number of values."""
    own = torch.tensor(values, dtype=torch.float64, device=ranks.device)
    parts = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(parts, own, group=ranks.group)
    return [part.tolist() for part in parts]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank, like nccl-tests."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]

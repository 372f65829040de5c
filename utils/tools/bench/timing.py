"""Time iterations of a collective: on the CPU by the clock, on an accelerator by its events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from .operations import Ranks

T = TypeVar("T")


def time_iterations(run: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `count` runs. Their sum is the time of the whole loop."""
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


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks of the group, and on an accelerator until it has done its work."""
    one = torch.zeros(1, device=ranks.device)
    dist.all_reduce(one, group=ranks.group)
    one.item()


def gather_objects(value: T) -> list[T]:
    """Return the value of each rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather(values: Sequence[float], ranks: Ranks) -> list[list[float]]:
    """Return the values of each rank; all ranks have the same number of them."""
    own = torch.tensor(values, dtype=torch.float64, device=ranks.device)
    parts = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(parts, own, group=ranks.group)
    return [part.tolist() for part in parts]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank, as nccl-tests does."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]

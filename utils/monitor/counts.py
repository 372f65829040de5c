"""How many collectives this rank has entered. Private API of torch: it offers no public count."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist


def entered_collectives() -> int | None:
    """Return how many collectives of the default group this rank has entered.

    None where torch does not count them. No other count is kept by the backends themselves; it
    includes DistributedDataParallel's reductions.
    """
    group = dist.group.WORLD
    return None if group is None else sequence_number(group)


def total_collectives() -> int:
    """Return how many collectives of all groups this rank has entered; 0 where torch counts none.

    torch lists its groups nowhere else.
    """
    return sum(sequence_number(group) or 0 for group in list(dist.distributed_c10d._world.pg_map))


def group_timeout(group: dist.ProcessGroup | None) -> float | None:
    """Return the seconds after which torch ends a collective of a group; None where unknown."""
    try:
        [device, *_] = group._device_types  # type: ignore[union-attr]
        seconds = group._get_backend(device).options._timeout.total_seconds()  # type: ignore
        return float(seconds)
    except (AttributeError, RuntimeError, ValueError):
        return None


def sequence_number(group: dist.ProcessGroup) -> int | None:
    """Return how many collectives of a group this rank has entered; None where not counted."""
    errors = (AttributeError, RuntimeError, ValueError)
    with contextlib.suppress(*errors):
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    # "ProcessGroup undefined does not yet support sequence numbers": init_process_group("cpu:gloo")
    # or "cpu:gloo,cuda:nccl". There each device's backend counts; two devices may have the same.
    with contextlib.suppress(*errors):
        backends: set[Any] = {group._get_backend(device) for device in group._device_types}
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    return None

"""Predict the memory of a rank under FSDP2, from a trace of the whole model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import Trace


def memory(trace: Trace, shards: int, *, optimizer: bool | None = None) -> dict[str, float]:
    """Return the bytes by category at the peak on one of `shards` ranks that share a model.

    Parameters, gradients and the optimizer's state are divided among the ranks. "gathered" is what
    a rank holds of whole parameters and gradients while it computes.

    optimizer: True for the peak while the optimizer runs, False for that of the rest of the step.
    """
    if optimizer is None:
        peaks = [memory(trace, shards, optimizer=phase) for phase in (False, True)]
        return max(peaks, key=lambda parts: sum(parts.values()))

    parts: dict[str, float] = dict(trace.peaks[optimizer, True].bytes)
    parts["gradients"] = sum(size for _, size in trace.gradients)
    divided = ["parameters", "gradients", "optimizer"]
    if optimizer:
        divided.append("temporary")  # as large as the parameters that are updated
    for name in divided:
        parts[name] /= shards
    parts["gathered"] = 0.0 if optimizer or shards == 1 else gathered(trace.shard_groups)
    return parts


def gathered(groups: Sequence[int]) -> float:
    """Return the bytes of whole parameters and gradients at the peak of a backward pass.

    groups: bytes of the parameters of each fully_shard(), the whole model last. Gradients are
        taken to be as large as parameters.
    """
    *blocks, root = groups
    if not blocks:
        return 2.0 * root  # its gradients, and the copy that is reduced
    # The root stays gathered, and its gradients are reduced last. Of the blocks: the parameters of
    # this one and of the next, which is gathered meanwhile; the gradients of this one and of the
    # one before, which are being reduced.
    return 2.0 * root + 4.0 * max(blocks)

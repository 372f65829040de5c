"""Predict the memory of a rank under FSDP2, from a trace of the whole model on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import Trace

_ACTIVE = ("buffers", "inputs", "activations", "temporary")  # whole on each rank


def memory(trace: Trace, shards: int, *, optimizer: bool | None = None) -> dict[str, float]:
    """Return the bytes by category at the peak on one of `shards` ranks that share a model.

    Parameters, gradients and the optimizer's state are divided among the ranks. "gathered" is what
    a rank has of whole parameters and gradients while it computes.

    optimizer: True for the peak while the optimizer runs, False for that of the rest of the step.
    """
    at_rest = trace.peaks[True, True].bytes
    states = {name: at_rest[name] / shards for name in ("parameters", "optimizer")}
    moments: list[dict[str, float]] = []
    if optimizer is not True:
        moments += _computing(trace, shards)
    if optimizer is not False:
        # Its temporary tensors are as large as what it updates.
        gradients = trace.bucket_bytes / shards
        active = {name: float(at_rest[name]) for name in _ACTIVE}
        active["temporary"] /= shards
        moments.append({"gradients": gradients, **active, "gathered": 0.0})
    most = max(moments, key=lambda parts: sum(parts.values()))
    return {**states, **most}


def _computing(trace: Trace, shards: int) -> Iterator[dict[str, float]]:
    """Yield the bytes by category, without the states, at moments of the two passes.

    The group of the whole model, the last one, stays gathered. Of the others, the parameters of two
    are gathered: those in use, and those of the next one. Gradients are whole until the last one of
    their group is ready. Then they are copied and reduced, and the copy stays until the next ones
    are copied.
    """
    groups = trace.shard_groups
    is_divided = shards > 1  # a single rank gathers nothing, and still copies the gradients
    root = len(groups) - 1
    largest = max(groups[:root], default=0)

    def moment(live: dict[str, int], gathered: float, reduced: float) -> dict[str, float]:
        active = {name: float(live[name]) for name in _ACTIVE}
        return {"gradients": reduced / shards, **active, "gathered": gathered}

    # Activations are at their peak between the forward and the backward pass.
    yield moment(trace.peaks[False, True].bytes, is_divided * (groups[root] + 2 * largest), 0)

    order = [gradient.group for gradient in trace.shard_gradients]
    missing = Counter(order)
    whole, reducing, reduced = Counter[int](), 0, 0
    for number, (group, size, live) in enumerate(trace.shard_gradients):
        coming = next((later for later in order[number:] if later not in (group, root)), None)
        parameters = groups[root] + (0 if coming is None else groups[coming])
        whole[group] += size
        in_use = groups[group] if group != root else 0
        gathered = is_divided * (parameters + in_use) + whole.total() + reducing
        yield moment(live, gathered, reduced)

        missing[group] -= 1
        if not missing[group]:
            reducing = whole.pop(group)
            gathered = is_divided * parameters + whole.total() + 2 * reducing
            yield moment(live, gathered, reduced)
            reduced += reducing

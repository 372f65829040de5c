"""Add to DistributedDataParallel's errors which parameters they are about, and on which ranks.

Loaded when such an error ends a rank.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_SHAPE = re.compile(r"params\[(\d+)\] in this process with sizes (\[[^]]*\])")
_COUNT = re.compile(r"DDP expects same model across all ranks")
_WAIT_SECONDS = 3.0  # seconds to wait for another rank's parameters
_SHOWN = 4  # parameters named in a message


def explain(error: BaseException, rank: int, store: Store) -> str:
    """Return which parameters an error of DistributedDataParallel is about; "" for other errors.

    store: shared by all ranks. If the ranks have different numbers of parameters, they find the
    first difference through it.
    """
    text = str(error)
    model = _model_of(error.__traceback__)
    if model is None:
        return ""
    parameters = [(n, list(p.shape)) for n, p in model.named_parameters() if p.requires_grad]
    if found := _UNUSED.search(text):
        numbers = [int(number) for number in found[1].split()]
        names = [parameters[n][0] for n in numbers if n < len(parameters)]
        more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        return (
            f"no gradient in the step before for {', '.join(names[:_SHOWN])}{more}: this rank's "
            "batch did not use them. Use them on every rank, or pass find_unused_parameters=True"
        )
    if (found := _SHAPE.search(text)) and int(found[1]) < len(parameters):
        name = parameters[int(found[1])][0]
        return (
            f"the ranks build different models: {name} has the shape {found[2]} on rank {rank}, "
            "and another one on rank 0"
        )
    if _COUNT.search(text):
        return _first_difference(parameters, rank, store)
    return ""


def _model_of(trace: TracebackType | None) -> nn.Module | None:
    """Return the model of the innermost DistributedDataParallel that a traceback goes through."""
    model: nn.Module | None = None
    for frame, _ in traceback.walk_tb(trace):
        values = frame.f_locals
        if isinstance(values.get("self"), DistributedDataParallel):
            module = values["self"].__dict__.get("_modules", {}).get("module")
            model = module or values.get("module")
    return model


def _first_difference(parameters: Sequence[tuple[str, list[int]]], rank: int, store: Store) -> str:
    """Find the first parameter that differs from rank 0's; rank 0 compares with rank 1."""
    other = 1 if rank == 0 else 0
    problem = "the ranks build different models"
    try:
        if rank in (0, 1):
            store.set(f"ddpkit/model/{rank}", json.dumps(parameters))
        store.wait([f"ddpkit/model/{other}"], timedelta(seconds=_WAIT_SECONDS))
        theirs = [(n, shape) for n, shape in json.loads(store.get(f"ddpkit/model/{other}"))]
    except (RuntimeError, ValueError):
        return problem  # the other rank has failed in another way
    for number in range(max(len(parameters), len(theirs))):
        own, its = (
            f"{named[number][0]} {named[number][1]}" if number < len(named) else "none"
            for named in (parameters, theirs)
        )
        if own != its:
            return (
                f"{problem}: the first trainable parameter that differs is {own} on rank {rank} "
                f"and {its} on rank {other}"
            )
    return problem

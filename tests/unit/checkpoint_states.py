"""States as a checkpoint file holds them, and states compared bit for bit; for test_checkpoint_*.py."""
from __future__ import annotations

import json
from typing import Any

import numpy
import torch

from utils.checkpoint.pack import pack
from utils.checkpoint.restore import Restorer
from utils.checkpoint.unpack import unpack

Saved = tuple[Any, dict[str, torch.Tensor], dict[str, Any]]


def saved(state: Any) -> Saved:
    """What a file holds: the tree, the tensors as plain contiguous copies, the PerRank trees."""
    packed = pack(state)
    tree, own = json.loads(json.dumps([packed.tree, packed.own]))
    tensors = {**packed.common, **packed.main, **packed.local, **packed.mine}
    return tree, {name: one.resolve_conj().contiguous().clone()
                  for name, one in tensors.items()}, own


def unpacked(state: Any) -> Any:
    """A state that was saved and read again."""
    return unpack(*saved(state)[:2])


def restored(source: Any, state: Any) -> Any:
    """Save `source` and restore it into `state`."""
    restorer = Restorer(state, *saved(source))
    assert restorer.mismatches == []
    return restorer.restore()


def mismatches(source: Any, state: Any) -> str:
    return "; ".join(Restorer(state, *saved(source)).mismatches)


def bits(value: Any) -> Any:
    """A state as plain data with all types and every bit."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()
        return [str(value.dtype), list(value.shape), raw]
    if isinstance(value, numpy.ndarray):
        return [kind, str(value.dtype.descr), value.shape, value.tobytes()]
    if isinstance(value, dict):
        factory = str(getattr(value, "default_factory", ""))
        return [kind, factory, [[bits(key), bits(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [kind, *map(bits, value)]
    return [kind, hex(value) if type(value) is int else repr(value)]

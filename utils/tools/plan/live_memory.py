"""The memory that tensors use while steps are traced: live storages by category, and peaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "EMA copy",  # parameters with the model's shapes that no optimizer updates
    "inputs",
    "activations",  # made in the forward pass
    "temporary",  # made in the backward pass and by the optimizer
    "rounding",  # the allocator's rounding of each block
)
_BLOCK = 512  # bytes; kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp


@dataclass
class Peak:
    """The moment of a step with the highest memory use."""

    total: int = -1
    bytes: dict[str, int] = field(default_factory=dict)  # bytes by category
    where: str = ""


@dataclass
class _Storage:
    size: int
    category: str


class LiveMemory:
    """The storages that are alive, each counted once, and the peaks since begin_step().

    peaks: keys (while the optimizer runs, without gradients). live: bytes by category.
    """

    def __init__(self) -> None:
        self.live = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._storages: weakref.WeakKeyDictionary[Any, _Storage] = weakref.WeakKeyDictionary()
        self.begin_step()

    def begin_step(self) -> None:
        self.peaks = {(o, without): Peak() for o in (False, True) for without in (False, True)}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._storages

    def count(
        self, tensor: Tensor, category: str, *, in_optimizer: bool, where: Callable[[], str]
    ) -> None:
        """Add a storage, or move it to another category. where: describes this moment."""
        if tensor.device.type == "meta":
            return  # tensors on "meta" have no memory
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage)
        if entry is not None:
            if category != "inputs":
                self.live[entry.category] -= entry.size
                self.live[category] += entry.size
                entry.category = category
            return
        # A batch may be a view of a data set that stays on the host.
        size = tensor.nbytes if category == "inputs" else storage.nbytes()
        entry = self._storages[storage] = _Storage(size, category)
        weakref.finalize(storage, self._change, entry, -1)
        self._change(entry, 1)
        for without in (False, True):
            total = self._total - (self.live["gradients"] if without else 0)
            if total > self.peaks[in_optimizer, without].total:
                live = {**self.live, "gradients": 0} if without else dict(self.live)
                self.peaks[in_optimizer, without] = Peak(total, live, where())

    def _change(self, entry: _Storage, sign: int) -> None:
        rounding = -entry.size % _BLOCK
        self.live[entry.category] += sign * entry.size
        self.live["rounding"] += sign * rounding
        self._total += sign * (entry.size + rounding)

"""A copy of tensors in memory that is kept from save to save, and which rank copies which of them.

Not here: what is in the tensors (checkpoint_state.py), where the copy goes (checkpoint_files.py).
"""
from __future__ import annotations

import heapq
from collections.abc import Mapping

import torch
from torch import Tensor

from .checkpoint_state import Packed

Layout = list[tuple[str, torch.dtype, tuple[int, ...], int, int]]  # name, type, shape, first byte, bytes
_LEAST_SHARE = 32 << 20  # bytes that are worth a writer of their own


def share_out(packed: Packed, rank: int, world_size: int) -> dict[str, Tensor]:
    """The replicated tensors that this rank writes; every rank comes to the same distribution.

    The longest first, each to the rank that has least so far.
    """
    writers = max(1, min(world_size, sum(tensor.nbytes for tensor in packed.common.values()) // _LEAST_SHARE))
    loads = [(0, writer) for writer in range(writers)]
    loads[0] = (sum(tensor.nbytes for tensor in packed.main.values()), 0)
    heapq.heapify(loads)
    share = dict(packed.main) if rank == 0 else {}
    for name, tensor in sorted(packed.common.items(), key=lambda item: -item[1].nbytes):
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + tensor.nbytes, writer))
        if writer == rank:
            share[name] = tensor
    return share


class Snapshot:
    """Room for one copy. Memory that was touched before is written several times as fast as fresh memory."""

    def __init__(self) -> None:
        self.layout: Layout = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._events: list[torch.Event] = []

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy; the tensors may change as soon as this returns. GPUs may still be copying then (see bytes())."""
        self.layout, self._size = [], 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # so all are aligned
            self.layout.append((name, tensor.dtype, tuple(tensor.shape), self._size, tensor.nbytes))
            self._size += tensor.nbytes
        on_cuda = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        if self._buffer.numel() < self._size or on_cuda and not self._buffer.is_pinned():
            self._buffer = torch.empty(0)  # first, so that there are never two
            self._buffer = torch.empty(self._size, dtype=torch.uint8, pin_memory=bool(on_cuda))
        with torch.no_grad():
            for name, dtype, shape, first, size in self.layout:
                room = self._buffer[first:first + size].view(dtype).view(shape)
                # The copy runs in the GPU's queue, before whatever the training puts there next.
                room.copy_(tensors[name], non_blocking=tensors[name].device in on_cuda)
        self._events = [torch.cuda.current_stream(device).record_event() for device in on_cuda]

    def bytes(self) -> Tensor:
        """The copied bytes in the order of the layout, once they are there."""
        for event in self._events:
            event.synchronize()
        return self._buffer[:self._size]

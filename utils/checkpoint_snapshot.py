"""A copy of tensors in memory that is kept from save to save, and which rank copies which of them.

A tensor is written by another rank than 0 only if DistributedDataParallel keeps it equal on all ranks.

Not here: what is in the tensors (checkpoint_state.py), where the copy goes (checkpoint_files.py).
"""
from __future__ import annotations

import gc
import heapq
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .checkpoint_state import Packed, Replicas, walk

Layout = list[tuple[str, torch.dtype, tuple[int, ...], int, int]]  # name, type, shape, first byte, bytes
_Found = TypeVar("_Found")
_LEAST_SHARE = 32 << 20  # bytes that are worth a writer of their own
_LARGEST_LOCAL_BYTES = 1 << 20  # of a buffer that each rank keeps; running statistics are smaller, masks are larger


class ReplicaFinder:
    """Finds the DistributedDataParallel modules of this process, also when a state names the module inside."""

    def __init__(self) -> None:
        self._found: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._searched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def find(self, state: Any) -> Replicas:
        """The parameters that all ranks have alike, and the small buffers that each rank has of its own.

        Only modules of which an optimizer in the state trains parameters: deepcopy() of a DistributedDataParallel for
        an average of the weights is one too, but no gradients keep its copies alike.
        """
        trained = {id(parameter) for optimizer in _instances(state, torch.optim.Optimizer)
                   for group in optimizer.param_groups for parameter in group["params"]}
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1 or not trained:
            return Replicas()
        modules = list(_instances(state, torch.nn.Module))
        self._found.update(one for one in modules if isinstance(one, DistributedDataParallel))
        known = {id(one.module) for one in self._found} | {id(one) for one in self._found}
        unknown = [one for one in modules if id(one) not in known and one not in self._searched]
        if unknown:  # a look at all objects of the process; once for each module
            self._found.update(one for one in gc.get_objects() if isinstance(one, DistributedDataParallel))
            self._searched.update(unknown)
        parameters: set[int] = set()
        buffers: set[int] = set()
        for ddp in self._found:
            if dist.get_world_size(ddp.process_group) != dist.get_world_size():
                continue  # equal within a group of ranks only
            # DistributedDataParallel exchanges no gradients of the others: one rank may change them alone.
            reduced = {id(one) for name, one in ddp.module.named_parameters(remove_duplicate=False)
                       if one.requires_grad and id(one) in trained and name not in ddp.parameters_to_ignore}
            if reduced:
                buffers.update(id(one) for one in ddp.module.buffers() if one.nbytes <= _LARGEST_LOCAL_BYTES)
                if not getattr(ddp, "_comm_hooks", []):  # a communication hook may leave the gradients different
                    parameters |= reduced
        return Replicas(frozenset(parameters), frozenset(buffers))


def _instances(state: Any, cls: type[_Found]) -> Iterator[_Found]:
    return (one for _, one in walk(state) if isinstance(one, cls))


def share_out(packed: Packed, rank: int, world_size: int) -> dict[str, Tensor]:
    """The common tensors that this rank writes; every rank comes to the same distribution. Rank 0 adds its own.

    The longest first, each to the rank that has least so far.
    """
    writers = max(1, min(world_size, sum(tensor.nbytes for tensor in packed.common.values()) // _LEAST_SHARE))
    loads = [(0, writer) for writer in range(writers)]
    own = {**packed.main, **packed.local}
    loads[0] = (sum(tensor.nbytes for tensor in own.values()), 0)
    heapq.heapify(loads)
    share = own if rank == 0 else {}
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

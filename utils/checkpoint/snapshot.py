"""Copy tensors into memory that is kept from save to save, and share that work between the ranks.

A rank other than 0 writes a tensor only if DistributedDataParallel keeps it equal on all ranks.
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

from .entries import walk
from .format import TensorPlace, place_tensors
from .pack import Packed, Replicas

MIN_SHARE_BYTES = 32 << 20  # a smaller part is not worth another writer
MAX_LOCAL_BYTES = 1 << 20  # of a buffer: running statistics are smaller, masks are larger

_Found = TypeVar("_Found")


class ReplicaFinder:
    """Finds the DistributedDataParallel modules of this process.

    It finds them also where a state holds only the module inside.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._searched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def find(self, state: Any) -> Replicas:
        """Return the parameters that are equal on all ranks, and each rank's small buffers.

        A module counts only if an optimizer in the state trains its parameters. The copy of a
        DistributedDataParallel module in an average of the weights is such a module, too, but no
        gradients keep it equal.
        """
        trained = {
            id(parameter)
            for optimizer in _instances(state, torch.optim.Optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        is_parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not trained or not is_parallel:
            return Replicas()

        self._search(list(_instances(state, torch.nn.Module)))
        parameters: set[int] = set()
        buffers: set[int] = set()
        for ddp in self._found:
            if dist.get_world_size(ddp.process_group) != dist.get_world_size():
                continue  # equal only within a group of ranks
            # DistributedDataParallel exchanges no gradients of other parameters: they may differ.
            reduced = {
                id(parameter)
                for name, parameter in ddp.module.named_parameters(remove_duplicate=False)
                if parameter.requires_grad
                and id(parameter) in trained
                and name not in ddp.parameters_to_ignore
            }
            if not reduced:
                continue
            small = (one for one in ddp.module.buffers() if one.nbytes <= MAX_LOCAL_BYTES)
            buffers.update(map(id, small))
            # A communication hook may leave different gradients. There is no public list of them.
            if not getattr(ddp, "_comm_hooks", []):
                parameters |= reduced
        return Replicas(frozenset(parameters), frozenset(buffers))

    def _search(self, modules: list[torch.nn.Module]) -> None:
        self._found.update(one for one in modules if isinstance(one, DistributedDataParallel))
        known = {id(ddp.module) for ddp in self._found} | {id(ddp) for ddp in self._found}
        unknown = [one for one in modules if id(one) not in known and one not in self._searched]
        if unknown:  # a look at all objects of the process, once for each module
            objects = gc.get_objects()
            self._found.update(one for one in objects if isinstance(one, DistributedDataParallel))
            self._searched.update(unknown)


def _instances(state: Any, cls: type[_Found]) -> Iterator[_Found]:
    return (value for _, value in walk(state) if isinstance(value, cls))


def share_out(packed: Packed, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the tensors that this rank writes for all ranks.

    Rank 0 writes its own tensors. The common tensors are distributed, largest first, each to the
    rank that has least so far. Every rank computes the same distribution.
    """
    common_bytes = sum(tensor.nbytes for tensor in packed.common.values())
    writer_count = max(1, min(world_size, common_bytes // MIN_SHARE_BYTES))
    of_rank_0 = {**packed.main, **packed.local}

    loads = [(0, writer) for writer in range(writer_count)]
    loads[0] = (sum(tensor.nbytes for tensor in of_rank_0.values()), 0)
    heapq.heapify(loads)

    share = of_rank_0 if rank == 0 else {}
    for name, tensor in sorted(packed.common.items(), key=lambda item: -item[1].nbytes):
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + tensor.nbytes, writer))
        if writer == rank:
            share[name] = tensor
    return share


class Snapshot:
    """Memory for one copy of tensors.

    It is kept, because memory that was touched before is written several times as fast.
    """

    def __init__(self) -> None:
        self.places: dict[str, TensorPlace] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._events: list[tuple[torch.device, torch.Event]] = []

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors, which may change as soon as this returns.

        Copies from a GPU may still be running then: see bytes().
        """
        self.places = place_tensors(tensors)
        self._size = sum(tensor.nbytes for tensor in tensors.values())

        on_cuda = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        if self._buffer.numel() < self._size or on_cuda and not self._buffer.is_pinned():
            self._buffer = torch.empty(0)  # free the old memory first
            self._buffer = torch.empty(self._size, dtype=torch.uint8, pin_memory=bool(on_cuda))

        with torch.no_grad():
            for name, place in self.places.items():
                raw = self._buffer[place.start : place.end]
                # torch conjugates and negates in host memory, without waiting for the copy to it.
                tensor = tensors[name].resolve_conj().resolve_neg()
                # The copy is queued on the GPU before whatever the training queues next.
                is_queued = tensor.device in on_cuda
                raw.view(place.dtype).view(place.shape).copy_(tensor, non_blocking=is_queued)
        self._events = [
            (device, torch.cuda.current_stream(device).record_event()) for device in on_cuda
        ]

    def bytes(self) -> Tensor:
        """Wait for the copies, and return the bytes of all tensors in the order of `places`."""
        for device, event in self._events:
            # In a thread that has chosen no GPU, a call of CUDA makes a context on GPU 0:
            # https://github.com/meta-pytorch/torchcomms/pull/777
            with torch.cuda.device(device):
                event.synchronize()
        return self._buffer[: self._size]

"""Copy tensors into memory that is reused by every save, and share the writing between ranks.

A rank other than 0 writes a tensor for all ranks only if the state shows that
DistributedDataParallel keeps it equal on them. Samples of every tensor (ReplicaSample) check that.
Ranks diverge if a script calls model(x) instead of ddp(x), or if an optimizer has another learning
rate on one rank; then almost every element differs. Buffers are not compared: BatchNorm's running
statistics differ between ranks.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..consistency.samples import DIGITS, digests, take_sample
from .entries import PerRank, walk
from .format import TensorPlace, place_tensors
from .pack import Packed

MIN_SHARE_BYTES = 32 << 20  # bytes; a smaller part is not worth another writer


def replicated_parameters(state: Any) -> frozenset[int]:
    """Return the id() of each parameter that DistributedDataParallel keeps equal on all ranks.

    The state must contain that module, possibly inside others, and an optimizer of its parameters.
    A copy of the module in an average of weights has no optimizer: no gradients keep it equal.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return frozenset()
    values = [value for _, value in walk(state)]
    per_rank = (value.value for value in values if isinstance(value, PerRank))
    own = {id(value) for part in per_rank for _, value in walk(part)}  # such as a sharded optimizer
    optimizers = (
        value
        for value in values
        if isinstance(value, torch.optim.Optimizer) and id(value) not in own
    )
    modules = (value for value in values if isinstance(value, torch.nn.Module))
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    trained = {id(parameter) for group in groups for parameter in group["params"]}

    found: set[int] = set()
    for ddp in itertools.chain.from_iterable(module.modules() for module in modules):
        if isinstance(ddp, DistributedDataParallel):
            found |= trained & _exchanged(ddp)
    return frozenset(found)


def _exchanged(ddp: DistributedDataParallel) -> set[int]:
    """Return the id() of each parameter whose gradients are averaged over all ranks."""
    parameters = {
        id(parameter): parameter.nbytes
        for name, parameter in ddp.module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }
    if not hasattr(ddp, "logger"):  # delay_all_reduce_named_params names all parameters
        return set()
    # torch has no public list. Parameters that were frozen or absent when the module was wrapped
    # are not exchanged, and a communication hook may leave different gradients.
    data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    is_complete = data["total_parameter_size_bytes"] == sum(parameters.values())
    is_global = dist.get_world_size(ddp.process_group) == dist.get_world_size()
    return set(parameters) if is_complete and is_global and not data.get("comm_hook") else set()


def share_out(packed: Packed, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the tensors that this rank writes for all ranks.

    Rank 0 writes its own tensors. The common tensors go to the ranks in order of size, each to
    the rank that has the fewest bytes so far. Every rank computes the same distribution.
    """
    common, share = packed.of("common"), packed.of("main", "local") if rank == 0 else {}
    common_bytes = sum(tensor.nbytes for tensor in common.values())
    writer_count = max(1, min(world_size, common_bytes // MIN_SHARE_BYTES))
    loads = [(0, writer) for writer in range(writer_count)]
    loads[0] = (sum(tensor.nbytes for tensor in packed.of("main", "local").values()), 0)
    heapq.heapify(loads)

    for name, tensor in sorted(common.items(), key=lambda item: -item[1].nbytes):
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + tensor.nbytes, writer))
        if writer == rank:
            share[name] = tensor
    return share


class Snapshot:
    """Memory for a copy of tensors.

    It is reused, because writing to memory that was touched before is several times as fast.
    """

    def __init__(self) -> None:
        self.places: dict[str, TensorPlace] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._events: list[tuple[torch.device, torch.Event]] = []

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors, which may change as soon as this returns.

        Copies from a GPU may still be running then; bytes() waits for them.
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
                # torch conjugates and negates in host memory, and would not wait for the copy.
                tensor = tensors[name].resolve_conj().resolve_neg()
                # The GPU runs the copy before any later work of the training. For 500 MB that adds
                # 11 ms on an H100. A side stream would hide 9 ms of it until the next optimizer
                # step, but changes that a script makes before that would tear the copy.
                is_queued = tensor.device in on_cuda
                raw.view(place.dtype).view(place.shape).copy_(tensor, non_blocking=is_queued)
        self._events = [
            (device, torch.cuda.current_stream(device).record_event()) for device in on_cuda
        ]

    def bytes(self) -> Tensor:
        """Wait for the copies, and return all tensors' bytes in the order of `places`."""
        for device, event in self._events:
            # In a thread without a current GPU, a call of CUDA makes a context on GPU 0:
            # https://github.com/meta-pytorch/torchcomms/pull/777
            with torch.cuda.device(device):
                event.synchronize()
        return self._buffer[: self._size]


class ReplicaSample:
    """A sample of this rank's replicated settings and tensors, taken at construction.

    names: paths of the compared entries in the state.
    """

    def __init__(self, packed: Packed) -> None:
        common = packed.of("common")
        self.names = [*packed.settings, *common]
        self._settings = [
            zlib.crc32(json.dumps(setting).encode()) for setting in packed.settings.values()
        ]
        self._count = len(common)
        self._samples = take_sample(list(common.values()))

    def digests(self) -> str:
        """Wait for the copies from a GPU, and return all entries' digests in one string."""
        of_settings = "".join(f"{checksum:0{DIGITS}x}" for checksum in self._settings)
        return of_settings + digests(self._samples, self._count)[0]


def find_divergence(names: Sequence[str], digests: Sequence[str]) -> str:
    """Return which rank has diverged from rank 0, and where first; "" if none has.

    names: from rank 0. digests: ReplicaSample.digests() of each rank.
    """
    expected = digests[0]
    for rank, found in enumerate(digests):
        if found == expected:
            continue
        if not (found and expected):
            return (
                f"DistributedDataParallel does not average the same parameters on rank {rank} as "
                "on rank 0. Freeze or unfreeze parameters before the model is wrapped, on all ranks"
            )
        number = len(os.path.commonprefix([found, expected])) // DIGITS
        name = names[min(number, len(names) - 1)]
        return (
            f"{name} of rank {rank} differs from that of rank 0; expected equal parameters, "
            "optimizer states and settings. Train with ddp(x), not model(x); give all ranks the "
            "same learning rate, and step their optimizers and schedulers alike"
        )
    return ""

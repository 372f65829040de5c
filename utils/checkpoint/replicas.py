"""Compare what DistributedDataParallel keeps equal on all ranks, by samples of every tensor.

Ranks diverge when a script calls model(x) instead of ddp(x), or when an optimizer has another
learning rate on one rank. Almost every element differs then, so a sample of each tensor shows it.
Buffers are not compared: the running statistics of BatchNorm differ between ranks.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .checksums import memory
from .entries import is_dense
from .pack import Packed

# of a tensor: runs of adjacent elements, because the first element of a cache line costs most
_RUNS, _RUN_LENGTH = 64, 16
_DIGEST_LENGTH = 8  # hexadecimal digits


class ReplicaSample:
    """A sample of the replicated settings and tensors of this rank, taken when it is made.

    names: the entries that are compared, by their paths in the state.
    """

    def __init__(self, packed: Packed) -> None:
        self.names = [*packed.settings, *packed.common]
        self._settings = [zlib.crc32(json.dumps(one).encode()) for one in packed.settings.values()]
        self._tensor_count = len(packed.common)
        self._groups: list[tuple[list[int], list[int], Tensor]] = []
        self._events: list[tuple[torch.device, torch.Event]] = []

        numbers: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        tensors = list(packed.common.values())
        for number, tensor in enumerate(tensors):
            numbers.setdefault((tensor.device, tensor.dtype), []).append(number)
        for (device, _), members in numbers.items():
            parts = [_take(tensors[number]) for number in members]
            is_queued = device.type == "cuda"
            values = torch.cat(parts).to("cpu", non_blocking=is_queued)
            self._groups.append((members, [part.numel() for part in parts], values))
            if is_queued:
                self._events.append((device, torch.cuda.current_stream(device).record_event()))

    def digests(self) -> str:
        """Wait for the copies from a GPU, and return the digests of all entries in one string."""
        for device, event in self._events:
            with torch.cuda.device(device):  # as in Snapshot.bytes()
                event.synchronize()
        of_tensors = [0] * self._tensor_count
        for members, sizes, values in self._groups:
            # One at a time: torch starts threads for more elements, which takes longer.
            for number, part in zip(members, values.split_with_sizes(sizes), strict=True):
                part = torch.view_as_real(part) if part.is_complex() else part
                part = part.double()
                part.masked_fill_(part.isnan(), math.nan)  # the bits of a NaN are arbitrary
                of_tensors[number] = zlib.crc32(memory(part))
        return "".join(f"{one:0{_DIGEST_LENGTH}x}" for one in [*self._settings, *of_tensors])


def _take(tensor: Tensor) -> Tensor:
    """Return a sample of the elements, in the order in which they are in memory."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    count = tensor.numel()
    if count <= _RUNS * _RUN_LENGTH:
        return tensor.as_strided((count,), (1,))
    return tensor.as_strided((_RUNS, _RUN_LENGTH), (count // _RUNS, 1)).flatten()


def find_divergence(names: Sequence[str], digests: Sequence[str]) -> str:
    """Return which rank has diverged from rank 0, and where first; "" if none has.

    names: of rank 0. digests: of all ranks, from ReplicaSample.digests().
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
        number = len(os.path.commonprefix([found, expected])) // _DIGEST_LENGTH
        name = names[min(number, len(names) - 1)]
        return (
            f"{name} of rank {rank} differs from that of rank 0; expected equal parameters, "
            "optimizer states and settings. Train with ddp(x), not model(x); give all ranks the "
            "same learning rate, and step their optimizers and schedulers alike"
        )
    return ""

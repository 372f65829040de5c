"""Make a rank's report of its training: samples of its parameters and of an epoch's first batch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    pass


_RUNS, _RUN_LENGTH = 64, 16  # sampled runs in a tensor, and adjacent elements in a run
DIGITS = 8  # hexadecimal digits of a digest
# Attributes of a sampler that must be equal on all ranks.
SAMPLER_SETTINGS = ("num_replicas", "shuffle", "seed", "drop_last", "epoch")


# What one rank reports ----------------------------------------------------------------------------


class Sample(NamedTuple):
    """Elements of tensors of one dtype and device, on their way to the CPU."""

    numbers: list[int]  # numbers of the sampled tensors
    sizes: list[int]  # sampled elements of each tensor
    values: Tensor
    event: tuple[torch.device, torch.Event] | None  # ends the copy from a GPU; None on the CPU


def take_sample(tensors: Sequence[Tensor]) -> list[Sample]:
    """Queue copies of some elements of each tensor to the CPU; do not wait for them."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(number)
    samples = []
    for (device, _), numbers in groups.items():
        parts = [_some_elements(tensors[number]) for number in numbers]
        on_gpu = device.type == "cuda"
        values = torch.cat(parts).to("cpu", non_blocking=on_gpu)
        sizes = [part.numel() for part in parts]
        event = (device, torch.cuda.current_stream(device).record_event()) if on_gpu else None
        samples.append(Sample(numbers, sizes, values, event))
    return samples


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and whole: not sharded, nested, sparse or quantised."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and not hasattr(tensor, "_fsdp_flattened")  # set by FSDP1
    )


def _some_elements(tensor: Tensor) -> Tensor:
    """Return runs of elements in memory order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    is_dense = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    tensor = tensor if is_dense else tensor.contiguous()
    count = tensor.numel()
    if count <= _RUNS * _RUN_LENGTH:
        return tensor.as_strided((count,), (1,))
    return tensor.as_strided((_RUNS, _RUN_LENGTH), (count // _RUNS, 1)).flatten()


def digests(samples: Sequence[Sample], count: int) -> tuple[str, bool]:
    """Wait for the copies; return all tensors' digests in one string, and whether all are finite.

    The bits of a NaN are arbitrary, so all NaNs count as equal.
    """
    found, finite = [0] * count, True
    for sample in samples:
        if sample.event is not None:
            device, event = sample.event
            # In a thread without a current GPU, a call of CUDA makes a context on GPU 0:
            # https://github.com/meta-pytorch/torchcomms/pull/777
            with torch.cuda.device(device):
                event.synchronize()
        # One tensor at a time: torch would start threads for more elements, which takes longer.
        parts = sample.values.split_with_sizes(sample.sizes)
        for number, part in zip(sample.numbers, parts, strict=True):
            if part.is_floating_point():
                part = part.double()
                finite = finite and bool(part.isfinite().all())
                part = part.masked_fill(part.isnan(), math.nan)
            found[number] = zlib.crc32(ctypes.string_at(part.data_ptr(), part.nbytes))
    return "".join(f"{checksum:0{DIGITS}x}" for checksum in found), finite


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group that are plain values on the CPU."""
    groups = []
    for group in optimizer.param_groups:
        plain = {}
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                value = value.item()
            if isinstance(value, (bool, int, float, str)) or (
                isinstance(value, (tuple, list))
                and all(isinstance(number, (int, float)) for number in value)
            ):
                plain[name] = value
        groups.append(plain)
    return groups


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return a loader's sampler if it has the settings of DistributedSampler, else None."""
    for sampler in (
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", 0),
    ):
        if all(hasattr(sampler, name) for name in ("num_replicas", "rank")):
            return sampler
    return None


def describe_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a loader that the ranks compare, as JSON values."""
    sampler = sampler_of(loader)
    found: dict[str, Any] = {
        "is_divided": sampler is not None,
        "is_stream": isinstance(loader.dataset, IterableDataset),
        "batch_size": loader.batch_size,
    }
    with contextlib.suppress(Exception):  # describing must not fail for any data set
        found["length"] = len(loader.dataset)  # type: ignore[arg-type]
        found["batches"] = len(loader)
    if sampler is not None:
        found["part"] = sampler.rank
        found |= {name: getattr(sampler, name, None) for name in SAMPLER_SETTINGS}
    return found


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a batch, which may be nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)

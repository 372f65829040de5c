"""Return the kind and the work of each operation, on which its time on a GPU depends.

Arithmetic is counted here if torch.utils.flop_counter counts it wrongly: it multiplies the weight
gradient of a grouped convolution by its groups, and counts causal attention in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten: Any = torch.ops.aten
_LOOKUPS = {_aten.embedding, _aten.embedding_dense_backward, _aten.index, _aten.index_put}
_NORMALISATIONS = {
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "_native_batch_norm_legit",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
}
# These read their input twice: first for statistics or sums, then for the result.
_TWO_PASSES = {"native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit"}
_TF32 = "tf32"


class TracedOperation(NamedTuple):
    """The work of one operation."""

    phase: str  # "forward", "backward" or "optimizer"
    kind: str  # matmul, convolution, attention, normalisation, embedding or pointwise
    flops: float
    moved_bytes: int  # bytes read and written
    dtype: str  # "float32", "bfloat16", ...; "tf32" if torch permits it
    width: int = 0  # smallest dimension of a matrix product; width of a convolution in one group
    channels_last: bool = False


class _Work(NamedTuple):
    flops: float
    width: int


def describe(
    phase: str,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    output: Any,
) -> TracedOperation:
    """Return the work of an operation that has run.

    inputs, outputs: tensors among its arguments and results that have a storage.
    """
    packet = function._overloadpacket
    name: str = packet.__name__
    moved: list[Tensor] = [*(outputs if packet in _LOOKUPS else inputs), *outputs]
    if not outputs and function._schema.is_mutable:
        moved += _written(function, args)
    if name in _TWO_PASSES:
        moved += [tensor for tensor in inputs if tensor.dim() > 1]
    kind, work = "pointwise", _Work(0.0, 0)
    if packet in (_aten.convolution, _aten.convolution_backward):
        kind, work = "convolution", _convolution(packet, args, output)
    elif "attention" in name:
        kind, work = "attention", _attention(name, args, kwargs)
    elif (count := flop_registry.get(packet)) is not None:
        kind, work = "matmul", _Work(count(*args, **kwargs, out_val=output), _width(inputs))
    elif packet in _LOOKUPS:
        kind = "embedding"
    elif name in _NORMALISATIONS:
        kind = "normalisation"
    dtype = str(next((t.dtype for t in outputs if t.is_floating_point()), torch.float32))[6:]
    if work.flops and dtype == "float32" and tf32_is_permitted(kind):
        dtype = _TF32
    return TracedOperation(
        phase,
        kind,
        work.flops,
        sum(tensor.nbytes for tensor in moved),
        dtype,
        work.width,
        kind in ("convolution", "normalisation") and any(map(_is_channels_last, inputs)),
    )


def tf32_is_permitted(kind: str) -> bool:
    """Whether torch lets a float32 operation of this kind compute in TF32 now."""
    matmul: Any = torch.backends.cuda.matmul
    old: Any = torch.backends.cudnn if kind == "convolution" else matmul
    settings = getattr(torch.backends.cudnn, "conv", None) if kind == "convolution" else matmul
    # torch 2.9 and newer have this attribute; the older one fails if a script mixes both.
    precision = getattr(settings, "fp32_precision", None)
    return bool(old.allow_tf32) if precision is None else precision == _TF32


def _convolution(packet: Any, args: Sequence[Any], output: Any) -> _Work:
    """Count a convolution: each element of its larger side meets the weights of its group."""
    backward = packet is _aten.convolution_backward
    if backward:
        gradient, image, weight = args[:3]
        transposed, groups, wanted = args[7], args[9], args[10]
        large = image if transposed else gradient
        passes = sum(wanted[:2])  # gradients of the image and of the weights
    else:
        image, weight = args[:2]
        transposed, groups = args[6], args[8]
        large, passes = (image if transposed else output), 1
    inner = math.prod(weight.shape[1:])
    width = min(weight.shape[0] // groups, inner)
    return _Work(2.0 * passes * large.numel() * inner, width)


def _attention(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Work:
    """Count attention: two matrix products forward, five backward; half of that if causal."""
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    *batch, length, width = query.shape
    size = math.prod(batch) * length * key.shape[-2]
    flops = 2.0 * size * (width + value.shape[-1])
    if backward:
        flops *= 2.5
    if any(argument is True for argument in _causal(name, args, kwargs)):
        flops /= 2
    return _Work(flops, width)


def _causal(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    schema = getattr(_aten, name).default._schema.arguments
    places = [i for i, argument in enumerate(schema) if argument.name == "is_causal"]
    return [args[i] for i in places if i < len(args)] + [kwargs.get("is_causal")]


def _width(inputs: Sequence[Tensor]) -> int:
    matrices = [tensor for tensor in inputs if tensor.dim() > 1]
    return min((size for tensor in matrices for size in tensor.shape[-2:]), default=0)


def _written(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operation without a result writes, as in optimizers."""
    found: list[Tensor] = []
    for argument, value in zip(function._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() not in (4, 5):
        return False
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)

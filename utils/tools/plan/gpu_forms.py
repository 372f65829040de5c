"""Let a trace on a CPU run each operation in the form that a GPU runs.

Some operations of torch depend on the device. On a CPU, attention with dropout computes its scores
in float32, dropout keeps a mask as large as its input, and autocast leaves softmax and
normalisation in 16 bits. CUDA's forms are registered for the CPU while a trace runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
# Operations that a CPU runs in 16 bits under autocast, but a GPU in float32:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("reciprocal", "rsqrt", "sinh", "softplus", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("layer_norm", "group_norm", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList"),
    *("norm.Scalar", "norm.ScalarOpt_dim"),
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention that never has all scores in memory: flash, or efficient in float32 or masked."""
    if enable_gqa:
        factor = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(factor, -3) for part in (key, value))
    if query.dim() != 4:  # CUDA has no such kernel either
        math = _aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash = _aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0.0)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = _aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def dropout(inputs: Tensor, p: float, train: bool) -> Any:
    """Dropout in one operation, which keeps a mask of one byte for each element."""
    return torch.native_dropout(inputs, p, train)[0] if train and p > 0 else _aten.alias(inputs)


def rms_norm(inputs: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Any:
    """RMSNorm as the single operation of LayerNorm, which reads, writes and keeps the same."""
    return torch.native_layer_norm(inputs, shape, weight, None, eps or 1e-5)[0]


# Operation that depends on the device -> its form on a GPU.
FORMS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "dropout": dropout,
    "rms_norm": rms_norm,
}


@contextmanager
def forms_of_gpu() -> Iterator[None]:
    """Replace the CPU's operations by a GPU's in the `with` block."""
    make_library: Any = torch.library.Library
    library = make_library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that operations are replaced
            for name, form in FORMS.items():
                library.impl(name, form, "AutogradCPU")
            for name in IN_FLOAT32:
                library.impl(name, _in_float32(name), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(_aten, packet), overload or "default")

    def widened(value: Any) -> Any:
        short = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if short else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operation(*map(widened, args), **{k: widened(v) for k, v in kwargs.items()})

    return run

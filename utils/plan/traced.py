"""Turn a trace into predictions: memory with DDP's buckets, times of a GPU, the largest batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..script_modules import name_conflict, script_modules
from .communication import PlanError
from .hardware import Accelerator
from .step import Computation, Gradient

if TYPE_CHECKING:
    from .trace import Trace


def memory(
    trace: Trace, *, bucket_view: bool = False, optimizer: bool | None = None
) -> dict[str, float]:
    """Return the bytes by category at the peak, with DDP's buckets.

    optimizer: True for the peak while the optimizer runs, False for that of the rest of the step.
    """
    if optimizer is None:
        peak = trace.peak(without_gradients=bucket_view)
    else:
        peak = trace.peaks[optimizer, bucket_view]
    return {**peak.bytes, "buckets": float(trace.bucket_bytes)}


def computation(trace: Trace, gpu: Accelerator) -> Computation:
    """Return the times of a step on a GPU: each operation at its limit of arithmetic or memory."""
    seconds = [gpu.seconds(op.flops, op.moved_bytes, op.dtype) for op in trace.operations]
    ends = [0.0, *accumulate(seconds)]
    optimizer = sum(
        time for time, op in zip(seconds, trace.operations, strict=True) if op.phase == "optimizer"
    )
    gradients = tuple(Gradient(ends[index + 1], size) for index, size in trace.gradients)
    return Computation(gradients, ends[-1] - optimizer, optimizer)


def scaled_to(computation: Computation, micro_step: float, accumulate_steps: int) -> Computation:
    """Return a computation of the same shape with measured seconds per micro-step."""
    factor = micro_step * accumulate_steps / computation.backward_end
    gradients = tuple(Gradient(entry.ready * factor, entry.size) for entry in computation.gradients)
    end = computation.backward_end * factor
    return Computation(gradients, end, computation.optimizer * factor)


def largest_batches(
    totals: dict[int, float], least_memory: float, gpus: Iterable[Accelerator]
) -> dict[str, tuple[float, int]]:
    """Return for each GPU its usable memory and the largest micro-batch; 0 where none fits.

    totals: predicted bytes at two micro-batches; memory is taken to grow linearly. That is on the
    safe side between the two, because the peak is where most of several growing amounts is.
    least_memory: bytes that the optimizer needs with any micro-batch.
    """
    (small, least), (large, most) = sorted(totals.items())
    slope = (most - least) / (large - small)
    fixed = least - slope * small
    found = {}
    for gpu in gpus:
        fits = slope > 0 and least_memory <= gpu.memory
        batch = int((gpu.memory - fixed) / slope) if fits else 0
        found[gpu.name] = (gpu.memory, max(0, batch))
    return found


def trace_factory(
    name: str,
    batch: int,
    optimizer: str,
    precision: str,
    accumulate_steps: int,
    *,
    seconds: float,
) -> Trace:
    """Trace the model of a factory "module:function".

    The function gets the micro-batch and returns (model, inputs) or (model, inputs, loss): inputs
    is a tensor, or a tuple or dict of arguments; loss maps the model's output to a number. seconds:
    see trace_steps().
    """
    import torch
    from torch import nn

    from .trace import trace_training

    if precision not in ("fp32", "amp", "bf16-pure"):
        raise PlanError(
            f"A model cannot be traced with precision {precision!r}. Expected fp32, amp or "
            "bf16-pure. For mixed precision with a master copy, use --parameters."
        )
    made: dict[str, Any] = {}

    def build() -> nn.Module:
        result = factory(batch)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise PlanError(
                f"{name} returned {type(result).__name__}. Expected (model, inputs) or (model, "
                "inputs, loss function)."
            )
        made["inputs"], made["loss"] = result[1], result[2] if len(result) == 3 else _default_loss
        model: nn.Module = result[0]
        return model.to(torch.bfloat16) if precision == "bf16-pure" else model

    def step(model: nn.Module) -> torch.Tensor:
        inputs = made["inputs"]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
            if isinstance(inputs, dict):
                output = model(**inputs)
            else:
                output = model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
            loss: torch.Tensor = made["loss"](output)
        return loss

    classes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    }
    try:
        with script_modules(""):
            factory = _load(name)
            return trace_training(
                build,
                step,
                classes[optimizer],
                accumulate_steps=accumulate_steps,
                seconds=seconds,
            )
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{name} could not be traced: {type(error).__name__}: {error}. It fails with real "
            "tensors on the CPU, too. Correct it, or use --parameters instead."
        ) from error


def _default_loss(output: Any) -> Any:
    loss = getattr(output, "loss", None)
    return output.float().mean() if loss is None else loss


def _load(name: str) -> Callable[[int], Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[[int], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"--model {name}: {error}{name_conflict(error)}. Expected module:function, "
            "importable from here."
        ) from None
    return found

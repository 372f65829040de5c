"""Turn a trace into predictions: memory with DDP, times on a GPU, the largest batch."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..bench.script_modules import name_conflict, script_modules
from .hardware import NARROW, Accelerator, PredictionError, TooFewSteps
from .step_model import Computation, Gradient

if TYPE_CHECKING:
    from .trace import Trace

_MOST_TRACES = 30  # traces to find the largest micro-batch
_MOST_SAMPLES = 2**40


def memory(
    trace: Trace, *, bucket_view: bool = False, optimizer: bool | None = None
) -> dict[str, float]:
    """Return the bytes by category at the peak, including DDP's buckets.

    optimizer: True: the peak while the optimizer runs; False: in the rest of the step.
    """
    if optimizer is None:
        peak = trace.peak(without_gradients=bucket_view)
    else:
        peak = trace.peaks[optimizer, bucket_view]
    return {**peak.bytes, "buckets": float(trace.bucket_bytes)}


def computation(trace: Trace, gpu: Accelerator, launch_seconds: float = 0.0) -> Computation:
    """Return the times of a step on a GPU: each operation at its limit of arithmetic or memory.

    launch_seconds: seconds the CPU needs to start an operation. If operations take longer to start
    than to compute, this bounds the step: max(sum of the operations, their number *
    launch_seconds).
    """
    seconds = [gpu.seconds(operation) for operation in trace.operations]
    computed, started = sum(seconds), launch_seconds * len(seconds)
    if started > computed:
        seconds = [launch_seconds] * len(seconds)
    ends = [0.0, *accumulate(seconds)]
    gradients = tuple(Gradient(ends[index + 1], size) for index, size in trace.gradients)
    busy = min(1.0, computed / started) if started else 1.0
    # Operations after the last backward pass, such as clip_grad_norm_(), need reduced gradients.
    last = max(i for i, op in enumerate(trace.operations) if op.phase == "backward")
    return Computation(gradients, ends[last + 1], ends[-1] - ends[last + 1], busy)


@dataclass(frozen=True)
class Uncertainty:
    """The factor by which the time of a step may be wrong, and the kind of steps it applies to."""

    kind: str
    factor: float


# 9 of 10 published speeds of each kind are within these factors: `python -m tests.published`.
CONVOLUTIONS = Uncertainty("convolutions", 1.3)
MATRICES = Uncertainty("matrix products", 1.25)
GROUPS = Uncertainty("convolutions with few channels in a group", 1.4)
SHORT = Uncertainty("operations too short to fill a GPU", 1.8)
OTHER = Uncertainty("operations for which no published speed is known", 2.0)


def uncertainty(trace: Trace, gpu: Accelerator, launch_seconds: float) -> Uncertainty:
    """Return the possible error of the predicted time, from the least certain part that matters."""
    times: dict[str, float] = defaultdict(float)
    for operation in trace.operations:
        narrow = operation.kind == "convolution" and operation.width < NARROW
        times["narrow" if narrow else operation.kind] += gpu.seconds(operation)
    total = sum(times.values())
    if launch_seconds * len(trace.operations) > total / 2:
        return SHORT
    if times["narrow"] > 0.1 * total:
        return GROUPS
    products = times["matmul"] + times["attention"] + times["convolution"]
    if products < 0.15 * total:
        return OTHER
    return CONVOLUTIONS if times["convolution"] > products / 2 else MATRICES


def scaled_to(computation: Computation, micro_step: float, accumulate_steps: int) -> Computation:
    """Return a computation of the same shape, with measured seconds per micro-step."""
    factor = micro_step * accumulate_steps / computation.backward_end
    gradients = tuple(Gradient(entry.ready * factor, entry.size) for entry in computation.gradients)
    end = computation.backward_end * factor
    return Computation(gradients, end, computation.optimizer * factor)


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batch that fits: 0 samples if none does, None if unknown.

    unconfirmed: why traces do not confirm it; "" if they do. data_ended: larger ones may fit, but
    the script lacks the data for two steps with them.
    """

    samples: int | None
    unconfirmed: str = ""
    data_ended: bool = False


def largest_batch(
    total: Callable[[int], float | None], batch: int, capacity: float
) -> LargestBatch:
    """Find the largest micro-batch whose memory is at most the capacity.

    total: traces a micro-batch of this number of samples, and returns the bytes at the peak; None
    if this host is too small for the trace. Raises PlanError.

    Traces at three sizes show what grows linearly and quadratically. Traces at the solution and
    next to it confirm or correct it.
    """
    known: dict[int, float] = {}
    first = [4 * batch, 2 * batch, batch]
    fits, too_large, unit = 0, _MOST_SAMPLES, 1
    width, doubled = math.inf, False
    reason = "the memory does not grow steadily with the micro-batch"
    for _ in range(_MOST_TRACES):
        least, most = (fits // unit + 1) * unit, (too_large - 1) // unit * unit
        if first:
            size = first.pop()
        elif least <= most:
            size = _solution(known, capacity)
            if max(known.values()) > capacity and too_large - fits > width / 2:
                size = (fits + too_large) // 2  # the curve has a kink
            size = max(least, min(size // unit * unit, most))
            width = too_large - fits
        elif fits + 2 * unit in known or not fits:
            return LargestBatch(fits)
        else:
            size = fits + 2 * unit  # one more unit, because the memory may depend on divisors
        try:
            found = total(size)
        except PredictionError as error:
            if fits and isinstance(error.__cause__, TooFewSteps):
                return LargestBatch(fits, data_ended=True)
            reason = f"{size} samples cannot be traced: {str(error).rstrip('.')}"
            if first or unit == batch:
                break
            unit = 2 if batch % 2 == 0 and unit == 1 else batch
            continue
        if found is None:
            reason = f"a trace of {size} samples needs too much memory or time of this host"
            return LargestBatch(_solution(known, capacity) if len(known) > 1 else None, reason)
        known[size] = found
        if ended := _data_end(known):
            return LargestBatch(ended, data_ended=True)
        per_sample = (known[2 * batch] - known[batch]) / batch if 2 * batch in known else 0.0
        if not doubled and 8 * batch < size and found < min(capacity, per_sample * size / 2):
            first.append(2 * size)  # far less than expected: may it already have all the data?
            doubled = True
        if found <= capacity:
            fits = max(fits, size)
        else:
            too_large = min(too_large, size)
        if fits > too_large:
            break
        if fits > _MOST_SAMPLES // 32:
            return LargestBatch(None, "the memory does not grow with the micro-batch")
    return LargestBatch(fits or None, reason)


def _data_end(known: dict[int, float]) -> int | None:
    """Return the largest batch before memory stopped growing: larger ones have all the data."""
    most = max(known.values())
    smaller = [samples for samples, size in known.items() if size < most]
    constant = [samples for samples, size in known.items() if size == most]
    return max(smaller) if smaller and max(constant) >= 2 * min(constant) else None


def _solution(known: dict[int, float], capacity: float) -> int:
    """Return the size at which a curve through the nearest known sizes reaches the capacity."""
    nearest = sorted(known.items(), key=lambda item: abs(item[1] - capacity))
    (x, y), (x1, y1), *more = nearest[:3]
    slope, curvature = (y1 - y) / (x1 - x), 0.0
    for x2, y2 in more:
        curvature = max(0.0, ((y2 - y1) / (x2 - x1) - slope) / (x2 - x))
    slope += curvature * (x - x1)
    root = slope**2 + 4 * curvature * (capacity - y)
    if slope + math.sqrt(max(0.0, root)) <= 0 or root < 0:
        return 16 * max(known)
    return int(x + 2 * (capacity - y) / (slope + math.sqrt(root)))


def trace_factory(
    name: str,
    batch: int,
    optimizer: str,
    precision: str,
    accumulate_steps: int,
    *,
    gpu: bool = True,
) -> Trace:
    """Trace a factory's model "module:function", in the form of a GPU or of this CPU.

    The function gets the micro-batch and returns (model, inputs) or (model, inputs, loss). inputs:
    a tensor, or a tuple or dict of arguments. loss: maps the model's output to a number.
    """
    import torch
    from torch import nn

    from .trace import ValueNeeded, trace_training

    if precision not in ("fp32", "amp", "bf16-pure"):
        raise PredictionError(
            f"A model cannot be traced with precision {precision!r}. Expected fp32, amp or "
            "bf16-pure. For mixed precision with a master copy, use --parameters."
        )
    made: dict[str, Any] = {}

    def build() -> nn.Module:
        result = factory(batch)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise PredictionError(
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
                gpu=gpu,
            )
    except ValueNeeded as error:
        raise PredictionError(f"{name} could not be traced. {error}") from error
    except PredictionError:
        raise
    except Exception as error:
        raise PredictionError(
            f"{name} could not be traced: {type(error).__name__}: {error}. Expected "
            "a model that trains on a CPU. Correct it, or use --parameters instead."
        ) from error


def _default_loss(output: Any) -> Any:
    loss = getattr(output, "loss", None)
    return output.float().mean() if loss is None else loss


def _load(name: str) -> Callable[[int], Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[[int], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PredictionError(
            f"--model {name}: {error}{name_conflict(error)}. Expected module:function, "
            "importable from here."
        ) from None
    return found

"""Derive one recommendation from a prediction: what fits, then how it scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .communication import Network
from .predict import Workload, holds_up_to, percentages, scaling
from .step import Step

GOOD, LEAST = 0.8, 0.7  # target efficiency; efficiency below which to shard
GB = 1e9
_FACTORS = (2, 4, 8, 16, 32)  # of the micro-batch, or of the micro-steps


@dataclass(frozen=True)
class Fit:
    """What fits into the memory of a GPU, and the recommendation that follows.

    ddp: whether DDP can be used at all. this_batch: whether with this micro-batch. free: the
    largest micro-batch that fits, as a multiple of this one; None where that is not known.
    """

    texts: tuple[str, ...] = ()
    ddp: bool = True
    this_batch: bool = True
    free: float | None = None


def memory_advice(
    memory: Mapping[str, float],
    capacity: float,
    gpus: int,
    name: str,
    *,
    complete: bool,
    sharded: bool = False,
    largest: int | None = None,
    batch: int = 1,
) -> Fit:
    """Return what fits on a GPU, and the first change that makes the training fit.

    memory: predicted bytes by category; capacity: usable bytes. complete: the activations are
    included. sharded: memory is that of FSDP2. largest: samples of the largest micro-batch that
    fits, None where it is not known; batch: those of the present one.
    """
    total = sum(memory.values())
    used = f"{total / GB:.1f} GB of the {capacity / GB:.1f} GB that are usable on {name}"
    if total <= capacity and not complete:
        return Fit((f"Without activations, the training needs {used}. They may not fit.",))
    if total <= capacity:
        free = None if largest is None else max(1.0, largest / batch)
        return Fit((f"The training fits: {used}.",), free=free)

    without = "" if complete else " even without activations"
    fails = f"The training does not fit{without}: {used}."
    growing = sum(memory.get(key, 0.0) for key in ("inputs", "activations", "temporary"))
    if sharded:
        if total - growing > capacity:
            return Fit((fails, "Shard the model over more GPUs."), ddp=False)
        return Fit((fails, _LESS_ACTIVATIONS.format(growing / GB)), ddp=False)

    states = sum(memory.get(key, 0.0) for key in ("parameters", "gradients", "optimizer"))
    saved = min(memory.get("buckets", 0.0), memory.get("gradients", 0.0))
    view = (
        f"DDP(gradient_as_bucket_view=True) saves {saved / GB:.1f} GB, the second copy of the "
        "gradients."
    )
    if saved and total - saved <= capacity:
        return Fit((fails, f"{view} Then {'it fits' if complete else 'the rest fits'}."))
    fixed = total - growing
    if fixed <= capacity:
        return Fit((fails, _LESS_ACTIVATIONS.format(growing / GB)), this_batch=False)
    if fixed - saved <= capacity:
        texts = (fails, view, _LESS_ACTIVATIONS.format(growing / GB))
        return Fit(texts, this_batch=False)
    shard = (
        f"Parameters, gradients and optimizer need {states / GB:.1f} GB on each GPU with any "
        f"batch size. Use FSDP2 (fully_shard): {states / gpus / GB:.1f} GB on each of {gpus} GPUs, "
        "or HSDP, which shards within a node only."
    )
    if states / gpus > capacity:
        least = math.ceil(states / capacity)
        shard = (
            f"Parameters, gradients and optimizer need {states / GB:.1f} GB. Use FSDP2 "
            f"(fully_shard) on more than {least} GPUs."
        )
    return Fit((fails, shard), ddp=False)


_LESS_ACTIVATIONS = (
    "Activations, inputs and temporary memory need {:.1f} GB. Use a smaller micro-batch with "
    "accumulation, or torch.utils.checkpoint, which recomputes activations."
)


def scaling_advice(
    work: Workload, network: Network, gpus: int, gradient_bytes: int, fit: Fit
) -> list[str]:
    """Return what to do about scaling. gradient_bytes: of one element of a gradient."""
    if not fit.ddp:
        return ["The scaling is that of DDP, which does not fit. FSDP2 sends 1.5 times its bytes."]
    step = work.step(network, gpus)
    found = (
        f"On {gpus} GPUs the efficiency is {_range(step)}: each GPU waits {step.exposed:.3f} s for "
        f"communication, and up to {step.delay:.3f} s for slower GPUs and communication kernels, "
        f"in a step of {step.computation:.3f} s of computation"
    )
    if not fit.this_batch:
        return [f"{found}, with the micro-batch that does not fit. Predict it for a smaller one."]
    if step.low_efficiency >= GOOD:
        return [f"{found}. Stay with DDP."]
    texts = [f"{found}. The target is {GOOD:.0%}."]
    limit = holds_up_to(scaling(work, network, _sizes(gpus)), GOOD)
    if limit is not None and limit > 1:
        texts.append(f"The efficiency is at least {GOOD:.0%} on up to {limit} GPUs.")

    factors = [factor for factor in _FACTORS if fit.free and factor <= fit.free]
    if factors:
        factor, larger = _first_good(work.enlarged, factors, network, gpus)
        texts.append(
            f"Memory is free for {factor} times the micro-batch: {_range(larger)}, if training "
            f"converges with {factor} times the global batch."
        )
    factor, accumulated = _first_good(work.accumulated, _FACTORS, network, gpus)
    if accumulated.low_efficiency >= GOOD:
        texts.append(
            f"Accumulate {work.accumulate_steps * factor} micro-steps under no_sync(): "
            f"{_range(accumulated)}, if training converges with {factor} times the global batch."
        )
    if fit.free is None:
        texts.append("Where memory is free, a larger micro-batch has the same effect.")
    if gradient_bytes == 4:
        compressed = work.compressed(2).step(network, gpus)
        texts.append(f"A bf16 or fp16 communication hook halves the bytes: {_range(compressed)}.")
    if step.low_efficiency < LEAST and fit.free and not factors:
        texts.append(
            "If these are not enough, FSDP2 or HSDP free memory for a larger micro-batch, which "
            "computes longer between exchanges. Each GPU then sends 1.5 times the bytes of DDP in "
            "a step."
        )
    return texts


def _range(step: Step) -> str:
    return percentages(step.low_efficiency, step.efficiency, 0)


def _first_good(
    change: Callable[[int], Workload], factors: Sequence[int], network: Network, gpus: int
) -> tuple[int, Step]:
    """Return the first factor that reaches the target, or the last one, with its step."""
    for factor in factors:
        step = change(factor).step(network, gpus)
        if step.low_efficiency >= GOOD:
            break
    return factor, step


def _sizes(gpus: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 < gpus:
        sizes.append(sizes[-1] * 2)
    return [*sizes, gpus]

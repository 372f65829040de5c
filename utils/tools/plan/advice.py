"""Say what a prediction means: a report, a page with sliders, and one recommendation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hardware import Network
from .step_model import (
    COMMUNICATION_SHARE,
    EXPECTED_MAXIMA,
    OPTIMIZER_STATES,
    PRECISIONS,
    Step,
    Workload,
    percentages,
)

GOOD, LEAST = 0.8, 0.7  # target efficiency; efficiency below which to shard
GB = 1e9
_PAGE = Path(__file__).with_name("page.html")
_SECONDS = ("step", "computation", "communication", "exposed")
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
    passes: Mapping[str, float] | None = None,
    largest: int | None = None,
    batch: int | None = None,
) -> Fit:
    """Return what fits on a GPU, and the changes that make the training fit.

    memory: predicted bytes by category; capacity: usable bytes. complete: the activations are
    included. passes: as memory, at the peak outside the optimizer. largest: samples of the
    largest micro-batch that fits; batch: those of the present one; None where they are not known.
    """
    total = sum(memory.values())
    used = f"{total / GB:.1f} GB of the {capacity / GB:.1f} GB that are usable on {name}"
    if total <= capacity and not complete:
        return Fit((f"Without activations, the training needs {used}. They may not fit.",))
    if total <= capacity:
        free = None if largest is None or batch is None else max(1.0, largest / batch)
        return Fit((f"The training fits: {used}.",), free=free)

    without = "" if complete else " even without activations"
    texts = [f"The training does not fit{without}: {used}."]
    unfused = memory.get("temporary", 0.0)
    if passes is not None and unfused and sum(passes.values()) < total:
        memory = max(passes, {**memory, "temporary": 0.0}, key=lambda parts: sum(parts.values()))
        total = sum(memory.values())
        texts.append(
            f"The peak is in the optimizer, whose temporary tensors need {unfused / GB:.1f} GB. "
            "Adam, AdamW, SGD and Adagrad have none with fused=True: the training then needs "
            f"{total / GB:.1f} GB."
        )
        if total <= capacity:
            return Fit(tuple(texts))
    growing = sum(memory.get(key, 0.0) for key in ("inputs", "activations", "temporary"))
    less = f"Activations, inputs and temporary memory need {growing / GB:.1f} GB. Use "
    if largest:
        less += f"a micro-batch of {largest}, the largest that fits, with accumulation, or "
    elif largest is None and batch is None:
        less += "a smaller micro-batch with accumulation, if it has more than 1 sample, or "
    elif largest is None and batch != 1:
        less += "a smaller micro-batch with accumulation, or "
    less += "torch.utils.checkpoint, which recomputes activations."
    saved = min(memory.get("buckets", 0.0), memory.get("gradients", 0.0))
    view = (
        f"DDP(gradient_as_bucket_view=True) saves {saved / GB:.1f} GB, the second copy of the "
        "gradients."
    )
    if saved and total - saved <= capacity:
        return Fit((*texts, f"{view} Then {'it fits' if complete else 'the rest fits'}."))
    fixed = total - growing
    if fixed <= capacity:
        return Fit((*texts, less), this_batch=False)
    if fixed - saved <= capacity:
        return Fit((*texts, view, less), this_batch=False)
    states = sum(memory.get(key, 0.0) for key in ("parameters", "gradients", "optimizer"))
    shard = (
        f"Parameters, gradients and optimizer need {states / GB:.1f} GB on each GPU with any "
        f"batch size. Use FSDP2 (fully_shard): {states / gpus / GB:.1f} GB on each of {gpus} GPUs, "
        "or HSDP, which shards within a node only."
    )
    if gpus == 1 or states / gpus > capacity:
        least = max(1, math.ceil(states / capacity))
        shard = (
            f"Parameters, gradients and optimizer need {states / GB:.1f} GB. Use FSDP2 "
            f"(fully_shard) on more than {least} GPU{'s' * (least > 1)}."
        )
    return Fit((*texts, shard), ddp=False)


def scaling_advice(
    work: Workload, network: Network, gpus: int, gradient_bytes: float, fit: Fit
) -> list[str]:
    """Return what to do about scaling. gradient_bytes: of one element of a gradient."""
    if not fit.ddp:
        return ["The scaling is that of DDP, which does not fit. FSDP2 sends 1.5 times its bytes."]
    step = work.step(network, gpus)
    found = (
        f"On {gpus} GPUs the efficiency is {_range(step)}: each GPU waits {step.exposed:.4f} s for "
        f"communication, and up to {step.delay:.4f} s for slower GPUs and communication kernels, "
        f"in a step of {step.computation:.4f} s of computation"
    )
    if not fit.this_batch:
        return [f"{found}, with the micro-batch that does not fit."]
    if step.low_efficiency >= GOOD:
        return [f"{found}. Stay with DDP."]
    texts = [f"{found}. The target is {GOOD:.0%}."]
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
    if gradient_bytes > 3:
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
    return percentages(step.low_efficiency, step.efficiency, 1)


def _first_good(
    change: Callable[[int], Workload], factors: Sequence[int], network: Network, gpus: int
) -> tuple[int, Step]:
    """Return the first factor that reaches the target, or the last one, with its step."""
    for factor in factors:
        step = change(factor).step(network, gpus)
        if step.low_efficiency >= GOOD:
            break
    return factor, step


# The report and the page ----------------------------------------------------------------------


def as_text(plan: dict[str, Any]) -> str:
    """Return a report to read."""
    lines = []
    if plan["assumed"]:
        lines += [f"Assumed: {', '.join(plan['assumed'])}", ""]
    if plan["memory"]:
        total = sum(plan["memory"].values())
        where = f", at its peak in {plan['peak']}" if plan["peak"] else ""
        lines += [f"Memory per GPU: {total / GB:.2f} GB{where}"]
        lines += [f"  {name:<12} {size / GB:9.3f} GB" for name, size in plan["memory"].items()]
    if largest := plan["largest_micro_batch"]:
        samples, unconfirmed = largest["samples"], largest["unconfirmed"]
        found = "unknown" if samples is None else f"{samples} samples" if samples else "none fits"
        found += f", not confirmed: {unconfirmed}" if unconfirmed else ""
        lines += ["", f"Largest micro-batch on {largest['gpu']}: {found}"]
    if plan["scaling"]:
        lines += ["", "Scaling, each GPU with its own batch"]
        head = ("GPUs", "step s", "computed", "communic.", "exposed", "GB sent")
        lines.append("  " + " ".join(f"{text:>10}" for text in head) + "    efficiency")
        for row in plan["scaling"]:
            numbers = (
                *(row[f"{key}_seconds"] for key in _SECONDS),
                row["sent_bytes"] / GB,
            )
            cells = " ".join(f"{number:>10.4f}" for number in numbers)
            efficiency = percentages(row["low_efficiency"], row["efficiency"], 1)
            lines.append(f"  {row['gpus']:>10} {cells}  {efficiency}")
        for level, size in plan["holds_up_to"].items():
            limit = (
                f"on up to {size} GPU{'s' * (size > 1)}"
                if size
                else f"on all of up to {row['gpus']} GPUs"
            )
            lines.append(f"  at least {float(level):.0%} {limit}")
    if plan["advice"]:
        lines += ["", "Advice", *(f"  {text}" for text in plan["advice"])]
    if plan["notes"]:
        lines += ["", "Notes", *(f"  {text}" for text in plan["notes"])]
    return "\n".join(lines).strip()


def write_page(inputs: dict[str, Any], path: Path) -> None:
    """Write the page with sliders. inputs: where they stand at first."""
    data = {
        "inputs": inputs,
        "precisions": {name: vars(kind) for name, kind in PRECISIONS.items()},
        "optimizer_states": OPTIMIZER_STATES,
        "expected_maxima": EXPECTED_MAXIMA,
        "communication_share": COMMUNICATION_SHARE,
    }
    text = _PAGE.read_text(encoding="utf-8")
    path.write_text(text.replace("/*DATA*/ null", json.dumps(data)), encoding="utf-8")

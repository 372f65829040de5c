"""Explain a prediction: a report, a page with sliders, and one recommendation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .figures import (
    bytes_text,
    efficiency_text,
    gpus_text,
    percentages,
    seconds_range,
    seconds_text,
)
from .hardware import Network
from .step_model import (
    COMMUNICATION_SHARE,
    DDP_SECONDS,
    EXPECTED_MAXIMA,
    LOSS,
    MEASURED_ERROR,
    OPTIMIZER_STATES,
    PRECISIONS,
    Step,
    Workload,
)

GOOD, LEAST = 0.8, 0.7  # target efficiency; below the second, recommend sharding
# Mean errors of predictions (docs/performance.md). A smaller gain is no reason for advice.
STEP_ERROR, MEMORY_ERROR = 0.04, 0.01
_PAGE = Path(__file__).with_name("page.html")
_COLUMNS = ("GPUs", "step", "computation", "communication", "exposed", "sent", "efficiency")
_SECONDS = _COLUMNS[2:5]
_FACTORS = (2, 4, 8, 16, 32)  # tried multiples of the micro-batch, and of the micro-steps


@dataclass(frozen=True)
class Fit:
    """What fits into a GPU's memory, and the recommendation that follows.

    ddp: whether DDP can be used at all. this_batch: whether this micro-batch fits. free: the
    largest micro-batch that fits, as a multiple of this one; None if unknown.
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
    """Return what fits on a GPU, and changes that make the training fit.

    memory: predicted bytes by category; capacity: usable bytes. complete: whether activations are
    included. passes: like memory, at the peak outside the optimizer. largest: samples in the
    largest micro-batch that fits; batch: samples in the present one; None if unknown.
    """
    total = sum(memory.values())
    used = f"{bytes_text(total)} of the {bytes_text(capacity)} that are usable on {name}"
    if total <= capacity and not complete:
        rest = "They may not fit" if total > capacity / 2 else "Activations are not counted"
        return Fit(
            (f"Without activations, the training needs {used}. {rest}: give a script or --model.",)
        )
    if total <= capacity:
        free = None if largest is None or batch is None else max(1.0, largest / batch)
        return Fit((f"The training fits: {used}.",), free=free)

    without = "" if complete else " even without activations"
    texts = [f"The training does not fit{without}: {used}."]
    unfused = memory.get("temporary", 0.0)
    if passes is not None and unfused and sum(passes.values()) < (1 - MEMORY_ERROR) * total:
        memory = max(passes, {**memory, "temporary": 0.0}, key=lambda parts: sum(parts.values()))
        total = sum(memory.values())
        texts.append(
            f"The peak is in the optimizer, whose temporary tensors need {bytes_text(unfused)}. "
            "Adam, AdamW, SGD and Adagrad have none with fused=True: the training then needs "
            f"{bytes_text(total)}."
        )
        if total <= capacity:
            return Fit(tuple(texts))
    growing = sum(memory.get(key, 0.0) for key in ("inputs", "activations", "temporary"))
    less = f"Activations, inputs and temporary memory need {bytes_text(growing)}. Use "
    if largest:
        less += f"a micro-batch of {largest}, the largest that fits, with accumulation, or "
    elif largest is None and batch is None:
        less += "a smaller micro-batch with accumulation, if it has more than 1 sample, or "
    elif largest is None and batch != 1:
        less += "a smaller micro-batch with accumulation, or "
    less += "torch.utils.checkpoint, which recomputes activations."
    saved = min(memory.get("buckets", 0.0), memory.get("gradients", 0.0))
    view = (
        f"DDP(gradient_as_bucket_view=True) saves {bytes_text(saved)}, the second copy of the "
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
        f"Parameters, gradients and optimizer need {bytes_text(states)} on each GPU with any "
        f"batch size. Use FSDP2 (fully_shard): {bytes_text(states / gpus)} on each of {gpus} GPUs, "
        "or HSDP, which shards within a node only."
    )
    if gpus == 1 or states / gpus > capacity:
        least = max(1, math.ceil(states / capacity))
        shard = (
            f"Parameters, gradients and optimizer need {bytes_text(states)}. Use FSDP2 "
            f"(fully_shard) on more than {gpus_text(least)}."
        )
    return Fit((*texts, shard), ddp=False)


def scaling_advice(
    work: Workload, network: Network, gpus: int, gradient_bytes: float, fit: Fit
) -> list[str]:
    """Return what to do about scaling. gradient_bytes: bytes per element of a gradient."""
    if not fit.ddp:
        return ["The scaling is that of DDP, which does not fit. FSDP2 sends 1.5 times its bytes."]
    step = work.step(network, gpus)
    if gpus == 1:
        takes = seconds_range(step.total, *step.seconds_range(work.error))
        return [f"On 1 GPU, a step takes {takes}. Nothing is communicated."]
    found = f"On {gpus} GPUs the efficiency is {_range(step)}: {_waits(step)}"
    if not fit.this_batch:
        return [f"{found}, with the micro-batch that does not fit."]
    if step.low_efficiency >= GOOD:
        return [f"{found}. Stay with DDP."]

    def helps(changed: Step) -> bool:
        # An error of the computation affects both steps alike.
        low, high = step.low_efficiency, step.efficiency
        gains = (changed.low_efficiency - low, changed.efficiency - high)
        return min(gains) > STEP_ERROR * low and (not work.predicted or max(gains) > high - low)

    texts = [f"{found}. The target is {GOOD:.0%}."]
    factors = [factor for factor in _FACTORS if fit.free and factor <= fit.free]
    if factors:
        factor, larger = _first_good(work.enlarged, factors, network, gpus)
        if helps(larger):
            texts.append(
                f"Memory is free for {factor} times the micro-batch: {_range(larger)}, if training "
                f"converges with {factor} times the global batch."
            )
    factor, accumulated = _first_good(work.accumulated, _FACTORS, network, gpus)
    if accumulated.low_efficiency >= GOOD and helps(accumulated):
        texts.append(
            f"Accumulate {work.accumulate_steps * factor} micro-steps under no_sync(): "
            f"{_range(accumulated)}, if training converges with {factor} times the global batch."
        )
    if fit.free is None:
        texts.append("Where memory is free, a larger micro-batch has the same effect.")
    if gradient_bytes > 3:
        compressed = work.compressed(2).step(network, gpus)
        if helps(compressed):
            texts.append(
                f"A bf16 or fp16 communication hook halves the bytes: {_range(compressed)}."
            )
    if step.low_efficiency < LEAST and fit.free and not factors:
        texts.append(
            "If these are not enough, FSDP2 or HSDP free memory for a larger micro-batch, which "
            "computes longer between exchanges. Each GPU then sends 1.5 times the bytes of DDP in "
            "a step."
        )
    return texts


def _range(step: Step) -> str:
    return percentages(step.low_efficiency, step.efficiency)


def _waits(step: Step) -> str:
    """Return what a GPU waits for in a step, without waits below the error of the step's time."""
    causes = [
        f"{limit}{seconds_text(seconds)} for {cause}"
        for limit, seconds, cause in (
            ("", step.exposed, "communication"),
            ("up to ", step.delay, "slower GPUs, communication kernels and DDP itself"),
        )
        if seconds > STEP_ERROR * step.computation
    ]
    waits = " and ".join(causes) or f"less than {STEP_ERROR:.0%} of the step"
    return f"each GPU waits {waits}, and computes for {seconds_text(step.computation)}"


def _first_good(
    change: Callable[[int], Workload], factors: Sequence[int], network: Network, gpus: int
) -> tuple[int, Step]:
    """Return the first factor that reaches the target, else the last one, with its step."""
    for factor in factors:
        step = change(factor).step(network, gpus)
        if step.low_efficiency >= GOOD:
            break
    return factor, step


# The report and the page ----------------------------------------------------------------------


def table(plan: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the printed scaling table."""
    return [
        [
            str(row["gpus"]),
            seconds_range(*(row[f"{end}step_seconds"] for end in ("", "low_", "high_"))),
            *(seconds_text(row[f"{key}_seconds"]) for key in _SECONDS),
            bytes_text(row["sent_bytes"]),
            efficiency_text(row["low_efficiency"], row["efficiency"], row["gpus"]),
        ]
        for row in plan["scaling"]
    ]


def memory_rows(memory: Mapping[str, float]) -> list[list[str]]:
    """Return the rows of the printed memory table: used categories, and their total."""
    sizes = {name: size for name, size in memory.items() if size}
    return [
        [name, bytes_text(size)] for name, size in (*sizes.items(), ("total", sum(memory.values())))
    ]


def limits(plan: dict[str, Any]) -> list[str]:
    """Return the printed lines about the number of GPUs up to which the efficiency is good."""
    most = max((row["gpus"] for row in plan["scaling"]), default=0)
    return [
        f"at least {float(level):.0%} on "
        + (f"up to {gpus_text(size)}" if size else f"all of up to {gpus_text(most)}")
        for level, size in plan["holds_up_to"].items()
    ]


def largest_text(largest: dict[str, Any]) -> str:
    """Return the printed line about the largest micro-batch that fits."""
    samples = largest["samples"]
    found = "unknown" if samples is None else f"{samples} samples" if samples else "none fits"
    if largest["data_ended"]:
        found = f"at least {found}: the data ended"
    if largest["unconfirmed"]:
        found += f", not confirmed: {largest['unconfirmed']}"
    return f"Largest micro-batch on {largest['gpu']}: {found}"


def as_text(plan: dict[str, Any]) -> str:
    """Return the report as text."""
    lines = [
        plan["title"],
        *([f"Assumed: {', '.join(plan['assumed'])}"] if plan["assumed"] else []),
    ]
    if plan["memory"]:
        where = f", at its peak in {plan['peak']}" if plan["peak"] else ""
        lines += ["", f"Memory per GPU{where}"]
        lines += [f"  {name:<12} {size:>8}" for name, size in memory_rows(plan["memory"])]
    if plan["largest_micro_batch"]:
        lines += ["", largest_text(plan["largest_micro_batch"])]
    if plan["scaling"]:
        lines += ["", "Scaling, each GPU with its own batch"]
        for cells in (list(_COLUMNS), *table(plan)):
            widths = (6, 22, 13, 13, 13, 13, 0)
            aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append("  " + "  ".join(aligned))
        lines += [f"  {text}" for text in limits(plan)]
    if plan["advice"]:
        lines += ["", "Advice", *(f"  {text}" for text in plan["advice"])]
    if plan["notes"]:
        lines += ["", "Notes", *(f"  {text}" for text in plan["notes"])]
    return "\n".join(lines).strip()


def page_data(
    plan: dict[str, Any], work: Workload, *, traced: bool, measured: bool
) -> dict[str, Any]:
    """Return the data of the page: initial settings, and constants.

    traced: whether gradients and memory are from a trace. measured: whether the time of the
    computation was given.
    """
    computation = work.computation
    largest = plan["largest_micro_batch"]
    return {
        "title": plan["title"],
        "lines": [f"Assumed: {', '.join(plan['assumed'])}"] if plan["assumed"] else [],
        "advice": [*plan["advice"], *([largest_text(largest)] if largest else [])],
        "notes": plan["notes"],
        "inputs": plan["inputs"],
        "memory": plan["memory"] if traced else None,
        "measured": measured,
        "traced": {
            "gradients": [[gradient.ready, gradient.size] for gradient in computation.gradients],
            "backward_end": computation.backward_end,
            "optimizer": computation.optimizer,
            "micro_steps": work.accumulate_steps,
        }
        if traced
        else None,
        "columns": _COLUMNS,
        "precisions": {name: vars(kind) for name, kind in PRECISIONS.items()},
        "optimizer_states": OPTIMIZER_STATES,
        "expected_maxima": EXPECTED_MAXIMA,
        "communication_share": COMMUNICATION_SHARE,
        "ddp_seconds": DDP_SECONDS,
        "loss": LOSS,
        "tensors": work.tensors,
        "error": work.error,
        "measured_error": MEASURED_ERROR,
        "predicted": work.predicted,
    }


def write_page(data: dict[str, Any], path: Path) -> None:
    """Write the page with fields and sliders, a single file that works without a network."""
    text = json.dumps(data).replace("<", "\\u003c")  # a note may contain "</script>"
    page = _PAGE.read_text(encoding="utf-8").replace("/*DATA*/ null", text)
    path.write_text(page, encoding="utf-8")

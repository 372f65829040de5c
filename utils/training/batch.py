"""Keep the global batch the same on any number of ranks: split, learning rate, accumulation.

# A resumed run then has the same bits.
prime_ddp_buckets(ddp, lambda: cross_entropy(ddp(inputs), targets))
split = split_batch(global_batch=1024, world_size=dist.world_size, max_micro_batch=64)
lr = scale_lr(3e-4, split.global_batch / 256, "sqrt")  # 3e-4 was found with a batch of 256
loader = DataLoader(data, batch_size=split.micro_batch, sampler=sampler)
for step, micro_batches in enumerate(batched(loader, split.accumulation)):
    optimizer.param_groups[0]["lr"] = lr * linear_warmup(step, steps=500)
    for (inputs, targets), weight in accumulate(ddp, micro_batches):
        (weight * cross_entropy(ddp(inputs), targets)).backward()
    optimizer.step()
    optimizer.zero_grad()

GradientNoiseScale measures whether a larger global batch is worth its samples (noise_scale.py).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.rng import random_states, restore_random_states
from .noise_scale import GradientNoiseScale as GradientNoiseScale
from .noise_scale import recommend as recommend

_Batch = TypeVar("_Batch")
RULES = ("linear", "sqrt", "none")


# The split --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSplit:
    """A global batch of micro_batch * world_size * accumulation samples per optimizer step."""

    global_batch: int
    world_size: int
    micro_batch: int  # samples per rank in one forward and backward pass
    accumulation: int  # forward and backward passes per optimizer step


def split_batch(
    global_batch: int, world_size: int, max_micro_batch: int, *, min_micro_batch: int = 1
) -> BatchSplit:
    """Return the split with the fewest passes of at most max_micro_batch samples on a rank.

    min_micro_batch: refuse slow splits: 127 samples per rank have only the divisors 1 and 127.
    Raises ValueError if there is no split.
    """
    for name, value in (
        ("global_batch", global_batch),
        ("world_size", world_size),
        ("min_micro_batch", min_micro_batch),
        ("max_micro_batch", max_micro_batch),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1. Correct it")
    if min_micro_batch > max_micro_batch:
        raise ValueError(
            f"min_micro_batch={min_micro_batch} is above max_micro_batch={max_micro_batch}. "
            "Correct one"
        )

    share, rest = divmod(global_batch, world_size)
    micro_batch = None if rest else _micro_batch(share, min_micro_batch, max_micro_batch)
    if micro_batch is not None:
        return BatchSplit(global_batch, world_size, micro_batch, share // micro_batch)
    raise ValueError(
        f"A global batch of {global_batch} cannot be split into equal micro-batches of "
        f"{min_micro_batch} to {max_micro_batch} samples on {world_size} rank(s). Expected a "
        "product of micro-batch, ranks and accumulation. Change the global batch or the number of "
        "ranks"
    )


def _micro_batch(share: int, least: int, most: int) -> int | None:
    """Return the largest divisor of a rank's share from least to most; None if there is none."""
    for passes in range(math.ceil(share / most), share // least + 1):
        if share % passes == 0:
            return share // passes
    return None


# The learning rate ------------------------------------------------------------------------------


def scale_lr(lr: float, factor: float, rule: str) -> float:
    """Return the learning rate for a global batch that is `factor` times as large as before.

    "linear"  lr * factor: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in
              1 Hour", arXiv:1706.02677, section 2.1; for SGD, with linear_warmup().
    "sqrt"    lr * sqrt(factor), which keeps the variance of an SGD update: Krizhevsky 2014, "One
              weird trick for parallelizing convolutional neural networks", arXiv:1404.5997. For
              Adam see Malladi et al. 2022, arXiv:2205.10287.
    "none"    lr.

    Raises ValueError for another rule, and for numbers that are not positive and finite.
    """
    if not (0 < factor < math.inf and 0 <= lr < math.inf):
        raise ValueError(
            f"lr={lr!r} factor={factor!r}; expected finite numbers, the factor above 0. "
            "Correct them"
        )
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(RULES)}. Correct it")
    return lr * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[rule]


def linear_warmup(step: int, steps: int, start: float = 0.0) -> float:
    """Return the factor of the learning rate in optimizer step `step`, counted from 0.

    It rises in equal parts from `start` to 1, which it reaches in step `steps` - 1. The first step
    is one part above start, so that no step is lost if start is 0. Gradual warm-up by Goyal et al.
    2017 (see scale_lr), section 2.2, starts at the unscaled rate (start = 1 / factor) and takes 5
    epochs.
    """
    if step < 0 or steps < 0 or not 0 <= start <= 1:
        raise ValueError(
            f"step={step} steps={steps} start={start}; expected 0 or more, and a start from 0 to 1"
        )
    return 1.0 if step + 1 >= steps else start + (1 - start) * (step + 1) / steps


# Gradients of the whole batch -------------------------------------------------------------------


def batched(batches: Iterable[_Batch], count: int) -> Iterator[list[_Batch]]:
    """Iterate over lists of `count` batches; the last may be shorter. Reads no batch ahead."""
    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1. Correct it")
    remaining = iter(batches)
    while group := list(islice(remaining, count)):
        yield group


def accumulate(
    model: torch.nn.Module,
    micro_batches: Sequence[_Batch],
    *,
    samples: float | None = None,
    size: Callable[[_Batch], float] | None = None,
) -> Iterator[tuple[_Batch, float]]:
    """Iterate over the micro-batches of one optimizer step, each with the weight for its mean loss.

    The loop's body runs the forward and backward pass. With these weights the gradients add up to
    the gradient of the mean over the global batch, even if the last micro-batch is short.
    DistributedDataParallel exchanges gradients in the last pass only (DDP.no_sync).

    samples: samples of this rank in this step; default: all samples in micro_batches. If ranks
    have unequal shares, pass dist.all_reduce_mean(samples_of_this_rank) on all ranks. It may count
    tokens if `size` does.
    size: returns the samples of a micro-batch; default: the length of its first tensor.

    Statistics that a model keeps (BatchNorm) still cover single micro-batches. Raises
    ValueError for a step without samples, TypeError for a batch of unknown length, and
    RuntimeError with static_graph=True before prime_ddp_buckets().
    """
    sizes = [(size or _length)(batch) for batch in micro_batches]
    whole = sum(sizes) if samples is None else samples
    if micro_batches and not whole > 0:
        raise ValueError(
            f"the optimizer step has {whole} samples; expected more than 0. Leave empty steps out"
        )
    if len(micro_batches) > 1 and _records_static_graph(model):
        raise RuntimeError(
            "accumulate() was called before the first exchange of gradients of a "
            "DistributedDataParallel with static_graph=True, which cannot be inside of no_sync(). "
            "Call prime_ddp_buckets(model, loss) once before the training"
        )
    # A model without DistributedDataParallel has no gradients to exchange.
    no_sync: Callable[[], contextlib.AbstractContextManager[None]] = getattr(
        model, "no_sync", contextlib.nullcontext
    )
    for number, (batch, size_of_batch) in enumerate(zip(micro_batches, sizes, strict=True), 1):
        with contextlib.nullcontext() if number == len(micro_batches) else no_sync():
            yield batch, size_of_batch / whole


def prime_ddp_buckets(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """Let DistributedDataParallel fix its gradient buckets; a resumed run then has the same bits.

    In the first backward pass of a process (the second with static_graph=True) DDP records when
    each gradient is ready, and reorders its buckets for all later passes. A gradient's bucket
    decides in which order three or more ranks add it up, and so its last bits. Call this once on
    all ranks, before a checkpoint is loaded.

    loss: runs one forward pass as in training, with inputs of the training's shapes and any
    values. It must use every output that the training's loss uses.

    The model keeps its mode. Buffers (BatchNorm's statistics), gradients, random number generators
    and the state of a communication hook are restored afterwards. Changes remain if a model updates
    parameters in the backward pass, or counts passes in plain attributes.

    Raises RuntimeError inside no_sync(), where DDP records nothing.
    """
    ddp = _find_ddp(model)
    if ddp is not None and not ddp.require_backward_grad_sync:
        raise RuntimeError(
            "prime_ddp_buckets() was called inside of no_sync(). Expected a pass that exchanges "
            "gradients. Call it outside"
        )
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    hooks = _hook_states(ddp)
    generators = random_states()
    try:
        for _ in range(2 if ddp is not None and ddp.static_graph else 1):
            for parameter, _ in gradients:
                parameter.grad = None
            with torch.enable_grad():
                torch.autograd.backward(loss())
    finally:
        restore_random_states(generators)
        for state, attributes in hooks:
            for name, value in attributes.items():
                setattr(state, name, value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                buffer.copy_(values)
                setattr(module, name, buffer)


def _find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    return next(
        (module for module in model.modules() if isinstance(module, DistributedDataParallel)), None
    )


def _records_static_graph(model: torch.nn.Module) -> bool:
    """Whether the next backward pass records the graph; in no_sync(), torch then asserts."""
    ddp = _find_ddp(model)
    if ddp is None or not ddp.static_graph:
        return False
    # Private: torch does not show otherwise that the first backward pass is over.
    return not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)


def _hook_states(ddp: DistributedDataParallel | None) -> list[tuple[object, dict[str, Any]]]:
    """Return the states of communication hooks, each with a copy of its attributes."""
    # Private: torch gives no other access to a hook's state, such as PowerSGDState.
    states = [
        state for _, state in getattr(ddp, "_comm_hooks", ()) if not isinstance(state, ProcessGroup)
    ]
    found = []
    for state in states:
        names = [
            *getattr(state, "__dict__", ()),
            *(name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())),
        ]
        attributes = {name: getattr(state, name) for name in names if hasattr(state, name)}
        groups = {
            id(value): value for value in attributes.values() if isinstance(value, ProcessGroup)
        }
        found.append((state, copy.deepcopy(attributes, groups)))  # process groups are not copied
    return found


def _length(batch: object) -> int:
    """Return the length of the first tensor of a batch from a DataLoader."""
    inner = batch
    while not isinstance(inner, torch.Tensor):
        if isinstance(inner, Mapping) and inner:
            inner = next(iter(inner.values()))
        elif isinstance(inner, Sequence) and not isinstance(inner, str) and inner:
            inner = inner[0]
        else:
            raise TypeError(
                f"a micro-batch of type {type(batch).__name__} has no tensor in the first place. "
                "Expected tensors, or lists and dictionaries of them. Give size=, which returns "
                "the number of its samples"
            )
    return len(inner)

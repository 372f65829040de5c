"""Find what is wrong with a training in the reports of all its ranks, and put it into words."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..ranges import name_ranks

if TYPE_CHECKING:
    pass
from .samples import DIGITS, SAMPLER_SETTINGS

# A rank makes no steps if it reports none within so many seconds after another rank's 16th step.
NO_STEP_AT, NO_STEP_SECONDS = 16, 2.0
# A model that no optimizer holds is compared between these two optimizer steps: it has not changed.
HELD_FROM, HELD_UNTIL = 2, 4
_SAMPLER_REMEDY = "Give it sampler=DistributedSampler(data, job.world_size, job.rank)"
_STREAM_REMEDY = (
    "No sampler divides an IterableDataset: split it by rank and worker in its __iter__(), "
    "islice(samples, job.rank * workers + worker, None, job.world_size * workers), with "
    "get_worker_info() for the workers"
)


# What all ranks have reported ---------------------------------------------------------------------


def parameter_problem(reports: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """Return how the ranks differ after an optimizer step, and the number of the parameter.

    reports: one per rank. "settings", "shapes", "digests", "finite" describe the parameters.
    "unfinished": whether DistributedDataParallel has not ended its reduction; it raises an error
    itself at the next step. "steps": the steps since the last comparison. "loss": the first loss
    that was not finite. Returns ("", -1) if all is well.
    """
    first = reports[0]
    if any(report["unfinished"] for report in reports):
        return "", -1
    for rank, report in enumerate(reports):
        for number, (ours, theirs) in enumerate(
            zip(first["settings"], report["settings"], strict=False)
        ):
            for name in ours.keys() & theirs.keys():
                if ours[name] != theirs[name]:
                    return (
                        f"{name} of parameter group {number} is {theirs[name]} on rank {rank} and "
                        f"{ours[name]} on rank 0. Give the optimizers of all ranks the same "
                        "settings, and step their schedulers alike"
                    ), -1
    for rank, report in enumerate(reports):
        if report["shapes"] != first["shapes"]:
            return _other_parameters(rank), -1
        if report["digests"] != first["digests"]:
            pairs = zip(_split(first["digests"]), _split(report["digests"]), strict=True)
            number = next(number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)
            return f"differs on rank {rank} from rank 0", number
    bad = [rank for rank, report in enumerate(reports) if not report["finite"]]
    if bad:
        began = next((report["loss"] for report in reports if report["loss"]), "")
        if not began and len(bad) == len(reports):
            began = (
                "Averaged gradients carry it to all ranks: ddpkit.metrics names step and rank at "
                "which the loss begins it"
            )
        return (
            f"a parameter has become NaN or infinite on {name_ranks(bad)}, in {first['steps']} of "
            f"the optimizer. {f'{began}. ' if began else ''}Lower the learning rate, or clip the "
            "gradients"
        ), -1
    return "", -1


def _other_parameters(rank: int) -> str:
    """Return a message; "" for the inner optimizer of a sharded one."""
    sharded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if sharded is not None and _instances_of(sharded.ZeroRedundancyOptimizer):
        return ""
    return (
        f"the optimizer of rank {rank} has other parameters than that of rank 0. Freeze the same "
        "parameters on all ranks, and give their optimizers the same ones, in the same order"
    )


def _split(text: str) -> list[str]:
    return [text[start : start + DIGITS] for start in range(0, len(text), DIGITS)]


def data_problem(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with the data of an epoch; "" if all is well.

    reports: describe_loader() of each rank, with "batch", the digest of its first batch.
    """
    world_size, divided = len(reports), {report["is_divided"] for report in reports}
    same: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.get("batch"):
            same.setdefault(report["batch"], []).append(rank)
    twins = max(same.values(), key=len, default=[])
    if divided == {False} and len(twins) == world_size and not has_groups():
        return (
            f"all {world_size} ranks train on the same batches: the DataLoader does not divide the "
            f"data. {_STREAM_REMEDY if reports[0].get('is_stream') else _SAMPLER_REMEDY}"
        )
    if divided != {True}:
        return ""
    for name in ("length", "batch_size", *SAMPLER_SETTINGS):
        values = [report.get(name) for report in reports]
        for rank, value in enumerate(values):
            if value != values[0]:
                return (
                    f"{name} of the data is {value} on rank {rank} and {values[0]} on rank 0. "
                    "Expected the same on all ranks, or they train on overlapping parts, or on "
                    "different numbers of batches"
                )
    parts: dict[Any, list[int]] = {}
    for rank, report in enumerate(reports):
        parts.setdefault(report["part"], []).append(rank)
    twins = max((ranks for ranks in parts.values()), key=len)
    has_same_batch = len({reports[rank].get("batch") for rank in twins}) == 1
    if len(twins) > 1 and has_same_batch and not has_groups():
        replicas = reports[0]["num_replicas"]
        return (
            f"{name_ranks(twins)} train on the same part of the data, {reports[twins[0]]['part']} "
            f"of {replicas}; there are {world_size} ranks. Give DistributedSampler "
            "num_replicas=job.world_size and rank=job.rank"
        )
    return ""


def has_groups() -> bool:
    """Whether ranks may hold or read different data on purpose, as with tensor parallelism."""
    others = ("deepspeed", "megatron")
    is_divided = torch.distributed.distributed_c10d.get_pg_count() > 1
    return is_divided or any(name in sys.modules for name in others)


def no_step_problem(ranks: Sequence[int], parameters: Sequence[Tensor]) -> str:
    """Return a message about ranks that have made no step; "" if they need not make one.

    A rank must make steps if DistributedDataParallel has averaged the gradients, because it took
    part. torch's Join is the exception: it stands in for a rank that has no batches.
    """
    owners = _instances_of(DistributedDataParallel)
    averaged = [ddp for ddp in owners if ddp._lazy_init_ran and not ddp._join_config.enable]
    held = {id(parameter) for ddp in averaged for parameter in ddp.parameters()}
    if not ranks or not any(id(parameter) in held for parameter in parameters):
        return ""
    return (
        f"the optimizer has made {NO_STEP_AT} steps on other ranks, and none on "
        f"{name_ranks(ranks)}: its parameters stay as they were. Call optimizer.step() on every "
        "rank"
    )


class Divergence(NamedTuple):
    """A parameter that differs between the ranks."""

    text: str  # the message, with the likely reason
    may_be_averaged: bool  # whether the script itself may average it every few steps


def describe_divergence(problem: str, parameter: Tensor) -> Divergence:
    """Describe a parameter that differs.

    Searches all objects of this process, which takes tens of milliseconds.
    """
    found = _instances_of(nn.Module)
    wrapped = [module for module in found if isinstance(module, DistributedDataParallel)]
    names = [
        name
        for module in [*(ddp.module for ddp in wrapped), *found]
        for name, candidate in module.named_parameters()
        if candidate is parameter
    ]
    name = max(names, key=len, default="a parameter").removeprefix("module.")
    owners = [
        ddp for ddp in wrapped if any(candidate is parameter for candidate in ddp.parameters())
    ]
    if names and not owners:
        reason = (
            "No DistributedDataParallel contains it, so that its gradients are not averaged. Wrap "
            "the model: ddp = DDP(model, device_ids=job.device_ids), and train with ddp(x)"
        )
    elif owners and not any(getattr(ddp, "_lazy_init_ran", True) for ddp in owners):
        reason = (
            "The model was called directly, not through DistributedDataParallel, so that gradients "
            "are not averaged. Train with ddp(x), not model(x) or ddp.module(x)"
        )
    elif any(getattr(ddp, "_delay_all_reduce_params", ()) for ddp in owners):
        reason = "DistributedDataParallel leaves it to delay_all_reduce_named_params"
    else:
        reason = (
            "Its gradients are not averaged, or one rank changes them or the parameter afterwards. "
            "Leave no_sync() before the forward pass of the last micro-batch; load weights and "
            "freeze or unfreeze parameters before the model is wrapped; train with ddp(x), not "
            "ddp.module(x); clip and step alike on all ranks"
        )
    is_reduced = any(ddp.require_backward_grad_sync for ddp in owners)
    return Divergence(f"{name} {problem}. {reason}", not is_reduced)


def has_unfinished_reduction(models: Collection[DistributedDataParallel]) -> bool:
    """Whether a backward pass has ended before DistributedDataParallel averaged all gradients.

    Private API of torch, which otherwise reports this only in the next forward pass.
    """
    for ddp in list(models):
        reducer = getattr(ddp, "reducer", None)
        try:
            if reducer is not None:
                reducer._check_reducer_finalized()
        except RuntimeError:
            return True
    return False


def untrained_problem(model: DistributedDataParallel, optimizer: Optimizer) -> str:
    """Return a message about a model that no optimizer holds; "" if one does.

    optimizer: the one that makes steps. Searches all objects of this process.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for other in _instances_of(Optimizer):
        held = (parameter for group in other.param_groups for parameter in group["params"])
        if any(id(parameter) in own for parameter in held):
            return ""
    name, kind = type(model.module).__name__, type(optimizer).__name__
    return (
        f"the optimizer {kind} holds none of the parameters of {name}, the model in "
        f"DistributedDataParallel, which has not changed in {HELD_UNTIL} steps. Make it from the "
        f"parameters of the model that is trained: {kind}(ddp.parameters(), ...)"
    )


def _instances_of(kind: type) -> list[Any]:
    """Return the instances of a class and its subclasses in this process.

    Python code never sees a list of all objects. The list would also hold a tuple that the
    training is building, and tuple() raises SystemError there if it is not the only owner.
    """
    kinds, new = {kind}, [kind]
    while new:
        children: set[type] = set(new.pop().__subclasses__()) - kinds
        kinds |= children
        new.extend(children)
    all_objects: Iterator[object] = chain.from_iterable(map(gc.get_objects, (None,)))
    used = kinds.intersection(map(type, all_objects))
    return [referrer for referrer in gc.get_referrers(*used) if type(referrer) in used]

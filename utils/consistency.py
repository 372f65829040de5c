"""Notice a training that goes wrong without an error, and say on which rank and why.

Each rank samples its parameters after some of its optimizer steps, and the first batch of each
epoch. A thread compares the samples of all ranks over the store of the process group, without a
collective. A difference is logged once, as an ERROR; the training goes on.

Not noticed: a rank without DistributedDataParallel that makes no step of its optimizer.

On by default: who forgets set_epoch(), a sampler or DistributedDataParallel does not know what to
switch on. torch has a hook for the steps of all optimizers, but none for the epochs and batches of
loaders, which training_hooks wraps, nor a way from a parameter to its wrapper, for which gc is
searched, only after a difference was found. tests/bench/bench_consistency.py measures the cost.

Off: setup_distributed(check_training=False), or DDPKIT_CHECK_TRAINING=0. "error" ends the training.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import math
import queue
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from .coordination import CoordinationError
from .host.cores import name_ranks
from .launch_protocol import PROBLEM, Failure, send
from .log import get_logger

if TYPE_CHECKING:
    from .coordination import StoreCommunicator

_log = get_logger(__name__)
_RUNS, _RUN_LENGTH = 64, 16  # of a tensor: runs of adjacent elements
DIGITS = 8  # hexadecimal, of a digest
_CHECKED_EPOCHS = 3
_CLOSE_SECONDS = 5.0
_LEAVE_SECONDS, _LEAVE_POLL_SECONDS = 0.5, 0.002
# A rank that has reported no step, so long after this rank's 16th, makes none.
_NO_STEP_AT, _NO_STEP_SECONDS = 16, 2.0
# Ranks that average their parameters every few steps differ in between: so many steps, and seconds,
# after a difference was found, it is an error.
_AVERAGING_STEPS, _AVERAGING_SECONDS = 256, 60.0
# Steps of an optimizer between which a model that none holds has not changed.
_HELD_FROM, _HELD_UNTIL = 2, 4
# What a sampler of one rank has in common with those of the others, and what it has not.
_SETTINGS = ("num_replicas", "shuffle", "seed", "drop_last", "epoch")
_ORDINALS = ("first", "second", "third", "fourth", "fifth")  # scripts count epochs from 0 or 1
_SAMPLER_REMEDY = "Give it sampler=DistributedSampler(data, job.world_size, job.rank)"
_STREAM_REMEDY = (
    "No sampler divides an IterableDataset: split it by rank and worker in its __iter__(), "
    "islice(samples, job.rank * workers + worker, None, job.world_size * workers), with "
    "get_worker_info() for the workers"
)


# What one rank reports ----------------------------------------------------------------------------


class Sample(NamedTuple):
    """Elements of tensors of one dtype and device, on their way to the CPU."""

    numbers: list[int]  # of the tensors
    sizes: list[int]  # elements of each
    values: Tensor
    event: tuple[torch.device, torch.Event] | None  # of a copy from a GPU


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
        and not hasattr(tensor, "_fsdp_flattened")  # by FSDP1
    )


def _some_elements(tensor: Tensor) -> Tensor:
    """Return runs of elements, in the order in which they are in memory."""
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
    """Wait for the copies; return the digests of all tensors in one string, and if all are finite.

    The bits of a NaN are arbitrary: all NaNs are equal here.
    """
    found, finite = [0] * count, True
    for sample in samples:
        if sample.event is not None:
            device, event = sample.event
            # In a thread that has chosen no GPU, a call of CUDA makes a context on GPU 0:
            # https://github.com/meta-pytorch/torchcomms/pull/777
            with torch.cuda.device(device):
                event.synchronize()
        # One at a time: torch starts threads for more elements, which takes longer.
        parts = sample.values.split_with_sizes(sample.sizes)
        for number, part in zip(sample.numbers, parts, strict=True):
            if part.is_floating_point():
                part = part.double()
                finite = finite and bool(part.isfinite().all())
                part = part.masked_fill(part.isnan(), math.nan)
            found[number] = zlib.crc32(ctypes.string_at(part.data_ptr(), part.nbytes))
    return "".join(f"{checksum:0{DIGITS}x}" for checksum in found), finite


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group that are plain values, on the CPU."""
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
    """Return the sampler of a loader that has the settings of DistributedSampler; None if none."""
    for sampler in (
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", 0),
    ):
        if all(hasattr(sampler, name) for name in ("num_replicas", "rank")):
            return sampler
    return None


def describe_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what the ranks compare about a loader: JSON values."""
    sampler = sampler_of(loader)
    found: dict[str, Any] = {
        "is_divided": sampler is not None,
        "is_stream": isinstance(loader.dataset, IterableDataset),
        "batch_size": loader.batch_size,
    }
    with contextlib.suppress(Exception):  # of any data set
        found["length"] = len(loader.dataset)  # type: ignore[arg-type]
        found["batches"] = len(loader)
    if sampler is not None:
        found["part"] = sampler.rank
        found |= {name: getattr(sampler, name, None) for name in _SETTINGS}
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


# What all ranks have reported ---------------------------------------------------------------------


def parameter_problem(reports: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """Return what differs between the ranks after one optimizer step, and the parameter's number.

    reports: by rank: "settings", "shapes", "digests", "finite"; "unfinished": whether
    DistributedDataParallel did not end its reduction, for which it raises an error at the next
    step; "steps": since the last comparison; "loss": the first one that was not finite. ("", -1)
    where all is well.
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
    """Return a message; "" for the optimizer inside of a sharded one."""
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
    """Return what is wrong with the data of an epoch; "" where all is well.

    reports: by rank, from describe_loader(), with "batch", the digest of the first batch.
    """
    world_size, divided = len(reports), {report["is_divided"] for report in reports}
    same: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.get("batch"):
            same.setdefault(report["batch"], []).append(rank)
    twins = max(same.values(), key=len, default=[])
    if divided == {False} and len(twins) == world_size and not _has_groups():
        return (
            f"all {world_size} ranks train on the same batches: the DataLoader does not divide the "
            f"data. {_STREAM_REMEDY if reports[0].get('is_stream') else _SAMPLER_REMEDY}"
        )
    if divided != {True}:
        return ""
    for name in ("length", "batch_size", *_SETTINGS):
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
    if len(twins) > 1 and has_same_batch and not _has_groups():
        replicas = reports[0]["num_replicas"]
        return (
            f"{name_ranks(twins)} train on the same part of the data, {reports[twins[0]]['part']} "
            f"of {replicas}; there are {world_size} ranks. Give DistributedSampler "
            "num_replicas=job.world_size and rank=job.rank"
        )
    return ""


def _has_groups() -> bool:
    """Whether ranks may differ on purpose, as with tensor parallelism: what they hold, and read."""
    others = ("deepspeed", "megatron")
    is_divided = torch.distributed.distributed_c10d.get_pg_count() > 1
    return is_divided or any(name in sys.modules for name in others)


def no_step_problem(ranks: Sequence[int], parameters: Sequence[Tensor]) -> str:
    """Return a message about ranks that have made no step; "" if they need not make one.

    They must where DistributedDataParallel has averaged the gradients: they computed theirs, too,
    unless torch's Join stands in for a rank that has no batches.
    """
    owners = _instances_of(DistributedDataParallel)
    averaged = [ddp for ddp in owners if ddp._lazy_init_ran and not ddp._join_config.enable]
    held = {id(parameter) for ddp in averaged for parameter in ddp.parameters()}
    if not ranks or not any(id(parameter) in held for parameter in parameters):
        return ""
    return (
        f"the optimizer has made {_NO_STEP_AT} steps on other ranks, and none on "
        f"{name_ranks(ranks)}: its parameters stay as they were. Call optimizer.step() on every "
        "rank"
    )


class Divergence(NamedTuple):
    """A parameter that differs between the ranks."""

    text: str  # with the likely reason
    may_be_averaged: bool  # the script itself may make it equal every few steps


def describe_divergence(problem: str, parameter: Tensor) -> Divergence:
    """Describe a parameter that differs.

    Searches the objects of this process, which takes some tens of milliseconds.
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

    Private API of torch, which otherwise says so only in the next forward pass.
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
    """Return a message about a model that no optimizer holds; "" where one does.

    optimizer: that makes steps. Searches the objects of this process.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for other in _instances_of(Optimizer):
        held = (parameter for group in other.param_groups for parameter in group["params"])
        if any(id(parameter) in own for parameter in held):
            return ""
    name, kind = type(model.module).__name__, type(optimizer).__name__
    return (
        f"the optimizer {kind} holds none of the parameters of {name}, the model in "
        f"DistributedDataParallel, which has not changed in {_HELD_UNTIL} steps. Make it from the "
        f"parameters of the model that is trained: {kind}(ddp.parameters(), ...)"
    )


def _instances_of(kind: type) -> list[Any]:
    """Return the instances of a class and its subclasses in this process.

    No list of all objects is ever seen by Python code, as it also holds a tuple that the training
    is building: tuple() would raise SystemError there, since it no longer owns that alone.
    """
    kinds, new = {kind}, [kind]
    while new:
        children: set[type] = set(new.pop().__subclasses__()) - kinds
        kinds |= children
        new.extend(children)
    all_objects: Iterator[object] = chain.from_iterable(map(gc.get_objects, (None,)))
    used = kinds.intersection(map(type, all_objects))
    return [referrer for referrer in gc.get_referrers(*used) if type(referrer) in used]


# Watching -----------------------------------------------------------------------------------------


@dataclass
class _Epoch:
    """One pass over a loader."""

    loader: DataLoader[Any]
    description: dict[str, Any]
    batch: list[Sample] | None = None  # of the first batch
    count: int = 0  # tensors of the batch
    batches: int = 0  # before the first step


class TrainingWatch:
    """Compares the training of this rank with that of the others, from now to close().

    Only the main thread trains; one thread talks to the store.
    """

    def __init__(
        self,
        communicator: StoreCommunicator | None,
        models: Collection[DistributedDataParallel] = (),
    ) -> None:
        """Begin.

        communicator: None for one rank, whose training is compared with none.
        models: wrapped ones, which the caller adds to.
        """
        global watch
        watch = self
        self._models = models
        # Digests of models that the optimizers which have made steps do not hold.
        self._not_held: weakref.WeakKeyDictionary[DistributedDataParallel, list[Sample]] = (
            weakref.WeakKeyDictionary()
        )
        self._last_before = 0  # the last step before which parameters are compared
        # A difference that is an error unless the ranks average, and when: time.monotonic().
        self._suspicion: tuple[str, float] | None = None
        self._communicator = communicator
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, list[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._loaders: weakref.WeakKeyDictionary[DataLoader[Any], list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.epochs: weakref.WeakKeyDictionary[Any, _Epoch] = weakref.WeakKeyDictionary()
        self.iterator: Callable[[], Any] = lambda: None  # that has yielded the last batch
        self.on_step: list[Callable[[Optimizer], object]] = []  # called after each step
        self._reported: set[str] = set()
        self.problem = ""  # that this rank has logged
        self.bad_loss = ""  # "loss of step 7 is not finite on rank 1", where Metrics has seen it
        self._has_trained = False
        self._thread: threading.Thread | None = None
        self._has_left = False
        # Each rank uses its optimizers and loaders in the same order; some have ended meanwhile.
        self._numbers, self._numbers_of_loaders = itertools.count(), itertools.count()
        atexit.register(self._close_at_exit)

    def close(self, *, orderly: bool = True) -> None:
        """Stop watching. What has been sampled is still compared. A second call does nothing.

        orderly: the other ranks close, too. Rank 0, which may serve the store, waits for them a
        moment: torch prints a warning for each call to a store that is gone.
        """
        global watch
        atexit.unregister(self._close_at_exit)
        watch = None if watch is self else watch
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None
        communicator, has_left, self._has_left = self._communicator, self._has_left, True
        if communicator is None or has_left or not orderly:
            return
        with contextlib.suppress(CoordinationError):
            left, deadline = communicator.count("left"), time.monotonic() + _LEAVE_SECONDS
            while not communicator.rank and left < communicator.world_size:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LEAVE_POLL_SECONDS)
                left = communicator.count("left", 0)

    def _close_at_exit(self) -> None:
        # sys.last_type is set by an exception that nobody has caught.
        self.close(orderly=not hasattr(sys, "last_type"))

    # The main thread

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that a step of any optimizer begins: by then the ranks may have averaged."""
        count = self._optimizers.get(optimizer)
        if count is None or count[1] >= self._last_before or _is_capturing():
            return
        parameters = _plain_parameters(optimizer)
        samples = take_sample(parameters)
        number, step = count[0], count[1] + 1
        self._send(lambda: self._report_before(number, step, samples, len(parameters)))

    def stepped(self, optimizer: Optimizer) -> None:
        """Note a step of any optimizer, after it."""
        count = self._optimizers.get(optimizer)
        if count is None:
            count = self._optimizers[optimizer] = [next(self._numbers), 0, 1, 0]
        count[1] += 1
        if count[1] == count[2] and self._communicator is not None:
            self._check_parameters(optimizer, count[0], count[3] + 1, count[1])
            count[2], count[3] = next_checked(count[1]), count[1]
        iterator = self.iterator() if self.epochs else None
        if iterator is not None and (epoch := self.epochs.pop(iterator, None)) is not None:
            self._check_epoch(epoch)
        for call in self.on_step:
            call(optimizer)

    def _check_parameters(self, optimizer: Optimizer, number: int, first: int, step: int) -> None:
        """Compare the parameters after a step. first: the first step since the last comparison."""
        if _is_capturing() or _has_groups():
            return
        parameters = _plain_parameters(optimizer)
        if step in (_HELD_FROM, _HELD_UNTIL):
            self._check_held(optimizer, step)
        report = {
            "unfinished": has_unfinished_reduction(self._models),
            "steps": f"step {step}" if first == step else f"steps {first}-{step}",
            "settings": settings_of(optimizer),
            "shapes": zlib.crc32(
                str([(parameter.shape, parameter.dtype) for parameter in parameters]).encode()
            ),
        }
        samples = take_sample(parameters)
        topic = f"step/{number}/{step}"
        self._send(lambda: self._report_parameters(topic, step, report, samples, parameters))
        if step == _NO_STEP_AT:
            self._send(lambda: self._report_no_step(f"step/{number}/1", parameters))

    def _check_held(self, optimizer: Optimizer, step: int) -> None:
        """Look for a model that gets gradients, and that no optimizer which makes steps holds."""
        held = {
            id(parameter)
            for stepping in self._optimizers
            for group in stepping.param_groups
            for parameter in group["params"]
        }
        for ddp in list(self._models):
            own = [parameter for parameter in ddp.parameters() if is_plain(parameter)]
            if any(id(parameter) in held for parameter in own):
                return  # this training is more than one model
        for ddp in list(self._models):
            own = [p for p in ddp.parameters() if is_plain(p) and p.grad is not None]
            if not own:
                continue
            samples = take_sample(own[:1])
            before = self._not_held.pop(ddp, None)
            if step == _HELD_FROM:
                self._not_held[ddp] = samples
            elif before is not None:
                self._send(functools.partial(self._report_held, ddp, optimizer, before, samples))

    def _check_epoch(self, epoch: _Epoch) -> None:
        """Compare a loader whose batches are trained on."""
        if self._communicator is not None and not self._has_trained:
            self._has_trained = True
            self._log_global_batch(epoch, self._communicator.world_size)
        number, begun, last_order = self._loaders[epoch.loader]
        order = epoch.description.get("epoch")
        if epoch.description.get("shuffle") and begun and order == last_order:
            self._send(lambda: self._log_once("set_epoch", _same_order(begun)))
        self._loaders[epoch.loader] = [number, begun + 1, order]
        if begun < _CHECKED_EPOCHS:
            self._send(lambda: self._report_epoch(f"data/{number}/{begun}", epoch))

    def missing_from(self, state: Sequence[object]) -> list[str]:
        """Return what this training uses, and a state does not hold: it restarts at a resume.

        state: all values in the state, at any depth.
        """
        held = {id(value) for value in state} | {
            id(getattr(value, "optim", None)) for value in state
        }
        dicts = [value for value in state if isinstance(value, dict)]  # also of state_dict()
        missing = []
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer
            is_held = id(optimizer) in held or inner is not None and id(inner) in held
            if not is_held and not any("param_groups" in entries for entries in dicts):
                missing.append(f"the optimizer {name}")
            schedules = [
                schedule for schedule in state if getattr(schedule, "optimizer", None) is optimizer
            ]
            has_schedule = hasattr(optimizer.step, "_wrapped_by_lr_sched")
            if (
                has_schedule
                and not schedules
                and not any("last_epoch" in entries for entries in dicts)
            ):
                missing.append(f"the learning-rate scheduler of {name}")
        for loader, (_, epochs, _) in self._loaders.items():
            if epochs and hasattr(loader, "state_dict") and id(loader) not in held:
                missing.append(f"the {type(loader).__name__}")
        return missing

    def _log_global_batch(self, epoch: _Epoch, world_size: int) -> None:
        size = epoch.description["batch_size"]
        # Several batches before a step: gradients are accumulated, or the next batch is loaded.
        if size and epoch.description["is_divided"] and epoch.batches == 1 and not _has_groups():
            _log.info("global batch %d x %d = %d samples", world_size, size, world_size * size)

    def _send(self, task: Callable[[], object]) -> None:
        if self._communicator is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="training checks", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def begin_epoch(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Note that the script iterates over a loader."""
        with contextlib.suppress(TypeError):  # an iterator without weak references
            self.epochs[iterator] = _Epoch(loader, describe_loader(loader))
        if loader not in self._loaders:
            self._loaders[loader] = [next(self._numbers_of_loaders), 0, None]

    def first_batch(self, iterator: Any, batch: object) -> None:
        """Sample the first batch of an iterator; count those before the first step."""
        epoch = self.epochs.get(iterator)
        if epoch is None:
            return
        epoch.batches += 1
        if epoch.batch is not None or _is_capturing():
            return
        tensors = [tensor for tensor in tensors_in(batch) if is_plain(tensor)]
        tensors = tensors if self._loaders[epoch.loader][1] < _CHECKED_EPOCHS else []
        epoch.batch, epoch.count = take_sample(tensors), len(tensors)

    # The thread

    def _run(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                task()
                if self._suspicion is not None and time.monotonic() > self._suspicion[1]:
                    self._end_suspicion()
            self._end_suspicion()
        except CoordinationError:  # the store is gone: the training ends
            pass

    def _next_task(self) -> Callable[[], object] | None:
        if self._suspicion is None:
            return self._tasks.get()
        try:
            return self._tasks.get(timeout=max(0.0, self._suspicion[1] - time.monotonic()))
        except queue.Empty:
            return self._end_suspicion

    def _end_suspicion(self) -> None:
        """Report a difference if the parameters have not become equal since."""
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is not None:
            assert self._communicator is not None
            if not self._communicator.count("averaged", 0):
                self._log_once("parameters", suspicion[0])

    def _report_before(self, number: int, step: int, samples: list[Sample], count: int) -> None:
        """Compare parameters before a step: equal ones, after a difference, were averaged."""
        assert self._communicator is not None

        def conclude(reports: list[str]) -> None:
            assert self._communicator is not None
            if len(set(reports)) == 1 and self._communicator.count("averaged") == 1:
                _log.info(
                    "the parameters differ between the ranks, and are equal again before step %d, "
                    "as with averaging every few steps",
                    step,
                )

        self._communicator.report(f"before/{number}/{step}", digests(samples, count)[0], conclude)
        if self._communicator.count("averaged", 0):
            self._last_before = 0

    def _report_held(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        before: list[Sample],
        after: list[Sample],
    ) -> None:
        if digests(before, 1) == digests(after, 1):
            self._log_once("held", untrained_problem(ddp, optimizer))

    def _report_epoch(self, topic: str, epoch: _Epoch) -> None:
        assert self._communicator is not None
        report = {**epoch.description, "batch": digests(epoch.batch or [], epoch.count)[0]}
        self._communicator.report(
            topic, report, lambda reports: self._log_once("data", data_problem(reports))
        )

    def _report_parameters(
        self,
        topic: str,
        step: int,
        report: dict[str, Any],
        samples: list[Sample],
        parameters: Sequence[Tensor],
    ) -> None:
        assert self._communicator is not None
        found, finite = digests(samples, len(parameters))

        def conclude(reports: list[dict[str, Any]]) -> None:
            problem, number = parameter_problem(reports)
            if number >= 0 and "parameters" not in self._reported:
                self._diverged(problem, parameters[number])
            else:
                self._log_once("parameters", problem)

        report |= {"digests": found, "finite": finite, "loss": self.bad_loss}
        self._communicator.report(topic, report, conclude)
        if not self._last_before and self._communicator.count("differs", 0):
            if not self._communicator.count("averaged", 0):
                self._last_before = step + _AVERAGING_STEPS

    def _diverged(self, problem: str, parameter: Tensor) -> None:
        """Report a difference, at once or when it is known that the ranks do not average."""
        assert self._communicator is not None
        if self._suspicion is not None or self._communicator.count("averaged", 0):
            return
        found = describe_divergence(problem, parameter)
        if not found.may_be_averaged:
            self._log_once("parameters", found.text)
        elif self._communicator.count("differs") == 1:
            self._suspicion = found.text, time.monotonic() + _AVERAGING_SECONDS

    def _report_no_step(self, topic: str, parameters: Sequence[Tensor]) -> None:
        assert self._communicator is not None
        deadline = time.monotonic() + _NO_STEP_SECONDS
        while self._communicator.count(f"{topic}/reports", 0) < self._communicator.world_size:
            if time.monotonic() > deadline:
                missing = self._communicator.missing(topic)
                self._log_once("no step", no_step_problem(missing, parameters))
                return
            time.sleep(_NO_STEP_SECONDS / 20)

    def _log_once(self, subject: str, problem: str) -> None:
        if problem and subject not in self._reported:
            self._reported.add(subject)
            assert self._communicator is not None
            if self._communicator.count(f"reported/{subject}") > 1:  # by another rank
                return
            self.problem = self.problem or problem
            _log.error("%s. (To switch this check off: %s=0)", problem, "DDPKIT_CHECK_TRAINING")
            send(PROBLEM, failure=Failure(problem, "training"))  # the line may scroll away


def _same_order(begun: int) -> str:
    """begun: epochs before the one that repeats the order."""
    epoch, one_before = f"epoch {begun + 1}, counted from 1,", "epoch before"
    if begun < len(_ORDINALS):
        epoch, one_before = f"the {_ORDINALS[begun]} epoch", _ORDINALS[begun - 1]
    return (
        f"{epoch} repeats the order of the {one_before}: sampler.set_epoch() was not called. Call "
        "it at the start of each epoch"
    )


def next_checked(step: int) -> int:
    """Return the next step whose parameters are compared: 1, 2, 4, 8, ..., 1024, 2048, 3072, ..."""
    return 2 * step if step < 1024 else step + 1024


def _plain_parameters(optimizer: Optimizer) -> list[Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter for parameter in parameters if is_plain(parameter)]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


watch: TrainingWatch | None = None  # of this process, while its job is open

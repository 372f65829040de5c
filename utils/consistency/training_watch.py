"""Compare the ranks of a training in a thread: after some steps, and when an epoch begins."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import queue
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..coordination import CoordinationError
from ..launch_protocol import PROBLEM, Failure, send
from ..log import get_logger

if TYPE_CHECKING:
    from ..coordination import StoreCommunicator
from .comparison import (
    HELD_FROM,
    HELD_UNTIL,
    NO_STEP_AT,
    NO_STEP_SECONDS,
    data_problem,
    describe_divergence,
    has_groups,
    has_unfinished_reduction,
    no_step_problem,
    parameter_problem,
    untrained_problem,
)
from .samples import (
    Sample,
    describe_loader,
    digests,
    is_plain,
    settings_of,
    take_sample,
    tensors_in,
)

_log = get_logger(__name__)
_CHECKED_EPOCHS = 3
_CLOSE_SECONDS = 5.0
_LEAVE_SECONDS, _LEAVE_POLL_SECONDS = 0.5, 0.002
# Ranks that average their parameters every few steps differ in between. A difference is an error
# after so many steps, or seconds.
_AVERAGING_STEPS, _AVERAGING_SECONDS = 256, 60.0
_ORDINALS = ("first", "second", "third", "fourth", "fifth")  # a script may count epochs from 0 or 1


# Watching -----------------------------------------------------------------------------------------


@dataclass
class _Epoch:
    """One pass over a loader."""

    loader: DataLoader[Any]
    description: dict[str, Any]
    batch: list[Sample] | None = None  # sample of the first batch
    count: int = 0  # tensors in the first batch
    batches: int = 0  # batches before the first step


class TrainingWatch:
    """Compares this rank's training with the other ranks' until close().

    Only the main thread trains; one thread talks to the store.
    """

    def __init__(
        self,
        communicator: StoreCommunicator | None,
        models: Collection[DistributedDataParallel] = (),
    ) -> None:
        """Start the comparison.

        communicator: None for a single rank, which is compared with no other.
        models: wrapped models; the caller adds to them.
        """
        global watch
        watch = self
        self._models = models
        # Samples of models that no stepping optimizer holds.
        self._not_held: weakref.WeakKeyDictionary[DistributedDataParallel, list[Sample]] = (
            weakref.WeakKeyDictionary()
        )
        self._last_before = 0  # parameters are compared before each step up to this one
        # (difference, deadline in time.monotonic()): an error unless the ranks average until then
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
        self.iterator: Callable[[], Any] = lambda: None  # source of the last batch
        self.on_step: list[Callable[[Optimizer], object]] = []  # called after each step
        self.steps = 0  # steps of all optimizers
        self._reported: set[str] = set()
        self.problem = ""  # the first problem that this rank has logged
        self.bad_loss = ""  # set by Metrics: "loss of step 7 is not finite on rank 1"
        self._has_trained = False
        self._thread: threading.Thread | None = None
        self._has_left = False
        # Numbers that identify optimizers and loaders: each rank uses them in the same order. The
        # dictionaries forget them at their end.
        self._numbers, self._numbers_of_loaders = itertools.count(), itertools.count()
        atexit.register(self._close_at_exit)

    def close(self, *, orderly: bool = True) -> None:
        """Stop watching. Samples that were taken are still compared. A second call does nothing.

        orderly: whether the other ranks close, too. Rank 0, which may serve the store, waits for
        them a moment: torch prints a warning for each call to a store that is gone.
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
        # An uncaught exception has set sys.last_type.
        self.close(orderly=not hasattr(sys, "last_type"))

    # The main thread

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer step begins; the ranks may have averaged before it."""
        count = self._optimizers.get(optimizer)
        if count is None or count[1] >= self._last_before or _is_capturing():
            return
        parameters = _plain_parameters(optimizer)
        samples = take_sample(parameters)
        number, step = count[0], count[1] + 1
        self._send(lambda: self._report_before(number, step, samples, len(parameters)))

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has made a step."""
        self.steps += 1
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
        if _is_capturing() or has_groups():
            return
        parameters = _plain_parameters(optimizer)
        if step in (HELD_FROM, HELD_UNTIL):
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
        if step == NO_STEP_AT:
            self._send(lambda: self._report_no_step(f"step/{number}/1", parameters))

    def _check_held(self, optimizer: Optimizer, step: int) -> None:
        """Look for a model that gets gradients, although no stepping optimizer holds it."""
        held = {
            id(parameter)
            for stepping in self._optimizers
            for group in stepping.param_groups
            for parameter in group["params"]
        }
        for ddp in list(self._models):
            own = [parameter for parameter in ddp.parameters() if is_plain(parameter)]
            if any(id(parameter) in held for parameter in own):
                return  # one model of several is trained
        for ddp in list(self._models):
            own = [p for p in ddp.parameters() if is_plain(p) and p.grad is not None]
            if not own:
                continue
            samples = take_sample(own[:1])
            before = self._not_held.pop(ddp, None)
            if step == HELD_FROM:
                self._not_held[ddp] = samples
            elif before is not None:
                self._send(functools.partial(self._report_held, ddp, optimizer, before, samples))

    def _check_epoch(self, epoch: _Epoch) -> None:
        """Compare a loader whose batches are used for training."""
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
        """Return parts of this training that a state lacks; a resume would restart them.

        state: all values in the state, at any depth.
        """
        held = {id(value) for value in state} | {
            id(getattr(value, "optim", None)) for value in state
        }
        dicts = [value for value in state if isinstance(value, dict)]  # also from state_dict()
        missing = []
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            inner = getattr(optimizer, "optim", None)  # set by ZeroRedundancyOptimizer
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
        if size and epoch.description["is_divided"] and epoch.batches == 1 and not has_groups():
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
        with contextlib.suppress(TypeError):  # not for an iterator without weak references
            self.epochs[iterator] = _Epoch(loader, describe_loader(loader))
        if loader not in self._loaders:
            self._loaders[loader] = [next(self._numbers_of_loaders), 0, None]

    def first_batch(self, iterator: Any, batch: object) -> None:
        """Sample the first batch of an iterator, and count its batches before the first step."""
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
        except CoordinationError:  # the store is gone, so the training ends
            pass

    def _next_task(self) -> Callable[[], object] | None:
        if self._suspicion is None:
            return self._tasks.get()
        try:
            return self._tasks.get(timeout=max(0.0, self._suspicion[1] - time.monotonic()))
        except queue.Empty:
            return self._end_suspicion

    def _end_suspicion(self) -> None:
        """Report a difference, unless the parameters have become equal since."""
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is not None:
            assert self._communicator is not None
            if not self._communicator.count("averaged", 0):
                self._log_once("parameters", suspicion[0])

    def _report_before(self, number: int, step: int, samples: list[Sample], count: int) -> None:
        """Compare parameters before a step. If equal after a difference, they were averaged."""
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
        """Report a difference, at once or as soon as it is known that the ranks do not average."""
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
        deadline = time.monotonic() + NO_STEP_SECONDS
        while self._communicator.count(f"{topic}/reports", 0) < self._communicator.world_size:
            if time.monotonic() > deadline:
                missing = self._communicator.missing(topic)
                self._log_once("no step", no_step_problem(missing, parameters))
                return
            time.sleep(NO_STEP_SECONDS / 20)

    def _log_once(self, subject: str, problem: str) -> None:
        if problem and subject not in self._reported:
            self._reported.add(subject)
            assert self._communicator is not None
            if self._communicator.count(f"reported/{subject}") > 1:  # another rank has reported it
                return
            self.problem = self.problem or problem
            _log.error("%s. (To switch this check off: %s=0)", problem, "DDPKIT_CHECK_TRAINING")
            send(PROBLEM, failure=Failure(problem, "training"))  # the line may scroll away


def _same_order(begun: int) -> str:
    """Return a message. begun: number of epochs before the one that repeats the order."""
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


watch: TrainingWatch | None = None  # the watch of this process, while its job is open

"""Trace training steps: the memory and the work of each operation.

The tensors are fake: they have a shape but no data, so no memory is allocated and nothing is
computed. If values decide how the steps go on, the trace ends with ValueNeeded.
"""

from __future__ import annotations

import logging
import os
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# The documented way to see each operation, although its module's name has an underscore:
# https://dev-discuss.pytorch.org/t/what-and-why-is-torch-dispatch/557
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .gpu_forms import forms_of_gpu
from .hardware import PredictionError, TooFewSteps
from .live_memory import LiveMemory, Peak
from .operations import TracedOperation, describe

_MOST_STEPS = 25  # traced at most, while the optimizer's state grows
_READS_A_VALUE = torch.ops.aten._local_scalar_dense.default


@dataclass
class Trace:
    """The work and memory of the last traced step."""

    num_parameters: int
    # Keys: (while the optimizer runs, without gradients). With DDP(gradient_as_bucket_view=True),
    # the gradients are in the buckets.
    peaks: dict[tuple[bool, bool], Peak]
    operations: list[TracedOperation]
    # (index of the operation after which a gradient is ready to be sent, its bytes)
    gradients: list[tuple[int, int]]
    bucket_bytes: int
    micro_steps: int  # backward passes per step
    ddp_options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def peak(self, *, without_gradients: bool = False) -> Peak:
        """Return the peak of the whole step."""
        peaks = (self.peaks[optimizer, without_gradients] for optimizer in (False, True))
        return max(peaks, key=lambda peak: peak.total)


class StepsTraced(SystemExit):
    """Ends a script normally, when the steps are traced or cannot be traced."""


class ValueNeeded(PredictionError):
    """Values decide how the steps go on, but fake tensors have none."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"It needs values{caller()}: measure a step, for example with ddpkit bench ddp. "
            f"({what}; a trace has shapes, but no values.)"
        )


class StepTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the storages that fake tensors use, by category, over a number of optimizer steps.

    The first step creates the state of the optimizer; the last one is reported.
    """

    def __init__(self, *, num_steps: int = 2, gpu: bool = True) -> None:
        # gpu: trace operations in their form on a GPU instead of the CPU's.
        super().__init__()  # type: ignore[no-untyped-call]
        self.sync = True  # False under DDP.no_sync()
        self.ddp_options: dict[str, Any] = {}
        self.notes: list[str] = []
        self._reason: PredictionError | None = None  # why there is no trace
        self._state_bytes, self._extra_steps = 0, _MOST_STEPS - num_steps
        self._steps_left, self._gpu = num_steps, gpu
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._finished: Trace | None = None
        self._input_size = self._largest_input = 0
        self._was_smaller = False
        # DDP's parameters; it has buckets for all of them.
        self.exchanged: list[nn.Parameter] = []
        self.passes = Counter[bool]()  # operations without and with gradients enabled
        self._made: dict[int, weakref.ref[Tensor]] = {}  # id() of a parameter -> the parameter
        self._memory = LiveMemory()
        self._module, self._in_optimizer = "", False
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._begin_step()

    # --- what is traced

    @contextmanager
    def active(self) -> Iterator[None]:
        """Trace the operations in the `with` block."""
        # With oneDNN, a fake LSTM lacks its data for the backward pass.
        set_onednn: Any = torch.backends.mkldnn.set_flags
        onednn, *_ = set_onednn(False)
        self._hooks += [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        try:
            with forms_of_gpu() if self._gpu else nullcontext(), self:
                yield
        finally:
            set_onednn(onednn)
            for hook in self._hooks:
                hook.remove()

    def track(self, model: nn.Module) -> None:
        """Count a model's parameters and buffers, and note when its gradients become ready."""
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
        for buffer in model.buffers():
            self._count(buffer, "buffers")
        self.track_parameters(model.parameters())

    def track_optimizer(self, optimizer: Optimizer) -> None:
        """Count a step of this optimizer as part of each traced step."""
        self._optimizers.add(optimizer)
        for group in optimizer.param_groups:
            self.track_parameters(group["params"])

    def track_parameters(self, parameters: Iterable[Tensor]) -> None:
        known = {id(parameter) for parameter in self._parameters}
        for parameter in parameters:
            if id(parameter) in known or not isinstance(parameter, nn.Parameter):
                continue
            self._parameters.append(parameter)
            self._count(parameter, "parameters")
            if parameter.requires_grad:
                add_hook: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(add_hook(self._gradient_ready))

    def made(self, parameter: Tensor) -> None:
        """Note a new parameter, even if no optimizer updates it."""
        self._made[id(parameter)] = weakref.ref(parameter)

    def _count_copies(self) -> None:
        known = {id(parameter) for parameter in self._parameters}
        shapes = Counter(parameter.shape for parameter in self._parameters)
        others = [
            parameter
            for key, reference in self._made.items()
            if key not in known and (parameter := reference()) is not None
        ]
        is_copy = not Counter(parameter.shape for parameter in others) - shapes
        for parameter in others:
            self._count(parameter, "EMA copy" if is_copy else "parameters")

    @property
    def is_finished(self) -> bool:
        """Whether the steps have been traced; later operations change nothing."""
        return self._finished is not None

    def end(self, reason: PredictionError) -> NoReturn:
        """End the script, which can neither catch nor report the reason. result() raises it."""
        self._reason = reason
        raise StepsTraced

    def result(self) -> Trace:
        """Return the trace. Raises PredictionError if there is none."""
        if self._reason is not None:
            raise self._reason
        if self._finished is None:
            raise TooFewSteps(
                f"The trace ended {self._steps_left} optimizer steps too early. Expected a model "
                "that is trained for at least 2 steps of each optimizer. Check the number of steps "
                "and the data."
            )
        if not self._finished.gradients:
            raise PredictionError(
                "The traced step has no backward pass that communicates. Expected loss.backward() "
                "outside of no_sync() before each optimizer step. Use --model or --parameters."
            )
        self._finished.notes = list(dict.fromkeys(self.notes))
        return self._finished

    def _finish(self) -> Trace:
        known = {key for key, _, _ in self._gradients}
        self._gradients += [
            (id(tensor), len(self._operations) - 1, tensor.nbytes)
            for tensor in self.exchanged
            if known and tensor.requires_grad and id(tensor) not in known
        ]
        last = {key: (index, size) for key, index, size in self._gradients}
        sent = [(index, size) for _, index, size in self._gradients]
        if not self.ddp_options:  # a script without DDP has no reason to call no_sync()
            sent = sorted(last.values())
        return Trace(
            sum(parameter.numel() for parameter in self._parameters),
            self._memory.peaks,
            self._operations,
            sent,
            sum(size for _, size in last.values()),
            max(self._times_ready.values(), default=0),
            self.ddp_options,
        )

    # --- events

    def _begin_step(self) -> None:
        self._memory.begin_step()
        self._operations: list[TracedOperation] = []
        self._gradients: list[tuple[int, int, int]] = []  # (id() of the parameter, index, bytes)
        self._times_ready = Counter[int]()  # id() of a parameter -> backward passes
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._module = name
            if not name:
                tensors = [item for item in tree_iter(inputs) if isinstance(item, Tensor)]
                for tensor in tensors:
                    self._count(tensor, "inputs")
                if torch.is_grad_enabled():
                    self._input_size = sum(tensor.numel() for tensor in tensors)

        return enter

    def _gradient_ready(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        parts = list(_strided(parameter.grad))
        for part in parts:
            self._count(part, "gradients")
        size = sum(part.nbytes for part in parts)
        self._times_ready[id(parameter)] += 1
        if self.sync:
            index = len(self._operations) - 1
            self._gradients.append((id(parameter), index, size))

    def _before_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._in_optimizer = True
        for group in optimizer.param_groups:
            # torch's optimizers use their multi-tensor form on GPUs, which needs more memory.
            if self._gpu and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
        args = tuple(self._outside_optimizer(argument) for argument in args)
        return args, {name: self._outside_optimizer(argument) for name, argument in options.items()}

    def _outside_optimizer(self, closure: Any) -> Any:
        """Wrap a closure, so that its passes do not count as work of the optimizer."""
        if not callable(closure):
            return closure

        def run() -> Any:
            self._in_optimizer = False
            try:
                return closure()
            finally:
                self._in_optimizer = True

        return run

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self._in_optimizer = False
        for value in _strided(list(optimizer.state.values())):
            self._count(value, "optimizer")
        self._count_copies()
        self._stepped.add(optimizer)
        if any(other not in self._stepped for other in self._optimizers):
            return
        self._steps_left -= 1
        is_smaller = self._input_size < self._largest_input
        self._largest_input = max(self._largest_input, self._input_size)
        if self._steps_left == 0 and is_smaller and not self._was_smaller:
            # The input is smaller, as in the last batch of an epoch: trace one more step.
            self._was_smaller, self._steps_left = True, 1
        state_bytes, self._state_bytes = self._state_bytes, self._memory.live["optimizer"]
        if self._steps_left == 0 and self._state_bytes > state_bytes and self._extra_steps:
            self._extra_steps, self._steps_left = self._extra_steps - 1, 1
        if self._steps_left == 0:
            if self._state_bytes > state_bytes:
                self.notes.append(
                    f"The optimizer's state still grew by {self._state_bytes - state_bytes:,} bytes"
                    " in the last traced step. The prediction excludes what follows."
                )
            self._finished = self._finish()
        self._begin_step()
        if self._finished is not None:
            raise StepsTraced

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _READS_A_VALUE and is_fake(args[0]):
            return self._value_of(args[0])
        output = self._run(function, args, kwargs)
        inputs, outputs = list(_strided((args, kwargs))), list(_strided(output))
        if not any(map(is_fake, inputs)) and not any(map(is_fake, outputs)):
            return output  # such as loading data
        self.passes[torch.is_grad_enabled()] += 1
        for tensor in inputs:
            if tensor not in self._memory:
                self._count(tensor, "inputs")
        if function._schema.is_mutable or not self._is_view(outputs):
            self._operations.append(
                describe(self._phase(), function, args, kwargs, inputs, outputs, output)
            )
        for tensor in outputs:
            if tensor not in self._memory:
                self._count(tensor, self._category(), str(function))
        return output

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation. Raises ValueNeeded if values decide its result."""
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
        )

        try:
            output = function(*args, **kwargs)
        except DataDependentOutputException:
            self.end(ValueNeeded(f"They are the result of {function}"))
        except DynamicOutputShapeException:
            self.end(ValueNeeded(f"They decide on the size of {function}"))
        if isinstance(output, Tensor) and output.is_sparse and is_fake(output):
            self.end(ValueNeeded("A sparse tensor has as many elements as its values say"))
        return output

    def _is_view(self, outputs: list[Tensor]) -> bool:
        return all(tensor in self._memory for tensor in outputs)

    def _phase(self) -> str:
        if self._in_optimizer:
            return "optimizer"
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"

    def _category(self) -> str:
        return "activations" if self._phase() == "forward" else "temporary"

    def _value_of(self, tensor: Tensor) -> float:
        """Return a value for a number that the script prints, and note it; else ValueNeeded."""
        if tensor.is_floating_point():
            self.notes.append(f"The script reads a computed value{caller()}: traced as 1.0.")
            return 1.0
        self.end(ValueNeeded(f"The model computed a {str(tensor.dtype)[6:]} that the script reads"))

    # --- bytes

    def _count(self, tensor: Tensor, category: str, operation: str = "") -> None:
        where = partial(self._where, operation)
        self._memory.count(tensor, category, in_optimizer=self._in_optimizer, where=where)

    def _where(self, operation: str) -> str:
        phase = self._phase()
        inside = f" of {self._module}" if phase == "forward" and self._module else ""
        return f"{phase}{inside}" + (f", {operation}" if operation else "")


def _strided(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree that have a storage; for sparse ones, indices and values."""
    for item in tree_iter(tree):
        if not isinstance(item, Tensor):
            continue
        if item.layout == torch.sparse_coo:
            yield from (item._indices(), item._values())
        elif item.layout == torch.strided:
            yield item


def host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_fake(tensor: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake_mode() -> Any:
    """Return a mode in which new tensors are fake; they also compute with real tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public name for it

    # FakeTensorMode logs each exception that it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def convertible_parameters() -> Iterator[None]:
    """Let Module.to(dtype) convert fake parameters. torch swaps them, which weak references bar."""
    original: Any = nn.Module._apply
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # shared ones only once
    outermost: list[nn.Module] = []

    def apply(module: Any, function: Callable[..., Any], recurse: bool = True) -> Any:
        if not any(map(is_fake, module.parameters())):
            return original(module, function, recurse)
        if outermost:
            return convert(module, function, recurse)
        outermost.append(module)
        try:
            return convert(module, function, recurse)
        finally:
            outermost.clear()
            converted.clear()  # frees the memory of the old parameters

    def convert(module: Any, function: Callable[..., Any], recurse: bool) -> Any:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, old in module._parameters.items():
            new = old if old is None or id(old) in converted else function(old)
            if old is not None and new is not old:
                converted[id(old)] = (old, nn.Parameter(new.detach(), old.requires_grad))
            if id(old) in converted:
                module._parameters[name] = converted[id(old)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def trace_steps(run: Callable[[StepTracer], None], *, gpu: bool = True) -> Trace:
    """Trace the steps that `run` executes with a tracer.

    Raises PredictionError, and any error of `run`.
    """
    tracer = StepTracer(gpu=gpu)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            run(tracer)
    except Exception:
        if not tracer.is_finished:  # a script may fail at its end
            raise
    return tracer.result()


def trace_training(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module], Tensor],
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    *,
    accumulate_steps: int = 1,
    gpu: bool = True,
) -> Trace:
    """Trace training steps of a model.

    build: makes the model; its tensors become fake. step: runs a forward pass on a batch, and
    returns the loss. gpu: trace operations in their form on a GPU instead of this CPU's.
    """

    def run(tracer: StepTracer) -> None:
        with fake_mode(), convertible_parameters():
            model = build()
        optimizer = make_optimizer(model.parameters())

        with tracer.active():
            tracer.track(model)
            try:
                while True:
                    optimizer.zero_grad()
                    for i in range(accumulate_steps):
                        tracer.sync = i == accumulate_steps - 1
                        loss: Any = step(model)
                        loss.backward()
                    optimizer.step()
            except StepsTraced:
                pass

    return trace_steps(run, gpu=gpu)


def caller() -> str:
    """Return " at FILE:LINE" of the innermost frame outside torch and this package, or ""."""
    return _place(traceback.extract_stack())


def described(error: BaseException) -> str:
    """Return type, message and place of an error in the traced program."""
    place = _place(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {str(error).rstrip('.')}{place}"


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    skipped = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
    for frame in reversed(frames):
        if not frame.filename.startswith(skipped):
            return f" at {os.path.basename(frame.filename)}:{frame.lineno}"
    return ""

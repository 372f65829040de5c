"""Trace an unmodified training script: run it with fake parameters until its second step.

Parameters become fake when they are created, and so does everything computed from them. All else,
such as loading data, runs as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...checkpoint import Checkpointer
from ...host import process
from ..bench.script_modules import name_conflict, script_modules
from .hardware import PredictionError
from .trace import (
    StepsTraced,
    StepTracer,
    Trace,
    ValueNeeded,
    caller,
    convertible_parameters,
    described,
    fake_mode,
    is_fake,
    trace_steps,
)

_DDP_OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
_RANK_VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # nothing connects to it
}


def trace_script(path: str, arguments: Sequence[str], *, timeout: float = 300) -> Trace:
    """Trace a script with its arguments, as the single rank of a CPU run.

    timeout: seconds until the script must have made its second optimizer step.
    Raises PlanError, which says what could not be traced.
    """
    if not Path(path).is_file():
        raise PredictionError(f"There is no script {path!r}. Expected the path of a Python file.")
    # Private; no other collectives of torch.distributed accept fake tensors.
    importlib.import_module("torch.distributed._tools.fake_collectives")
    output = io.StringIO()
    variables: dict[str, str] = {}

    folder = str(Path(path).resolve().parent)

    def run(tracer: StepTracer) -> None:
        output.truncate(output.seek(0))
        tracers[:] = [tracer]
        before = set(sys.modules)
        try:
            _run(path, arguments, variables, tracer, output)
        finally:  # modules that the script has imported belong to this attempt
            for name in sys.modules.keys() - before:
                file = str(getattr(sys.modules[name], "__file__", ""))
                if os.path.dirname(file) == folder:
                    del sys.modules[name]

    tracers: list[StepTracer] = []

    def evaluates() -> bool:
        return any(tracer.passes[False] > tracer.passes[True] for tracer in tracers)

    with (
        _time_limit(path, timeout, evaluates),
        script_modules(folder),
        _output_to_stderr(),
        _tf32_reset(),
    ):
        try:
            try:
                trace = trace_steps(run)
            except KeyError as error:
                if error.args[0] not in _RANK_VARIABLES:
                    raise
                # The script requires torchrun. The variables are not set at first, because without
                # them most scripts and libraries do not use torch.distributed.
                variables = _RANK_VARIABLES
                trace = trace_steps(run)
        except PredictionError as error:
            raise PredictionError(f"{path} could not be traced. {error}") from error
        except Exception as problem:
            raise PredictionError(
                f"{path} could not be traced: {described(problem)}{name_conflict(problem)}. "
                "Expected a script that trains as the only rank on a CPU, without values of its "
                "tensors. Correct it, or use --model or --parameters."
                f"{_last(output)}"
            ) from problem
    if not trace.ddp_options:
        trace.notes.append("The script does not use DDP: its default buckets are assumed.")
    trace.notes.append("The script ran as the only rank: a global batch that it divides is whole.")
    return trace


def _run(
    path: str,
    arguments: Sequence[str],
    variables: dict[str, str],
    tracer: StepTracer,
    output: io.StringIO,
) -> None:
    """Run the script with these rank variables."""
    argv, sys.argv = sys.argv, [path, *arguments]
    try:
        with _Patches(tracer).applied(variables), tracer.active(), _OnCPU(tracer):
            with contextlib.redirect_stdout(output), convertible_parameters():
                runpy.run_path(path, run_name="__main__")
    except StepsTraced:
        pass
    except SystemExit as error:
        if error.code:
            raise PredictionError(f"It ended with SystemExit: {error}.{_last(output)}") from error
    finally:
        sys.argv = argv
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


@contextlib.contextmanager
def _tf32_reset() -> Iterator[None]:
    """Restore settings that the script changes for the process. torch reads this variable, too."""
    try:
        yield
    finally:
        permitted = os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"
        torch.set_float32_matmul_precision("high" if permitted else "highest")
        torch.backends.cudnn.allow_tf32 = True


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send C++ output to standard error: gloo of torch 2.8 prints who is connected."""
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


@contextlib.contextmanager
def _time_limit(path: str, seconds: float, evaluates: Callable[[], bool]) -> Iterator[None]:
    """End this process with an error after so many seconds.

    evaluates: returns whether most operations so far were without gradients.

    A thread does it. A signal handler would wait for the end of an operation. If C++ has called
    the interrupted Python code, an exception in the handler would end the process by SIGABRT.
    """

    def stop() -> None:
        text = (
            f"ddpkit plan: error: {path} has not reached its second optimizer step within "
            f"{seconds:.0f} s. Expected steps of a torch.optim optimizer. "
        )
        if evaluates():
            text += (
                "Most of its operations were without gradients, as in an evaluation before the "
                "first step: give the script an option that evaluates less or later, or raise "
                "--trace-timeout.\n"
            )
        else:
            text += (
                "If the script only takes long to load its data, raise --trace-timeout; otherwise "
                "use --model or --parameters.\n"
            )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        process.end(1)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a thread that is still alive when Python ends can abort the process


class _OnCPU(TorchFunctionMode):
    """Put on the CPU whatever a script puts on a GPU, because a login node has no GPU."""

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.numpy and is_fake(args[0]):
            self._tracer.end(ValueNeeded("The script reads an array of them"))
        args, kwargs = tree_map(_on_cpu, (args, kwargs or {}))
        if function is torch.Tensor.to and isinstance(args[1] if args[1:] else None, int):
            args = (args[0], "cpu", *args[2:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return _on_cpu(function(*args, **kwargs))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "xpu"):
        return "cpu"
    if isinstance(value, torch.device) and (
        value.type in ("cuda", "xpu") or value.index is not None
    ):
        return torch.device("cpu")
    return value


class _Patches:
    """Replacements for functions of torch, through which the tracer follows the script."""

    def __init__(self, tracer: StepTracer) -> None:
        self._tracer, self._mode = tracer, fake_mode()

    @contextlib.contextmanager
    def applied(self, variables: dict[str, str]) -> Iterator[None]:
        """Replace the functions, and set only these rank variables."""
        tracer = self._tracer
        new_parameter = nn.Parameter.__new__
        init_optimizer = torch.optim.Optimizer.__init__
        init_autocast = torch.autocast.__init__
        to_module = nn.Module.to

        def make_parameter(
            cls: Any, data: torch.Tensor | None = None, requires_grad: bool = True
        ) -> Any:
            if data is not None and not is_fake(data):
                data = self._mode.from_tensor(data.detach())
            parameter = new_parameter(cls, data, requires_grad)
            tracer.made(parameter)
            return parameter

        copy_tensor: Any = torch.Tensor.__deepcopy__

        def copy_parameter(tensor: torch.Tensor, memo: Any) -> Any:
            copied = copy_tensor(tensor, memo)
            if is_fake(tensor) and isinstance(tensor, nn.Parameter):
                tracer.made(copied)
            return copied

        def initializer(original: Callable[..., Any]) -> Callable[..., Any]:
            def initialize(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                # The values do not matter; trunc_normal_() of torch 2.14 would read them.
                return tensor if is_fake(tensor) else original(tensor, *args, **options)

            return initialize

        def make_ddp(ddp: Any, module: nn.Module, *args: object, **options: Any) -> None:
            nn.Module.__init__(ddp)
            ddp.module, ddp.process_group = module, dist.group.WORLD
            ddp.static_graph = bool(options.get("static_graph"))
            ddp.require_backward_grad_sync = True
            tracer.ddp_options = {name: options.get(name) for name in _DDP_OPTIONS}
            tracer.exchanged += module.parameters()
            tracer.track(module)

        def move_module(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
            if args and isinstance(args[0], int):
                args = ("cpu", *args[1:])
            if "device" in options:
                options["device"] = "cpu"
            return to_module(module, *args, **options)

        def fully_shard(module: Any, **options: Any) -> Any:
            text = (
                f"It calls fully_shard(){caller()}. Memory and steps under FSDP2 are not "
                "predicted: measure a step, and print torch.cuda.max_memory_allocated()."
            )
            tracer.end(PredictionError(text))

        def make_optimizer(optimizer: Any, params: Any, *args: Any, **options: Any) -> None:
            init_optimizer(optimizer, params, *args, **options)
            tracer.track_optimizer(optimizer)

        def make_autocast(autocast: Any, device_type: str, *args: Any, **options: Any) -> None:
            if device_type != "cpu" and not args and options.get("dtype") is None:
                options["dtype"] = torch.float16
            init_autocast(autocast, "cpu", *args, **options)

        def init_process_group(*args: object, **options: object) -> None:
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            original_init(backend="gloo", store=store, rank=0, world_size=1)

        original_init: Callable[..., None] = dist.init_process_group
        replaced: list[tuple[Any, str, Any]] = [
            (nn.Parameter, "__new__", staticmethod(make_parameter)),
            (DistributedDataParallel, "__init__", make_ddp),
            (DistributedDataParallel, "forward", lambda ddp, *a, **k: ddp.module(*a, **k)),
            (DistributedDataParallel, "no_sync", lambda ddp: self._no_sync(ddp)),
            (DistributedDataParallel, "join", lambda ddp, *a, **k: contextlib.nullcontext()),
            (DistributedDataParallel, "register_comm_hook", self._ignore_hook()),
            (torch.Tensor, "__deepcopy__", copy_parameter),
            (nn.Module, "to", move_module),
            (fsdp, "fully_shard", fully_shard),
            (torch.optim.Optimizer, "__init__", make_optimizer),
            (torch.autocast, "__init__", make_autocast),
            (torch, "compile", self._not_compiled),
            (torch, "save", lambda *args, **options: None),  # the weights are not real
            (torch.distributed.checkpoint, "save", lambda *args, **options: None),
            (torch.distributed.checkpoint, "async_save", lambda *args, **options: None),
            (Checkpointer, "save", lambda *args, **options: None),
            (torch.cuda, "set_device", lambda device: None),
            (torch.multiprocessing, "spawn", lambda run, args=(), *a, **k: run(0, *args)),
            (dist, "init_process_group", init_process_group),
        ]
        replaced += [
            (nn.init, name, initializer(function))
            for name, function in vars(nn.init).items()
            if name.endswith("_") and not name.startswith("_") and inspect.isfunction(function)
        ]
        kept = [(place, name, place.__dict__[name]) for place, name, _ in replaced]
        environ = dict(os.environ)
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        for place, name, value in replaced:
            setattr(place, name, value)
        try:
            yield
        finally:
            for place, name, value in kept:
                setattr(place, name, value)
            os.environ.clear()
            os.environ.update(environ)

    @contextlib.contextmanager
    def _no_sync(self, ddp: Any) -> Iterator[None]:
        self._tracer.sync = ddp.require_backward_grad_sync = False
        try:
            yield
        finally:
            self._tracer.sync = ddp.require_backward_grad_sync = True

    def _ignore_hook(self) -> Callable[..., None]:
        def ignore(ddp: nn.Module, state: object, hook: Any) -> None:
            name = getattr(hook, "__name__", type(hook).__name__)
            self._tracer.notes.append(f"Predicted without the communication hook {name}.")

        return ignore

    def _not_compiled(self, model: Any = None, **options: object) -> Any:
        self._tracer.notes.append("Predicted without torch.compile.")
        return model if model is not None else lambda function: function


def _last(output: io.StringIO) -> str:
    lines = output.getvalue().strip().splitlines()[-3:]
    return "".join(f"\n  it printed: {line}" for line in lines)

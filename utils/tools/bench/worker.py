"""Run a training script with some settings changed, and measure its steps.

trials.py starts it for each rank, with a Trial in the environment. A step ends with the step of the
first optimizer that the script uses. Phases in which the ranks exchange gradients alternate with
phases in which each rank trains alone. The difference in time is the cost of the communication.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ..operations import AllReduce, Participants, time_iterations
from ..script_modules import name_conflict, script_modules
from . import hooks

VARIABLE = "DDPKIT_TRIAL"
HOOKS = ("bf16", "fp16")
SETTLING_STEPS = 2  # of each phase, not measured: the ranks wait for each other again
WARM_UP_STEPS = 5  # not measured; PowerSGD exchanges whole gradients in so many backward passes
# Work.wait() is timed, too.
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
    "scatter_object_list",
)


@dataclass(frozen=True)
class Settings:
    """What a trial changes in the script; the defaults change nothing."""

    ddp: dict[str, Any] = field(default_factory=dict)  # arguments of DistributedDataParallel
    hook: str = ""  # of HOOKS, or powersgd-RANK
    fused: bool = False  # the optimizer
    placeholders: dict[str, int] = field(default_factory=dict)  # {batch} in the arguments


@dataclass(frozen=True)
class Trial:
    """How to run the script. phases: "sync" or "local", each with a number of steps."""

    settings: Settings
    phases: list[tuple[str, int]]
    output: str


@dataclass
class Phase:
    """Steps of one kind that were measured."""

    seconds: float = 0.0
    data_seconds: float = 0.0
    steps: int = 0
    step_seconds: list[float] = field(default_factory=list)  # on a GPU only their sum is exact


@dataclass
class TrialReport:
    """What one rank has measured."""

    host: str = field(default_factory=socket.gethostname)
    phases: dict[str, Phase] = field(default_factory=lambda: {"sync": Phase(), "local": Phase()})
    losses: list[float] = field(default_factory=list)  # of each backward pass before "local"
    passes: int = 0  # backward passes per step
    exchanges: int = 0  # passes per step that exchange gradients
    models: int = 1  # DistributedDataParallel; the bytes and buckets are those of all
    backend: str = ""
    network: str = ""  # a warning that the network is not the expected one
    threads: int = 0
    cpus: list[int] = field(default_factory=list)
    small_seconds: float = 0.0  # of an all-reduce of one number
    whole_seconds: float = 0.0  # of an all-reduce of as many bytes as all gradients
    gradient_bytes: int = 0
    hook: str = ""
    bucket_bytes: list[int] = field(default_factory=list)
    find_unused_parameters: bool = False
    unused_bytes: int = 0

    def step(self, kind: str) -> float:
        """Return the seconds of a step."""
        return self.phases[kind].seconds / self.phases[kind].steps

    def typical_step(self, kind: str) -> float:
        """Return the seconds of a step; on the CPU the mean of the middle half of all steps."""
        times = sorted(self.phases[kind].step_seconds)
        quarter = len(times) // 4
        if self.backend != "gloo" or not quarter:
            return self.step(kind)
        return statistics.fmean(times[quarter : len(times) - quarter])

    def data(self, kind: str) -> float:
        """Return the seconds per step in which the rank waited for data."""
        return self.phases[kind].data_seconds / self.phases[kind].steps


class Recorder:
    """Change the script's settings and measure its steps."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.report = TrialReport()
        # The kind of each coming step, and whether it is measured.
        self._plan = [("warm-up", False)] * WARM_UP_STEPS
        for kind, steps in trial.phases:
            self._plan += [(kind, False)] * SETTLING_STEPS + [(kind, True)] * steps
        self._step = 0
        self._alone = self._plan[0][0] == "local"  # in this step, the ranks train alone
        self._ddps: list[DistributedDataParallel] = []
        self._optimizer: object = None
        self._step_start = self._data_seconds = self._wait_seconds = 0.0
        self._passes = self._exchanges = 0
        self._will_exchange = self._waiting = False

    def install(self) -> None:
        """Replace what the script will call."""
        settings = self._trial.settings
        _wrap_init(DistributedDataParallel, settings.ddp, self._prepare_ddp)
        if settings.fused:
            for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
                _wrap_init(kind, {"fused": True})
        if settings.hook:
            register = DistributedDataParallel.register_comm_hook
            self._register_hook = register
            setattr(DistributedDataParallel, "register_comm_hook", lambda *_: None)  # noqa: B010
        load, backward = DataLoader.__iter__, torch.Tensor.backward
        scale = torch.amp.GradScaler.scale

        def timed_load(loader: DataLoader[Any]) -> Iterator[Any]:
            batches, is_first = load(loader), True
            while True:
                start = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                seconds = time.perf_counter() - start
                if is_first:  # workers start, once an epoch, and epochs of a trial are short
                    self._wait_seconds += seconds
                else:
                    self._data_seconds += seconds
                is_first = False
                yield batch

        def recorded_backward(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            self._passes += 1
            self._exchanges += self._will_exchange
            self._will_exchange = False
            value = unscaled.pop() if unscaled else loss
            if value.numel() == 1 and not self._alone:
                losses.append(value.detach())  # it is read later: that would wait for a GPU
            backward(loss, *args, **options)  # type: ignore[no-untyped-call]

        def recorded_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            unscaled[:] = [outputs] if isinstance(outputs, torch.Tensor) else []
            return scale(scaler, outputs)

        losses: list[torch.Tensor] = []
        unscaled: list[torch.Tensor] = []  # the loss of the next backward pass
        self._losses = losses
        setattr(DataLoader, "__iter__", timed_load)  # noqa: B010
        setattr(torch.Tensor, "backward", recorded_backward)  # noqa: B010
        setattr(torch.amp.GradScaler, "scale", recorded_scale)  # noqa: B010
        setattr(torch.multiprocessing, "spawn", _refuse_spawn)  # noqa: B010
        for owner, name in [*((dist, name) for name in COLLECTIVES), (dist.Work, "wait")]:
            if hasattr(owner, name):  # the *_single collectives: torch 2.13
                setattr(owner, name, self._timed(getattr(owner, name)))
        register_optimizer_step_post_hook(self._end_step)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Time a collective of the script while the ranks train alone.

        It waits for the slowest rank: that is not computation of this one.
        """

        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            if not self._alone or self._waiting:
                return call(*args, **options)
            self._waiting = True  # all_gather_object() calls all_gather()
            _synchronize()
            start = time.perf_counter()
            try:
                result = call(*args, **options)
                _synchronize()
            finally:
                self._wait_seconds += time.perf_counter() - start
                self._waiting = False
            return result

        return timed

    def _prepare_ddp(self, ddp: DistributedDataParallel) -> None:
        self._ddps.append(ddp)
        name = self._trial.settings.hook
        if name.startswith("powersgd"):
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            state = powersgd.PowerSGDState(None, **powersgd_arguments(name))
            self._register_hook(ddp, state, hooks.in_order(powersgd.powerSGD_hook))
        elif name:
            self._register_hook(ddp, None, getattr(hooks, f"{name}_hook"))
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._alone:
            ddp.require_backward_grad_sync = False  # as in no_sync()
        elif ddp.require_backward_grad_sync:
            self._will_exchange = True  # once, in the next backward pass

    def _end_step(self, optimizer: object, args: object, options: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        kind, measured = self._plan[self._step]
        last = self._step + 1 == len(self._plan)
        if last or self._plan[self._step + 1] != (kind, measured):
            _synchronize()  # between phases only: in each step it would slow a GPU
        now = time.perf_counter()
        if measured:
            phase = self.report.phases[kind]
            seconds = now - self._step_start - self._wait_seconds
            phase.seconds += seconds
            phase.step_seconds.append(seconds)
            phase.data_seconds += self._data_seconds
            phase.steps += 1
        if kind != "local":
            self.report.passes, self.report.exchanges = self._passes, self._exchanges
        self._step_start, self._data_seconds, self._wait_seconds = now, 0.0, 0.0
        self._passes = self._exchanges = 0
        if last:
            self._alone = False
            self._write()
            if dist.is_initialized():
                dist.barrier()  # another rank may still receive from this one
            os._exit(0)  # what the script would do at its end is not measured
        self._step += 1
        self._alone = self._plan[self._step][0] == "local"
        for ddp in self._ddps:
            ddp.require_backward_grad_sync = True

    def explain_end(self) -> str:
        """Return why the script ended before all phases were measured."""
        return (
            f"the script ended after {self._step} optimizer steps. Expected {len(self._plan)} of "
            "one optimizer. Let it train longer"
        )

    def _write(self) -> None:
        report, ddps = self.report, self._ddps
        # Many scripts wrap the model only if there are several ranks.
        if not ddps and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                "the script has created no DistributedDataParallel. Expected one. Wrap the model"
            )
        report.losses = [loss.item() for loss in self._losses]
        report.backend = dist.get_backend() if dist.is_initialized() else ""
        report.threads, report.cpus = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
        report.models = len(ddps)
        for ddp in ddps:
            # Prototype interface of torch: no other one reports the buckets.
            data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
            report.bucket_bytes += [int(size) for size in sizes.split(", ") if size]
            report.hook = report.hook or data.get("comm_hook", "")
            report.gradient_bytes += sum(
                parameter.numel() * parameter.element_size()
                for parameter in ddp.parameters()
                if parameter.requires_grad
            )
            report.find_unused_parameters |= bool(ddp.find_unused_parameters)
            report.unused_bytes += data.get("unused_parameter_size", 0)
        # What scaling.find_causes() needs.
        if ddps and any(kind == "local" for kind, _ in self._trial.phases):
            device = next(ddps[0].parameters()).device
            report.small_seconds = _time_all_reduce(4, device)
            report.whole_seconds = _time_all_reduce(report.gradient_bytes, device)
        Path(self._trial.output).write_text(json.dumps(asdict(report)))


def powersgd_arguments(hook: str) -> dict[str, Any]:
    """Return the keyword arguments of PowerSGDState for a hook such as "powersgd-16"."""
    rank = int(hook.rpartition("-")[2])
    return {"matrix_approximation_rank": rank, "start_powerSGD_iter": WARM_UP_STEPS}


def _wrap_init(
    kind: type, changed: dict[str, Any], then: Callable[[Any], None] | None = None
) -> None:
    """Let a class be constructed with changed keyword arguments."""
    init = kind.__init__  # type: ignore[misc]

    def changed_init(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, **changed})
        if then is not None:
            then(self)

    kind.__init__ = changed_init  # type: ignore[misc]


def _refuse_spawn(*args: object, **options: object) -> None:
    sys.exit(
        "the script starts its own ranks with torch.multiprocessing.spawn. Expected one process "
        "per rank, which this command starts. Read RANK and WORLD_SIZE instead, as for torchrun"
    )


def _time_all_reduce(size: int, device: torch.device) -> float:
    """Return the median seconds of an all-reduce of float32 values."""
    ranks = Participants(dist.get_rank(), dist.get_world_size(), device)
    operation = AllReduce(ranks, size)
    operation.run()
    return statistics.median(time_iterations(operation.run, 5, device))


def _synchronize() -> None:
    accelerator = getattr(torch, "accelerator", torch.cuda)
    if accelerator.is_available():
        accelerator.synchronize()


def main() -> None:
    content = json.loads(os.environ[VARIABLE])
    trial = Trial(**{**content, "settings": Settings(**content["settings"])})
    script, *arguments = sys.argv[1:]
    recorder = Recorder(trial)
    recorder.install()
    sys.argv = [script, *arguments]
    with script_modules(str(Path(script).resolve().parent)):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        except ImportError as error:
            error.msg += name_conflict(error)
            raise
    sys.exit(recorder.explain_end())


if __name__ == "__main__":
    main()

"""Run a training script, and measure its steps.

trials.py starts it for each rank; the first argument is a Trial. A step ends with a step of the
first optimizer that the script uses. Phases in which the ranks exchange gradients alternate with
phases in which each rank trains alone. The difference in time is the cost of communication.
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

from ...gather import gather_json
from .collective_operations import AllReduce, Participants, time_iterations
from .script_modules import name_conflict, script_modules

RESULT = "ddpkit-trial "  # prefix of all ranks' reports, in rank 0's output
SETTLING_STEPS = 2  # unmeasured steps of each phase: ranks wait for each other again
WARM_UP_STEPS = 5  # steps that are not measured
# Functions to time, besides Work.wait().
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter"),
    "scatter_object_list",
)


@dataclass(frozen=True)
class Trial:
    """How to run the script. phases: "sync" or "local", each with a number of steps."""

    phases: list[tuple[str, int]]


@dataclass
class Phase:
    """Measured steps of one kind."""

    seconds: float = 0.0
    data_seconds: float = 0.0
    steps: int = 0


@dataclass
class TrialReport:
    """The measurements of one rank."""

    host: str = field(default_factory=socket.gethostname)
    phases: dict[str, Phase] = field(default_factory=lambda: {"sync": Phase(), "local": Phase()})
    passes: int = 0  # backward passes per step
    exchanges: int = 0  # passes per step that exchange gradients
    backend: str = ""
    whole_seconds: float = 0.0  # seconds for one all-reduce of as many bytes as all gradients have
    gradient_bytes: int = 0

    def step(self, kind: str) -> float:
        """Return the seconds of a step."""
        return self.phases[kind].seconds / self.phases[kind].steps

    def data(self, kind: str) -> float:
        """Return the seconds per step in which the rank waited for data."""
        return self.phases[kind].data_seconds / self.phases[kind].steps


class Recorder:
    """Measures the steps of the script."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.report = TrialReport()
        # For each coming step: its kind, and whether it is measured.
        self._plan = [("warm-up", False)] * WARM_UP_STEPS
        for kind, steps in trial.phases:
            self._plan += [(kind, False)] * SETTLING_STEPS + [(kind, True)] * steps
        self._step = 0
        self._alone = self._plan[0][0] == "local"  # True in a step in which the ranks train alone
        self._ddps: list[DistributedDataParallel] = []
        self._optimizer: object = None
        self._step_start = self._data_seconds = self._wait_seconds = 0.0
        self._passes = self._exchanges = 0
        self._will_exchange = self._waiting = False

    def install(self) -> None:
        """Replace the functions that the script will call."""
        init = DistributedDataParallel.__init__
        load, backward = DataLoader.__iter__, torch.Tensor.backward

        def recorded_init(ddp: DistributedDataParallel, *args: Any, **options: Any) -> None:
            init(ddp, *args, **options)
            self._ddps.append(ddp)
            ddp.register_forward_pre_hook(self._before_forward)

        def timed_load(loader: DataLoader[Any]) -> Iterator[Any]:
            batches, is_first = load(loader), True
            while True:
                start = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                seconds = time.perf_counter() - start
                if is_first:  # workers start once an epoch, and a trial's epochs are short
                    self._wait_seconds += seconds
                else:
                    self._data_seconds += seconds
                is_first = False
                yield batch

        def recorded_backward(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            self._passes += 1
            self._exchanges += self._will_exchange
            self._will_exchange = False
            backward(loss, *args, **options)  # type: ignore[no-untyped-call]

        setattr(DistributedDataParallel, "__init__", recorded_init)  # noqa: B010
        setattr(DataLoader, "__iter__", timed_load)  # noqa: B010
        setattr(torch.Tensor, "backward", recorded_backward)  # noqa: B010
        setattr(torch.multiprocessing, "spawn", _refuse_spawn)  # noqa: B010
        for owner, name in [*((dist, name) for name in COLLECTIVES), (dist.Work, "wait")]:
            if hasattr(owner, name):  # torch 2.13 and newer have the *_single collectives
                setattr(owner, name, self._timed(getattr(owner, name)))
        register_optimizer_step_post_hook(self._end_step)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Time a collective of the script while the ranks train alone.

        It waits for the slowest rank, which is not computation on this one.
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

    def _before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._alone:
            ddp.require_backward_grad_sync = False  # like no_sync()
        elif ddp.require_backward_grad_sync:
            self._will_exchange = True  # only in the next backward pass

    def _end_step(self, optimizer: object, args: object, options: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        kind, measured = self._plan[self._step]
        last = self._step + 1 == len(self._plan)
        if last or self._plan[self._step + 1] != (kind, measured):
            _synchronize()  # only between phases: in each step it would slow down a GPU
        now = time.perf_counter()
        if measured:
            phase = self.report.phases[kind]
            phase.seconds += now - self._step_start - self._wait_seconds
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
            os._exit(0)  # the end of the script is not measured
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
        report.backend = dist.get_backend() if dist.is_initialized() else ""
        parameters = [
            parameter for ddp in ddps for parameter in ddp.parameters() if parameter.requires_grad
        ]
        report.gradient_bytes = sum(
            parameter.numel() * parameter.element_size() for parameter in parameters
        )
        # Needed by scaling.find_causes().
        if ddps and any(kind == "local" for kind, _ in self._trial.phases):
            report.whole_seconds = _time_all_reduce(report.gradient_bytes, parameters[0].device)
        reports = [asdict(report)]
        if dist.is_initialized():
            reports = gather_json(asdict(report))
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"\n{RESULT}{json.dumps(reports)}", flush=True)


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
    content, script, *arguments = sys.argv[1:]
    trial = Trial(**json.loads(content))
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

"""Record the values of each step on rank 0: a log that survives restarts, and progress lines.

    metrics = stack.enter_context(Metrics(dist, "runs/a", unit="tokens", per_step=491_520))
    state = {"model": ddp, "optimizer": optimizer, "metrics": metrics}
    found = checkpoints.load_latest(state)
    for step in range(found.step + 1 if found else 1, steps + 1):
        with metrics.data_wait():
            batch = next(batches)
        ...
        metrics.log(step, loss=loss, lr=lr)
        checkpoints.save(step, state)

Put the Metrics into the state of the Checkpointer, so that a save first writes all values up to its
step. After a restart, the lines of steps that are trained again are dropped. The log
metrics.jsonl therefore has every step once, no matter how often the training is killed. ddpkit plot
draws it.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed

from ..consistency import training_watch
from ..distributed import Distributed
from ..launch_protocol import read_restart_notice
from ..log import clear_progress, get_logger, show_progress
from .run_log import FILE_NAME, RunLog
from .trackers import TensorBoard, Tracker, TrackerMissing, WeightsAndBiases

_log = get_logger(__name__)
_LONGEST_DELAY_SECONDS = 5.0  # a step is in the log within this time, even if steps are long
_EXIT_SECONDS = 5.0  # at sys.exit(), other ranks' values have this time to arrive


class Metrics:
    """Records the values of each step on rank 0. Every rank makes one and calls the same methods.

    A tensor is averaged over all ranks, without waiting for it; a number is taken from rank 0. The
    log also has columns for the step time, the wait for data, the speed, and rank 0's peak memory.
    Reading a value from a GPU waits for it, so steps are written in groups.

    folder: folder for the log and the files of TensorBoard and Weights & Biases, such as the
        folder of the checkpoints. None: progress lines only.
    unit, per_step: unit of the speed, and the number of units that all ranks process in a step.
    flops: floating-point operations per step over all ranks; adds the column tflops, per rank.
    peak_flops: of one device, per second; adds the column mfu, the share of it that is reached.
    last_step: last step of the training, for the progress lines.
    every: number of steps that are written together.
    print_every: steps between two progress lines. A terminal also shows a line in between.
    tensorboard: also write event files, in folder/tensorboard.
    wandb: also write a run of this project, in folder/wandb. It is offline unless WANDB_MODE says
        otherwise, and remains one run after restarts.

    The first value that is NaN or infinite is logged as an ERROR with its step and rank.
    Rank 0 warns if a package is missing or the log cannot be written; neither ends the training.
    """

    def __init__(
        self,
        dist: Distributed,
        folder: str | os.PathLike[str] | None = None,
        *,
        unit: str = "samples",
        per_step: float = 1,
        flops: float = 0.0,
        peak_flops: float = 0.0,
        last_step: int | None = None,
        every: int = 10,
        print_every: int = 10,
        tensorboard: bool = False,
        wandb: str | None = None,
    ) -> None:
        if every < 1 or print_every < 1:
            raise ValueError(f"every={every} print_every={print_every}; expected 1 or more")
        self._dist, self._unit, self._per_step = dist, unit, per_step
        self._flops, self._peak_flops = flops / dist.world_size, peak_flops
        self._every, self._print_every, self._last_step = every, print_every, last_step
        self._output = None
        if folder is not None and dist.is_main:
            self._output = _Output(Path(folder), dist, tensorboard, wandb)

        self._pending: list[_Record] = []  # steps with values not read yet
        self._reported_problem = False
        self._unprinted: list[_Record] = []  # steps since the last progress line
        self._step: int | None = None  # the last logged step
        self._steps, self._seconds = 0, 0.0  # steps read so far, and their seconds
        self._data_seconds = 0.0
        self._step_start = self._last_flush = time.perf_counter()

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Measure the wait for the next batch. A step begins here, and ends with log().

        An evaluation or a save after log() therefore counts for no step.
        """
        self._flush_if_due()
        self._step_start = time.perf_counter()
        yield
        self._data_seconds = time.perf_counter() - self._step_start

    def log(self, step: int, **values: torch.Tensor | float) -> None:
        """Record values of a step. A second call for the same step adds values to it.

        Steps are counted from 1. All ranks pass the same names. Raises ValueError for a step
        that is complete, because a later one was logged or it was saved.
        """
        now = time.perf_counter()
        if not (self._pending and self._pending[-1].step == step):
            if self._step is not None and step <= self._step:
                raise ValueError(
                    f"step {step} was logged after step {self._step} was complete. Expected "
                    "increasing steps. Log all values of a step before it is saved"
                )
            self._flush_if_due()  # otherwise data_wait() does this
            seconds = now - self._step_start
            self._pending.append(_Record(step, time.time(), seconds, self._data_seconds))
            self._step, self._step_start, self._data_seconds = step, now, 0.0
        self._pending[-1].add(values, self._dist.world_size, self._dist.rank)

    def flush(self, *, sync: bool = False) -> None:
        """Read the pending values, write and print them. sync: wait until they are on disk."""
        start = time.perf_counter()
        records, self._pending = self._pending, []
        for record in records:
            record.wait()
            if self._dist.is_main:
                record.read()
                if not self._reported_problem and (problem := record.problem()):
                    self._reported_problem = True
                    _log.error("%s", problem)
                    if training_watch.watch is not None:
                        training_watch.watch.bad_loss = problem.partition(". ")[0]
        self._last_flush = time.perf_counter()
        if records and self._dist.device.type != "cpu":  # a GPU has computed these steps until now
            drained = self._last_flush - start
            seconds = (sum(record.seconds for record in records) + drained) / len(records)
            for record in records:
                record.seconds = seconds
        self._steps += len(records)
        self._seconds += sum(record.seconds for record in records)

        if self._dist.is_main:
            for record in records:
                self._print(record)
            if records and self._unprinted:
                show_progress(self._describe_progress(records[-1].step))
        if self._output is not None:
            memory = _peak_memory(self._dist.device)
            for record in records:
                self._output.add(record, {**self._columns([record]), "memory_bytes": memory})
            self._output.write(sync)

    def summary(self) -> str:
        """Return a line about this process's training: units, seconds, and units per second."""
        units, seconds = self._steps * self._per_step, max(self._seconds, 1e-9)
        return (
            f"{units:,.0f} {self._unit} in {seconds:.1f} s: {units / seconds:,.0f} {self._unit}/s"
        )

    def state_dict(self) -> dict[str, int]:
        """Write all values up to this step. Checkpointer.save() calls it."""
        self.flush(sync=True)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing: the first logged step shows where the training resumes."""

    def close(self) -> None:
        """Write pending values. A second call does nothing."""
        self.flush()
        clear_progress()
        output, self._output = self._output, None
        if output is not None:
            output.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, (Exception, SystemExit)):  # the last losses may show what went wrong
            end = time.monotonic() + (_EXIT_SECONDS if isinstance(error, SystemExit) else 0)
            while (
                not all(record.is_complete() for record in self._pending) and time.monotonic() < end
            ):
                time.sleep(0.01)
            self._pending = [record for record in self._pending if record.is_complete()]
            with contextlib.suppress(Exception):
                self.close()

    def _flush_if_due(self) -> None:
        if self._pending and (
            len(self._pending) >= self._every
            or self._is_printed(self._pending[-1].step)
            or time.perf_counter() - self._last_flush > _LONGEST_DELAY_SECONDS
        ):
            self.flush()

    def _columns(self, records: Sequence[_Record]) -> dict[str, float]:
        """Return the columns computed from the step times; means over several steps."""
        seconds = max(sum(record.seconds for record in records) / len(records), 1e-9)
        columns = {
            f"{self._unit}_per_second": self._per_step / seconds,
            "step_seconds": seconds,
            "data_seconds": sum(record.data_seconds for record in records) / len(records),
        }
        if self._flops:
            columns["tflops"] = self._flops / seconds / 1e12
        if self._flops and self._peak_flops:
            columns["mfu"] = self._flops / seconds / self._peak_flops
        return columns

    def _is_printed(self, step: int) -> bool:
        return step % self._print_every == 0 or step == self._last_step

    def _print(self, record: _Record) -> None:
        self._unprinted.append(record)
        if self._is_printed(record.step):
            _log.info("%s", self._describe(self._unprinted))
            self._unprinted.clear()

    def _describe_progress(self, step: int) -> str:
        text = self._describe(self._unprinted)
        if self._last_step is None:
            return text
        seconds = int((self._last_step - step) * self._seconds / self._steps)
        return f"{text}  {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"

    def _describe(self, records: Sequence[_Record]) -> str:
        """Return a line such as "step    25/600  loss 2.3456  lr 1.00e-03  5,120 tokens/s".

        The values are means over the steps, except the learning rate: the last step's is shown.
        """
        last = "" if self._last_step is None else f"/{self._last_step}"
        words = [f"step {records[-1].step:5d}{last}"]
        for name in dict.fromkeys(name for record in records for name in record.values):
            found = [record.values[name] for record in records if name in record.values]
            mean = sum(found) / len(found)
            words.append(f"lr {found[-1]:.2e}" if name == "lr" else f"{name} {mean:.4f}")
        columns = self._columns(records)
        words.append(f"{columns[f'{self._unit}_per_second']:,.0f} {self._unit}/s")
        if "mfu" in columns:
            words.append(f"mfu {100 * columns['mfu']:.1f}%")
        return "  ".join(words)


class _Record:
    """One step; its values may still be computed."""

    def __init__(self, step: int, now: float, seconds: float, data_seconds: float) -> None:
        self.step, self.time = step, now
        self.seconds, self.data_seconds = seconds, data_seconds
        self.values: dict[str, float] = {}  # name -> value; tensors are missing until read()
        # (names, their values in one tensor, sum of that over all ranks in the background)
        self._tensors: list[tuple[list[str], torch.Tensor, torch.distributed.Work | None]] = []
        self._bad_ranks = self._sum_of_bad_ranks = 0.0

    def add(self, values: Mapping[str, torch.Tensor | float], world_size: int, rank: int) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach().float().reshape(())
                self.values[name] = float("nan")  # keeps the order of the names
            else:
                self.values[name] = float(value)
        if not tensors:
            return
        joined, work = torch.stack(list(tensors.values())), None
        if world_size > 1:
            # Add the number of ranks with a value that is not finite, and the sum of these ranks.
            bad = (~joined.isfinite()).any().float()
            joined = torch.cat([joined / world_size, torch.stack([bad, bad * rank])])
            work = torch.distributed.all_reduce(joined, async_op=True)
        self._tensors.append((list(tensors), joined, work))

    def is_complete(self) -> bool:
        """Whether all ranks have sent their values."""
        return all(work is None or work.is_completed() for _, _, work in self._tensors)

    def wait(self) -> None:
        """Wait for all ranks' values. With a GPU, only the GPU waits."""
        for _, _, work in self._tensors:
            if work is not None:
                work.wait()

    def read(self) -> None:
        """Read the values of the tensors."""
        for names, joined, work in self._tensors:
            found = joined.tolist()
            if work is not None:
                *found, self._bad_ranks, self._sum_of_bad_ranks = found
            self.values.update(zip(names, found, strict=True))
        self._tensors.clear()

    def problem(self) -> str:
        """Return which values are not finite, and on which rank; "" if all are. After read()."""
        names = [name for name, value in self.values.items() if not math.isfinite(value)]
        if not names:
            return ""
        ranks = ""
        if self._bad_ranks == 1:
            ranks = f" on rank {self._sum_of_bad_ranks:.0f}"
        elif self._bad_ranks > 1:
            ranks = f" on {self._bad_ranks:.0f} ranks"
        return (
            f"{', '.join(names)} of step {self.step} is not finite{ranks}. Lower the learning rate "
            "or clip the gradients; look at the batch of that step"
        )


class _Output:
    """The files of a run: the log, TensorBoard's and Weights & Biases'. Rank 0 only."""

    def __init__(
        self, folder: Path, dist: Distributed, tensorboard: bool, wandb: str | None
    ) -> None:
        self._folder, self._dist = folder, dist
        self._tensorboard, self._wandb = tensorboard, wandb
        self._log: RunLog | None = None
        self._trackers: list[Tracker] = []
        self._unwritten: list[_Row] = []
        self._is_failing = False  # whether the last attempt to write failed

    def add(self, record: _Record, columns: Mapping[str, float]) -> None:
        self._unwritten.append(_Row(record.step, record.time, {**record.values, **columns}))

    def write(self, sync: bool) -> None:
        """Write pending rows. The first step shows where the log continues."""
        rows = self._unwritten
        if not rows and (self._log is None or not sync):
            return
        lines: list[dict[str, object]] = [
            {"step": row.step, "time": round(row.time, 3), **row.values} for row in rows
        ]
        try:
            if self._log is None:
                self._log = self._open(rows[0])
            self._log.append(lines, sync=sync)
        except OSError as error:  # the disk may be full; the next call tries again
            if not self._is_failing:
                path = self._folder / FILE_NAME
                _log.warning("cannot write %s: %s. It is tried again after each step", path, error)
            self._is_failing = True
            return
        self._is_failing = False
        for tracker in self._trackers:
            for row in rows:
                tracker.log(row.step, row.values)
            tracker.flush()
        rows.clear()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        if self._log is not None:
            self._log.close()

    def _open(self, first: _Row) -> RunLog:
        """Open the log, to continue before the first step of this process."""
        last_step = first.step - 1
        log = RunLog(self._folder / FILE_NAME, last_step)
        if log.last_step != last_step:
            _log.warning(
                "%s ends with step %d. Expected step %d, after which this process continues. The "
                "steps in between are missing: put the Metrics into the state that is saved",
                log.path,
                log.last_step,
                last_step,
            )
        now = round(time.time(), 3)
        start: dict[str, object] = {"event": "start", "step": last_step, "run": log.run}
        start |= {"time": now, "world_size": self._dist.world_size}
        start["started_in"] = {
            name: round(seconds, 1) for name, seconds in self._dist.start_times._asdict().items()
        }
        notice = read_restart_notice()
        if notice is not None and notice.number:
            seconds = round(first.time - notice.failed_at, 1)
            start["restart"] = {
                "number": notice.number,
                "cause": notice.cause,
                "without": list(notice.without),
                "steps_lost": log.lost_steps,
                "seconds": seconds,
            }
            _log.info(
                "restart %d: the first step ended %.1f s after the failure; %d steps of the log "
                "are trained again",
                notice.number,
                seconds,
                log.lost_steps,
            )
        log.append([start])

        makers: list[Callable[[], Tracker]] = []
        if self._tensorboard:
            makers.append(lambda: TensorBoard(self._folder / "tensorboard", last_step + 1))
        if (project := self._wandb) is not None:
            makers.append(lambda: WeightsAndBiases(self._folder, project, log.run))
        for make in makers:
            try:
                self._trackers.append(make())
            except TrackerMissing as error:
                _log.warning("%s", error)
        return log


class _Row(NamedTuple):
    """A line of the log."""

    step: int
    time: float
    values: dict[str, float]


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has used, on its GPU or else in host memory."""
    if device.type == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux reports KiB
    return int(getattr(torch, device.type).max_memory_allocated(device))

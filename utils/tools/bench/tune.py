"""Implement scripts/tune.py: find the settings of DistributedDataParallel that are fastest here.

The settings are tried one after another, first those that usually gain most. Each value runs in a
short trial, together with the best settings so far. The values that gain then run as long as the
longest trial of the unchanged script, the fastest first. The first one that is still faster, at
equal loss, joins the best settings. In the end the best settings and the unchanged script take
turns; they are recommended only if they are faster each time.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ...log import get_logger
from ..arguments import ArgumentParser
from .collective_bench import write
from .trials import TrialFailed, Trials, start_trials
from .worker import Settings, powersgd_arguments

_log = get_logger(__name__)
_TURNS = 3
LEAST_GAIN = 1.02  # a setting that gains less is not recommended
HEADER = f"# {'ms/pass':>9} {'speed':>9} {'loss':>8}  settings"
EPILOG = """\
Start it with any launcher, like the training:
  torchrun --standalone --nproc-per-node 2 scripts/tune.py examples/03_text_lm.py --steps 10000
  srun -N 2 --ntasks-per-node 4 --gpus-per-node 4 python scripts/tune.py train.py
With `{accumulation}` in the script's arguments, the number of micro-batches per optimizer step is
also tuned.

Every trial starts the script anew, and the script writes its own files. Start with an empty
checkpoint folder, and switch off resuming and saving: a trial that resumes where the one before
ended has another loss.

columns:
  ms/pass  time of a backward pass, with its share of the optimizer step
  speed    compared with the unchanged script
  loss     increase against the unchanged script after equally many micro-batches
"""
Changes = Mapping[str, Any]  # fields of Settings and their new values


@dataclass
class Measured:
    """Settings, and the results of their last trial."""

    name: str
    settings: Settings
    seconds: float = 0.0  # per backward pass
    passes: int = 1  # backward passes per step
    wall_seconds: float = 0.0  # of a short trial
    losses: list[float] = field(default_factory=list)  # of the longest trial, mean over the ranks
    gain: float = 1.0  # speed against the script as it is
    worse: float = 0.0  # relative increase of the loss
    problem: str = ""

    def show(self) -> str:
        """Return one line of the table."""
        problem = f"  NOT USED: {self.problem.splitlines()[-1]}" if self.problem else ""
        return (
            f"  {self.seconds * 1e3:>9.1f} {self.gain:>7.2f} x {self.worse:>+8.1%}  "
            f"{self.name}{problem}"
        )


def candidates(cpus: int, accumulation: bool) -> dict[str, dict[str, Changes]]:
    """Return the values to try for each setting, each with a name."""
    ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    ranks = (32, 16, 64, 8)
    hooks = ["bf16", "fp16", *(f"powersgd-{rank}" for rank in ranks)]
    found: dict[str, dict[str, Changes]] = {}
    found["hook"] = {f"hook {name}": {"hook": name} for name in hooks}
    if accumulation:
        found["accumulation"] = {
            f"accumulation={n}": {"placeholders": {"accumulation": n}} for n in (2, 4)
        }
    sizes = (5, 100, 400)
    found["bucket"] = {f"bucket_cap_mb={size}": {"ddp": {"bucket_cap_mb": size}} for size in sizes}
    for name in ("gradient_as_bucket_view", "static_graph", "batched_grad_copy"):
        if name in ddp:  # batched_grad_copy: torch 2.13
            found[name] = {name: {"ddp": {name: True}}}
    found["fused"] = {"fused optimizer": {"fused": True}}
    threads = sorted({1, max(1, cpus // 2), cpus})
    found["threads"] = {f"threads={n}": {"threads": n} for n in threads}
    found["workers"] = {f"num_workers={n}": {"workers": n} for n in (1, 4)}
    found["first_bucket"] = {"first bucket of 4 MiB": {"first_bucket_mb": 4}}
    return found


def combine(best: Measured, name: str, changes: Changes) -> Measured:
    """Return the best settings with some changes."""
    merged: dict[str, Any] = {
        key: {**getattr(best.settings, key), **value} if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    names = [best.name, name] if best.settings != Settings() else [name]
    return Measured(", ".join(names), dataclasses.replace(best.settings, **merged))


class Tuner:
    """Runs trials within a time budget. Every rank decides the same from the same numbers.

    steps: of a short trial. loss_steps: of a long one; 0: as many as take a fifth of the budget,
    at most 20 times `steps`. tolerance: allowed relative increase of the loss.
    """

    def __init__(
        self,
        trials: Trials,
        ranks: int,
        *,
        steps: int,
        budget: float,
        tolerance: float,
        loss_steps: int = 0,
    ) -> None:
        self._trials, self._ranks, self._tolerance = trials, ranks, tolerance
        self._steps, self._loss_steps = steps, loss_steps
        self._budget, self._end = budget, time.monotonic() + budget
        self.default = Measured("as it is", Settings())
        self.tried: list[Measured] = []
        self.not_tried: list[str] = []  # the budget is too short
        self._first: list[float] = []  # losses of the first trial
        self._same_start = True

    def search(self, groups: Mapping[str, Mapping[str, Changes]]) -> Measured:
        """Return the best settings found; the default where nothing gains.

        Raises TrialFailed if the unchanged script fails, or continues where a trial has ended.
        """
        _log.info(HEADER)
        self._measure_default(self._steps)
        step = self.default.seconds * self.default.passes
        steps = max(4, min(self._steps, int(self._budget / 20 / step)))
        shorter = (self._steps - steps) * step
        self.default.wall_seconds = max(0.0, self.default.wall_seconds - shorter)
        self._steps = steps
        if not self._loss_steps:
            self._loss_steps = max(2 * steps, min(20 * steps, int(self._budget / 5 / step)))
        self._measure_default(self._loss_steps)
        best = self.default
        for group in groups.values():
            best = self._improve(best, group)
        return self._confirm(best)

    def needed_budget(self) -> float:
        """Return about how many seconds it takes to try all values."""
        step = self.default.seconds * self.default.passes
        trials = len(self.tried) + len(self.not_tried) + 2 * _TURNS + 3
        long_trials = 2 * self._loss_steps * step  # of the unchanged script and one value
        return 1.2 * (trials * self.default.wall_seconds + long_trials)

    def _measure_default(self, steps: int) -> None:
        if not self._measure(self.default, steps):
            raise TrialFailed(f"the unchanged script failed: {self.default.problem}")
        if math.isinf(self.default.worse):
            losses = self.default.losses
            count = next(i for i, loss in enumerate(losses, 1) if not math.isfinite(loss))
            raise TrialFailed(
                f"the loss of the unchanged script is not finite after {count} micro-batches. "
                "Expected a finite loss. Correct the script, such as its learning rate"
            )
        _log.info(self.default.show())

    def _improve(self, best: Measured, group: Mapping[str, Changes]) -> Measured:
        """Return `best` with one of the changes, or `best` if none is faster at equal loss."""
        faster = []
        turns = 1 if best is self.default else _TURNS
        for name, changes in group.items():
            if not self._has_time(best.wall_seconds, best, turns):
                _log.info(f"# not tried, --budget is too short: {name}")
                self.not_tried.append(name)
                continue
            one = combine(best, name, changes)
            self.tried.append(one)
            if self._measure(one, self._steps) and one.seconds * LEAST_GAIN < best.seconds:
                faster.append(one)
            _log.info(one.show())
        for one in sorted(faster, key=lambda one: one.seconds):
            steps = max(1, self._loss_steps * self.default.passes // one.passes)
            if not self._has_time(one.wall_seconds + steps * one.passes * one.seconds, one):
                break
            valid = self._measure(one, steps, compare_loss=True)
            _log.info(one.show())
            if valid and one.seconds * LEAST_GAIN < best.seconds:
                return one
        return best

    def _confirm(self, best: Measured) -> Measured:
        """Return `best` if it beats the default each time in turns with it, else the default."""
        if best is self.default:
            return best
        gains: list[float] = []
        while len(gains) < _TURNS and (not gains or self._has_time(0, best)):
            valid = self._measure(self.default, self._steps) and self._measure(best, self._steps)
            _log.info(best.show())
            if not valid or best.gain < 1:
                return self.default
            gains.append(best.gain)
        best.gain = statistics.median(gains)
        return best if best.gain > LEAST_GAIN else self.default

    def _has_time(self, seconds: float, best: Measured, turns: int = 1) -> bool:
        """Return whether a trial of so many seconds leaves time for turns with the default."""
        end = time.monotonic() + seconds + turns * (self.default.wall_seconds + best.wall_seconds)
        return self._trials.agree(end < self._end)

    def _measure(self, one: Measured, steps: int, *, compare_loss: bool = False) -> bool:
        """Run a trial of some optimizer steps; return whether it is valid."""
        start = time.monotonic()
        placeholders = {"accumulation": 1, **one.settings.placeholders}
        settings = dataclasses.replace(one.settings, placeholders=placeholders)
        try:
            reports = self._trials.run(self._ranks, settings, [("sync", steps)])
        except TrialFailed as error:
            one.problem = str(error)
            return False
        if steps == self._steps:
            one.wall_seconds = time.monotonic() - start
        one.passes = max(1, reports[0].passes)
        one.seconds = max(report.typical_step("sync") for report in reports) / one.passes
        losses = zip(*(report.losses for report in reports), strict=False)
        means = [statistics.fmean(loss) for loss in losses]
        self._check_start(one, means)
        if len(means) >= len(one.losses):
            one.losses = means
            one.worse = loss_increase(self.default.losses, means)
        one.gain = self.default.seconds / one.seconds
        if one is self.default:
            return True
        if math.isinf(one.worse):
            one.problem = "its loss is not finite"
        elif compare_loss and one.worse > self._tolerance:
            one.problem = f"the loss is {one.worse:.1%} higher"
        if compare_loss and not means:
            one.problem = "its loss is unknown. Expected calls of loss.backward()"
        return not one.problem

    def _check_start(self, one: Measured, losses: Sequence[float]) -> None:
        """Warn where the unchanged script starts differently from its first trial.

        Raises TrialFailed where a trial's first losses are nearer to the last losses of the
        unchanged script than to its first ones, and these differ by more than a tenth.
        """
        first = self._first = self._first or list(losses)
        last = self.default.losses
        quarter = max(1, len(first) // 4)
        if not losses or not last or one.settings.placeholders:
            return
        start, end, now = (
            statistics.fmean(some) for some in (first[:quarter], last[-quarter:], losses[:quarter])
        )
        if start - end > abs(start) / 10 and start - now > (start - end) / 2:
            raise TrialFailed(
                f"the script continues where an earlier trial ended: its first losses were "
                f"{start:.4g}, and {now:.4g} in a later trial. Expected the same start each time. "
                "Switch off resuming from a checkpoint, or set a seed"
            )
        differs = abs(losses[0] - first[0]) > 1e-3 * abs(first[0])
        if one is self.default and differs and self._same_start:
            self._same_start = False
            _log.info(
                "# Warning: the script does not start from the same state each time: its first "
                f"loss was {first[0]:.4g}, then {losses[0]:.4g}.\n# Does it resume from a "
                "checkpoint, or set no seed? Expected the same first loss: otherwise the losses "
                "of the\n# trials are hard to compare. Switch off resuming, and set a seed."
            )


def loss_increase(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the relative increase of the mean loss in the last quarter of equally many losses.

    Losses count in units of the first one: a script may divide them by the number of micro-batches.
    Infinite where one of the losses is not a number.
    """
    count = min(len(before), len(after))
    if count == 0 or not before[0] or not after[0]:
        return 0.0
    last = slice(count - max(1, count // 4), count)
    old, new = (statistics.fmean(losses[last]) / abs(losses[0]) for losses in (before, after))
    return (new - old) / max(abs(old), 1e-12) if math.isfinite(new - old) else math.inf


def code(settings: Settings) -> str:
    """Return the settings as lines for a training script: only what changes."""
    arguments = "".join(f", {name}={value!r}" for name, value in settings.ddp.items())
    lines = []
    if arguments:
        lines = [f"ddp = DistributedDataParallel(...{arguments})  # add to your arguments"]
    if settings.first_bucket_mb:
        size = int(settings.first_bucket_mb * (1 << 20))
        lines = [
            "# before DistributedDataParallel:",
            f"torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = {size}",
            *lines,
        ]
    package = __name__.split(".")[0]
    hooks = f"{package}.tools.bench.hooks"
    folder = Path(__file__).resolve().parents[3]
    importable = f"import {hooks}  # {package} must be importable: PYTHONPATH={folder}"
    if settings.hook.startswith("powersgd"):
        values = powersgd_arguments(settings.hook)
        arguments = "".join(f", {name}={value}" for name, value in values.items())
        lines = [
            "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd",
            importable,
            *lines,
            "# ddp is your DistributedDataParallel:",
            f"state = powersgd.PowerSGDState(None{arguments})",
            f"ddp.register_comm_hook(state, {hooks}.in_order(powersgd.powerSGD_hook))",
        ]
    elif settings.hook:
        lines = [
            importable,
            *lines,
            "# ddp is your DistributedDataParallel:",
            f"ddp.register_comm_hook(None, {hooks}.{settings.hook}_hook)",
        ]
    if settings.fused:
        lines.append("optimizer = torch.optim.AdamW(..., fused=True)  # or your optimizer")
    if settings.workers is not None:
        lines.append(f"loader = DataLoader(..., num_workers={settings.workers})")
    if settings.threads is not None:
        lines.append(f"# before the start: export OMP_NUM_THREADS={settings.threads}")
    for name, value in settings.placeholders.items():
        lines.append(f"# in the script's arguments: {name} = {value}")
    return "\n".join(lines)


def conclusion(tuner: Tuner, best: Measured, tolerance: float) -> str:
    """Return the result as text."""
    missing, all_values = len(tuner.not_tried), len(tuner.tried) + len(tuner.not_tried)
    more = f"--budget to about {math.ceil(tuner.needed_budget() / 10) * 10} s"
    skipped = f" {missing} of {all_values} values were not tried: raise {more}." if missing else ""
    if best is tuner.default:
        found = f"No setting gains more than {LEAST_GAIN - 1:.0%} here. Keep the script as it is."
        return f"{found}{skipped}"
    return (
        f"{best.name}: {best.gain:.2f} times as fast, loss {best.worse:+.2%} after "
        f"{len(best.losses)} micro-batches (allowed: +{tolerance:.0%}).{skipped}\n"
        f"{code(best.settings)}"
    )


_SETTINGS = list(candidates(1, True))


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _SETTINGS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a setting; expected some of {', '.join(_SETTINGS)}"
            )
    return names


class _Module(argparse.Action):
    """Refuse -m MODULE."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        path = f"{values.replace('.', '/')}.py"
        parser.error(f"found -m {values}. Expected the path of a script, such as {path}")


def main(words: Sequence[str] | None = None) -> int:
    """Tune a script and return the exit status. words: the arguments; None: sys.argv."""
    parser = ArgumentParser(
        prog="tune.py",
        description="Find the settings of DistributedDataParallel that are fastest here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", type=float, default=600, metavar="SECONDS", help="for all trials; default: 600")
    add("--steps", type=int, default=20, metavar="N", help="steps of the first trials; default: 20")
    add("--warm-up", type=int, default=5, metavar="N", help="steps not measured; default: 5")
    add("--tolerance", type=float, default=0.02, help="allowed increase of the loss; default: 0.02")
    add(
        "--loss-steps",
        type=int,
        default=0,
        metavar="N",
        help="steps of the trials that compare the loss; default: as a fifth of the budget allows",
    )
    add("--trial-timeout", type=float, default=600, metavar="SECONDS", help="default: 600")
    add("--only", type=_names, metavar="SETTING,...", help=f"some of {', '.join(_SETTINGS)}")
    add("--output", type=Path, metavar="FILE", help="write the trials and the result as JSON")
    add("-m", action=_Module, help=argparse.SUPPRESS)
    add("script", nargs=argparse.REMAINDER, help="the training script and its arguments")
    args = parser.parse_args(words)
    if not args.script:
        parser.error("the training script is missing. Expected: tune.py [options] SCRIPT ...")
    groups = candidates(len(os.sched_getaffinity(0)), "{accumulation}" in " ".join(args.script))
    groups = {name: group for name, group in groups.items() if name in (args.only or _SETTINGS)}
    if not groups:
        parser.error(
            f"--only {','.join(args.only)} leaves nothing to try. Expected a newer torch, or "
            "{accumulation} in the script's arguments"
        )

    with start_trials(args.script, args.warm_up, args.trial_timeout) as (job, trials):
        tuner = Tuner(
            trials,
            job.world_size,
            steps=args.steps,
            budget=args.budget,
            tolerance=args.tolerance,
            loss_steps=args.loss_steps,
        )
        try:
            best = tuner.search(groups)
        except TrialFailed as error:
            if job.is_main:
                _log.error("%s", error)
            return 1
        if not tuner.tried:
            if job.is_main:
                _log.error(
                    "Nothing was tried: the unchanged script takes up all of --budget %.0f. "
                    "Raise it to about %d s",
                    args.budget,
                    math.ceil(tuner.needed_budget() / 10) * 10,
                )
            return 1
        _log.info(f"\n{conclusion(tuner, best, args.tolerance)}")
        if args.output and job.is_main:
            content = {
                "default": asdict(tuner.default),
                "tried": [asdict(one) for one in tuner.tried],
                "best": asdict(best),
            }
            write(args.output, json.dumps(content, indent=1) + "\n")
    return 0

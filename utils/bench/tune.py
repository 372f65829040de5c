"""Implement scripts/tune.py: find the settings of DistributedDataParallel that are fastest here.

Each setting is tried alone. Faster settings are combined. The combinations run in rounds, each
longer than the one before, and after each round the slower half drops out (successive halving). The
last one and the unchanged script then take three turns; it is recommended only if it is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from ..argument_parser import ArgumentParser
from ..distributed import setup_distributed
from ..log import get_logger
from .collectives import write
from .trials import TrialFailed, Trials
from .worker import Settings

_log = get_logger(__name__)
_TURNS = 3
LEAST_GAIN = 1.02  # a setting that gains less is not recommended
EPILOG = """\
Start it with any launcher, like the training:
  torchrun --standalone --nproc-per-node 2 scripts/tune.py examples/03_text_lm.py --steps 1000
  srun -N 2 --ntasks-per-node 4 --gpus-per-node 4 python scripts/tune.py train.py
With `{accumulation}` in the script's arguments, the number of micro-batches per optimizer step is
also tuned; the losses are then compared after equal numbers of micro-batches.
"""


@dataclass
class Measured:
    """Settings, and the results of their longest trial."""

    name: str
    settings: Settings
    seconds: float = 0.0  # per backward pass
    losses: list[float] = field(default_factory=list)  # mean over the ranks
    gain: float = 0.0  # speed against the script as it is
    worse: float = 0.0  # relative increase of the loss
    problem: str = ""


def candidates(cpus: int, accumulation: bool) -> dict[str, list[Measured]]:
    """Return the values to try for each setting."""
    ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    hooks = ("fp16", "bf16", "powersgd-4", "powersgd-16", "powersgd-64")
    found = {"hook": [Measured(f"hook {name}", Settings(hook=name)) for name in hooks]}
    if accumulation:
        found["accumulation"] = [
            Measured(f"accumulation={n}", Settings(placeholders={"accumulation": n}))
            for n in (2, 4)
        ]
    threads = sorted({1, max(1, cpus // 2), cpus})
    found["threads"] = [Measured(f"threads={n}", Settings(threads=n)) for n in threads]
    found["bucket"] = [_ddp(f"bucket_cap_mb={size}", bucket_cap_mb=size) for size in (5, 100, 400)]
    for name in ("gradient_as_bucket_view", "static_graph", "batched_grad_copy"):
        if name in ddp:  # batched_grad_copy: torch 2.13
            found[name] = [_ddp(name, **{name: True})]
    found["fused"] = [Measured("fused optimizer", Settings(fused=True))]
    found["workers"] = [Measured(f"num_workers={n}", Settings(workers=n)) for n in (1, 4)]
    found["first_bucket"] = [Measured("first bucket of 4 MiB", Settings(first_bucket_mb=4))]
    return found


def _ddp(text: str, **arguments: object) -> Measured:
    return Measured(text, Settings(ddp=arguments))


def combine(parts: Sequence[Measured]) -> Measured:
    """Return one candidate with the settings of all parts."""
    settings = Settings()
    for part in parts:
        changes = {
            one.name: getattr(part.settings, one.name)
            for one in dataclasses.fields(Settings)
            if getattr(part.settings, one.name) != getattr(Settings(), one.name)
        }
        for name in ("ddp", "placeholders"):
            if name in changes:
                changes[name] = {**getattr(settings, name), **changes[name]}
        settings = dataclasses.replace(settings, **changes)
    return Measured(", ".join(part.name for part in parts), settings)


class Tuner:
    """Runs trials within a time budget. Every rank decides the same from the same numbers."""

    def __init__(
        self, trials: Trials, ranks: int, steps: int, budget: float, tolerance: float
    ) -> None:
        self._trials, self._ranks, self._steps = trials, ranks, steps
        self._end, self._tolerance = time.monotonic() + budget, tolerance
        self._longest = 0.0
        self.default = Measured("as it is", Settings())
        self.alone: list[Measured] = []

    def out_of_time(self, trials: int = 3) -> bool:
        """Return whether so many trials, one and the last turn, would exceed the budget."""
        return self._trials.agree(time.monotonic() + trials * self._longest > self._end)

    def measure(self, one: Measured, steps: int) -> bool:
        """Run a trial; return whether it is valid."""
        start = time.monotonic()
        placeholders = {"accumulation": 1, **one.settings.placeholders}
        settings = dataclasses.replace(one.settings, placeholders=placeholders)
        try:
            reports = self._trials.run(self._ranks, settings, [("sync", steps)])
        except TrialFailed as error:
            one.problem = str(error)
            return False
        finally:
            self._longest = max(self._longest, time.monotonic() - start)
        slowest = max(report.typical_step("sync") for report in reports)
        one.seconds = slowest / max(1, reports[0].passes)
        losses = zip(*(report.losses for report in reports), strict=False)
        one.losses = [statistics.fmean(loss) for loss in losses]
        if one is not self.default:
            one.gain = self.default.seconds / one.seconds
            one.worse = loss_increase(self.default.losses, one.losses)
            if one.worse > self._tolerance:
                one.problem = f"the loss is {one.worse:.1%} higher"
        return not one.problem

    def search(self, groups: dict[str, list[Measured]]) -> Measured:
        """Return the best settings found; the default where nothing gains."""
        if not self.measure(self.default, self._steps):
            raise TrialFailed(self.default.problem)
        self._report(self.default)
        best: list[Measured] = []
        for group in groups.values():
            valid = []
            for one in group:
                if self.out_of_time():
                    break
                self.alone.append(one)
                if self.measure(one, self._steps):
                    valid.append(one)
                self._report(one)
            gainers = [one for one in valid if one.gain > LEAST_GAIN]
            best += sorted(gainers, key=lambda one: -one.gain)[:1]
        return self._halve(combinations(best))

    def _halve(self, remaining: list[Measured]) -> Measured:
        steps = self._steps
        while len(remaining) > 1 and not self.out_of_time():
            steps *= 2
            self.measure(self.default, steps)  # again: other jobs come and go
            valid = []
            for one in remaining:
                if not self.out_of_time() and self.measure(one, steps):
                    valid.append(one)
                    self._report(one)
            valid.sort(key=lambda one: one.seconds)
            remaining = valid[: (len(remaining) + 1) // 2] or remaining[:1]
        return self._confirm(remaining[0], steps) if remaining else self.default

    def _confirm(self, one: Measured, steps: int) -> Measured:
        """Return the candidate if it beats the default in turns with it, else the default."""
        gains = []
        for turn in range(_TURNS):
            if turn and self.out_of_time(2):
                break
            if not (self.measure(self.default, steps) and self.measure(one, steps)):
                return self.default
            self._report(one)
            gains.append(one.gain)
        one.gain = statistics.median(gains)
        return one if one.gain > LEAST_GAIN else self.default

    def _report(self, one: Measured) -> None:
        change = f"{one.gain:>6.2f} x" if one.gain else f"{'1':>6} x"
        losses = f"{one.losses[0]:.4g} -> {one.losses[-1]:.4g}, " if one.losses else ""
        loss = f"loss {losses}{one.worse:+.1%}"
        problem = f"  NOT USED: {one.problem.splitlines()[-1]}" if one.problem else ""
        _log.info(f"  {one.name:<60} {one.seconds * 1e3:>9.1f} ms {change}  {loss}{problem}")


def combinations(best: Sequence[Measured]) -> list[Measured]:
    """Return what to try together: all that gain, all but one of them, and each alone."""
    ordered = sorted(best, key=lambda one: -one.gain)[:5]
    sizes = {len(ordered), len(ordered) - 1, 1} - {0, -1}
    chosen = [
        parts
        for size in sorted(sizes, reverse=True)
        for parts in itertools.combinations(ordered, size)
    ]
    return [combine(parts) for parts in chosen]


def loss_increase(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the relative increase of the mean loss in the last quarter of equally many losses.

    Infinite where a loss is not a number.
    """
    count = min(len(before), len(after))
    if count == 0:
        return 0.0
    last = slice(count - max(1, count // 4), count)
    old, new = statistics.fmean(before[last]), statistics.fmean(after[last])
    return (new - old) / max(abs(old), 1e-12) if new == new else float("inf")


def code(settings: Settings) -> str:
    """Return the settings as lines for a training script."""
    arguments = "".join(f", {name}={value!r}" for name, value in settings.ddp.items())
    lines = [f"ddp = DistributedDataParallel(model, device_ids=dist.device_ids{arguments})"]
    if settings.first_bucket_mb:
        size = int(settings.first_bucket_mb * (1 << 20))
        lines.insert(0, f"torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = {size}")
    if settings.hook.startswith("powersgd"):
        rank = settings.hook.rpartition("-")[2]
        lines += [
            f"state = PowerSGDState(None, matrix_approximation_rank={rank}, start_powerSGD_iter=2)",
            "ddp.register_comm_hook(state, utils.hooks.in_order(powerSGD_hook))",
        ]
    elif settings.hook:
        lines.append(f"ddp.register_comm_hook(None, utils.hooks.{settings.hook}_hook)")
    if settings.fused:
        lines.append("optimizer = torch.optim.AdamW(..., fused=True)  # or your optimizer")
    if settings.workers is not None:
        lines.append(f"loader = DataLoader(..., num_workers={settings.workers})")
    if settings.threads is not None:
        lines.append(f"# before the start: export OMP_NUM_THREADS={settings.threads}")
    for name, value in settings.placeholders.items():
        lines.append(f"# in the script's arguments: {name} = {value}")
    return "\n".join(lines)


_SETTINGS = list(candidates(1, True))


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _SETTINGS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a setting; expected some of {', '.join(_SETTINGS)}"
            )
    return names


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
    add("--trial-timeout", type=float, default=600, metavar="SECONDS", help="default: 600")
    add("--only", type=_names, metavar="SETTING,...", help=f"some of {', '.join(_SETTINGS)}")
    add("--output", type=Path, metavar="FILE", help="write the trials and the result as JSON")
    add("script", nargs=argparse.REMAINDER, help="the training script and its arguments")
    args = parser.parse_args(words)
    if not args.script:
        parser.error("the training script is missing. Expected: tune.py [options] SCRIPT ...")

    threads = os.environ.get("OMP_NUM_THREADS")
    with setup_distributed("gloo", bind=False) as job:  # gloo: the GPUs stay free for the trials
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]  # the script chooses as it would without tune.py
        trials = Trials(job, args.script, warm_up=args.warm_up, timeout=args.trial_timeout)
        cpus = len(os.sched_getaffinity(0))
        groups = candidates(cpus, "{accumulation}" in " ".join(args.script))
        groups = {name: group for name, group in groups.items() if name in (args.only or _SETTINGS)}
        tuner = Tuner(trials, job.world_size, args.steps, args.budget, args.tolerance)
        try:
            best = tuner.search(groups)
        except TrialFailed as error:
            if job.is_main:
                _log.error("the unchanged script failed: %s", error)
            return 1
        gain = best.gain or 1.0
        _log.info(
            f"\n{best.name}: {gain:.2f} times as fast, loss {best.worse:+.2%} (allowed: "
            f"+{args.tolerance:.0%}).\n{code(best.settings)}"
        )
        if args.output and job.is_main:
            content = {
                "default": asdict(tuner.default),
                "alone": [asdict(one) for one in tuner.alone],
                "best": asdict(best),
            }
            write(args.output, json.dumps(content, indent=1) + "\n")
    return 0

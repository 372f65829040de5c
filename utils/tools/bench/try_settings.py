"""Try settings of DistributedDataParallel on a script: each against none, in turns."""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from ...log import get_logger
from .trials import TrialFailed, Trials
from .worker import HOOKS, Settings, powersgd_arguments

_log = get_logger(__name__)
_ROUNDS = 4
DEFAULT = ("bucket_cap_mb=100", "hook=bf16", "static_graph", "gradient_as_bucket_view", "fused")
_FLAGS = ("static_graph", "gradient_as_bucket_view", "batched_grad_copy")
HEADER = f"# {'ms/step':>9} {'speed':>9} {'loss':>9}  setting"


@dataclass
class Tried:
    """A setting, and what each round has measured: seconds per step, and the loss at the end."""

    name: str
    settings: Settings
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def spread(self) -> float:
        """How far the rounds differ, as a share of their median."""
        return (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds)


def parse(text: str) -> Settings:
    """Return the settings of NAME or NAME=VALUE. Raises ArgumentTypeError."""
    name, _, value = text.partition("=")
    if name == "bucket_cap_mb" and value.isdecimal() and int(value) > 0:
        return Settings(ddp={name: int(value)})
    is_powersgd = value.startswith("powersgd-") and value.removeprefix("powersgd-").isdecimal()
    if name == "hook" and (value in HOOKS or is_powersgd):
        return Settings(hook=value)
    if text == "fused":
        return Settings(fused=True)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if text in _FLAGS and text in known:  # batched_grad_copy: torch 2.13
        return Settings(ddp={text: True})
    raise argparse.ArgumentTypeError(
        f"{text!r} is no setting of this torch. Expected bucket_cap_mb=N, hook=bf16, hook=fp16, "
        f"hook=powersgd-RANK, fused or one of {', '.join(_FLAGS)}"
    )


def compare(
    trials: Trials, ranks: int, names: Sequence[str], *, steps: int, batch: int
) -> list[Tried]:
    """Run the script without a setting and with each, in turns; return all, none first.

    Raises TrialFailed where the unchanged script fails.
    """
    none = Tried("none", Settings())
    tried = [none, *(Tried(name, parse(name)) for name in names)]
    for turn in range(1, _ROUNDS + 1):
        for one in tried:
            if one.problem:
                continue
            settings = replace(one.settings, placeholders={"batch": batch})
            try:
                reports = trials.run(ranks, settings, [("sync", steps)])
            except TrialFailed as error:
                if one is none:
                    raise TrialFailed(f"the unchanged script failed: {error}") from None
                one.problem = str(error)
                continue
            one.seconds.append(max(report.typical_step("sync") for report in reports))
            _log.info(
                f"# turn {turn} of {_ROUNDS}: {one.seconds[-1] * 1e3:.1f} ms/step, {one.name}"
            )
            means = [
                statistics.fmean(losses)
                for losses in zip(*(report.losses for report in reports), strict=False)
            ]
            last = means[-max(1, len(means) // 4) :]
            one.losses.append(statistics.fmean(last) if last else float("nan"))
    return tried


def describe(tried: Sequence[Tried]) -> str:
    """Return the table, and for each setting a conclusion with the code to add."""
    none, *others = tried
    lines, ends = [HEADER, _row(none, none)], []
    for one in others:
        if one.problem:
            lines.append(f"  {'':>9} {'':>9} {'':>9}  {one.name}")
            ends.append(f"{one.name} failed: {one.problem.splitlines()[-1]}")
            continue
        lines.append(_row(one, none))
        ends += [_conclude(one, none), *(f"    {line}" for line in code(one.settings))]
    return "\n".join([*lines, "", *ends])


def _row(one: Tried, none: Tried) -> str:
    seconds, loss = statistics.median(one.seconds), statistics.median(one.losses)
    speed = f"{statistics.median(none.seconds) / seconds:.2f} x"
    return f"  {seconds * 1e3:>9.1f} {speed:>9} {loss:>9.4g}  {one.name}"


def _conclude(one: Tried, none: Tried) -> str:
    gain = statistics.median(none.seconds) / statistics.median(one.seconds)
    noise = max(one.spread, none.spread)
    speed = f"{gain:.2f} times as fast"
    if abs(gain - 1) <= noise:
        return (
            f"{one.name}: no conclusion: {speed}, while the rounds of one setting differ by "
            f"{noise:.0%}. Use more --steps, or a host without other programs"
        )
    losses = [f"{statistics.median(side.losses):.4g}" for side in (one, none)]
    change = "faster" if gain > 1 else "slower"
    return (
        f"{one.name}: {change}, {speed} (rounds differ by {noise:.0%}); loss {losses[0]}, "
        f"without it {losses[1]}"
    )


def code(settings: Settings) -> list[str]:
    """Return the settings as lines for a training script."""
    lines = []
    if arguments := "".join(f", {name}={value!r}" for name, value in settings.ddp.items()):
        lines.append(f"ddp = DistributedDataParallel(...{arguments})  # add to your arguments")
    if settings.fused:
        lines.append("optimizer = torch.optim.AdamW(..., fused=True)  # or your optimizer")
    if settings.hook:
        package, folder = __name__.split(".")[0], Path(__file__).resolve().parents[3]
        hooks = f"{package}.tools.bench.hooks"
        lines.append(f"import {hooks}  # {package} must be importable: PYTHONPATH={folder}")
        call = f"ddp.register_comm_hook(None, {hooks}.{settings.hook}_hook)"
        if settings.hook.startswith("powersgd"):
            values = powersgd_arguments(settings.hook)
            arguments = "".join(f", {name}={value}" for name, value in values.items())
            module = "torch.distributed.algorithms.ddp_comm_hooks"
            lines += [
                f"from {module} import powerSGD_hook as powersgd",
                f"state = powersgd.PowerSGDState(None{arguments})",
            ]
            call = f"ddp.register_comm_hook(state, {hooks}.in_order(powersgd.powerSGD_hook))"
        lines.append(f"{call}  # ddp is your DistributedDataParallel")
    return lines

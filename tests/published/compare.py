"""Hold predictions against the published measurements: times on one GPU, and efficiency on more."""
from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

from utils.tools.plan import traced
from utils.tools.plan.hardware import LAUNCH_SECONDS, Accelerator, Attainable, Hardware, Link, Network
from utils.tools.plan.step_model import Step, workload
from utils.tools.plan.trace import Trace

from .cases import Measurement, measurements, restored, stored_traces

HARDWARE = Hardware()


@dataclass(frozen=True)
class Comparison:
    row: Measurement
    predicted: float  # seconds of an optimizer step
    factor: float  # by which the prediction may be wrong, as it is printed
    cause: str  # of a wide range, or the kind of operations

    @property
    def ratio(self) -> float:
        return self.predicted / self.row.seconds

    @property
    def error(self) -> float:
        """Return the factor between both, at least 1."""
        return max(self.ratio, 1 / self.ratio)

    @property
    def inside(self) -> bool:
        return self.error <= self.factor


@dataclass(frozen=True)
class Scaled:
    """Published and predicted efficiency on several GPUs; the time on one is the published one."""

    row: Measurement
    efficiency: float
    step: Step

    @property
    def inside(self) -> bool:
        # Published numbers have three digits.
        return self.step.low_efficiency - 5e-4 <= self.efficiency <= self.step.efficiency + 5e-4


@cache
def _traces() -> dict[str, Trace]:
    return {program: restored(entry) for program, entry in stored_traces().items()}


def complete(row: Measurement) -> bool:
    """Whether a time is to be compared: complete, and neither compiled nor scripted with fused kernels."""
    return row.trust in "AB" and not row.compiled and row.program in _traces()


def is_fitted(row: Measurement) -> bool:
    """Whether the constants are fitted to a row: about half, of two sources and four GPUs."""
    return row.gpus == 1 and bool(re.match(r"lam-\w+-\w+-(v100|a100s80|h100|4090)-|dle-(rn|ser|eff)\w+-a100-", row.id))


def times(rows: Iterable[Measurement] | None = None, gpu: Callable[[str], Accelerator] = HARDWARE.accelerator,
          ) -> list[Comparison]:
    """Compare the times on one GPU without DDP."""
    found = []
    for row in measurements() if rows is None else rows:
        if row.gpus == 1 and row.parallel == "none" and complete(row):
            trace, accelerator = _traces()[row.program], gpu(row.gpu)
            step = traced.computation(trace, accelerator, LAUNCH_SECONDS)
            uncertainty = traced.uncertainty(trace, accelerator, LAUNCH_SECONDS)
            predicted = row.accumulate * step.backward_end + step.optimizer
            found.append(Comparison(row, predicted, uncertainty.factor, uncertainty.kind))
    return found


def _series_of(row: Measurement) -> str:
    return re.sub(r"-x\d+(-ddp)?$", "", row.id).replace("bucket1-", "")


def efficiencies() -> list[Scaled]:
    """Compare the efficiency of each row on several GPUs whose source has a row on one."""
    rows = [row for row in measurements() if complete(row)]
    alone = {_series_of(row): row for row in rows if row.gpus == 1 and row.parallel == "none"}
    found = []
    for row in rows:
        base = alone.get(_series_of(row))
        if row.gpus == 1 or base is None:
            continue
        node = HARDWARE.accelerator(row.gpu).node
        network = Network(_link(row.inside or node.inside), _link(row.between or node.between), node.gpus_per_node)
        trace = _traces()[row.program]
        micro_step = base.seconds / base.accumulate
        shape = traced.scaled_to(traced.computation(trace, HARDWARE.accelerator(row.gpu)), micro_step, 1)
        work = workload(shape, 1 if "bucket1" in row.id else None).accumulated(row.accumulate)
        found.append(Scaled(row, micro_step * row.accumulate / row.seconds, work.step(network, row.gpus)))
    return found


def _link(text: str) -> Link:
    try:
        return Link(float(text), 5e-6)
    except ValueError:
        return HARDWARE.link(text)


def summary(errors: Sequence[float]) -> str:
    ranked = sorted(errors)
    tenth = ranked[math.ceil(0.9 * len(ranked)) - 1]
    return f"median {statistics.median(ranked):.2f}, 9 of 10 within {tenth:.2f}, largest {ranked[-1]:.2f}"


# --- the fit

def fit(rounds: int = 12) -> Attainable:
    """Return the constants with the smallest errors of the fitted rows: one after another, in shrinking steps."""
    rows = [row for row in measurements() if is_fitted(row) and complete(row)]
    best = HARDWARE.accelerator("h100").attainable
    steps = dict.fromkeys(asdict(best), 0.2)
    loss = _loss(best, rows)
    for _ in range(rounds):
        for name, step in steps.items():
            for factor in (math.exp(step), math.exp(-step)):
                changed = Attainable(**{**asdict(best), name: _limited(name, asdict(best)[name] * factor)})
                if (found := _loss(changed, rows)) < loss:
                    best, loss = changed, found
                    break
            else:
                steps[name] *= 0.6
    return best


def _limited(name: str, value: float) -> float:
    """Keep a share of bandwidth below what memory attains."""
    return min(value, 0.95) if name.startswith("bandwidth") else value


def _loss(constants: Attainable, rows: Sequence[Measurement]) -> float:
    """Return the mean error, whose logarithm counts by its square up to 10 %."""
    def accelerator(name: str) -> Accelerator:
        known = HARDWARE.accelerator(name)
        return Accelerator(**{**{key: getattr(known, key) for key in known.__dataclass_fields__},
                              "attainable": constants})
    errors = (math.log(comparison.error) for comparison in times(rows, accelerator))
    return statistics.fmean(5 * error**2 if error < 0.1 else error - 0.05 for error in errors)

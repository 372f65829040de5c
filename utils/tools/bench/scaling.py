"""Measure how a training scales from one rank to all, where the time goes, and why."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .trials import Trials
from .worker import TrialReport

LOW = 0.9  # causes are named below this efficiency
HIGH = 1.25  # above this efficiency, the measurement on one rank was disturbed
_LEAST = 0.05  # share of a step; a cheaper cause is not named
_MIB = 1 << 20

HEADER = f"""\
# {"scaling":>7} {"ranks":>6} {"hosts":>6} {"step":>9} {"efficiency":>10} \
{"compute":>9} {"exposed":>9} {"data":>9} {"uneven":>9}
# {"":>7} {"":>6} {"":>6} {"(ms)":>9} {"(%)":>10} {"(ms)":>9} {"(ms)":>9} {"(ms)":>9} {"(ms)":>9}"""
COLUMNS = """\
columns, each per optimizer step:
  efficiency  weak: step on 1 rank / step, for equally many backward passes
              strong: step on 1 rank / (ranks * step)
  compute     mean over the ranks, each training alone, without its wait for data and in
              collectives that the script calls
  exposed     communication that computation does not hide: step - slowest rank alone
  data        wait for the DataLoader, mean over the ranks
  uneven      slowest rank alone - mean of the ranks
"""


@dataclass(frozen=True)
class MeasuredPoint:
    """The measurement on one number of ranks. All times in seconds per optimizer step."""

    kind: str  # "weak" or "strong"
    ranks: int
    hosts: int
    step: float
    efficiency: float
    compute: float
    exposed: float
    data: float
    uneven: float
    reports: list[TrialReport]

    def show(self) -> str:
        """Return one line of the table."""
        times = [self.compute, self.exposed, self.data, self.uneven]
        cells = " ".join(f"{seconds * 1e3:>9.1f}" for seconds in times)
        return (
            f"  {self.kind:>7} {self.ranks:>6} {self.hosts:>6} {self.step * 1e3:>9.1f} "
            f"{self.efficiency * 100:>10.1f} {cells}"
        )


def split(
    kind: str, hosts: int, reports: list[TrialReport], first: MeasuredPoint | None
) -> MeasuredPoint:
    """Split the time of a step. first: the measurement on one rank, if known."""
    ranks = len(reports)
    step = statistics.fmean(report.step("sync") for report in reports)
    alone = [report.step("local") for report in reports]
    data = statistics.fmean(report.data("local") for report in reports)
    base = first.step if first else step
    if first and kind == "weak":  # a script may divide its micro-batches among the ranks
        base *= max(1, reports[0].passes) / max(1, first.reports[0].passes)
    return MeasuredPoint(
        kind=kind,
        ranks=ranks,
        hosts=hosts,
        step=step,
        efficiency=base / step if kind == "weak" else base / (ranks * step),
        compute=statistics.fmean(alone) - data,
        exposed=max(0.0, step - max(alone)) if ranks > 1 else 0.0,
        data=data,
        uneven=max(alone) - statistics.fmean(alone),
        reports=reports,
    )


def numbers_of_ranks(world_size: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of all ranks."""
    powers = [1 << power for power in range(world_size.bit_length())]
    return sorted({*(ranks for ranks in powers if ranks < world_size), world_size})


def batch_per_rank(kind: str, batch: int, world_size: int, ranks: int) -> int | None:
    """Return the batch of each rank; for strong scaling, the global batch stays the same.

    Returns None if the global batch cannot be divided equally.
    """
    if kind == "weak":
        return batch
    share, rest = divmod(batch * world_size, ranks)
    return None if rest else share


def run(trials: Trials, ranks: int, steps: int, batch: int) -> list[TrialReport]:
    """Measure the script on the first `ranks` ranks. batch: replaces {batch} in its arguments."""
    phases = [("sync", steps), ("local", steps)] * 2  # in turns: the host's load may change
    return trials.run(ranks, batch, phases)


# The likeliest causes of a low efficiency, each with its evidence ---------------------------------


@dataclass(frozen=True)
class ScalingCause:
    """A cause, and the seconds it may cost in each step."""

    name: str
    seconds: float
    evidence: str


def find_causes(point: MeasuredPoint) -> list[ScalingCause]:
    """Return the causes that the measurement shows, the most expensive first."""
    found = [cause for check in _CHECKS for cause in check(point)]
    worth = [cause for cause in found if cause.seconds > _LEAST * point.step]
    return sorted(worth, key=lambda cause: -cause.seconds)


def explain(point: MeasuredPoint, causes: Sequence[ScalingCause]) -> str:
    """Return the summary: the efficiency and its likeliest causes."""
    ranks = f"{point.ranks} rank{'s' * (point.ranks > 1)}"
    start = f"{point.efficiency:.0%} efficiency ({point.kind} scaling) on {ranks}"
    if point.efficiency > HIGH:
        return (
            f"{start}: a step of one rank took longer than expected. Nothing follows from that: "
            "measure again on hosts without other work, or with more --steps."
        )
    if not causes and point.efficiency >= LOW:
        computing = min(point.compute / point.step, 1)
        return f"{start}, computing {computing:.0%} of the time: no problem found."
    if not causes:
        return (
            f"{start}. No cause was found: {point.exposed * 1e3:.1f} ms of "
            f"{point.step * 1e3:.1f} ms per step are exposed communication."
        )
    lines = [
        f"{number}. {cause.name}, up to {cause.seconds * 1e3:.1f} ms of {point.step * 1e3:.1f} ms "
        f"per step. {cause.evidence}."
        for number, cause in enumerate(causes, 1)
    ]
    return "\n".join([f"{start}. Check first:", *lines])


def _data_wait(point: MeasuredPoint) -> Iterator[ScalingCause]:
    yield ScalingCause(
        "data wait",
        point.data,
        f"A rank waits {point.data * 1e3:.1f} ms per step for its DataLoader. Use more workers, or "
        "local files",
    )


def _slow_rank(point: MeasuredPoint) -> Iterator[ScalingCause]:
    alone = [report.step("local") - report.data("local") for report in point.reports]
    slowest, median = max(alone), statistics.median_low(alone)
    if slowest > 1.2 * median:
        rank = alone.index(slowest)
        yield ScalingCause(
            "one slow rank",
            slowest - median,
            f"Rank {rank} on {point.reports[rank].host} computes {slowest * 1e3:.1f} ms per step "
            f"alone, the median rank {median * 1e3:.1f} ms. Look for other processes and low "
            "clock rates there, or exclude the host",
        )


def _micro_batch(point: MeasuredPoint) -> Iterator[ScalingCause]:
    report = point.reports[0]
    if report.whole_seconds > point.compute:
        yield ScalingCause(
            "too small a micro-batch",
            # The saving if the micro-batch or the accumulation were twice as large.
            min(point.exposed, report.whole_seconds * report.exchanges) / 2,
            f"The exchange of {report.gradient_bytes / 1e6:.1f} MB takes "
            f"{report.whole_seconds * 1e3:.1f} ms, the computation {point.compute * 1e3:.1f} ms: "
            "overlap cannot hide it. Use larger micro-batches, or accumulate",
        )


_CHECKS: tuple[Callable[[MeasuredPoint], Iterator[ScalingCause]], ...] = (
    _data_wait,
    _slow_rank,
    _micro_batch,
)

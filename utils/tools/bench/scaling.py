"""Measure how a training scales from one rank to all, where the time goes, and why."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import host_pairs
from .trials import Trials
from .worker import TrialReport

LOW = 0.9  # efficiency below which causes are named
HIGH = 1.25  # above which the measurement on one rank was disturbed
_LEAST = 0.05  # share of a step; a cause that costs less is not named
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
    """A measured number of ranks. All times in seconds per optimizer step."""

    kind: str  # weak or strong
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
    """Return where the time of a step goes. first: the measurement on one rank, if known."""
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
    """Return the batch of each rank. For strong scaling, all ranks keep their global batch.

    Returns None if the global batch cannot be divided equally.
    """
    if kind == "weak":
        return batch
    share, rest = divmod(batch * world_size, ranks)
    return None if rest else share


def run(trials: Trials, ranks: int, steps: int, batch: int) -> list[TrialReport]:
    """Measure the script on the first `ranks` ranks. batch: for {batch} in its arguments."""
    phases = [("sync", steps), ("local", steps)] * 2  # in turns: the load of the host may change
    return trials.run(ranks, batch, phases)


# The likeliest causes of a low efficiency, each with its evidence ---------------------------------


@dataclass(frozen=True)
class ScalingCause:
    """A cause and the seconds of each step that it may cost."""

    name: str
    seconds: float
    evidence: str


@dataclass(frozen=True)
class Links:
    """Bandwidths between hosts in bytes per second, as links.measure_pairs() finds them."""

    bandwidths: Mapping[host_pairs.Pair, float]
    names: Sequence[str]


def find_causes(point: MeasuredPoint, links: Links | None = None) -> list[ScalingCause]:
    """Return the causes that the measurement shows, the costliest first."""
    found = [cause for check in _CHECKS for cause in check(point)]
    if links:
        found += _slow_link(point, links)
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
            f"{start}. No known cause was found: {point.exposed * 1e3:.1f} ms of "
            f"{point.step * 1e3:.1f} ms per step are exposed communication."
        )
    lines = [
        f"{number}. {cause.name}, up to {cause.seconds * 1e3:.1f} ms of {point.step * 1e3:.1f} ms "
        f"per step. {cause.evidence}."
        for number, cause in enumerate(causes, 1)
    ]
    return "\n".join([f"{start}. Check first:", *lines])


def _accumulation(point: MeasuredPoint) -> Iterator[ScalingCause]:
    report = point.reports[0]
    if report.exchanges > 1 and report.models == 1:  # several: each may need its exchange
        yield ScalingCause(
            "accumulation that communicates each time",
            point.exposed * (1 - 1 / report.exchanges),
            f"Gradients are exchanged in {report.exchanges} of {report.passes} backward passes per "
            "step. Use ddp.no_sync() for all but the last (utils.training.accumulate)",
        )


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


def _slow_link(point: MeasuredPoint, links: Links) -> Iterator[ScalingCause]:
    slow_hosts, slow_links = host_pairs.find_slow(links.bandwidths)
    slow = [pair for pair in links.bandwidths if pair in slow_links or set(pair) & set(slow_hosts)]
    if slow:
        usual = max(links.bandwidths.values())
        share = min(links.bandwidths[pair] for pair in slow) / usual
        yield ScalingCause(
            "one slow link",
            point.exposed * (1 - share),
            host_pairs.describe(links.bandwidths, links.names).rstrip("."),
        )


def _overlap(point: MeasuredPoint) -> Iterator[ScalingCause]:
    report = point.reports[0]
    usual = math.ceil(report.gradient_bytes / (25 * _MIB)) + report.models
    more = len(report.bucket_bytes) - usual
    mean = statistics.fmean(report.bucket_bytes or [0]) / _MIB
    if more > 0 and mean < 1:
        in_one = report.whole_seconds * report.exchanges
        latencies = more * report.small_seconds * report.exchanges
        yield ScalingCause(
            "many small buckets",
            min(point.exposed, max(latencies, point.exposed - in_one)),
            f"{len(report.bucket_bytes)} buckets of {mean:.2f} MiB on average. One all-reduce of "
            f"all gradients takes {report.whole_seconds * 1e3:.1f} ms, the smallest one "
            f"{report.small_seconds * 1e3:.2f} ms. Raise bucket_cap_mb (default: 25)",
        )
    hidden = report.whole_seconds - point.exposed / max(1, report.exchanges)
    possible = min(report.whole_seconds, 0.5 * point.compute)  # the backward pass is half or more
    if report.hook and hidden < 0.4 * possible:
        yield ScalingCause(
            "no overlap",
            possible - max(0.0, hidden),
            f"The hook {report.hook} hides {max(0.0, hidden) * 1e3:.1f} ms of an exchange of "
            f"{report.whole_seconds * 1e3:.1f} ms. A hook that waits before it returns hides "
            "nothing: return the Future",
        )
    if report.find_unused_parameters and not report.unused_bytes:
        yield ScalingCause(
            "find_unused_parameters",
            report.small_seconds + 0.03 * point.compute,
            "It traverses the autograd graph in each step, and no parameter was unused. Remove it",
        )


def _threads(point: MeasuredPoint) -> Iterator[ScalingCause]:
    for host in dict.fromkeys(report.host for report in point.reports):
        local = [report for report in point.reports if report.host == host]
        threads = sum(report.threads for report in local)
        cpus = len({cpu for report in local for cpu in report.cpus})
        if threads > cpus:
            name, share = "too many threads", 1 - cpus / threads
        elif local[0].backend == "gloo" and cpus >= 2 * threads:
            name, share = "too few threads", (1 - threads / cpus) / 2
        else:
            continue
        yield ScalingCause(
            name,
            point.compute * share,
            f"{len(local)} ranks on {host} run {threads} threads on {cpus} CPUs. Set "
            f"OMP_NUM_THREADS={max(1, cpus // len(local))}",
        )
        return


def _micro_batch(point: MeasuredPoint) -> Iterator[ScalingCause]:
    report = point.reports[0]
    if report.whole_seconds > point.compute:
        yield ScalingCause(
            "too small a micro-batch",
            # With a micro-batch, or an accumulation, twice as large.
            min(point.exposed, report.whole_seconds * report.exchanges) / 2,
            f"The exchange of {report.gradient_bytes / 1e6:.1f} MB takes "
            f"{report.whole_seconds * 1e3:.1f} ms, the computation {point.compute * 1e3:.1f} ms: "
            "overlap cannot hide it. Use larger micro-batches, or accumulate",
        )


def _sockets(point: MeasuredPoint) -> Iterator[ScalingCause]:
    expected = os.environ.get("DDPKIT_NETWORK", "Socket")
    warning = next((report.network for report in point.reports if report.network), "")
    if point.hosts > 1 and point.reports[0].backend == "gloo" and expected != "Socket":
        warning = (
            f"gloo uses TCP sockets, although {expected} is expected (DDPKIT_NETWORK). Use the "
            "backend of the GPUs"
        )
    if warning:
        yield ScalingCause(
            "sockets instead of the fabric", 0.6 * point.exposed, warning.rstrip(".")
        )


_CHECKS: tuple[Callable[[MeasuredPoint], Iterator[ScalingCause]], ...] = (
    _accumulation,
    _data_wait,
    _slow_rank,
    _overlap,
    _threads,
    _sockets,
    _micro_batch,
)

"""Measure how a training scales from one rank to all, and where the time goes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .trials import Trials
from .worker import Report, Settings

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
class Point:
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
    reports: list[Report]

    def show(self) -> str:
        """Return one line of the table."""
        times = [self.compute, self.exposed, self.data, self.uneven]
        cells = " ".join(f"{seconds * 1e3:>9.1f}" for seconds in times)
        return (
            f"  {self.kind:>7} {self.ranks:>6} {self.hosts:>6} {self.step * 1e3:>9.1f} "
            f"{self.efficiency * 100:>10.1f} {cells}"
        )


def split(kind: str, hosts: int, reports: list[Report], first: Point | None) -> Point:
    """Return where the time of a step goes. first: the measurement on one rank, if known."""
    ranks = len(reports)
    step = statistics.fmean(report.step("sync") for report in reports)
    alone = [report.step("local") for report in reports]
    data = statistics.fmean(report.data("local") for report in reports)
    base = first.step if first else step
    if first and kind == "weak":  # a script may divide its micro-batches among the ranks
        base *= max(1, reports[0].passes) / max(1, first.reports[0].passes)
    return Point(
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


def run(trials: Trials, ranks: int, steps: int, batch: int) -> list[Report]:
    """Measure the script on the first `ranks` ranks. batch: for {batch} in its arguments."""
    phases = [("sync", steps), ("local", steps)] * 2  # in turns: the load of the host may change
    return trials.run(ranks, Settings(placeholders={"batch": batch}), phases)

"""Find slow ranks: the time of each step, split into data, computation and waiting for others.

    timer = StepTimer(dist, every=100)
    for batch in timer.batches(loader):
        loss = model(batch)
        with timer.exchange():  # where this rank meets the others
            loss.backward()

`ddpkit plot steps.csv` draws the steps of all ranks.
"""

from __future__ import annotations

import contextlib
import csv
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed

from ..distributed import Distributed
from ..gather import gather_json
from ..log import get_logger

_log = get_logger(__name__)
_Batch = TypeVar("_Batch")
_GPU_SAMPLE = 10  # one step in so many is measured, because a measurement waits for the GPU


class RankTimes(NamedTuple):
    """Mean seconds of a rank's steps."""

    rank: int
    host: str
    data: float  # seconds until the next batch arrives
    computation: float
    waiting: float  # seconds of waiting for other ranks

    @property
    def work(self) -> float:
        """Return the seconds in which this rank works; the others wait if it takes longest."""
        return self.data + self.computation


class StepTimer:
    """Measures the steps of this rank, and compares all ranks after every `every` steps.

    The rank with the shortest time in exchange() waits for nobody. The other ranks' additional time
    there counts as waiting.
    """

    def __init__(
        self, dist: Distributed, *, every: int = 100, share: float = 0.2, file: str | None = None
    ) -> None:
        """Prepare the measurement; all ranks have to call this.

        every: steps between two comparisons, equal on all ranks. share: rank 0 names a host that
        works this much longer than the median of the other hosts. file: CSV file to which rank 0
        appends every comparison.
        """
        if every < 1 or share <= 0:
            raise ValueError(f"every is {every}, share {share}; expected 1 or more, and above 0")
        self._dist, self._every, self._share, self._file = dist, every, share, file
        self._sample = min(every, _GPU_SAMPLE) if dist.device.type != "cpu" else 1
        self._step = 0
        self._sums = [0.0, 0.0, 0.0]  # seconds in measured steps: step, data, exchange
        self._measured = 0  # number of measured steps
        self._hosts: list[str] = [""] * dist.world_size
        if dist.world_size > 1:
            self._hosts = gather_json(socket.gethostname())

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of a loader; a step lasts until the next batch is requested."""
        batches = iter(loader)
        while True:
            start = self._now()
            try:
                batch = next(batches)
            except StopIteration:
                return
            data = self._now() - start
            yield batch
            if self._is_measured():
                self._sums[0] += self._now() - start
                self._sums[1] += data
                self._measured += 1
            self._step += 1
            if self._step % self._every == 0:
                self._compare()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Measure the part of a step in which this rank meets the others, such as backward()."""
        start = self._now()
        yield
        if self._is_measured():
            self._sums[2] += self._now() - start

    def _is_measured(self) -> bool:
        return self._step % self._sample == 0

    def _now(self) -> float:
        if self._dist.device.type == "cuda" and self._is_measured():
            torch.cuda.synchronize(self._dist.device)
        return time.perf_counter()

    def _compare(self) -> None:
        """Gather three numbers from each rank; print and record them on rank 0."""
        sums = torch.tensor(self._sums, dtype=torch.float64, device=self._dist.device)
        sums /= self._measured
        self._sums, self._measured = [0.0, 0.0, 0.0], 0
        gathered = [torch.empty_like(sums) for _ in self._hosts]
        if len(gathered) > 1:
            torch.distributed.all_gather(gathered, sums)
        else:
            gathered = [sums]
        if not self._dist.is_main:
            return
        times = split([values.tolist() for values in gathered], self._hosts)
        if slow := describe_slowest(times, self._share):
            _log.warning("steps %d to %d: %s", self._step - self._every + 1, self._step, slow)
        if self._file is not None:
            append(self._file, self._step, times)


def split(measured: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[RankTimes]:
    """Return the times of all ranks. measured: each rank's seconds of step, data and exchange."""
    shortest = min(exchange for _, _, exchange in measured)
    return [
        RankTimes(rank, hosts[rank], data, step - data - (exchange - shortest), exchange - shortest)
        for rank, (step, data, exchange) in enumerate(measured)
    ]


def describe_slowest(times: Sequence[RankTimes], share: float) -> str:
    """Return which host is slower than the median of the others by `share`; "" if none is.

    On a single host, compares its ranks.
    """
    several_hosts = len({rank_times.host for rank_times in times}) > 1
    slowest: dict[str | int, RankTimes] = {}  # host (or rank) -> its slowest rank
    for rank_times in times:
        place = rank_times.host if several_hosts else rank_times.rank
        slowest[place] = max(
            slowest.get(place, rank_times), rank_times, key=lambda times: times.work
        )
    ranked = sorted(slowest.values(), key=lambda times: times.work)
    if len(ranked) < 2:
        return ""

    worst, usual = ranked[-1], statistics.median(rank_times.work for rank_times in ranked[:-1])
    if worst.work <= usual * (1 + share):
        return ""
    return (
        f"rank {worst.rank} on {worst.host} is slow: it works {1e3 * worst.work:.1f} ms in each "
        f"step (data {1e3 * worst.data:.1f}, computation {1e3 * worst.computation:.1f}), the "
        f"median of the other {'hosts' if several_hosts else 'ranks'} is {1e3 * usual:.1f} ms"
    )


def append(file: str, step: int, times: Sequence[RankTimes]) -> None:
    """Append a comparison to a CSV file, whose columns are the step and the fields of RankTimes."""
    with open(file, "a", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        if stream.tell() == 0:
            writer.writerow(["step", *RankTimes._fields])
        writer.writerows([step, *row] for row in times)

"""Divide the shards of an epoch into streams, and read the stream of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from .permutation import Permutation


@dataclass
class Layout:
    """Progress of one (ranks, workers) layout through the shards that earlier layouts left.

    Stream s is read by worker s // ranks of rank s % ranks. Of S streams it reads the shards
    s, s + S, s + 2S, ... of those left, in the order of the epoch. The number of finished shards
    therefore identifies them.
    """

    ranks: int
    workers: int
    turns: list[int]  # for each rank, which of its streams gives the next batch
    streams: list[list[int]]  # for each stream: finished shards, samples read of the shard after

    @classmethod
    def untouched(cls, ranks: int, workers: int) -> Layout:
        """Return the layout at the start of an epoch."""
        return cls(ranks, workers, [0] * ranks, [[0, 0] for _ in range(ranks * workers)])

    @property
    def is_untouched(self) -> bool:
        return not any(map(any, self.streams))

    def streams_of(self, rank: int) -> list[list[int]]:
        return self.streams[rank :: self.ranks]

    def check(self, shards: int) -> None:
        """Raise ValueError for numbers that no layout of this many shards has."""
        sizes_match = (
            _all_in([self.ranks, self.workers], 1)
            and len(self.turns) == self.ranks
            and _all_in(self.turns, 0, self.workers - 1)
            and len(self.streams) == self.ranks * self.workers
        )
        if not sizes_match:
            raise ValueError(
                f"{self.ranks} ranks with {self.workers} workers have {len(self.streams)} streams "
                f"and the turns {self.turns}"
            )
        for stream, (finished, samples) in enumerate(self.streams):
            if not (_all_in([finished], 0, shards) and _all_in([samples], 0)):
                raise ValueError(
                    f"stream {stream} has finished {finished!r} of {shards} shards and read "
                    f"{samples!r} samples"
                )


def _all_in(values: list[int], least: int, most: float = float("inf")) -> bool:
    return all(type(value) is int and least <= value <= most for value in values)


def remaining_shards(shards: int, layouts: Iterable[Layout]) -> tuple[torch.Tensor, dict[int, int]]:
    """Return what these layouts left of an epoch.

    The first result has the positions, in the order of the epoch, of the shards that are not
    finished. The second has the number of samples already read of those that were started.
    """
    remaining = torch.arange(shards)
    samples_read: dict[int, int] = {}
    for layout in layouts:
        keep = torch.ones(len(remaining), dtype=torch.bool)
        for stream, (finished, samples) in enumerate(layout.streams):
            of_stream = slice(stream, None, len(layout.streams))
            keep[of_stream][:finished] = False
            if samples:
                samples_read[int(remaining[of_stream][finished])] = samples
        remaining = remaining[keep]
    return remaining, samples_read


@dataclass(frozen=True)
class PassPlan:
    """What the workers of one rank read in a pass."""

    epoch: int
    earlier: list[Layout]  # whose finished shards are left out
    ranks: int
    rank: int
    turn: int  # the stream of the first worker: torch requests batches from the workers in turn
    streams: list[list[int]]  # of this rank, as in Layout


class Progress(NamedTuple):
    """How far a stream is after a batch."""

    stream: int  # among those of the rank
    finished: int  # shards
    samples: int  # read of the shard after the finished ones


class Requests:
    """A sampler for torch's DataLoader: the plan once per worker, then None for each batch."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.plan: PassPlan | None = None  # of the pass that starts now

    def __iter__(self) -> Iterator[PassPlan | None]:
        return chain(repeat(self.plan, self.workers), repeat(None))


class StreamReader(Dataset[tuple[Any, Progress]]):
    """The data set of each worker. Gives the next batch of the worker's stream, and its progress.

    A finished stream gives empty batches, so that the workers take turns until the end of the pass.
    torch would leave a finished worker out instead, at a moment that depends on the timing; so
    would then the order of the batches.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open_shard: Callable[[Any, int], Iterable[Any]],
        batch_size: int | None,
        drop_last: bool,
        seed: int | None,
        collate_fn: Callable[[Any], Any],
    ) -> None:
        self._shards = shards
        self._open_shard = open_shard
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._seed = seed  # None: not shuffled
        self._collate_fn = collate_fn
        self._batches: Iterator[tuple[Any, Progress]] = iter(())

    def __getitem__(self, plan: PassPlan | None) -> tuple[Any, Progress]:
        if plan is not None:
            self._batches = self._read(plan)
        for batch in self._batches:
            return batch
        raise RuntimeError(
            "a batch was requested after the worker's stream had failed. Restart the iteration"
        )

    def _read(self, plan: PassPlan) -> Iterator[tuple[Any, Progress]]:
        worker = get_worker_info()
        stream = ((worker.id if worker else 0) + plan.turn) % len(plan.streams)
        positions, order, samples_read = self._shards_of(plan, stream)

        size = self._batch_size or 1
        batch: list[Any] = []
        finished, read_of_first = plan.streams[stream]
        samples = 0
        for number in range(finished, len(positions)):
            samples = samples_read.get(int(positions[number]), 0)
            if number == finished and read_of_first:
                samples = read_of_first

            reader = iter(self._open_shard(self._shards[int(order[number])], samples))
            while more := list(islice(reader, size - len(batch))):
                batch += more
                samples += len(more)
                if len(batch) == size:
                    yield self._collate(batch), Progress(stream, number, samples)
                    batch = []

        if batch and not self._drop_last:
            yield self._collate(batch), Progress(stream, len(positions) - 1, samples)
        yield from repeat((None, Progress(stream, len(self._shards), 0)))

    def _shards_of(
        self, plan: PassPlan, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]]:
        """Return a stream's shards: positions in the epoch, indices, and samples already read."""
        remaining, samples_read = remaining_shards(len(self._shards), plan.earlier)
        first = stream * plan.ranks + plan.rank
        positions = remaining[first :: len(plan.streams) * plan.ranks]
        if self._seed is None:
            return positions, positions, samples_read
        order = Permutation(len(self._shards), self._seed, plan.epoch)(positions)
        return positions, order, samples_read

    def _collate(self, samples: list[Any]) -> Any:
        return self._collate_fn(samples if self._batch_size else samples[0])

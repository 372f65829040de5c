"""Batches of shards that are read as streams, shared out over ranks and workers, with a state that resumes exactly.

Not here: data sets whose samples can be asked for by number (data.py), saving the state (checkpoint.py).
"""
from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert, get_worker_info

from .data import Permutation, check_order_version, order_version, replica

Shard = TypeVar("Shard")
_Mark = tuple[int, int, int]  # stream of the rank, shards that it is through with, samples read of the one after
_Report = tuple[int, int, dict[int, tuple[bool, int, list[list[int]]]]]  # rank, workers, by epoch as in _Pass


class ResumableShardLoader(Generic[Shard]):
    """A DataLoader over shards (files, URLs, anything) that are read as streams of unknown length, with a state.

        def read(path, first):                         # the samples of a shard from number `first` on
            with open(path) as lines:
                yield from islice(lines, first, None)  # or seek, where the format allows it

        loader = ResumableShardLoader(paths, read, batch_size=16, num_workers=4)
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                ...

    shards: at least one per rank; the same on all. open_shard: called in the workers; gives the same samples each time.
    shuffle: the order of the shards, another one in each epoch; not the samples within one. The other arguments and
    **options are those of torch.utils.data.DataLoader; all ranks need the same num_workers.

    Every worker of every rank reads whole shards, one after the other, and makes its batches of them; the workers of a
    rank take turns. Over all ranks each sample of an epoch comes once (with drop_last but for the last of each worker).

    The state counts what the training loop got, not what workers read ahead. Under the same number of ranks and workers
    the batches that are left come as without the interruption; under others, every sample that is left comes once. Its
    size goes with the number of workers of all ranks, not with that of shards or samples. The pass over the next epoch
    may begin before the last one is read to its end, except with persistent_workers.

    Ranks get different numbers of batches. Either count steps and not epochs: a rank that is through with one epoch
    goes on with the next, which the state can tell. Or end the epoch on all ranks when the first has no batch left,
    which an all-reduce at each step finds out. Or use torch's Join, and save when all ranks have left it.
    """

    def __init__(self, shards: Sequence[Shard], open_shard: Callable[[Shard, int], Iterable[Any]],
                 batch_size: int | None = 1, *, num_replicas: int | None = None, rank: int | None = None,
                 shuffle: bool = True, seed: int = 0, drop_last: bool = False, num_workers: int = 0,
                 collate_fn: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.num_replicas, self.rank = replica(num_replicas, rank)
        if len(shards) < self.num_replicas:
            raise ValueError(f"there are {len(shards)} shards for {self.num_replicas} ranks; expected at least one for "
                             "each. Divide the data into more shards")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more, or None for single samples")
        self.shards, self.shuffle, self.seed, self.epoch = shards, shuffle, seed, 0
        self._workers = max(1, num_workers)
        self._reader = _Reader(shards, open_shard, batch_size, drop_last, seed if shuffle else None,
                               collate_fn or (default_convert if batch_size is None else default_collate))
        self._options = {"num_workers": num_workers, **options}
        self._tasks = _Tasks(self._workers)
        self._loader = self._make_loader()
        self._passes: list[_Pass] = []
        self._loaded: dict[int, list[_Layout]] = {}  # by epoch, the last layout being the present one
        self._ahead: set[int] = set()  # epochs of which the next pass begins as loaded, and not at the start

    def __iter__(self) -> Iterator[Any]:
        """The batches of (the rest of) the epoch. Workers begin to read at once."""
        if any(one.epoch == self.epoch and one.finished for one in self._passes):
            self._ahead.discard(self.epoch)
        begun = self._begin(self.epoch)
        if self._loader.persistent_workers:  # they end what they were reading
            self._give_up()
        else:
            self._loader = self._make_loader()
        self._tasks.plan = _Plan(begun.epoch, self._start(begun.epoch, begun.resumed)[:-1], self.num_replicas,
                                 self.rank, begun.turn, list(begun.streams))
        batches = _Batches(begun, iter(self._loader))
        begun.reader = weakref.ref(batches)
        self._passes = [one for one in self._passes if one.alive and one.epoch != self.epoch] + [begun]
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. Another epoch than the present one begins at its start."""
        if epoch != self.epoch:
            self._ahead = {one for one in self._ahead if one >= epoch and one != self.epoch}
            self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where training is: plain numbers, the same on every rank.

        A collective: all ranks call it between the same two steps. Batches that code between this loader and the loop
        takes ahead count as got.
        """
        mine = self._report()
        if self.num_replicas == 1:
            return self._merge([mine])
        if not dist.is_initialized():
            raise RuntimeError(f"the state is made of those of {self.num_replicas} ranks, and torch.distributed is not "
                               "initialised. Call setup_distributed() before")
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, mine)
        return self._merge(reports)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was taken. ValueError when it is of other shards or another order, or damaged."""
        check_order_version(state)
        for name, value in self._order().items():
            if state.get(name) != value:
                raise ValueError(f"the state of the loader is of {name}={state.get(name)!r}, but this one has "
                                 f"{name}={value!r}. Resume with the same shards and the same order, or start anew")
        try:
            loaded = {one["epoch"]: [_Layout(**layout) for layout in one["layouts"]] for one in state["epochs"]}
            if not loaded or not all(type(epoch) is int for epoch in loaded):
                raise ValueError(f"epochs are {list(loaded)}")
            for layouts in loaded.values():
                for layout in layouts:
                    layout.check(len(self.shards))
                _left(len(self.shards), layouts)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the state of the loader is damaged: {type(error).__name__}: {error}. Expected what "
                             "state_dict() gave; go back to an earlier checkpoint") from error
        for layouts in loaded.values():
            if not layouts or (layouts[-1].ranks, layouts[-1].workers) != (self.num_replicas, self._workers):
                layouts.append(self._untouched())
        self._give_up()
        self._loaded, self._ahead, self._passes = loaded, set(loaded), []
        self.epoch = min(loaded)

    def _give_up(self) -> None:
        for one in self._passes:
            one.given_up = True

    def _order(self) -> dict[str, int | bool]:
        return {"shards": len(self.shards), "seed": self.seed, "shuffle": self.shuffle, **order_version()}

    def _make_loader(self) -> DataLoader[Any]:
        """A new one for each pass, unless its workers persist: they copy the data set when they start."""
        return DataLoader(copy.copy(self._reader), batch_size=None, sampler=self._tasks, collate_fn=_as_it_is,
                          **self._options)

    def _untouched(self) -> _Layout:
        streams = self.num_replicas * self._workers
        return _Layout(self.num_replicas, self._workers, [0] * self.num_replicas, [[0, 0] for _ in range(streams)])

    def _start(self, epoch: int, resumed: bool) -> list[_Layout]:
        """What was done of an epoch before the next pass over it; the last layout is the present one."""
        return self._loaded[epoch] if resumed else [self._untouched()]

    def _begin(self, epoch: int) -> _Pass:
        resumed = epoch in self._ahead
        layout = self._start(epoch, resumed)[-1]
        return _Pass(epoch, resumed, layout.turns[self.rank], layout.streams[self.rank::self.num_replicas],
                     len(self.shards))

    def _report(self) -> _Report:
        """Where this rank is: in the passes that are being read, and in those loaded that are still to come."""
        told = [one for one in self._passes if one.alive and not one.finished]
        if not told:
            here = bool(self._passes) and self._passes[-1].epoch == self.epoch
            told = [self._passes[-1] if here else self._begin(self.epoch)]
        told += [self._begin(epoch) for epoch in self._ahead.difference(one.epoch for one in told)]
        return self.rank, self._workers, {one.epoch: (one.resumed, one.turn, list(one.streams)) for one in told}

    def _merge(self, reports: Iterable[_Report]) -> dict[str, Any]:
        """The state, of the reports of all ranks. Several of one rank (model-parallel ones) say the same."""
        by_rank = {rank: (workers, epochs) for rank, workers, epochs in reports}
        if sorted(by_rank) != list(range(self.num_replicas)):
            raise RuntimeError(f"the loaders are of ranks {sorted(by_rank)}; expected 0 to {self.num_replicas - 1}. "
                               "Give each its own rank, and all the same num_replicas")
        for rank, (workers, _) in by_rank.items():
            if workers != self._workers:
                raise RuntimeError(f"rank {rank} has {workers} workers, but rank {self.rank} has {self._workers}. Give "
                                   "all the same num_workers")
        entries: list[dict[str, Any]] = []
        for epoch in sorted({epoch for _, epochs in by_rank.values() for epoch in epochs}):
            layout, begun = self._untouched(), set()
            for rank, (_, epochs) in by_rank.items():
                if epoch in epochs:
                    resumed, layout.turns[rank], layout.streams[rank::self.num_replicas] = epochs[epoch]
                    begun.add(resumed)
                elif epoch < min(epochs):  # that rank is through with it
                    layout.streams[rank::self.num_replicas] = [[len(self.shards), 0] for _ in range(self._workers)]
            if len(begun) > 1:
                raise RuntimeError(f"some ranks repeat epoch {epoch}, others are still in their first pass over it. "
                                   "Call set_epoch() with a new number before each pass")
            layouts = [*self._start(epoch, begun.pop())[:-1], layout]
            touched = [asdict(one) for one in layouts if any(map(any, one.streams))]
            if touched or not entries:
                entries.append({"epoch": epoch, "layouts": touched})
        return {"epochs": entries, **self._order()}


@dataclass
class _Layout:
    """How far so many ranks with so many workers came in what the layouts before had left of an epoch.

    Stream s is that of worker s // ranks of rank s % ranks; of S streams it reads the shards s, s + S, s + 2S, ... of
    those that were left, in the order of the epoch. So the number of shards done tells which ones they were.
    """

    ranks: int
    workers: int
    turns: list[int]  # for each rank, which of its workers is next
    streams: list[list[int]]  # for each stream: shards it is through with, samples read of the one after

    def check(self, shards: int) -> None:
        if not (_counts([self.ranks, self.workers], 1) and len(self.turns) == self.ranks
                and _counts(self.turns, 0, self.workers - 1) and len(self.streams) == self.ranks * self.workers):
            raise ValueError(f"{self.ranks} ranks with {self.workers} workers have {len(self.streams)} streams and the "
                             f"turns {self.turns}")
        for stream, (done, first) in enumerate(self.streams):
            if not (_counts([done], 0, shards) and _counts([first], 0)):
                raise ValueError(f"stream {stream} is done with {done!r} of {shards} shards and {first!r} samples")


def _counts(values: list[int], least: int, most: float = float("inf")) -> bool:
    return all(type(value) is int and least <= value <= most for value in values)


@dataclass(frozen=True)
class _Plan:
    """What the workers of a rank read in a pass."""

    epoch: int
    before: list[_Layout]
    ranks: int
    rank: int
    turn: int  # the stream of the first worker; torch asks the workers in turn, beginning with the first
    streams: list[list[int]]  # of this rank, as in _Layout


class _Tasks:
    """What torch takes for the indices of samples: the plan once for each worker, then "the next batch" for ever."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.plan: _Plan | None = None  # of the pass that begins now

    def __iter__(self) -> Iterator[_Plan | None]:
        return chain(repeat(self.plan, self.workers), repeat(None))


class _Reader(Dataset[tuple[Any, _Mark]]):
    """What each worker has: gives the next batch of its stream, and how far the stream is after it.

    A stream that is through gives empty batches, so that workers take turns to the end of the pass. torch would leave
    it out instead, at a moment that depends on the timing, and so would the order of batches.
    """

    def __init__(self, shards: Sequence[Any], open_shard: Callable[[Any, int], Iterable[Any]], batch_size: int | None,
                 drop_last: bool, seed: int | None, collate_fn: Callable[[Any], Any]) -> None:
        self._shards, self._open_shard, self._batch_size = shards, open_shard, batch_size
        self._drop_last, self._seed, self._collate_fn = drop_last, seed, collate_fn
        self._batches: Iterator[tuple[Any, _Mark]] = iter(())

    def __getitem__(self, task: _Plan | None) -> tuple[Any, _Mark]:
        if task is not None:
            self._batches = self._read(task)
        for batch in self._batches:
            return batch
        raise RuntimeError("a worker was asked for more after its stream had failed. Begin another pass")

    def _read(self, plan: _Plan) -> Iterator[tuple[Any, _Mark]]:
        info = get_worker_info()
        stream = ((info.id if info else 0) + plan.turn) % len(plan.streams)
        left, read = _left(len(self._shards), plan.before)
        positions = left[stream * plan.ranks + plan.rank::len(plan.streams) * plan.ranks]
        order = positions if self._seed is None else Permutation(len(self._shards), self._seed, plan.epoch)(positions)
        done, first = plan.streams[stream]
        size, samples = self._batch_size or 1, list[Any]()
        for number in range(done, len(positions)):
            first = (number == done and first) or read.get(int(positions[number]), 0)
            reader = iter(self._open_shard(self._shards[int(order[number])], first))
            while some := list(islice(reader, size - len(samples))):
                samples += some
                first += len(some)
                if len(samples) == size:
                    yield self._collate_fn(samples if self._batch_size else samples[0]), (stream, number, first)
                    samples = []
        if samples and not self._drop_last:
            yield self._collate_fn(samples), (stream, number, first)
        yield from repeat((None, (stream, len(self._shards), 0)))


def _left(shards: int, layouts: Iterable[_Layout]) -> tuple[torch.Tensor, dict[int, int]]:
    """The positions in the order of an epoch that these layouts left, and how many samples of some are read already."""
    left, read = torch.arange(shards), {}
    for layout in layouts:
        keep = torch.ones(len(left), dtype=torch.bool)
        for stream, (done, first) in enumerate(layout.streams):
            mine = slice(stream, None, len(layout.streams))
            keep[mine][:done] = False
            if first:
                read[int(left[mine][done])] = first
        left = left[keep]
    return left, read


@dataclass(eq=False)
class _Pass:
    """One iteration over (the rest of) an epoch on this rank: what the training loop got of it."""

    epoch: int
    resumed: bool  # whether it began as loaded, and not at the start of the epoch
    turn: int
    streams: list[list[int]]
    shards: int
    reader: weakref.ref[_Batches] | None = None
    given_up: bool = False

    @property
    def alive(self) -> bool:
        return not self.given_up and self.reader is not None and self.reader() is not None

    @property
    def finished(self) -> bool:
        return all(done == self.shards for done, _ in self.streams)


class _Batches(Iterator[Any]):
    """Hands the batches to the training loop, and notes that it got them."""

    def __init__(self, one: _Pass, reader: Iterator[tuple[Any, _Mark]]) -> None:
        self._pass, self._reader = one, reader

    def __next__(self) -> Any:
        one = self._pass
        while not one.finished:
            if one.given_up:
                raise RuntimeError(f"this pass over epoch {one.epoch} ended when a state was loaded or, as persistent "
                                   "workers read one at a time, when another pass began. Use that one")
            batch, (stream, done, first) = next(self._reader)
            one.streams[stream] = [done, first]
            one.turn = (stream + 1) % len(one.streams)
            if done < one.shards:
                return batch
        self._reader = iter(())  # the workers may end
        raise StopIteration


def _as_it_is(batch: Any) -> Any:
    return batch

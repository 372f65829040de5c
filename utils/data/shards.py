"""A DataLoader over shards that are read as streams, with a state that resumes exactly."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypedDict, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate, default_convert

from .loader import pass_ended
from .permutation import ORDER_VERSION
from .sampler import WorkerSeeds, check_order, replica
from .shard_reader import Layout, PassPlan, Progress, Requests, StreamReader, remaining_shards

Shard = TypeVar("Shard")


class ShardOrder(TypedDict):
    """What the order of the shards depends on."""

    shards: int
    seed: int
    shuffle: bool
    order_version: int


class EpochState(TypedDict):
    """Where training is in one epoch."""

    epoch: int
    layouts: list[dict[str, Any]]  # of type Layout; each reads what the ones before it left


class ShardState(ShardOrder):
    """Where training is. Several epochs if some ranks have already started the next one."""

    epochs: list[EpochState]


@dataclass
class EpochReport:
    """Where one rank is in one epoch. turn, streams: of this rank, as in Layout."""

    resumed: bool
    turn: int
    streams: list[list[int]]


@dataclass
class RankReport:
    """Where one rank is in each epoch that it has started or has still to resume."""

    rank: int
    workers: int
    epochs: dict[int, EpochReport]


class ResumableShardLoader(Generic[Shard]):
    """A DataLoader over shards (files, URLs, ...) that are streams of unknown length, with a state.

        def read(path, first):                         # the samples of a shard from number `first`
            with open(path) as lines:
                yield from islice(lines, first, None)  # or seek, where the format allows it

        loader = ResumableShardLoader(paths, read, batch_size=16, num_workers=4)
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                ...

    shards: at least one per rank; the same on all ranks.
    open_shard: is called in the workers and gives the same samples each time.
    shuffle: change the order of the shards in each epoch; not the samples within a shard.
    The other arguments and **options are those of torch.utils.data.DataLoader. All ranks need the
    same num_workers.

    Every worker of every rank reads whole shards, one after the other, and makes batches of them.
    The workers of a rank take turns. Over all ranks each sample of an epoch is read once; drop_last
    leaves out the last short batch of each worker.

    The state counts the batches that the training loop received, not those that workers read ahead.
    With the same number of ranks and workers, a resumed run receives the very same batches. With
    other numbers, every remaining sample is read once. The size of the state grows with the number
    of workers of all ranks, not with that of shards or samples. Without persistent_workers, a pass
    over the next epoch may start before the present one is finished.

    Ranks receive different numbers of batches. Either count steps instead of epochs: a rank that
    has finished an epoch continues with the next one, which the state can express. Or end the epoch
    on all ranks when the first has no batch left, by an all-reduce at each step. Or use torch's
    Join, and save when all ranks have left it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        open_shard: Callable[[Shard, int], Iterable[Any]],
        batch_size: int | None = 1,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.num_replicas, self.rank = replica(num_replicas, rank)
        if len(shards) < self.num_replicas:
            raise ValueError(
                f"there are {len(shards)} shards for {self.num_replicas} ranks; expected at least "
                "one for each rank. Divide the data into more shards"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"batch_size is {batch_size}; expected 1 or more, or None for single samples"
            )

        self.shards = shards
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

        default_collate_fn = default_convert if batch_size is None else default_collate
        self._reader = StreamReader(
            shards,
            open_shard,
            batch_size,
            drop_last,
            seed if shuffle else None,
            collate_fn or default_collate_fn,
        )
        self._workers = max(1, num_workers)
        self._worker_seeds = WorkerSeeds()
        generator = self._worker_seeds.generator
        self._options = {"num_workers": num_workers, "generator": generator, **options}
        self._requests = Requests(self._workers)
        self._loader = self._make_loader()

        self._passes: list[_Pass] = []
        self._loaded: dict[int, list[Layout]] = {}  # by epoch; the last layout is the present one
        self._to_resume: set[int] = set()  # epochs whose next pass starts as loaded, not at 0

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of this rank in the rest of the epoch. Starts the workers."""
        if any(one.epoch == self.epoch and one.is_finished for one in self._passes):
            self._to_resume.discard(self.epoch)
        started = self._new_pass(self.epoch)

        if self._loader.persistent_workers:  # they end what they were reading
            self._close_passes()
        else:
            self._loader = self._make_loader()

        earlier = self._layouts(started.epoch, started.resumed)[:-1]
        self._worker_seeds.start_pass(
            self.seed, self.rank, started.epoch, len(earlier), started.turn, started.streams
        )
        self._requests.plan = PassPlan(
            epoch=started.epoch,
            earlier=earlier,
            ranks=self.num_replicas,
            rank=self.rank,
            turn=started.turn,
            streams=list(started.streams),
        )
        batches = _Batches(started, iter(self._loader))
        started.reader = weakref.ref(batches)

        others = [one for one in self._passes if one.is_open and one.epoch != self.epoch]
        self._passes = [*others, started]
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. An epoch other than the present one starts at 0."""
        if epoch != self.epoch:
            self._to_resume = {one for one in self._to_resume if one >= epoch and one != self.epoch}
            self.epoch = epoch

    def state_dict(self) -> ShardState:
        """Return where training is; the same on every rank.

        A collective: all ranks call it between the same two steps. Batches that code between this
        loader and the training loop takes ahead count as received. Raises RuntimeError if the
        loaders of the ranks do not match, or torch.distributed is not initialised.
        """
        report = self.report()
        if self.num_replicas == 1:
            return self.merge([report])
        if not dist.is_initialized():
            raise RuntimeError(
                f"the state consists of the reports of {self.num_replicas} ranks, and "
                "torch.distributed is not initialised. Call setup_distributed() before"
            )
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        return self.merge(reports)

    def load_state_dict(self, state: ShardState) -> None:
        """Continue where state_dict() was called.

        Raises ValueError if the state is damaged, or of other shards or another order.
        """
        check_order(state, self._order(), "loader", "shards")
        loaded = self._checked_layouts(state)
        for layouts in loaded.values():
            if not layouts or (layouts[-1].ranks, layouts[-1].workers) != self._size():
                layouts.append(Layout.untouched(*self._size()))

        self._close_passes()
        self._passes = []
        self._loaded = loaded
        self._to_resume = set(loaded)
        self.epoch = min(loaded)

    def report(self) -> RankReport:
        """Return this rank's part of the state: the open passes, and the epochs still to resume."""
        passes = [one for one in self._passes if one.is_open and not one.is_finished]
        if not passes:
            last = self._passes[-1] if self._passes else None
            in_epoch = last is not None and last.epoch == self.epoch
            passes = [last if last and in_epoch else self._new_pass(self.epoch)]

        not_started = self._to_resume.difference(one.epoch for one in passes)
        passes += [self._new_pass(epoch) for epoch in not_started]
        epochs = {
            one.epoch: EpochReport(one.resumed, one.turn, list(one.streams)) for one in passes
        }
        return RankReport(self.rank, self._workers, epochs)

    def merge(self, reports: Iterable[RankReport]) -> ShardState:
        """Return the state from the reports of all ranks. RuntimeError if they do not match.

        Several reports of one rank, as model-parallel ranks give them, are the same.
        """
        by_rank = {report.rank: report for report in reports}
        self._check_reports(by_rank)

        entries: list[EpochState] = []
        for epoch in sorted({epoch for report in by_rank.values() for epoch in report.epochs}):
            layouts = self._merge_epoch(epoch, by_rank)
            touched = [asdict(layout) for layout in layouts if not layout.is_untouched]
            if touched or not entries:
                entries.append({"epoch": epoch, "layouts": touched})
        return {**self._order(), "epochs": entries}

    def _merge_epoch(self, epoch: int, by_rank: dict[int, RankReport]) -> list[Layout]:
        """Return the layouts of an epoch. The last one is the present one, from the reports."""
        layout = Layout.untouched(*self._size())
        resumed = set[bool]()
        for rank, report in by_rank.items():
            streams_of_rank = slice(rank, None, self.num_replicas)
            if epoch in report.epochs:
                reported = report.epochs[epoch]
                layout.turns[rank] = reported.turn
                layout.streams[streams_of_rank] = reported.streams
                resumed.add(reported.resumed)
            elif epoch < min(report.epochs):  # that rank has finished it
                finished = [[len(self.shards), 0] for _ in range(self._workers)]
                layout.streams[streams_of_rank] = finished
        if len(resumed) > 1:
            raise RuntimeError(
                f"some ranks repeat epoch {epoch}; others are still in their first pass over it. "
                "Call set_epoch() with a new number before each pass"
            )
        return [*self._layouts(epoch, resumed.pop())[:-1], layout]

    def _check_reports(self, by_rank: dict[int, RankReport]) -> None:
        if sorted(by_rank) != list(range(self.num_replicas)):
            raise RuntimeError(
                f"the loaders are of ranks {sorted(by_rank)}; expected 0 to "
                f"{self.num_replicas - 1}. Give each its rank, and all the same num_replicas"
            )
        for rank, report in by_rank.items():
            if report.workers != self._workers:
                raise RuntimeError(
                    f"rank {rank} has {report.workers} workers, but rank {self.rank} has "
                    f"{self._workers}. Give all ranks the same num_workers"
                )

    def _checked_layouts(self, state: ShardState) -> dict[int, list[Layout]]:
        """Return the layouts of each epoch of a state. Raises ValueError if it is damaged."""
        try:
            loaded = {
                entry["epoch"]: [Layout(**layout) for layout in entry["layouts"]]
                for entry in state["epochs"]
            }
            if not loaded or not all(type(epoch) is int for epoch in loaded):
                raise ValueError(f"epochs are {list(loaded)}")
            for layouts in loaded.values():
                for layout in layouts:
                    layout.check(len(self.shards))
                remaining_shards(len(self.shards), layouts)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the state of the loader is damaged: {type(error).__name__}: {error}. Expected "
                "what state_dict() gave. Go back to an earlier checkpoint"
            ) from error
        return loaded

    def _order(self) -> ShardOrder:
        return {
            "shards": len(self.shards),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order_version": ORDER_VERSION,
        }

    def _size(self) -> tuple[int, int]:
        return self.num_replicas, self._workers

    def _layouts(self, epoch: int, resumed: bool) -> list[Layout]:
        """Return what was read of an epoch before the next pass; the last one is the present."""
        return self._loaded[epoch] if resumed else [Layout.untouched(*self._size())]

    def _new_pass(self, epoch: int) -> _Pass:
        resumed = epoch in self._to_resume
        layout = self._layouts(epoch, resumed)[-1]
        turn, streams = layout.turns[self.rank], layout.streams_of(self.rank)
        return _Pass(epoch, resumed, turn, streams, len(self.shards))

    def _close_passes(self) -> None:
        for one in self._passes:
            one.is_closed = True

    def _make_loader(self) -> DataLoader[Any]:
        """Return a new DataLoader, which each pass needs unless its workers persist."""
        return DataLoader(
            copy.copy(self._reader),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_identity,
            **self._options,
        )


@dataclass(eq=False)
class _Pass:
    """One iteration over the rest of an epoch on this rank, and what the training loop received."""

    epoch: int
    resumed: bool  # started as loaded, not at the start of the epoch
    turn: int
    streams: list[list[int]]
    shards: int
    reader: weakref.ref[_Batches] | None = None
    is_closed: bool = False  # replaced by another pass, or by a state

    @property
    def is_open(self) -> bool:
        return not self.is_closed and self.reader is not None and self.reader() is not None

    @property
    def is_finished(self) -> bool:
        return all(finished == self.shards for finished, _ in self.streams)


class _Batches(Iterator[Any]):
    """Hands the batches of one pass to the training loop and records their progress."""

    def __init__(self, current: _Pass, reader: Iterator[tuple[Any, Progress]]) -> None:
        self._pass = current
        self._reader = reader

    def __next__(self) -> Any:
        current = self._pass
        while not current.is_finished:
            if current.is_closed:
                raise RuntimeError(pass_ended(current.epoch))
            batch, (stream, finished, samples) = next(self._reader)
            current.streams[stream] = [finished, samples]
            current.turn = (stream + 1) % len(current.streams)
            if finished < current.shards:
                return batch
        self._reader = iter(())  # lets the workers end
        raise StopIteration


def _identity(batch: Any) -> Any:
    return batch

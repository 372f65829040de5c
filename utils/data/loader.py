"""A DataLoader that counts the batches the training loop received, so that a run can resume."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from .sampler import ResumableDistributedSampler, SamplerState, WorkerSeeds

if TYPE_CHECKING:
    from ..distributed import Distributed


def resumable_loader(
    dataset: Dataset[Any],
    job: Distributed,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    with_epoch: bool = False,
    **options: Any,
) -> ResumableDataLoader:
    """Return a ResumableDataLoader whose sampler, `loader.sampler`, divides the data by the ranks.

    job: from setup_distributed(). batch_size: samples per batch and rank. The sampler gets shuffle,
    seed, drop_last and with_epoch. The loader gets drop_last and all other options.
    """
    sampler = ResumableDistributedSampler(
        dataset,  # type: ignore[arg-type]
        job.world_size,
        job.rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        with_epoch=with_epoch,
    )
    return ResumableDataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, **options)


class ResumableDataLoader(DataLoader[Any]):
    """A torch DataLoader with a state that resumes within an epoch.

        loader = ResumableDataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        state = {"model": ddp, "optimizer": optimizer, "loader": loader}
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...

    The state counts the batches that the training loop received, without batches that workers
    fetched ahead. Save it on any rank, at the same step on all ranks; load it on all ranks.

    sampler: a ResumableDistributedSampler. The other arguments are passed to torch's DataLoader.
    generator: default: a new one, seeded for each pass. The start of a pass draws a number; from
    torch's default generator that would change the dropout of a resumed run. Workers start at the
    first batch.

    Raises ValueError for options that would give a resumed run other samples: in_order=False with
    workers; or persistent_workers=True with a data set that has an attribute `epoch` instead of a
    sampler with with_epoch=True.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        *,
        sampler: ResumableDistributedSampler,
        num_workers: int = 0,
        persistent_workers: bool = False,
        in_order: bool = True,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(sampler, ResumableDistributedSampler):
            raise TypeError(
                f"sampler is a {type(sampler).__name__}; expected a ResumableDistributedSampler, "
                "which knows its position. resumable_loader() makes both"
            )
        if num_workers and not in_order:
            raise ValueError(
                "in_order is False; expected True, the default. Batches that arrive in any order "
                "cannot be counted, and a resumed run would lose and repeat samples"
            )
        if persistent_workers and not sampler.with_epoch and _has_epoch(dataset):
            raise ValueError(
                "persistent_workers is True, and the data set has an attribute `epoch`, which "
                "these workers copy only once. A resumed run would receive other samples. Make the "
                "sampler with with_epoch=True and take (epoch, index) in __getitem__, or leave "
                "persistent_workers out"
            )

        worker_seeds = WorkerSeeds()
        super().__init__(
            dataset,
            batch_size,
            sampler=sampler,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            generator=generator or worker_seeds.generator,
            **options,
        )
        self._sampler = sampler
        self._worker_seeds = worker_seeds
        self._passes: list[_Pass] = []

    # torch declares its private iterator class as the result; this iterator counts the batches.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over the batches of this rank in the rest of the epoch."""
        return _CountedBatches(self)

    def state_dict(self, consumed: int | None = None) -> SamplerState:
        """Return the position of the training in the data, the same on every rank.

        consumed: samples of this rank used in the present pass. Pass it if code between this loader
        and the training loop takes batches ahead. Raises ValueError if the pass has fewer samples.
        """
        current = self._current_pass()
        if current is None:
            return self._sampler.state_at(self._sampler.epoch, self._sampler.start)

        used = current.received if consumed is None else consumed
        if not 0 <= used <= current.samples:
            raise ValueError(
                f"consumed is {used}; expected 0 to {current.samples}, the samples of this rank in "
                "the pass"
            )
        position = current.start + self._sampler.num_replicas * used
        return self._sampler.state_at(current.epoch, position)

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue where state_dict() was called, and set sampler.epoch.

        Raises ValueError if the state is damaged, or was saved for other data or another order.
        """
        self._sampler.resume(state)
        self._close_passes()
        self._passes = []

    def start_pass(self, reader: object) -> tuple[_Pass, Iterator[Any]]:
        """Start a pass that `reader` hands to the training loop; used by the loader's iterator."""
        if self.persistent_workers:  # persistent workers read one pass at a time
            self._close_passes()
        sampler = self._sampler
        self._worker_seeds.start_pass(sampler.seed, sampler.rank, sampler.epoch, sampler.start)
        started = _Pass(
            epoch=sampler.epoch,
            start=sampler.start,
            samples=sampler.samples_from(sampler.start),
            batch_size=self.batch_size or 1,
            reader=weakref.ref(reader),
        )
        self._passes = [started_pass for started_pass in self._passes if started_pass.is_open] + [
            started
        ]
        return started, super().__iter__()

    def forget_start(self, current: _Pass) -> None:
        """Let the next pass over the same epoch start at 0: a loaded position serves one pass."""
        if current.epoch == self._sampler.epoch:
            self._sampler.start = 0

    def _close_passes(self) -> None:
        for started_pass in self._passes:
            started_pass.is_closed = True

    def _current_pass(self) -> _Pass | None:
        """Return the pass that the training loop reads, or None before the first of an epoch.

        If several passes are open, the oldest counts: the loop may take the first batch of the next
        epoch before it has used the last ones of this epoch.
        """
        for started_pass in self._passes:
            if started_pass.is_open and not started_pass.is_finished:
                return started_pass
        for started_pass in reversed(self._passes):
            if started_pass.epoch == self._sampler.epoch:
                return started_pass
        return None


@dataclass(eq=False)
class _Pass:
    """One iteration over the rest of an epoch, and the training loop's position in it."""

    epoch: int
    start: int  # its first position in the global order
    samples: int  # samples of this rank until the end of the epoch
    batch_size: int
    reader: weakref.ref[object]  # dead once the loop has ended, even by break or an error
    batches: int = 0  # batches that the training loop received
    is_exhausted: bool = False  # no batch is left; drop_last may leave samples
    is_closed: bool = False  # replaced by another pass or by a loaded state

    @property
    def is_open(self) -> bool:
        return not self.is_closed and self.reader() is not None

    @property
    def received(self) -> int:
        """Samples that the training loop received; the last batch may be short."""
        return min(self.samples, self.batches * self.batch_size)

    @property
    def is_finished(self) -> bool:
        return self.is_exhausted or self.received >= self.samples


class _CountedBatches(Iterator[Any]):
    """Hands the batches of one pass to the training loop and counts them."""

    def __init__(self, loader: ResumableDataLoader) -> None:
        self._loader = loader
        self._pass: _Pass | None = None
        self._batches: Iterator[Any] = iter(())
        self._failed = 0  # failed batches since the last one received

    def __next__(self) -> Any:
        if self._pass is None:
            # Not earlier: without workers, torch draws the epoch's order only at the first batch.
            self._pass, self._batches = self._loader.start_pass(self)
        current = self._pass
        if current.is_closed:
            raise RuntimeError(pass_ended(current.epoch))

        try:
            batch = next(self._batches)
        except StopIteration:
            current.is_exhausted = True
            self._loader.forget_start(current)
            raise
        except Exception:
            self._failed += 1  # after a failed batch, a loop that continues receives the next one
            raise

        current.batches += 1 + self._failed
        self._failed = 0
        if current.batches > 1:  # a single batch may be just a look at the data
            self._loader.forget_start(current)
        return batch


def pass_ended(epoch: int) -> str:
    """Return a message for a training loop that continues a replaced pass."""
    return (
        f"this pass over epoch {epoch} ended when a state was loaded or, as persistent workers "
        "read one pass at a time, when another pass started. Iterate over the loader again"
    )


def _has_epoch(dataset: Any) -> bool:
    """Whether the data set, or one inside it (torch's Subset), has a number `epoch`."""
    while dataset is not None:
        if type(getattr(dataset, "__dict__", {}).get("epoch")) is int:
            return True
        dataset = getattr(dataset, "dataset", None)
    return False

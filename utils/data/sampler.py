"""Which samples of a map-style data set a rank trains on, and in which order."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterator, Mapping, Sized
from itertools import chain, repeat
from typing import Any, NoReturn, TypedDict, cast

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from .permutation import ORDER_VERSION, Permutation

FIRST_CHUNK = 1 << 9  # indices in a pass's first chunk: few, so that they are available at once
CHUNK = 1 << 15  # indices in later chunks, whose tensors fit into a core's cache


class SampleOrder(TypedDict):
    """The settings that decide the order of the samples."""

    length: int
    seed: int
    shuffle: bool
    drop_last: bool
    order_version: int


class SamplerState(SampleOrder):
    """A training's position in its data: equal on every rank, valid for any number of ranks."""

    epoch: int
    position: int  # samples of the epoch that all ranks received, added up


class ResumableDistributedSampler(Sampler[Any]):
    """Give each rank its part of an epoch in a repeatable order, like torch's DistributedSampler.

        sampler = ResumableDistributedSampler(dataset, dist.world_size, dist.rank)
        loader = ResumableDataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)

    It takes the arguments of torch.utils.data.DistributedSampler. The order is a Permutation, so an
    epoch of any length starts at once and in constant memory.

    An epoch has one global order, of which rank r of R takes the positions r, r + R, r + 2R, ...
    A single number therefore says how far the training is, and any number of ranks can continue.
    The ResumableDataLoader saves that state, because it counts the batches that the loop received.
    torchdata's StatefulDataLoader works as well: it saves the state of this sampler's iterator.

    with_epoch: yield pairs (epoch, index) instead of indices, for a data set whose samples depend
    on the epoch, for example through sample_seed(). The pair reaches every worker, persistent or
    not. An attribute that the script sets on the data set reaches only workers that start later.

    Raises ValueError for an empty data set or a rank that does not exist, and RuntimeError if
    num_replicas or rank is omitted and torch.distributed is not initialised.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        with_epoch: bool = False,
    ) -> None:
        self.num_replicas, self.rank = replica(num_replicas, rank)
        if len(dataset) < 1:
            raise ValueError("the data set is empty; expected at least one sample")

        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.with_epoch = with_epoch

        self.epoch = 0
        self.start = 0  # where the next pass over this epoch starts
        self.num_samples = self.samples_from(0)
        self.total_size = self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch."""
        return self.num_samples

    def __iter__(self) -> SampleIterator:
        """Iterate over the indices of this rank in the rest of the epoch."""
        chunks = _Chunks(self)
        indices = cast(SampleIterator, SampleIterator.from_iterable(chunks))
        indices.chunks = chunks
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. A pass over another epoch starts at 0."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0

    def samples_from(self, position: int) -> int:
        """Return the number of samples each rank has from this position to the end of the epoch."""
        remaining = max(0, len(self.dataset) - position)
        if self.drop_last:
            return remaining // self.num_replicas
        return math.ceil(remaining / self.num_replicas)

    def state_dict(self) -> NoReturn:
        """Raise RuntimeError: indices are drawn long before the training loop sees the samples."""
        raise RuntimeError(
            "the sampler does not know how many of its samples the training loop received. Read "
            "the data through a ResumableDataLoader and save the state of that loader"
        )

    def state_at(self, epoch: int, position: int) -> SamplerState:
        """Return the state of a run whose ranks received `position` samples of the epoch."""
        return {**self._order(), "epoch": epoch, "position": position}

    def resume(self, state: SamplerState) -> None:
        """Start the next pass at a state. Raises ValueError if its data or order differ."""
        self.check_state(state)
        self.epoch = state["epoch"]
        self.start = state["position"]

    def check_state(self, state: SamplerState) -> None:
        """Raise ValueError if a state is damaged, or was saved for other data or another order."""
        check_order(state, self._order(), "sampler", "data")
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and position >= 0):
            raise ValueError(
                f"the state of the sampler has epoch={epoch!r} position={position!r}; expected "
                "whole numbers of 0 or more. Go back to an earlier checkpoint"
            )

    def _order(self) -> SampleOrder:
        return {
            "length": len(self.dataset),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "order_version": ORDER_VERSION,
        }


class SampleIterator(chain[Any]):
    """The indices of one pass, with a state. Made by iter(sampler).

    It is a subclass of itertools.chain, so that no Python code runs for each index. torchdata's
    StatefulDataLoader calls state_dict() while it draws, and load_state_dict() before it draws.
    """

    chunks: _Chunks

    def state_dict(self) -> SamplerState:
        """Return the state after all indices drawn so far."""
        return self.chunks.state()

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue where state_dict() was called. Call it before the first index is drawn."""
        self.chunks.resume(state)


class _Chunks(Iterator[Iterator[Any]]):
    """Computes the indices of one pass, some thousand at a time."""

    def __init__(self, sampler: ResumableDistributedSampler) -> None:
        self._sampler = sampler
        self._start_at(sampler.epoch, sampler.start)

    def _start_at(self, epoch: int, position: int) -> None:
        sampler = self._sampler
        self._epoch = epoch
        self._start = position
        self._samples = sampler.samples_from(position)
        self._computed = 0
        self._chunk: Iterator[int] = iter(())
        self._order = (
            Permutation(len(sampler.dataset), sampler.seed, epoch) if sampler.shuffle else None
        )

    def __next__(self) -> Iterator[Any]:
        if self._computed >= self._samples:
            raise StopIteration

        sampler, length = self._sampler, len(self._sampler.dataset)
        size = CHUNK if self._computed else FIRST_CHUNK
        count = min(size, self._samples - self._computed)
        first = self._start + sampler.rank + self._computed * sampler.num_replicas
        last = first + (count - 1) * sampler.num_replicas

        positions = torch.arange(count, dtype=torch.int64).mul_(sampler.num_replicas).add_(first)
        if last >= length:
            positions %= length  # padding repeats the start of the order, as in torch
        indices = positions if self._order is None else self._order(positions)

        self._computed += count
        self._chunk = iter(indices.tolist())
        if sampler.with_epoch:
            return zip(repeat(self._epoch), self._chunk)  # noqa: B905 - the first has no end
        return self._chunk

    def state(self) -> SamplerState:
        drawn = self._computed - operator.length_hint(self._chunk)
        position = self._start + self._sampler.num_replicas * drawn
        return self._sampler.state_at(self._epoch, position)

    def resume(self, state: SamplerState) -> None:
        self._sampler.check_state(state)
        self._start_at(state["epoch"], state["position"])


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a seed for the random part of one sample, such as its augmentation.

    Use it as `torch.Generator().manual_seed(sample_seed(...))`. It depends only on the sample. The
    number of workers or ranks does not change the sample, and neither does a resume.
    """
    return _seed_of(f"{seed},{epoch},{index}")


class WorkerSeeds:
    """A separate generator, from which torch draws the seeds of DataLoader workers.

    A resumed run starts with a new generator, so each pass sets its state. The workers of a pass
    then have the same random numbers as in an uninterrupted run, and other ones than in any
    other pass.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self._pass = ""

    def start_pass(self, *key: object) -> None:
        """Seed the generator. key: identifies the rank, the epoch and the start of the pass.

        Another pass with the same key continues: it repeats samples, but not random numbers.
        """
        text = repr(key)
        if text != self._pass:
            self._pass = text
            self.generator.manual_seed(_seed_of(text))


def _seed_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def replica(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this process's rank; default: torch.distributed's."""
    if num_replicas is None or rank is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "num_replicas and rank were not given, and torch.distributed is not initialised. "
                "Call setup_distributed() before, or give both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank is {rank}; expected 0 to {num_replicas - 1}, of {num_replicas} replicas"
        )
    return num_replicas, rank


def check_order(
    state: Mapping[str, Any], expected: Mapping[str, Any], owner: str, data: str
) -> None:
    """Raise ValueError if a state was saved for another order of the samples than expected.

    expected: the present state. owner, data: names of the object and its data in the message.
    """
    saved_version = state.get("order_version")
    if saved_version != ORDER_VERSION:
        raise ValueError(
            f"the state of the {owner} has order_version={saved_version!r}; expected "
            f"order_version={ORDER_VERSION}, as each version of this package shuffles in its own "
            "order. Resume with the version that saved the state, or start again without the state"
        )
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(
                f"the state of the {owner} has {name}={state.get(name)!r}; expected "
                f"{name}={value!r}. Resume with the same {data} and the same order, or start again "
                "without the state"
            )

"""Which samples a rank trains on, in which order: a DistributedSampler that holds no permutation and can resume.

Not here: saving the state (checkpoint.py), the size of a batch (training.py).
"""
from __future__ import annotations

import hashlib
import math
import operator
import random
import sys
import weakref
from collections.abc import Iterator, Mapping, Sized
from itertools import chain, repeat
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

_ROUNDS, _ROUNDS_SMALL = 6, 12  # halves of few bits need more of them to be mixed well
_SMALL = 1 << 17
_CHUNK = 1 << 15  # indices computed at once: their tensors and list stay in a core's cache
_FIRST_CHUNK = 1 << 9  # of an iterator, so that the first index comes at once
_MOST = 1 << 60
_ORDER_VERSION = 2  # raise it with every change of the order that Permutation gives for a seed


class Permutation:
    """A pseudo-random order of 0 .. length-1 that is computed index by index: constant memory, any length at once.

    A Feistel network on pairs of numbers (Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002,
    section 4): position = left * 2^h + right, left below a, with a * 2^h at least the length. Each round changes one
    half by a keyed hash of the other, which can be undone, so that the whole is a bijection of a * 2^h numbers; a
    result beyond the length is put in again (cycle walking, section 3). The keys come from the seed.

    a is even: rotating an odd number of values is an even permutation, and so would be the whole for every key.
    """

    def __init__(self, length: int, *key: int) -> None:
        if not 0 < length <= _MOST:
            raise ValueError(f"length is {length}; expected 1 to {_MOST}")
        self.length = length
        self._h = max(1, (length - 1).bit_length() // 2)
        self._a = 2 * -(-length // (2 << self._h))
        rng = random.Random(hashlib.sha256(repr(key).encode()).digest())
        self._keys = [tuple(_signed(rng.getrandbits(32) | odd) for odd in (1, 0, 1))
                      for _ in range(_ROUNDS_SMALL if length < _SMALL else _ROUNDS)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """The indices at these positions; both int64, of one shape, 0 to length-1."""
        out = self._once(positions)
        beyond = (out >= self.length).nonzero().flatten()
        while beyond.numel():
            again = self._once(out[beyond])
            out[beyond] = again
            beyond = beyond[again >= self.length]
        return out

    def _once(self, positions: torch.Tensor) -> torch.Tensor:
        left = (positions >> self._h).to(torch.int32)
        right = (positions & ((1 << self._h) - 1)).to(torch.int32)
        for turn, (factor, offset, last) in enumerate(self._keys):
            source = left if turn % 2 else right
            mixed = source * factor  # wraps around at 32 bits, as hashes do
            mixed += offset
            mixed ^= mixed >> 15
            mixed *= last
            if turn % 2:
                mixed >>= 32 - self._h
                mixed &= (1 << self._h) - 1
                right ^= mixed
            else:
                step = mixed.to(torch.int64)  # the 32 bits as a fraction of a
                step &= 0xFFFFFFFF
                step *= self._a
                step >>= 32
                left += step.to(torch.int32)
                left -= self._a
                left += (left >> 31) & self._a  # where that was below zero
        return (left.to(torch.int64) << self._h) | right


def _signed(word: int) -> int:
    """The 32 bits as torch's int32 has them."""
    return word - (1 << 32) if word >= 1 << 31 else word


def order_version() -> dict[str, int | bool]:
    """Return the entry of a sampler's state that names the order of this version of the package."""
    return {"order_version": _ORDER_VERSION}


def check_order_version(state: Mapping[str, Any]) -> None:
    """Raise ValueError where a state was saved by a version of this package that shuffles in another order."""
    saved = state.get("order_version")
    if saved != _ORDER_VERSION:
        raise ValueError(f"the state has order_version={saved!r}: another version of this package saved it. Expected "
                         f"order_version={_ORDER_VERSION}, as each version shuffles in its own order. Resume with the "
                         "version that saved the state, or start the epoch again without it")


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed for what is random about one sample, such as its augmentation: `torch.Generator().manual_seed(...)`.

    It depends on the sample alone, so that neither the number of workers or ranks nor a resumed epoch changes it.
    """
    digest = hashlib.blake2b(f"{seed},{epoch},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def replica(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and own rank, by default those of torch.distributed."""
    if num_replicas is None or rank is None:
        if not dist.is_initialized():
            raise RuntimeError("num_replicas and rank were not given, and torch.distributed is not initialised. "
                               "Call setup_distributed() before, or give both")
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank is {rank}; expected 0 to {num_replicas - 1}, of {num_replicas} replicas")
    return num_replicas, rank


class ResumableDistributedSampler(Sampler[Any]):
    """torch's DistributedSampler, with a state that resumes in the middle of an epoch, and without its permutation.

    Arguments and meaning are those of torch.utils.data.DistributedSampler; the order is another one (see Permutation).
    Over all ranks an epoch is one global order of which rank r takes the positions r, r + R, r + 2R, ...: the state is
    a position in it, and goes on under another number of ranks R with the samples that are left.

    The state counts what the training loop got, not what workers of a DataLoader fetched ahead: when a DataLoader draws
    from this sampler, its own count of batches is read. Save it on any rank, at the same step on all; load it on all.

    with_epoch: give (epoch, index) instead of index, for a data set whose samples depend on the epoch, such as by
    sample_seed(). The epoch then reaches each worker with the sample, at any num_workers and with persistent_workers.
    An attribute that the script sets on the data set reaches only the workers that start afterwards, so persistent
    workers never see it: with them, a data set that has an attribute `epoch` is refused without with_epoch.
    A DataLoader with in_order=False is refused: how many batches were given does not tell which ones they were.
    """

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True,
                 seed: int = 0, drop_last: bool = False, *, with_epoch: bool = False) -> None:
        num_replicas, rank = replica(num_replicas, rank)
        if len(dataset) < 1:
            raise ValueError("the data set is empty; expected at least one sample")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        self.with_epoch = with_epoch
        self.num_samples = self._samples_from(0)  # of this rank in a whole epoch
        self.total_size = self.num_samples * num_replicas
        self._start = 0  # position in the global order from which the next pass over this epoch goes on
        self._passes: list[_Pass] = []

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, also when it goes on in the middle of one."""
        return self.num_samples

    def __iter__(self) -> Iterator[Any]:
        """Indices, or pairs (epoch, index). RuntimeError for a DataLoader with which a resumed run would go wrong."""
        if any(one.epoch == self.epoch and one.read for one in self._passes):
            self._start = 0  # what was loaded is where one pass went on; the next is a whole one
        begun = _Pass(self, self._start)
        indices = begun.indices()
        self._passes = [one for one in self._passes
                        if one.alive and one.epoch != self.epoch and one.reader is not begun.reader] + [begun]
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. Another epoch than the present one begins at its start."""
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def state_dict(self, consumed: int | None = None) -> dict[str, int | bool]:
        """Where training is: plain numbers, the same on every rank.

        consumed: samples of this rank used in the present pass, for a loop whose DataLoader cannot be followed (a
        batch_sampler without a batch_size, or batches taken ahead by code between the DataLoader and the loop).
        """
        one = next((one for one in self._passes if one.alive and not one.finished),
                   self._passes[-1] if self._passes else None)
        epoch, position = self.epoch, self._start
        if one is not None and (one.epoch == self.epoch or one.alive):
            used = one.consumed if consumed is None else consumed
            if used is None:
                raise RuntimeError("the DataLoader's batch_sampler has no batch_size, so that its batches cannot be "
                                   "counted in samples. Give the number: state_dict(consumed=...)")
            if not 0 <= used <= one.samples:
                raise ValueError(f"consumed is {used}; expected 0 to {one.samples}, this rank's samples of the pass")
            epoch, position = one.epoch, one.start + self.num_replicas * used
        return {"epoch": epoch, "position": position, "length": len(self.dataset), "seed": self.seed,
                "shuffle": self.shuffle, "drop_last": self.drop_last, **order_version()}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go on where state_dict() was taken. ValueError when it is of other data or another order."""
        check_order_version(state)
        own = {"length": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last}
        for name, value in own.items():
            if state.get(name) != value:
                raise ValueError(f"the state of the sampler is of {name}={state.get(name)!r}, but this one has "
                                 f"{name}={value!r}. Resume with the same data and the same order, or start anew")
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and position >= 0):
            raise ValueError(f"the state of the sampler has epoch={epoch!r} position={position!r}; expected numbers")
        self.epoch, self._start = epoch, position
        self._passes = []

    def _samples_from(self, start: int) -> int:
        """Samples of each rank from that position of the global order to the end of the epoch."""
        left = max(0, len(self.dataset) - start)
        return left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)


class _Pass:
    """One iteration over (the rest of) an epoch, and how far its reader is."""

    def __init__(self, sampler: ResumableDistributedSampler, start: int) -> None:
        self.epoch, self.start = sampler.epoch, start
        self.samples = sampler._samples_from(start)
        self._length, self._step, self._offset = len(sampler.dataset), sampler.num_replicas, sampler.rank
        self._order = Permutation(self._length, sampler.seed, sampler.epoch) if sampler.shuffle else None
        self._with_epoch, self._drawn, self._chunk = sampler.with_epoch, 0, iter(())
        # A DataLoader's iterator, and its attributes, which outlive it: after a break out of the loop they still tell.
        self._reader: weakref.ref[Any] | None = None
        self._loader: dict[str, Any] = {}

    def indices(self) -> Iterator[Any]:
        """What the sampler gives, at the speed of list iterators: no Python runs for each index."""
        chunks = self._chunks()
        self._find_loader()
        self._check_loader()
        if self._reader is None:
            self._reader = weakref.ref(chunks)
        return chain.from_iterable(chunks)

    def _chunks(self) -> Iterator[Iterator[Any]]:
        size = _FIRST_CHUNK
        while self._drawn < self.samples:
            count = min(size, self.samples - self._drawn)
            first = self.start + self._offset + self._drawn * self._step
            positions = torch.arange(count, dtype=torch.int64).mul_(self._step).add_(first)
            if first + (count - 1) * self._step >= self._length:
                positions %= self._length  # padding: from the start of the order, as torch does
            self._drawn += count
            self._chunk = iter((positions if self._order is None else self._order(positions)).tolist())
            yield zip(repeat(self.epoch), self._chunk) if self._with_epoch else self._chunk  # noqa: B905
            size = _CHUNK

    def _find_loader(self) -> None:
        """The DataLoader iterator that asked for these indices: it is in a frame above, holding this pass's reader."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(8):
            if frame is None:
                return
            reader = frame.f_locals.get("self")
            if isinstance(reader, _BaseDataLoaderIter):
                self._reader, self._loader = weakref.ref(reader), vars(reader)
                return
            frame = frame.f_back

    def _check_loader(self) -> None:
        """RuntimeError for options of the DataLoader with which a resumed run would get other samples."""
        if not self._loader.get("_in_order", True):
            raise RuntimeError("the DataLoader has in_order=False, so that the number of batches it gave does not tell "
                               "which samples they held. A resumed run would lose and repeat samples. Expected "
                               "in_order=True, the default: leave the option out")
        dataset: Any = self._loader.get("_dataset")
        while type(getattr(dataset, "epoch", None)) is not int and hasattr(dataset, "dataset"):
            dataset = dataset.dataset  # torch's Subset and its like
        if (self._loader.get("_persistent_workers") and not self._with_epoch
                and type(vars(dataset).get("epoch") if hasattr(dataset, "__dict__") else None) is int):
            raise RuntimeError("the DataLoader has persistent_workers=True, and its data set an attribute `epoch`, "
                               "which these workers copy only once. A resumed run would get other samples than one "
                               "without interruption. Make the sampler with with_epoch=True and take the epoch in "
                               "__getitem__((epoch, index)) instead, or leave persistent_workers out")

    @property
    def reader(self) -> object:
        """Who reads the indices; None when it is gone."""
        return self._reader() if self._reader is not None else None

    @property
    def alive(self) -> bool:
        return self.reader is not None

    @property
    def finished(self) -> bool:
        return (self.consumed or 0) >= self.samples

    @property
    def read(self) -> bool:
        """Whether this pass was read, to its end or not, and not only looked at: more than a batch was taken."""
        used = self.consumed
        if used is None or self._batch is None:
            return not self.alive
        return used >= self.samples or used > self._batch

    @property
    def consumed(self) -> int | None:
        """Samples that the training loop got; None where the DataLoader's batches cannot be counted in samples."""
        if not self._loader:
            return self._drawn - operator.length_hint(self._chunk)
        return None if self._batch is None else min(self.samples, self._loader["_num_yielded"] * self._batch)

    @property
    def _batch(self) -> int | None:
        """Samples of one batch, as far as it is known."""
        if not self._loader or not self._loader["_auto_collation"]:
            return 1
        size = getattr(self._loader["_index_sampler"], "batch_size", None)
        return size if isinstance(size, int) else None

"""utils/data/sampler.py, loader.py: ranks share data as with torch; a state resumes exactly."""
from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Subset

from utils.data import ResumableDataLoader, ResumableDistributedSampler, ResumableShardLoader, sample_seed


class Data(Dataset[Any]):
    """`length` samples; each is what `get` makes of its index."""

    def __init__(self, length: int, get: Callable[[Any], Any] = lambda index: index) -> None:
        self.length, self.get = length, get

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)


def sampler(length: int, replicas: int = 1, rank: int = 0, **options: Any) -> Any:
    return ResumableDistributedSampler(Data(length), replicas, rank, **options)


def loader(one: Any, batch_size: int | None = 4, **options: Any) -> ResumableDataLoader:
    return ResumableDataLoader(one.dataset, batch_size, sampler=one, **options)


def resumed(state: Any, *arguments: Any, **options: Any) -> ResumableDataLoader:
    """A new loader of a new sampler(*arguments), which continues where the state was saved."""
    other = loader(sampler(*arguments), **options)
    other.load_state_dict(state)
    return other


def samples(batches: Iterable[Any]) -> list[int]:
    return [index for batch in batches for index in torch.as_tensor(batch).flatten().tolist()]


@pytest.mark.parametrize("length, replicas", [(103, 1), (103, 4), (3, 4), (64, 8)])
def test_ranks_share_the_data_as_torch_does(length: int, replicas: int) -> None:
    for drop_last, shuffle in itertools.product((False, True), repeat=2):
        options = {"drop_last": drop_last, "shuffle": shuffle}
        ours = [sampler(length, replicas, rank, **options) for rank in range(replicas)]
        stock = [DistributedSampler(Data(length), replicas, rank, **options) for rank in range(replicas)]
        assert [one.total_size for one in ours] == [one.total_size for one in stock]
        indices, expected = [list(one) for one in ours], [list(one) for one in stock]
        assert [len(one) for one in ours] == [len(one) for one in indices]
        if shuffle:
            indices, expected = ([sorted(samples(ranks).count(index) for index in range(length))]
                                 for ranks in (indices, expected))
        assert indices == expected


def test_epochs_have_different_and_repeatable_orders() -> None:
    one = sampler(50)
    first = list(one)
    one.set_epoch(1)
    second = list(one)
    one.set_epoch(0)
    assert list(one) == first != second


@pytest.mark.parametrize("call, error, words", [
    (lambda: sampler(4, 2, 2), ValueError, "rank is 2; expected 0 to 1"),
    (lambda: sampler(4, 0, 0), ValueError, "rank is"), (lambda: sampler(4, 2, -1), ValueError, "rank is"),
    (lambda: sampler(0), ValueError, "empty"), (lambda: sampler(4, None, None), RuntimeError, "setup_distributed"),
    (lambda: sampler(4).state_dict(), RuntimeError, "ResumableDataLoader"),
    (lambda: loader(sampler(4), num_workers=2, in_order=False), ValueError, "in_order is False; expected True")])
def test_bad_arguments_are_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_huge_data_set_starts_and_resumes_in_little_memory() -> None:
    tracemalloc.start()
    one = sampler(10**10, 8, 3)
    next(iter(one))
    one.resume({**one.state_at(0, 0), "position": 10**10 // 2})
    next(iter(one))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_iterator_has_a_state_after_each_index() -> None:
    """torchdata's StatefulDataLoader saves it; it would prefer a state of the sampler itself."""
    one = sampler(1500, with_epoch=True)
    assert not hasattr(one, "load_state_dict")
    one.set_epoch(3)
    whole, indices, drawn = list(one), iter(one), 0
    assert [epoch for epoch, _ in whole] == [3] * 1500
    for count in (0, 1, 2, 511, 512, 513, 1499, 1500):
        drawn += len(list(islice(indices, count - drawn)))
        again = iter(sampler(1500, with_epoch=True))
        again.load_state_dict(indices.state_dict())
        assert list(again) == whole[count:]


@pytest.mark.parametrize("received", [11, 7])  # all whole batches of 4, or some of them
def test_a_loaded_position_is_for_one_pass(received: int) -> None:
    whole = list(sampler(107))
    batches = resumed(sampler(107).state_at(0, 60), 107, drop_last=True)
    next(iter(batches))  # a look at one batch is no pass
    assert samples(islice(batches, received)) == whole[60:60 + 4 * received]
    assert samples(batches) == whole[:104]


def test_several_resumes_in_one_epoch_lose_and_repeat_nothing() -> None:
    """The loop takes one batch ahead, and says so."""
    whole, got, state = list(sampler(101)), list[int](), sampler(101).state_at(0, 0)
    for count in (1, 10, 2, 8, 1000):
        batches = resumed(state, 101)
        reader = iter(batches)
        mine = samples(islice(reader, count))
        next(reader, None)
        state = batches.state_dict(consumed=len(mine))
        got += mine
    assert got == whole
    with pytest.raises(ValueError, match="consumed is 18; expected 0 to 17, "):
        batches.state_dict(consumed=18)

    batches = resumed(state, 101)
    assert samples(batches) == []
    batches.sampler.set_epoch(1)
    assert sorted(samples(batches)) == list(range(101))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_early_start_of_the_next_epoch_does_not_hide_this_one(workers: int) -> None:
    one = sampler(40)
    batches = loader(one, num_workers=workers)
    first = iter(batches)
    got = samples(islice(first, 2))
    one.set_epoch(1)
    second = iter(batches)
    early = samples(islice(second, 1))
    assert batches.state_dict() == one.state_at(0, len(got))
    got += samples(first)
    assert batches.state_dict() == one.state_at(1, 4)
    assert early + samples(second) == list(one)
    one.set_epoch(0)
    assert got == list(one)


def test_an_abandoned_epoch_does_not_hide_the_next_one() -> None:
    one = sampler(40)
    batches = loader(one)
    next(iter(batches))
    assert batches.state_dict() == one.state_at(0, 4)
    one.set_epoch(1)
    assert batches.state_dict() == one.state_at(1, 0)


def test_an_exhausted_pass_that_is_kept_does_not_hide_the_next_one() -> None:
    one = sampler(10)
    batches = loader(one, drop_last=True)  # two of the samples are never received
    kept = iter(batches)
    assert len(list(kept)) == 2 and batches.state_dict() == one.state_at(0, 8)
    one.set_epoch(1)
    following = iter(batches)
    next(following)
    assert batches.state_dict() == one.state_at(1, 4)


def test_single_samples_are_counted_without_a_batch_size() -> None:
    batches = loader(sampler(30), batch_size=None)
    assert samples(islice(batches, 2)) == list(sampler(30))[:2]
    assert batches.state_dict()["position"] == 2


def noise(samples: int, first: int) -> Iterator[Any]:
    return (torch.rand(()) for _ in range(first, samples))


def noisy_loaders() -> list[Any]:
    return [loader(ResumableDistributedSampler(Data(8, lambda _: torch.rand(())), 1, 0), num_workers=1),
            ResumableShardLoader([8, 8], noise, 4, num_replicas=1, rank=0, num_workers=1)]


@pytest.mark.parametrize("kind", [0, 1])
def test_workers_random_numbers_continue_after_a_resume(kind: int) -> None:
    """Otherwise each resumed epoch would get the augmentation of the first one again."""

    def epoch_of(batches: Any, epoch: int) -> Any:
        getattr(batches, "sampler", batches).set_epoch(epoch)
        return torch.cat(list(batches)).tolist()

    whole, other = (noisy_loaders()[kind] for _ in range(2))
    before = torch.get_rng_state()
    first = epoch_of(whole, 0)
    state = whole.state_dict()
    second = epoch_of(whole, 1)
    assert first != second
    assert torch.equal(before, torch.get_rng_state())  # or the dropout of a resumed run would change

    other.load_state_dict(state)
    assert epoch_of(other, 1) == second
    assert epoch_of(other, 1) != second  # a repeated epoch has the same samples, not the same noise


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_skips_a_bad_batch_is_counted_right(workers: int) -> None:
    def read(index: int) -> int:
        if index == whole[9]:
            raise OSError("unreadable")
        return index

    whole = list(sampler(40))
    batches = loader(ResumableDistributedSampler(Data(40, read), 1, 0), num_workers=workers)
    reader = iter(batches)
    samples(islice(reader, 2))
    with pytest.raises(OSError):
        next(reader)
    assert batches.state_dict()["position"] == 8  # a run that ends now tries the batch again
    assert samples([next(reader)]) == whole[12:16]
    assert batches.state_dict()["position"] == 16


def test_a_loop_that_continues_a_replaced_pass_is_refused() -> None:
    one = sampler(40)
    batches = loader(one, num_workers=1, persistent_workers=True)
    first = iter(batches)
    state = [next(first), batches.state_dict()][1]
    one.set_epoch(1)
    second = iter(batches)
    next(second)
    with pytest.raises(RuntimeError, match="this pass over epoch 0 ended"):
        next(first)
    batches.load_state_dict(state)
    with pytest.raises(RuntimeError, match="this pass over epoch 1 ended"):
        next(second)
    assert samples(batches) == list(sampler(40))[4:]


def test_the_epoch_reaches_persistent_workers() -> None:
    one, other = (sampler(60, with_epoch=True) for _ in range(2))
    batches, again = (loader(each, num_workers=2, persistent_workers=True) for each in (one, other))
    list(batches)  # the workers start in epoch 0
    one.set_epoch(1)
    got = list(islice(batches, 7))
    again.load_state_dict(batches.state_dict())
    rows = torch.cat([torch.stack(batch) for batch in [*got, *again]], 1)
    assert rows[0].tolist() == [1] * 60 and rows[1].tolist() == [index for _, index in one]


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_epoch_that_workers_would_not_see_is_refused(wrapped: bool) -> None:
    dataset: Any = Data(40)
    dataset.epoch = 0
    one = ResumableDistributedSampler(Subset(dataset, range(40)) if wrapped else dataset, 1, 0)
    with pytest.raises(ValueError, match="with_epoch=True"):
        loader(one, num_workers=1, persistent_workers=True)
    assert len(samples(loader(one, in_order=False))) == 40  # without workers the order is kept


@pytest.mark.parametrize("change, words", [
    ({"length": 11}, "length"), ({"seed": 1}, "seed"), ({"shuffle": False}, "shuffle"),
    ({"drop_last": True}, "drop_last"), ({"order_version": None}, "order_version=None.*version that saved"),
    ({"order_version": 1}, "order_version=1.*version that saved"), ({"epoch": None}, "whole numbers"),
    ({"position": -1}, "whole numbers"), ({"position": "4"}, "whole numbers")])
def test_another_order_or_a_damaged_state_is_refused(change: dict[str, Any], words: str) -> None:
    one = sampler(10)
    state: Any = {**one.state_at(0, 4), **change}
    for load in (loader(one).load_state_dict, iter(one).load_state_dict):
        with pytest.raises(ValueError, match=words):
            load(state)


def test_the_seed_of_a_sample_depends_on_seed_epoch_and_index() -> None:
    seeds = [sample_seed(*key) for key in itertools.product(range(3), range(3), range(500))]
    assert len(set(seeds)) == 4500 and seeds[-1] == sample_seed(2, 2, 499)
    assert 0 <= min(seeds) and max(seeds) < 1 << 63

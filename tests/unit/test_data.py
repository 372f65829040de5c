"""utils/data.py: the order is a permutation as good as randperm's, and its state resumes exactly."""
from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, Subset

from utils.data import Permutation, ResumableDistributedSampler, sample_seed


class Numbers(Sequence[int]):
    """A data set of `length` samples, each its own index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index


def sampler(length: int, replicas: int = 1, rank: int = 0, **options: bool | int) -> ResumableDistributedSampler:
    return ResumableDistributedSampler(Numbers(length), replicas, rank, **options)  # type: ignore[arg-type]


def samples(batches: Iterable[torch.Tensor]) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


# The order -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 1000, 4096, 4097, 131072, 200003])
def test_every_index_comes_once(length: int) -> None:
    order = Permutation(length, 1, 2)(torch.arange(length))
    assert torch.equal(order.sort().values, torch.arange(length))


@pytest.mark.parametrize("length", [10**8, 10**10, 10**15, 2**60])
def test_huge_orders_stay_in_range_and_collide_nowhere(length: int) -> None:
    step = max(1, length // 50_000)
    order = Permutation(length, 3)(torch.arange(0, length, step)[:50_000])
    assert 0 <= int(order.min()) and int(order.max()) < length
    assert len(order.unique()) == len(order)


def test_the_order_is_that_of_the_seed_and_the_epoch() -> None:
    """Written down, so that no release changes the order of a run that is to be resumed."""
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [0, 1, 3, 2, 7, 4, 6, 5, 9, 8]
    assert Permutation(10**10, 0, 1)(torch.arange(3)).tolist() == [9893941043, 1475216443, 625146259]
    assert Permutation(1000, 0, 1)(torch.arange(9)).tolist() != Permutation(1000, 1, 0)(torch.arange(9)).tolist()


# Of a random permutation each of these has mean 0 and variance 1; over K independent ones the mean of K is normal, and
# the bound of 4.5 standard deviations is missed by chance once in 150,000 times. The keys are fixed, so is the outcome.

def ascents(orders: torch.Tensor) -> torch.Tensor:
    n = orders.shape[1]
    return ((orders[:, 1:] > orders[:, :-1]).sum(1) - (n - 1) / 2) / math.sqrt((n + 1) / 12)


def correlation_with_position(orders: torch.Tensor) -> torch.Tensor:
    return spearman(orders, torch.arange(orders.shape[1]).expand_as(orders))


def correlation_with_next_epoch(orders: torch.Tensor) -> torch.Tensor:
    return spearman(orders[::2], orders[1::2])


def spearman(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    n = a.shape[1]
    middle = (n - 1) / 2
    return ((a.double() - middle) * (b - middle)).sum(1) / (n * (n * n - 1) / 12) * math.sqrt(n - 1)


def small_indices_in_the_first_half(orders: torch.Tensor) -> torch.Tensor:
    half = orders.shape[1] // 2
    found = (orders[:, :half] < half).sum(1).double()
    return (found - half / 2) / math.sqrt(half * 0.25 * half / (2 * half - 1))


def fixed_points(orders: torch.Tensor) -> torch.Tensor:
    return (orders == torch.arange(orders.shape[1])).sum(1).double() - 1


def same_side_of_the_middle_as_the_neighbour(orders: torch.Tensor) -> torch.Tensor:
    n = orders.shape[1]
    low = orders < n // 2
    pairs = (low[:, 0::2] == low[:, 1::2]).sum(1).double()
    p = (n / 2 - 1) / (n - 1)
    return (pairs - n / 2 * p) / math.sqrt(n / 2 * p * (1 - p) * n / (n - 1))


@pytest.mark.parametrize("statistic", [ascents, correlation_with_position, correlation_with_next_epoch,
                                       small_indices_in_the_first_half, fixed_points,
                                       same_side_of_the_middle_as_the_neighbour])
@pytest.mark.parametrize("length, count", [(100, 1000), (1000, 600), (200_000, 20)])
def test_the_order_is_as_random_as_randperm(statistic, length: int, count: int) -> None:  # type: ignore[no-untyped-def]
    orders = torch.stack([Permutation(length, 0, epoch)(torch.arange(length)) for epoch in range(count)])
    values = statistic(orders).double()
    assert abs(float(values.mean())) * math.sqrt(len(values)) < 4.5
    assert abs(float(values.var()) - 1) < 4.5 * math.sqrt(3 / len(values))


def is_odd(order: list[int]) -> bool:
    """Whether the permutation is a product of an odd number of transpositions."""
    cycles, seen = 0, set[int]()
    for first in order:
        cycles += first not in seen
        while first not in seen:
            seen.add(first)
            first = order[first]
    return (len(order) - cycles) % 2 == 1


@pytest.mark.parametrize("length", [*range(2, 33), 40, 56, 64, 144])
def test_half_of_the_orders_are_odd_and_every_place_is_as_likely(length: int) -> None:
    orders = torch.stack([Permutation(length, seed, length)(torch.arange(length)) for seed in range(400)])
    odd = sum(map(is_odd, orders.tolist()))
    assert abs(odd - 200) < 4.5 * 10
    times = torch.zeros(length, length).index_put_(
        (torch.arange(length).expand_as(orders), orders), torch.tensor(1.0), accumulate=True)
    chi_square = ((times - 400 / length) ** 2 / (400 / length)).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 4.5 * math.sqrt(2 * freedom) + 4


def test_every_order_of_a_tiny_data_set_occurs() -> None:
    seen = {tuple(Permutation(4, seed)(torch.arange(4)).tolist()) for seed in range(400)}
    assert len(seen) == 24


# The sampler ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("length, replicas", [(103, 1), (103, 2), (103, 4), (3, 4), (64, 8)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_ranks_share_the_data_as_torch_does(length: int, replicas: int, drop_last: bool, shuffle: bool) -> None:
    ours = [sampler(length, replicas, rank, drop_last=drop_last, shuffle=shuffle) for rank in range(replicas)]
    stock = [DistributedSampler(Numbers(length), replicas, rank, drop_last=drop_last, shuffle=shuffle)
             for rank in range(replicas)]
    assert [len(one) for one in ours] == [len(list(one)) for one in ours] == [len(one) for one in stock]
    assert [one.total_size for one in ours] == [one.total_size for one in stock]
    together = [index for one in ours for index in one]
    if shuffle:
        times = sorted(map(together.count, range(length)))
        expected = sorted([index for one in stock for index in one].count(index) for index in range(length))
        assert times == expected
    else:
        assert [list(one) for one in ours] == [list(one) for one in stock]


def test_epochs_have_different_orders_and_each_is_repeatable() -> None:
    one = sampler(50)
    orders = []
    for epoch in (0, 1, 0):
        one.set_epoch(epoch)
        orders.append(list(one))
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("bad", [{"num_replicas": 2, "rank": 2}, {"num_replicas": 0, "rank": 0},
                                 {"num_replicas": 2, "rank": -1}])
def test_a_rank_that_does_not_exist_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rank is"):
        ResumableDistributedSampler(Numbers(4), **bad)


def test_without_ranks_and_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="setup_distributed"):
        ResumableDistributedSampler(Numbers(4))


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        sampler(0)


# Resuming ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers, persistent", [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("leave", ["by break", "holding the iterator"])
def test_the_state_counts_what_the_loop_got_and_not_what_workers_fetched(workers: int, persistent: bool,
                                                                          leave: str) -> None:
    whole = sampler(103, 2, 1)
    whole.set_epoch(5)
    one = sampler(103, 2, 1)
    one.set_epoch(5)
    loader = DataLoader(Numbers(103), 4, sampler=one, num_workers=workers, persistent_workers=persistent)
    reader, got = iter(loader), []
    for _ in range(5):
        got += next(reader).tolist()
    if leave == "by break":
        del reader
    state = one.state_dict()
    other = sampler(103, 2, 1)
    other.load_state_dict(state)
    other.set_epoch(5)
    rest = samples(DataLoader(Numbers(103), 4, sampler=other, num_workers=workers))
    assert got + rest == list(whole)


def test_the_state_is_right_after_each_single_index_without_a_loader() -> None:
    whole = list(sampler(1500))
    one = sampler(1500)
    reader = iter(one)
    for done in (0, 1, 2, 511, 512, 513, 1499, 1500):
        while one.state_dict()["position"] < done:
            next(reader)
        other = sampler(1500)
        other.load_state_dict(one.state_dict())
        assert list(other) == whole[done:]


def test_an_epoch_that_was_done_is_not_repeated_and_the_next_one_is_whole() -> None:
    one = sampler(10)
    list(one)
    other = sampler(10)
    other.load_state_dict(one.state_dict())
    assert list(other) == []
    other.set_epoch(1)
    one.set_epoch(1)
    assert list(other) == list(one) and len(list(other)) == 10


@pytest.mark.parametrize("taken", [11, 7])  # all whole batches of 4, without the last three samples; not to the end
def test_what_was_loaded_is_for_one_pass_and_the_next_is_whole(taken: int) -> None:
    whole = list(sampler(107))
    one = sampler(107)
    one.load_state_dict({**one.state_dict(), "position": 60})
    loader = DataLoader(Numbers(107), 4, sampler=one, drop_last=True)
    next(iter(loader))  # a look at a batch is no pass
    read = [index for batch, _ in zip(loader, range(taken), strict=False) for index in batch.tolist()]
    assert read == whole[60:60 + 4 * taken]
    assert samples(iter(loader)) == whole[:104]


def test_several_resumes_in_one_epoch_lose_and_repeat_nothing() -> None:
    whole, got, state = list(sampler(101, 1, 0)), [], None
    for count in (1, 30, 2, 40, 1000):
        one = sampler(101, 1, 0)
        if state:
            one.load_state_dict(state)
        reader = iter(one)
        got += [index for index, _ in zip(reader, range(count), strict=False)]
        if count == 1000:
            break
        # zip has drawn one index more than it gave
        state = one.state_dict(consumed=count)
    assert got == whole


def test_another_number_of_ranks_goes_on_in_the_same_global_order() -> None:
    """4 ranks, then 2, then 3: every sample once, and each global batch of 12 as without the changes."""
    whole = list(sampler(1200))
    got: list[int] = []
    state = sampler(1200).state_dict()
    for replicas, steps in ((4, 10), (2, 50), (3, 40)):
        ranks = [sampler(1200, replicas, rank) for rank in range(replicas)]
        for one in ranks:
            one.load_state_dict(state)
        readers = [iter(DataLoader(Numbers(1200), 12 // replicas, sampler=one)) for one in ranks]
        for _ in range(steps):
            batches = [next(reader).tolist() for reader in readers]
            got += [index for same in zip(*batches, strict=True) for index in same]
        states = [one.state_dict() for one in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert got == whole


def test_a_next_epoch_that_is_being_fetched_already_does_not_hide_the_present_one() -> None:
    one = sampler(40)
    first = iter(DataLoader(Numbers(40), 4, sampler=one, num_workers=1))
    got = next(first).tolist() + next(first).tolist()
    one.set_epoch(1)
    second = iter(DataLoader(Numbers(40), 4, sampler=one, num_workers=1))
    assert one.state_dict()["epoch"] == 0 and one.state_dict()["position"] == len(got)
    samples(first)
    assert one.state_dict()["epoch"] == 1 and one.state_dict()["position"] == 0
    next(second)
    assert one.state_dict()["position"] == 4


def test_an_epoch_that_was_given_up_does_not_hide_the_next_one() -> None:
    one = sampler(40)
    for _ in zip(DataLoader(Numbers(40), 4, sampler=one), range(2), strict=False):
        pass
    one.set_epoch(1)
    assert one.state_dict()["epoch"] == 1 and one.state_dict()["position"] == 0


class Unsized(Sampler[list[int]]):
    """A batch sampler without batch_size."""

    def __init__(self, of: ResumableDistributedSampler) -> None:
        self.of = of

    def __iter__(self) -> Iterator[list[int]]:
        yield from BatchSampler(self.of, 3, drop_last=False)


def test_batches_of_a_batch_sampler_are_counted_or_the_number_is_asked_for() -> None:
    one = sampler(30)
    next(iter(DataLoader(Numbers(30), batch_sampler=BatchSampler(one, 6, drop_last=True))))
    assert one.state_dict()["position"] == 6
    next(iter(DataLoader(Numbers(30), batch_sampler=Unsized(one))))
    with pytest.raises(RuntimeError, match="consumed="):
        one.state_dict()
    assert one.state_dict(consumed=3)["position"] == 3


def test_single_samples_are_counted_where_the_loader_makes_no_batches() -> None:
    one = sampler(30)
    reader = iter(DataLoader(Numbers(30), batch_size=None, sampler=one))
    next(reader), next(reader)
    assert one.state_dict()["position"] == 2


class Augmented(Dataset[torch.Tensor]):
    """Samples that depend on the epoch, which comes with the index."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        epoch, index = key
        return torch.tensor([epoch, index, sample_seed(0, epoch, index)])


WORKERS: list[dict[str, Any]] = [
    {}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 4},
    {"num_workers": 1, "pin_memory": True}, {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}]


@pytest.mark.parametrize("options", WORKERS)
def test_the_epoch_reaches_every_worker_and_a_resumed_run_gets_the_same_samples(options: dict[str, Any]) -> None:
    def epochs(one: ResumableDistributedSampler, batches: int = 1000) -> list[list[int]]:
        loader, got = DataLoader(Augmented(), 4, sampler=one, **options), list[list[int]]()
        for epoch in range(one.epoch, 3):
            one.set_epoch(epoch)
            for batch in loader:
                got += batch.tolist()
                batches -= 1
                if not batches:
                    return got
        return got

    whole = epochs(sampler(60, with_epoch=True))
    assert [row[0] for row in whole] == 60 * [0] + 60 * [1] + 60 * [2]
    assert all(sample_seed(0, epoch, index) == seed for epoch, index, seed in whole)
    first = sampler(60, with_epoch=True)
    got = epochs(first, 20)  # into the second epoch
    second = sampler(60, with_epoch=True)
    second.load_state_dict(first.state_dict())
    assert got + epochs(second) == whole


def test_epochs_come_with_indices_without_a_loader_too() -> None:
    one = sampler(1500, with_epoch=True)
    one.set_epoch(3)
    reader = iter(one)
    got = [next(reader) for _ in range(700)]
    assert one.state_dict()["position"] == 700
    assert [epoch for epoch, _ in got] == [3] * 700
    assert [index for _, index in got] == Permutation(1500, 0, 3)(torch.arange(700)).tolist()


class WithEpoch(Numbers):
    epoch: int

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = 0


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(40))])
def test_an_epoch_that_persistent_workers_would_not_see_is_refused(wrap: Any) -> None:
    data = wrap(WithEpoch(40))
    one = sampler(40)
    with pytest.raises(RuntimeError, match="with_epoch=True"):
        iter(DataLoader(data, 4, sampler=one, num_workers=1, persistent_workers=True))
    assert len(samples(DataLoader(data, 4, sampler=one, num_workers=1))) == 40


def test_batches_in_any_order_are_refused_as_they_cannot_be_counted() -> None:
    with pytest.raises(RuntimeError, match="in_order=True"):
        iter(DataLoader(Numbers(40), 4, sampler=sampler(40), num_workers=2, in_order=False))
    assert len(samples(DataLoader(Numbers(40), 4, sampler=sampler(40), in_order=False))) == 40  # no workers


@pytest.mark.parametrize("name, value", [("length", 11), ("seed", 1), ("shuffle", False), ("drop_last", True)])
def test_a_state_of_another_order_is_refused(name: str, value: int) -> None:
    state = {**sampler(10).state_dict(), name: value}
    with pytest.raises(ValueError, match=name):
        sampler(10).load_state_dict(state)


@pytest.mark.parametrize("version", [None, 1])
def test_a_state_of_a_version_with_another_order_is_refused(version: int | None) -> None:
    state = {name: value for name, value in sampler(10).state_dict().items() if name != "order_version"}
    if version is not None:
        state["order_version"] = version
    with pytest.raises(ValueError, match=f"order_version={version}.*version that saved"):
        sampler(10).load_state_dict(state)


def test_the_order_of_this_version_is_kept() -> None:
    """Another order needs another order version: a state would go on with other samples."""
    assert sampler(10).state_dict()["order_version"] == 2
    assert list(sampler(10)) == [0, 1, 3, 2, 7, 4, 6, 5, 9, 8]
    assert Permutation(1 << 20, 0, 0)(torch.arange(4)).tolist() == [726526, 270253, 342699, 564302]


@pytest.mark.parametrize("broken", [{"epoch": None}, {"position": -1}, {"position": "4"}])
def test_a_broken_state_is_refused(broken: dict[str, object]) -> None:
    state = {**sampler(10).state_dict(), **broken}
    with pytest.raises(ValueError, match="expected numbers"):
        sampler(10).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [10**8, 10**10])
def test_huge_data_sets_start_and_resume_with_little_memory(length: int) -> None:
    tracemalloc.start()
    one = sampler(length, 8, 3)
    next(iter(one))
    one.load_state_dict({**one.state_dict(), "position": length // 2})
    next(iter(one))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


# What is random about a sample ---------------------------------------------------------------------------------------

def test_the_seed_of_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    seeds = {sample_seed(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(500)}
    assert len(seeds) == 4500
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)

"""utils/data: the sampler shares data as torch's does; either loader resumes exactly; random orders."""
from __future__ import annotations

import itertools
import math
import multiprocessing
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset, get_worker_info

from utils.checkpoint import Checkpointer, PerRank
from utils.data import Permutation, ResumableDataLoader, ResumableDistributedSampler, resumable_loader, sample_seed


def same(index: Any) -> Any:
    return index


class Data(Dataset[Any]):
    """`length` samples; each is what `get` makes of its index. `get` goes to workers by pickle since Python 3.14."""

    def __init__(self, length: int, get: Callable[[Any], Any] = same) -> None:
        self.length, self.get = length, get

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)


DATA_WITH_EPOCH: Any = SimpleNamespace(epoch=0)


def sampler(data: Any, replicas: int = 1, rank: int = 0, **options: Any) -> Any:
    return ResumableDistributedSampler(Data(data) if isinstance(data, int) else data, replicas, rank, **options)


def loader(one: Any, batch_size: int | None = 4, **options: Any) -> Any:
    return ResumableDataLoader(one.dataset, batch_size, sampler=one, **options)


def samples(batches: Iterable[torch.Tensor | int]) -> list[int]:
    return [sample for batch in batches for sample in torch.as_tensor(batch).flatten().tolist()]


@pytest.mark.parametrize("length, replicas", [(103, 1), (103, 4), (3, 4), (64, 8)])
def test_ranks_share_the_data_as_torch_does(length: int, replicas: int) -> None:
    for drop_last, shuffle in itertools.product((False, True), repeat=2):
        options = {"drop_last": drop_last, "shuffle": shuffle}
        ours = [sampler(length, replicas, rank, **options) for rank in range(replicas)]
        stock = [DistributedSampler(Data(length), replicas, rank, **options) for rank in range(replicas)]
        assert [one.total_size for one in ours] == [one.total_size for one in stock]
        assert [len(list(one)) for one in ours] == list(map(len, ours)) == list(map(len, stock))
        if shuffle:
            repeats, expected = (sorted(Counter(itertools.chain(*ranks)).values()) for ranks in (ours, stock))
            assert repeats == expected
        else:
            assert list(map(list, ours)) == list(map(list, stock))


@pytest.mark.parametrize("call, error, words", [
    (lambda: sampler(4, 2, 2), ValueError, "rank is 2; expected 0 to 1"),
    (lambda: sampler(4, 0, 0), ValueError, "rank is"), (lambda: sampler(4, 2, -1), ValueError, "rank is"),
    (lambda: sampler(0), ValueError, "empty"), (lambda: sampler(4, None, None), RuntimeError, "setup_distributed"),
    (lambda: sampler(4).state_dict(), RuntimeError, "ResumableDataLoader"),
    (lambda: loader(sampler(4), num_workers=2, in_order=False), ValueError, "in_order is False; expected True"),
    (lambda: loader(sampler(Subset(DATA_WITH_EPOCH, range(4))), num_workers=1, persistent_workers=True), ValueError,
     "with_epoch=True")])
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
    one, other = (sampler(1500, with_epoch=True) for _ in range(2))
    assert not hasattr(one, "load_state_dict")
    one.set_epoch(3)
    whole, indices = list(one), iter(one)
    assert [epoch for epoch, _ in whole] == [3] * 1500
    for count in range(1501):
        if count in (0, 1, 511, 512, 513, 1499, 1500):
            again = iter(other)
            again.load_state_dict(indices.state_dict())
            assert list(again) == whole[count:]
        next(indices, None)


@pytest.mark.parametrize("received", [11, 7])  # all whole batches of 4, or some of them
def test_a_loaded_position_is_for_one_pass(received: int) -> None:
    whole, batches = list(sampler(107)), loader(sampler(107), drop_last=True, in_order=False)  # it is, without workers
    batches.load_state_dict(sampler(107).state_at(0, 60))
    next(iter(batches))  # a look at one batch is no pass
    assert samples(islice(batches, received)) == whole[60:60 + 4 * received]
    assert samples(batches) == whole[:104]


def test_several_resumes_in_one_epoch_lose_and_repeat_nothing() -> None:
    """The loop takes one batch ahead, and says so."""
    whole, got, batches = list(sampler(101)), list[int](), loader(sampler(101))
    for count in (1, 10, 2, 8, 1000):
        reader = iter(batches)
        mine = samples(islice(reader, count))
        next(reader, None)
        state, batches = batches.state_dict(consumed=len(mine)), loader(sampler(101))
        batches.load_state_dict(state)
        got += mine
    assert got == whole
    with pytest.raises(ValueError, match="consumed is 1; expected 0 to 0, "):
        next(iter(batches), None)
        batches.state_dict(consumed=1)


@pytest.mark.parametrize("batch_size, workers", [(None, 0), (4, 1)])
def test_an_early_start_of_the_next_epoch_does_not_hide_this_one(batch_size: int | None, workers: int) -> None:
    one, other = (loader(sampler(125), batch_size, num_workers=workers) for _ in range(2))
    first = iter(one)
    got = samples(islice(first, 5))
    one.sampler.set_epoch(1)
    second = iter(one)
    early = samples(islice(second, 1))
    other.load_state_dict(one.state_dict())
    rest = samples(first)
    assert samples(other) == rest and sorted(got + rest) == list(range(125))

    other.load_state_dict(one.state_dict())
    second_rest = samples(second)
    assert samples(other) == second_rest and sorted(early + second_rest) == list(range(125))
    assert early + second_rest != got + rest


@pytest.mark.parametrize("exhausted", [False, True])
def test_an_ended_pass_does_not_hide_the_next_one(exhausted: bool) -> None:
    one, other = (loader(sampler(125), drop_last=True) for _ in range(2))
    kept = iter(one) if exhausted else None
    samples(kept or islice(one, 1))
    if exhausted:  # although the last sample is never received
        other.load_state_dict(one.state_dict())
        assert samples(other) == []
    one.sampler.set_epoch(1)
    other.sampler.set_epoch(1)
    whole = samples(other)
    assert len(whole) == 124
    other.load_state_dict(one.state_dict())
    assert samples(other) == whole

    following = iter(one)
    got = samples(islice(following, 3))
    other.load_state_dict(one.state_dict())
    assert got + samples(other) == whole


def noise_of(_: int) -> Tensor:
    return torch.rand(())


def test_workers_random_numbers_continue_after_a_resume() -> None:
    """Otherwise each resumed epoch would get the augmentation of the first one again."""
    noise = Data(8, noise_of)
    whole, other = (loader(sampler(noise), num_workers=1) for _ in range(2))
    before = torch.get_rng_state()
    first = samples(whole)
    state = whole.state_dict()
    whole.sampler.set_epoch(1)
    second = samples(whole)
    assert first != second
    assert torch.equal(before, torch.get_rng_state())  # or the dropout of a resumed run would change

    other.load_state_dict(state)
    other.sampler.set_epoch(1)
    assert samples(other) == second
    assert samples(other) != second  # a repeated epoch has the same samples, not the same noise


def read_except(bad: int, index: int) -> int:
    if index == bad:
        raise OSError("unreadable")
    return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_skips_a_bad_batch_is_counted_right(workers: int) -> None:
    whole = list(sampler(40))
    batches = loader(sampler(Data(40, partial(read_except, whole[9]))), num_workers=workers)
    reader = iter(batches)
    samples(islice(reader, 2))
    with pytest.raises(OSError):
        next(reader)
    assert batches.state_dict()["position"] == 8  # a run that ends now tries the batch again
    assert samples([next(reader)]) == whole[12:16]
    assert batches.state_dict()["position"] == 16


def test_a_loop_that_continues_a_replaced_pass_is_refused() -> None:
    others = set(multiprocessing.active_children())
    one = loader(sampler(125), num_workers=2, persistent_workers=True)
    first = iter(one)
    got = samples(islice(first, 3))
    state, workers = one.state_dict(), set(multiprocessing.active_children()) - others
    one.sampler.set_epoch(1)
    second = iter(one)
    next(second)
    with pytest.raises(RuntimeError, match="this pass over epoch 0 ended"):
        next(first)
    one.load_state_dict(state)
    with pytest.raises(RuntimeError, match="this pass over epoch 1 ended"):
        next(second)
    assert sorted(got + samples(one)) == list(range(125))
    assert set(multiprocessing.active_children()) - others == workers and len(workers) == 2


def test_loader_and_sampler_are_made_in_one_call() -> None:
    """For this rank of a job, with the arguments of both."""
    job = SimpleNamespace(rank=1, world_size=2)
    loader = resumable_loader(TensorDataset(torch.arange(8)), job, 2, shuffle=False, seed=7, drop_last=True)  # type: ignore[arg-type]
    assert [batch[0].tolist() for batch in loader] == [[1, 3], [5, 7]]
    assert (loader.sampler.seed, loader.state_dict()["position"]) == (7, 8)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="sampler is a DistributedSampler; expected a ResumableDistributedSampler"):
        ResumableDataLoader(loader.dataset, sampler=DistributedSampler(loader.dataset, 2, 1))  # type: ignore[arg-type]


def test_the_epoch_reaches_persistent_workers() -> None:
    one, other = (sampler(60, with_epoch=True) for _ in range(2))
    batches, again = (loader(each, num_workers=2, persistent_workers=True) for each in (one, other))
    list(batches)  # the workers start in epoch 0
    one.set_epoch(1)
    got = list(islice(batches, 7))
    again.load_state_dict(batches.state_dict())
    rows = torch.cat([torch.stack(batch) for batch in [*got, *again]], 1)
    assert rows[0].tolist() == [1] * 60 and rows[1].tolist() == [index for _, index in one]


@pytest.mark.parametrize("change, words", [
    ({"length": 11}, "length"), ({"seed": 1}, "seed"), ({"shuffle": False}, "shuffle"),
    ({"drop_last": True}, "drop_last"), ({"order_version": 1}, "order_version"), ({"epoch": None}, "whole numbers"),
    ({"position": -1}, "whole numbers"), ({"position": "4"}, "whole numbers")])
def test_another_order_or_a_damaged_state_is_refused(change: dict[str, Any], words: str) -> None:
    one = sampler(10)
    state: Any = {**one.state_at(0, 4), **change}
    for load in (loader(one).load_state_dict, iter(one).load_state_dict):
        with pytest.raises(ValueError, match=words):
            load(state)


class Stream(IterableDataset[int]):
    """Read by several workers, each of which has a state of its own."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info
        while self.read < 20:
            self.read += 1
            yield 20 * info.id + self.read - 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def test_a_stream_with_a_stateful_loader_resumes_as_documented(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    (block,) = (part for part in page.split("```python\n") if "StatefulDataLoader(" in part)

    def train(batches: int) -> Iterator[torch.Tensor]:
        model = torch.nn.Linear(1, 1)
        program: dict[str, Any] = {"stream": Stream(), "PerRank": PerRank, "ddp": model,
                                   "optimizer": torch.optim.SGD(model.parameters())}
        exec(block.split("```")[0], program)
        with Checkpointer(tmp_path) as checkpoints:
            restored = checkpoints.load_latest(program["state"])
            first = restored.step + 1 if restored else 1
            for step, batch in zip(range(first, batches + 1), program["loader"], strict=False):
                yield batch
                checkpoints.save(step, program["state"])

    got = samples(train(3))
    assert 0 < len(got) < 40
    assert sorted(got + samples(train(99))) == list(range(40))


def test_the_seed_of_a_sample_depends_on_seed_epoch_and_index() -> None:
    seeds = [sample_seed(*key) for key in itertools.product(range(3), range(3), range(500))]
    assert len(set(seeds)) == 4500 and seeds[-1] == sample_seed(2, 2, 499)
    assert 0 <= min(seeds) and max(seeds) < 1 << 63


def orders_of(length: int, count: int) -> torch.Tensor:
    return torch.stack([Permutation(length, length, epoch)(torch.arange(length)) for epoch in range(count)])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 31, 4096, 4097, 131072, 10**10, 2**60])
def test_no_index_comes_twice(length: int) -> None:
    """Of a huge order the test looks at 50,000 places."""
    step = max(1, length // 50_000) if length > 200_000 else 1
    order = Permutation(length, 1, 2)(torch.arange(0, length, step))
    assert 0 <= int(order.min()) and int(order.max()) < length
    assert len(order.unique()) == len(order)


def test_the_order_of_a_key_never_changes() -> None:
    """A run that resumes with a newer release needs the same order, or a higher ORDER_VERSION."""
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [0, 1, 3, 2, 7, 4, 6, 5, 9, 8]
    assert Permutation(1 << 20, 0, 0)(torch.arange(4)).tolist() == [726526, 270253, 342699, 564302]
    assert Permutation(10**10, 0, 1)(torch.arange(2)).tolist() == [9893941043, 1475216443]
    orders = [Permutation(1000, *key)(torch.arange(9)).tolist() for key in ((0, 1), (1, 0))]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("length, count", [(100, 1000), (200_000, 20)])
def test_the_order_is_as_random_as_randperm(length: int, count: int) -> None:
    """Each statistic has mean 0 and variance 1 for random orders; 4.5 standard deviations are allowed."""
    orders, half, middle = orders_of(length, count).double(), length // 2, (length - 1) / 2
    of_two_epochs = ((orders[::2] - middle) * (orders[1::2] - middle)).sum(1)
    correlation = of_two_epochs / (length * (length**2 - 1) / 12) * math.sqrt(length - 1)
    small_in_first_half = (orders[:, :half] < half).sum(1) - half / 2
    small_in_first_half /= math.sqrt(half * 0.25 * half / (length - 1))
    fixed_points = (orders == torch.arange(length)).sum(1) - 1.0
    for values in (correlation, small_in_first_half, fixed_points):
        assert abs(float(values.mean())) * math.sqrt(len(values)) < 4.5
        assert abs(float(values.var()) - 1) < 4.5 * math.sqrt(3 / len(values))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 9, 12, 17, 40, 144])
def test_half_of_the_orders_are_odd_and_no_place_is_special(length: int) -> None:
    orders = orders_of(length, 400)
    odd = torch.linalg.det(torch.eye(length)[orders]) < 0
    assert abs(int(odd.sum()) - 200) < 4.5 * 10
    assert length != 4 or len(orders.unique(dim=0)) == 24, "every order occurs"

    times = torch.eye(length)[orders].sum(0)
    chi_square = ((times - 400 / length) ** 2 / (400 / length)).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 4.5 * math.sqrt(2 * freedom) + 4

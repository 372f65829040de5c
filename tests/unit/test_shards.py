"""utils/data/shards.py: ranks and workers share the shards; the state resumes exactly."""
from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from utils.data import Permutation, ResumableShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
Shard = tuple[int, int]  # its number, and how many samples it has
SIZES = [7, 0, 31, 1, 16, 0, 5, 12, 3, 40, 8, 2, 0]
SHARDS = list(enumerate(SIZES))
EVERYTHING = [1000 * name + sample for name, size in SHARDS for sample in range(size)]


def read(shard: Shard, first: int) -> Iterable[int]:
    name, size = shard
    return range(1000 * name + first, 1000 * name + size)


def loader(replicas: int = 1, rank: int = 0, batch_size: int | None = 4, open_shard: Any = read, **options: Any) -> Any:
    return ResumableShardLoader(SHARDS, open_shard, batch_size, num_replicas=replicas, rank=rank, **options)


def loaders(replicas: int, state: Any = None, **options: Any) -> list[Any]:
    ranks = [loader(replicas, rank, **options) for rank in range(replicas)]
    for one in ranks:
        if state:
            one.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def state_of(ranks: list[Any]) -> Any:
    """Return what state_dict() returns on all ranks, which are in one process here."""
    reports = [one.report() for one in ranks]
    states = [one.merge(reports) for one in ranks]
    assert all(state == states[0] for state in states)
    return states[0]


def samples(batches: Iterable[torch.Tensor | int]) -> list[int]:
    return [sample for batch in batches for sample in torch.as_tensor(batch).flatten().tolist()]


def test_the_order_of_the_shards_is_that_of_the_epoch() -> None:
    one = loader(batch_size=None, seed=3, collate_fn=int)
    for epoch in (0, 1, 0):
        one.set_epoch(epoch)
        order = Permutation(len(SHARDS), 3, epoch)(torch.arange(len(SHARDS))).tolist()
        assert list(one) == [sample for name in order for sample in read(SHARDS[name], 0)]
    assert list(loader(batch_size=None, shuffle=False, collate_fn=int)) == EVERYTHING


@pytest.mark.parametrize("replicas, workers, persistent, done", [
    (1, 0, False, 13), (1, 3, True, 1), (1, 3, False, 25), (2, 2, False, 1), (2, 2, True, 8)])
def test_the_same_layout_resumes_with_the_very_same_batches(
        replicas: int, workers: int, persistent: bool, done: int) -> None:
    """Also when some workers have finished already, and after a run with another layout."""
    options = {"num_workers": workers, "persistent_workers": persistent, "collate_fn": tuple}
    before = loader()
    samples(islice(before, 3))
    state = before.state_dict()
    whole = [list(one) for one in loaders(replicas, state, **options)]
    ranks = loaders(replicas, state, **options)
    readers = [iter(one) for one in ranks]
    got = [list(islice(reader, done + rank)) for rank, reader in enumerate(readers)]
    rest = [list(one) for one in loaders(replicas, state_of(ranks), **options)]
    assert [first + second for first, second in zip(got, rest, strict=True)] == whole and all(rest)


@pytest.mark.parametrize("seed", range(20))
def test_any_chain_of_ranks_and_workers_sees_every_sample_once(seed: int) -> None:
    """Each rank receives another number of batches, from 0 on. Workers take time: few chains have them."""
    draw = random.Random(seed)
    replicas, workers = ([1, 2, 3], [0, 2, 3]) if seed < 3 else ([1, 2, 5, 13], [0])
    state, got = None, list[int]()
    for last in (False, False, False, True):
        ranks = loaders(draw.choice(replicas), state, seed=seed, num_workers=draw.choice(workers),
                        batch_size=draw.choice([None, 1, 3, 20, 1000]))
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers
                for sample in samples(reader if last else islice(reader, draw.randint(0, 4)))]
        state = state_of(ranks)
    assert sorted(got) == EVERYTHING
    assert all(samples(one) == [] for one in loaders(4, state, seed=seed))


@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_may_be_in_different_epochs(replicas: int) -> None:
    """Rank 0 is in epoch 1 and rank 1 in epoch 0. The state has both, also after a resume."""
    ranks = loaders(2)
    got = {0: [*samples(ranks[0]), *samples(islice(ranks[1], 2))]}
    ranks[0].set_epoch(1)
    got[1] = samples(islice(ranks[0], 3))
    state = state_of(ranks)
    ranks = loaders(replicas, state)
    assert state_of(ranks) == state and [entry["epoch"] for entry in state["epochs"]] == [0, 1]
    for one in ranks:
        assert one.epoch == 0
        for epoch in (0, 1):
            one.set_epoch(epoch)
            got[epoch] += samples(one)
    assert sorted(got[0]) == sorted(got[1]) == EVERYTHING


def broken(shard: Shard, first: int) -> Iterator[int]:
    yield from read(shard, first)
    if shard[0] == 4:
        raise OSError("the disk is gone")


def test_a_shard_that_cannot_be_read_is_an_error_and_not_the_end() -> None:
    one = loader(open_shard=broken, shuffle=False, num_workers=1, multiprocessing_context="spawn")
    reader, got = iter(one), list[int]()
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in reader:
            got += batch.tolist()
    with pytest.raises(RuntimeError, match="failed"):
        next(reader)
    (other,) = loaders(1, one.state_dict(), shuffle=False)
    assert got + samples(other) == EVERYTHING


def test_the_state_of_many_shards_is_small() -> None:
    one = ResumableShardLoader(range(100_000), lambda shard, first: [shard], 30, num_replicas=1, rank=0)
    got = samples(islice(one, 50))
    assert len(set(got)) == 30 * 50 and len(json.dumps(one.state_dict())) < 300


@pytest.mark.parametrize("change, words", [
    ({"order_version": 1}, "order_version=1.*version that saved"), ({"shards": 11}, "shards=11"),
    ({"seed": 1}, "seed=1.*Resume with the same"), ({"shuffle": False}, "shuffle=False"),
    *(({"epochs": epochs}, "damaged") for epochs in (
        None, [{"epoch": 0, "layouts": [{"ranks": 1, "workers": 2, "turns": [0], "streams": [[0, 0]]}]}]))])
def test_another_order_or_a_damaged_state_is_refused(change: dict[str, Any], words: str) -> None:
    one = loader()
    next(iter(one))
    before = one.state_dict()
    with pytest.raises(ValueError, match=words):
        one.load_state_dict({**before, **change})
    assert one.state_dict() == before


def test_an_epoch_that_one_rank_repeats_alone_is_refused() -> None:
    ranks = loaders(2)
    next(iter(ranks[0]))
    ranks = loaders(2, state_of(ranks))
    samples(ranks[0])
    next(iter(ranks[0]))  # the same epoch once more
    with pytest.raises(RuntimeError, match="some ranks repeat epoch 0"):
        state_of(ranks)


@pytest.mark.parametrize("make, words", [
    (lambda: state_of([loader(2, 0), loader(2, 0)]), r"of ranks \[0\]; expected 0 to 1"),
    (lambda: state_of([loader(2, 0), loader(2, 1, num_workers=2)]), "rank 1 has 2 workers, but rank 0 has 1"),
    (lambda: loader(2, 0).state_dict(), "Call setup_distributed"),
    (lambda: loader(replicas=14), "there are 13 shards for 14 ranks"),
    (lambda: loader(batch_size=0), "batch_size is 0")])
def test_bad_arguments_and_loaders_that_do_not_match_are_refused(make: Any, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        make()

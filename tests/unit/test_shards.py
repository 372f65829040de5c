"""utils/data/shards.py: ranks and workers share the shards; the state resumes exactly."""
from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from utils.checkpoint import Checkpointer
from utils.data import Permutation, ResumableShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
Shard = tuple[int, int]  # its number, and how many samples it has
SIZES = [7, 0, 31, 1, 16, 0, 5, 12, 3, 40, 8, 2, 0]
SHARDS = list(enumerate(SIZES))
EVERYTHING = [1000 * name + sample for name, size in SHARDS for sample in range(size)]
State = Any
Loader = ResumableShardLoader[Shard]


def read(shard: Shard, first: int) -> Iterable[int]:
    name, size = shard
    return range(1000 * name + first, 1000 * name + size)


def loader(replicas: int = 1, rank: int = 0, batch_size: int | None = 4, **options: Any) -> Loader:
    return ResumableShardLoader(
        SHARDS, read, batch_size, num_replicas=replicas, rank=rank, **options)


def loaders(replicas: int, state: State | None = None, **options: Any) -> list[Loader]:
    ranks = [loader(replicas, rank, **options) for rank in range(replicas)]
    for one in ranks:
        if state:
            one.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def state_of(ranks: list[Loader]) -> State:
    """Return what state_dict() returns on all ranks, which are in one process here."""
    reports = [one.report() for one in ranks]
    states = [one.merge(reports) for one in ranks]
    assert all(state == states[0] for state in states)
    return states[0]


def samples(batches: Iterable[torch.Tensor | int]) -> list[int]:
    return [sample for batch in batches for sample in torch.as_tensor(batch).flatten().tolist()]


# Every sample once --------------------------------------------------------------------------------

@pytest.mark.parametrize("replicas, workers", [(1, 0), (3, 0), (13, 0), (2, 2)])
@pytest.mark.parametrize("batch_size", [None, 4, 1000])
def test_every_sample_comes_once(replicas: int, workers: int, batch_size: int | None) -> None:
    got = [samples(one) for one in loaders(replicas, num_workers=workers, batch_size=batch_size)]
    assert sorted(sample for mine in got for sample in mine) == EVERYTHING


def test_the_order_of_the_shards_is_that_of_the_epoch() -> None:
    one = loader(batch_size=None, seed=3, collate_fn=int)
    for epoch in (0, 1, 0):
        one.set_epoch(epoch)
        order = Permutation(len(SHARDS), 3, epoch)(torch.arange(len(SHARDS))).tolist()
        assert list(one) == [sample for name in order for sample in read(SHARDS[name], 0)]
    assert list(loader(batch_size=None, shuffle=False, collate_fn=int)) == EVERYTHING


def test_drop_last_leaves_the_short_batches_out() -> None:
    whole = list(loader(collate_fn=tuple, num_workers=2))
    full = list(loader(collate_fn=tuple, num_workers=2, drop_last=True))
    assert full == [batch for batch in whole if len(batch) == 4]
    assert len(whole) - len(full) in (1, 2)


# Resuming ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("replicas, workers, persistent, done", [
    (1, 0, False, 13), (1, 3, True, 1), (1, 3, False, 25), (2, 2, False, 1), (2, 2, True, 8)])
def test_the_same_layout_resumes_with_the_very_same_batches(
        replicas: int, workers: int, persistent: bool, done: int) -> None:
    """Also when some workers have finished already, and after a run with another layout."""
    options = {"num_workers": workers, "persistent_workers": persistent, "collate_fn": tuple}
    before = loader()
    readers = [iter(before)]
    samples(islice(readers[0], 3))
    state = before.state_dict()
    whole = [list(one) for one in loaders(replicas, state, **options)]
    ranks = loaders(replicas, state, **options)
    readers = [iter(one) for one in ranks]
    got = [list(islice(reader, done + rank)) for rank, reader in enumerate(readers)]
    rest = [list(one) for one in loaders(replicas, state_of(ranks), **options)]
    assert [first + second for first, second in zip(got, rest, strict=True)] == whole and all(rest)


@pytest.mark.parametrize("seed", range(40))
def test_any_chain_of_numbers_of_ranks_sees_every_sample_once(seed: int) -> None:
    """Without workers; each rank receives another number of batches."""
    draw = random.Random(seed)
    state, got = None, list[int]()
    for last in (False, False, False, True):
        batch_size = draw.choice([None, 1, 3, 20])
        ranks = loaders(draw.randint(1, 6), state, batch_size=batch_size, seed=seed)
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers
                for sample in samples(reader if last else islice(reader, draw.randint(0, 4)))]
        state = state_of(ranks)
    assert sorted(got) == EVERYTHING
    assert all(samples(one) == [] for one in loaders(4, state, seed=seed))


def test_another_number_of_workers_receives_what_is_left() -> None:
    state, got = None, list[int]()
    for replicas, workers in ((2, 2), (1, 3), (3, 0)):
        ranks = loaders(replicas, state, num_workers=workers)
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers for sample in samples(islice(reader, 4))]
        state = state_of(ranks)
    got += [sample for one in loaders(2, state) for sample in samples(one)]
    assert sorted(got) == EVERYTHING


@pytest.mark.parametrize("workers", [0, 2])
def test_an_early_start_of_the_next_epoch_does_not_hide_this_one(workers: int) -> None:
    one = loader(num_workers=workers)
    first = iter(one)
    got = samples(islice(first, 5))
    one.set_epoch(1)
    second = iter(one)
    state = one.state_dict()
    assert [entry["epoch"] for entry in state["epochs"]] == [0]
    other = loader(num_workers=workers)
    other.load_state_dict(state)
    early = samples(islice(second, 1))  # an epoch that the loop reads is in the state as well
    assert [entry["epoch"] for entry in one.state_dict()["epochs"]] == [0, 1]
    assert (other.epoch, got + samples(other)) == (0, got + samples(first))
    assert [entry["epoch"] for entry in one.state_dict()["epochs"]] == [1]
    assert sorted(early + samples(second)) == EVERYTHING


@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_may_be_in_different_epochs(replicas: int) -> None:
    """Rank 0 is in epoch 1 and rank 1 in epoch 0. The state has both, also after a resume."""
    ranks = loaders(2)
    got: dict[int, list[int]] = {0: samples(ranks[0]), 1: []}
    slow = iter(ranks[1])
    got[0] += samples(islice(slow, 2))
    ranks[0].set_epoch(1)
    fast = iter(ranks[0])
    got[1] += samples(islice(fast, 3))
    state = state_of(ranks)
    ranks = loaders(replicas, state)
    assert state_of(ranks) == state and [entry["epoch"] for entry in state["epochs"]] == [0, 1]
    for one in ranks:
        assert one.epoch == 0
        for epoch in (0, 1):
            one.set_epoch(epoch)
            got[epoch] += samples(one)
    assert sorted(got[0]) == sorted(got[1]) == EVERYTHING


def test_an_abandoned_epoch_does_not_hide_the_next_one() -> None:
    one = loader()
    for _ in one:
        break
    assert one.state_dict()["epochs"][0]["layouts"][0]["streams"] != [[0, 0]]
    loaded = loader()
    loaded.load_state_dict(one.state_dict())
    for each in (one, loaded):
        each.set_epoch(1)
        assert each.state_dict()["epochs"] == [{"epoch": 1, "layouts": []}]
        each.set_epoch(0)
        assert sorted(samples(each)) == EVERYTHING


def test_a_finished_epoch_is_not_repeated_and_the_next_is_whole() -> None:
    one = loader()
    samples(one)
    other = loader()
    other.load_state_dict(one.state_dict())
    assert list(other) == []
    other.set_epoch(1)
    assert sorted(samples(other)) == sorted(samples(other)) == EVERYTHING


def with_pid(batch: list[int]) -> tuple[int, list[int]]:
    return os.getpid(), batch


def test_persistent_workers_read_each_epoch_and_end_abandoned_passes() -> None:
    one = loader(num_workers=2, persistent_workers=True, collate_fn=with_pid)
    pids = set()

    def received(batches: Iterable[tuple[int, list[int]]]) -> list[int]:
        pairs = list(batches)
        pids.update(pid for pid, _ in pairs)
        return [sample for _, batch in pairs for sample in batch]

    old = iter(one)
    got = received(islice(old, 3))
    one.load_state_dict(one.state_dict())
    assert sorted(got + received(one)) == EVERYTHING
    one.set_epoch(1)
    second = iter(one)
    next(second)
    one.set_epoch(2)
    assert sorted(received(one)) == EVERYTHING
    assert len(pids) == 2
    for reader, epoch in ((old, 0), (second, 1)):
        with pytest.raises(RuntimeError, match=f"this pass over epoch {epoch} ended"):
            next(reader)


def test_spawned_workers_read_the_same() -> None:
    assert samples(loader(num_workers=1, multiprocessing_context="spawn")) == samples(loader())


def broken(shard: Shard, first: int) -> Iterator[int]:
    yield from read(shard, first)
    if shard[0] == 4:
        raise OSError("the disk is gone")


def test_a_shard_that_cannot_be_read_is_an_error_and_not_the_end() -> None:
    one = ResumableShardLoader(
        SHARDS, broken, 4, num_replicas=1, rank=0, shuffle=False, num_workers=1)
    reader, got = iter(one), list[int]()
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in reader:
            got += batch.tolist()
    with pytest.raises(RuntimeError, match="failed"):
        next(reader)
    other = loader(shuffle=False)
    other.load_state_dict(one.state_dict())
    assert got + samples(other) == EVERYTHING


def of_two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    one = ResumableShardLoader(SHARDS, read, 4)
    with Checkpointer(f"{folder}/checkpoints") as checkpoints:
        got = samples(islice(iter(one), 2 + rank))
        checkpoints.save(1, {"shards": one})
        checkpoints.wait()
        state = one.state_dict()
        one = ResumableShardLoader(SHARDS, read, 4)
        checkpoints.load_latest({"shards": one})
        assert one.state_dict() == state
    Path(folder, f"rank {rank}").write_text(json.dumps([got + samples(one), state]))
    dist.destroy_process_group()


def test_the_state_of_two_real_ranks_is_one_and_is_saved_once(tmp_path: Path) -> None:
    start_processes(of_two_ranks, (str(tmp_path),), nprocs=2, start_method="fork")
    (first, state), (second, other) = (
        json.loads((tmp_path / f"rank {rank}").read_text()) for rank in range(2))
    assert sorted(first + second) == EVERYTHING and state == other


# States -----------------------------------------------------------------------------------------

def test_the_state_of_a_hundred_thousand_shards_is_small() -> None:
    shards, state, got = [(name, 1) for name in range(100_000)], None, list[int]()
    for replicas, batches in ((16, 9), (12, 7), (4, 5)):
        ranks = [ResumableShardLoader(shards, read, 30, num_replicas=replicas, rank=rank)
                 for rank in range(replicas)]
        for one in ranks:
            if state:
                one.load_state_dict(state)
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers for sample in samples(islice(reader, batches))]
        state = state_of(ranks)
    assert len(got) == len(set(got)) == 30 * (16 * 9 + 12 * 7 + 4 * 5)
    assert len(json.dumps(state)) < 1000


@pytest.mark.parametrize("change, words", [
    ({"order_version": None}, "order_version=None.*version that saved"),
    ({"order_version": 1}, "order_version=1.*version that saved"), ({"shards": 11}, "shards=11"),
    ({"seed": 1}, "seed=1.*Resume with the same"), ({"shuffle": False}, "shuffle=False")])
def test_a_state_of_another_order_is_refused(change: dict[str, Any], words: str) -> None:
    state: Any = {**loader().state_dict(), **change}
    with pytest.raises(ValueError, match=words):
        loader().load_state_dict(state)


@pytest.mark.parametrize("epochs", [
    None, [], [{"epoch": 0}], [{"epoch": "0", "layouts": []}], [[0]],
    *([{"epoch": 0, "layouts": [
        {"ranks": 1, "workers": 2, "turns": [0], "streams": [[0, 0], [2, 1]], **change}]}]
      for change in (
          {"ranks": 2}, {"workers": 0}, {"turns": [2]}, {"turns": []}, {"streams": [[0, 0]]},
          {"streams": [[0, 0], [0]]}, {"streams": [[0, 0], [14, 0]]},
          {"streams": [[0, -1], [0, 0]]},
          {"streams": [[0, 0.5], [0, 0]]}, {"streams": [[13, 1], [0, 0]]}, {"more": 1}))])
def test_a_damaged_state_is_refused_and_changes_nothing(epochs: object) -> None:
    one = loader()
    next(iter(one))
    before = one.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        one.load_state_dict({**before, "epochs": epochs})
    assert one.state_dict() == before


def test_loaders_that_do_not_match_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"of ranks \[0\]; expected 0 to 1"):
        state_of([loader(2, 0), loader(2, 0)])
    with pytest.raises(RuntimeError, match="rank 1 has 2 workers, but rank 0 has 1"):
        state_of([loader(2, 0), loader(2, 1, num_workers=2)])
    with pytest.raises(RuntimeError, match="Call setup_distributed"):
        loader(2, 0).state_dict()
    ranks = loaders(2)
    ranks = loaders(2, state_of([one for one in ranks if next(iter(one)) is not None]))
    samples(ranks[0])
    reader = iter(ranks[0])  # the same epoch once more
    next(reader)
    with pytest.raises(RuntimeError, match="some ranks repeat epoch 0"):
        state_of(ranks)


@pytest.mark.parametrize("bad, words", [
    ({"replicas": 14}, "there are 13 shards for 14 ranks"), ({"batch_size": 0}, "batch_size is 0"),
    ({"replicas": 2, "rank": 2}, "rank is 2; expected 0 to 1"),
    ({"num_workers": -1}, "num_workers"), ({"replicas": None}, "setup_distributed")])
def test_bad_arguments_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        loader(**bad)

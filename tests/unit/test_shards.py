"""utils/shards.py: streams are shared out with every sample once, and the state resumes exactly."""
from __future__ import annotations

import json
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
from utils.data import Permutation
from utils.shards import ResumableShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
Shard = tuple[int, int]  # its number, and how many samples it has
SIZES = [7, 0, 31, 1, 16, 0, 5, 12, 3, 40, 8, 2, 0]
SHARDS = list(enumerate(SIZES))
EVERYTHING = [1000 * name + sample for name, size in SHARDS for sample in range(size)]
State = dict[str, Any]


def read(shard: Shard, first: int) -> Iterable[int]:
    name, size = shard
    return range(1000 * name + first, 1000 * name + size)


def loader(replicas: int = 1, rank: int = 0, batch_size: int | None = 4, **options: Any) -> ResumableShardLoader[Shard]:
    return ResumableShardLoader(SHARDS, read, batch_size, num_replicas=replicas, rank=rank, **options)


def loaders(replicas: int, state: State | None = None, **options: Any) -> list[ResumableShardLoader[Shard]]:
    ranks = [loader(replicas, rank, **options) for rank in range(replicas)]
    for one in ranks:
        if state:
            one.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def state_of(ranks: list[ResumableShardLoader[Shard]]) -> State:
    """What state_dict() gives on all ranks; here they are in one process."""
    reports = [one._report() for one in ranks]
    states = [one._merge(reports) for one in ranks]
    assert all(state == states[0] for state in states)
    return states[0]


def samples(batches: Iterable[torch.Tensor | int]) -> list[int]:
    return [sample for batch in batches for sample in torch.as_tensor(batch).flatten().tolist()]


# Sharing out ---------------------------------------------------------------------------------------------------------

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


def test_batches_are_made_in_the_workers_by_the_collate_function_and_drop_last_leaves_the_small_ones_out() -> None:
    whole = list(loader(collate_fn=tuple, num_workers=2))
    full = list(loader(collate_fn=tuple, num_workers=2, drop_last=True))
    assert full == [batch for batch in whole if len(batch) == 4] and len(whole) - len(full) in (1, 2)


# Resuming ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("replicas, workers, persistent, done", [
    (1, 0, False, 13), (1, 3, True, 1), (1, 3, False, 25), (2, 2, False, 1), (2, 2, True, 8)])
def test_the_same_layout_goes_on_with_the_very_same_batches(replicas: int, workers: int, persistent: bool,
                                                            done: int) -> None:
    """Also when some workers have run dry already, and after an interruption under another layout."""
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
    """Workers are absent here, which the layout does not know; the batches of each rank come at its own pace."""
    draw = random.Random(seed)
    state, got = None, list[int]()
    for last in (False, False, False, True):
        ranks = loaders(draw.randint(1, 6), state, batch_size=draw.choice([None, 1, 3, 20]), seed=seed)
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers
                for sample in samples(reader if last else islice(reader, draw.randint(0, 4)))]
        state = state_of(ranks)
    assert sorted(got) == EVERYTHING
    assert all(samples(one) == [] for one in loaders(4, state, seed=seed))


def test_another_number_of_workers_goes_on_with_what_the_loop_did_not_get() -> None:
    state, got = None, list[int]()
    for replicas, workers in ((2, 2), (1, 3), (3, 0)):
        ranks = loaders(replicas, state, num_workers=workers)
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers for sample in samples(islice(reader, 4))]
        state = state_of(ranks)
    assert sorted(got + [sample for one in loaders(2, state) for sample in samples(one)]) == EVERYTHING


@pytest.mark.parametrize("workers", [0, 2])
def test_a_next_epoch_that_was_begun_already_does_not_hide_the_present_one(workers: int) -> None:
    one = loader(num_workers=workers)
    first = iter(one)
    got = samples(islice(first, 5))
    one.set_epoch(1)
    second = iter(one)
    state = one.state_dict()
    assert [entry["epoch"] for entry in state["epochs"]] == [0]
    other = loader(num_workers=workers)
    other.load_state_dict(state)
    early = samples(islice(second, 1))  # and one that is read already is told as well
    assert [entry["epoch"] for entry in one.state_dict()["epochs"]] == [0, 1]
    assert (other.epoch, got + samples(other)) == (0, got + samples(first))
    assert [entry["epoch"] for entry in one.state_dict()["epochs"]] == [1]
    assert sorted(early + samples(second)) == EVERYTHING


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_rank_that_went_on_to_the_next_epoch_waits_for_nobody(replicas: int) -> None:
    """Rank 0 is in epoch 1 while rank 1 is in epoch 0: the state tells both, and so does the one after it."""
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


def test_an_epoch_that_was_given_up_does_not_hide_the_next_one() -> None:
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


def test_an_epoch_that_was_done_is_not_repeated_and_the_next_one_is_whole() -> None:
    one = loader()
    samples(one)
    other = loader()
    other.load_state_dict(one.state_dict())
    assert list(other) == []
    other.set_epoch(1)
    assert sorted(samples(other)) == sorted(samples(other)) == EVERYTHING


def test_persistent_workers_read_each_epoch_and_end_a_pass_that_was_given_up() -> None:
    one = loader(num_workers=2, persistent_workers=True)
    old = iter(one)
    got = samples(islice(old, 3))
    state = one.state_dict()
    pids = [worker.pid for worker in one._loader._iterator._workers]  # type: ignore[union-attr]
    one.load_state_dict(state)
    assert sorted(got + samples(one)) == EVERYTHING
    one.set_epoch(1)
    second = iter(one)
    next(second)
    one.set_epoch(2)
    assert sorted(samples(one)) == EVERYTHING
    assert [worker.pid for worker in one._loader._iterator._workers] == pids  # type: ignore[union-attr]
    for reader, epoch in ((old, 0), (second, 1)):
        with pytest.raises(RuntimeError, match=f"this pass over epoch {epoch} ended"):
            next(reader)


def test_spawned_workers_do_the_same() -> None:
    one = loader(num_workers=1, multiprocessing_context="spawn")
    reader = iter(one)
    assert samples(reader) == samples(loader())


def broken(shard: Shard, first: int) -> Iterator[int]:
    yield from read(shard, first)
    if shard[0] == 4:
        raise OSError("the disk is gone")


def test_a_shard_that_cannot_be_read_is_an_error_and_not_the_end() -> None:
    one = ResumableShardLoader(SHARDS, broken, 4, num_replicas=1, rank=0, shuffle=False, num_workers=1)
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
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
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
    (first, state), (second, other) = (json.loads((tmp_path / f"rank {rank}").read_text()) for rank in range(2))
    assert sorted(first + second) == EVERYTHING and state == other


# States --------------------------------------------------------------------------------------------------------------

def test_the_state_is_small_also_with_a_hundred_thousand_shards() -> None:
    shards, state, got = [(name, 1) for name in range(100_000)], None, list[int]()
    for replicas, batches in ((16, 9), (12, 7), (4, 5)):
        ranks = [ResumableShardLoader(shards, read, 30, num_replicas=replicas, rank=rank) for rank in range(replicas)]
        for one in ranks:
            if state:
                one.load_state_dict(state)
        readers = [iter(one) for one in ranks]
        got += [sample for reader in readers for sample in samples(islice(reader, batches))]
        state = state_of(ranks)
    assert len(got) == len(set(got)) == 30 * (16 * 9 + 12 * 7 + 4 * 5)
    assert len(json.dumps(state)) < 1000


@pytest.mark.parametrize("version", [None, 1])
def test_a_state_of_a_version_with_another_order_is_refused(version: int | None) -> None:
    state = {name: value for name, value in loader().state_dict().items() if name != "order_version"}
    if version is not None:
        state["order_version"] = version
    with pytest.raises(ValueError, match=f"order_version={version}.*version that saved"):
        loader().load_state_dict(state)


@pytest.mark.parametrize("name, value", [("shards", 11), ("seed", 1), ("shuffle", False)])
def test_a_state_of_another_order_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*Resume with the same"):
        loader().load_state_dict({**loader().state_dict(), name: value})


@pytest.mark.parametrize("epochs", [
    None, [], [{"epoch": 0}], [{"epoch": "0", "layouts": []}], [[0]],
    *([{"epoch": 0, "layouts": [{"ranks": 1, "workers": 2, "turns": [0], "streams": [[0, 0], [2, 1]], **change}]}]
      for change in ({"ranks": 2}, {"workers": 0}, {"turns": [2]}, {"turns": []}, {"streams": [[0, 0]]},
                     {"streams": [[0, 0], [0]]}, {"streams": [[0, 0], [14, 0]]}, {"streams": [[0, -1], [0, 0]]},
                     {"streams": [[0, 0.5], [0, 0]]}, {"streams": [[13, 1], [0, 0]]}, {"more": 1}))])
def test_a_damaged_state_is_refused_and_changes_nothing(epochs: object) -> None:
    one = loader()
    next(iter(one))
    before = one.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        one.load_state_dict({**before, "epochs": epochs})
    assert one.state_dict() == before


def test_ranks_that_do_not_fit_together_are_told() -> None:
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
    ({"replicas": 2, "rank": 2}, "rank is 2; expected 0 to 1"), ({"num_workers": -1}, "num_workers")])
def test_bad_arguments_are_refused(bad: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loader(**bad)


def test_without_ranks_and_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="setup_distributed"):
        ResumableShardLoader(SHARDS, read)

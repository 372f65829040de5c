"""utils/checkpoint/checkpointer.py in one process: what a training loop sees of saving and loading."""
from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.checkpoint_states import bits
from utils import coordination
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, disk, list_steps
from utils.checkpoint.pack import Packed
from utils.checkpoint.snapshot import Snapshot, share_out

ROOT = Path(__file__).resolve().parents[2]


class WaitingDisk:
    """The real disk, whose fsync waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, file: int) -> None:
        assert self.go.wait(30)
        os.fsync(file)


@pytest.fixture
def waiting_disk(monkeypatch: pytest.MonkeyPatch) -> WaitingDisk:
    waiting = WaitingDisk()
    monkeypatch.setattr(disk, "system", waiting)
    return waiting


@pytest.fixture
def failing_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(old: Path, new: Path) -> None:
        raise PermissionError(13, "Permission denied")

    class System:
        def __getattr__(self, name: str) -> Any:
            return rename if name == "rename" else getattr(os, name)

    monkeypatch.setattr(disk, "system", System())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    return caplog


class Training:
    """A model with dropout and batch norm, AdamW and a schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3),
                                   nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule,
                "losses": self.losses}

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.model(torch.rand(16, 6) * random.random()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.losses.append(loss.item())


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    uninterrupted = Training()
    random.seed(0)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_latest(uninterrupted.state()) is None
        uninterrupted.steps(5)
        checkpoints.save(5, uninterrupted.state())
        uninterrupted.steps(7)
    resumed = Training()
    resumed.steps(3)  # another history, which must not matter
    random.seed(99)
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.load_latest(resumed.state())
    assert found is not None and found.step == 5
    resumed.steps(7)
    assert resumed.losses == uninterrupted.losses
    for one, other in ((uninterrupted.model, resumed.model),
                       (uninterrupted.optimizer, resumed.optimizer)):
        assert bits(one.state_dict()) == bits(other.state_dict())


# Saving in the background ---------------------------------------------------------------------

def test_the_state_may_change_as_soon_as_save_returns(
        tmp_path: Path, waiting_disk: WaitingDisk) -> None:
    x, numbers = torch.zeros(1000), [1]
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x, "list": numbers})
        x.fill_(7.0)
        numbers.append(2)
        waiting_disk.go.set()
        found = checkpoints.load_latest({"x": x, "list": []})
    assert found is not None and found.state["list"] == [1] and not x.any()


def test_a_second_save_waits_for_the_first(tmp_path: Path, waiting_disk: WaitingDisk) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        second = threading.Thread(target=checkpoints.save, args=(2, {}))
        second.start()
        second.join(0.2)
        assert second.is_alive() and list_steps(tmp_path) == []
        waiting_disk.go.set()
        second.join(30)
        assert 1 in list_steps(tmp_path)
    assert list_steps(tmp_path) == [1, 2]


def test_a_training_that_fails_still_finishes_its_save(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": torch.rand(1_000_000)})
        print(1 / 0)
    assert list_steps(tmp_path) == [3]


def test_a_process_that_ends_without_close_finishes_its_save(tmp_path: Path) -> None:
    code = ("import sys, torch; from utils.checkpoint import Checkpointer\n"
            "Checkpointer(sys.argv[1]).save(1, {'x': torch.zeros(1_000_000)})")
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert list_steps(tmp_path) == [1]


@pytest.mark.usefixtures("failing_rename")
def test_close_raises_the_error_of_the_save_in_flight(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot save step 3"), \
            Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {})


@pytest.mark.usefixtures("failing_rename")
def test_a_failed_save_does_not_hide_the_error_of_the_training(
        tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {})
        print(1 / 0)
    assert "cannot save step 3" in log.text


# Which checkpoints stay -----------------------------------------------------------------------

def test_the_last_and_the_multiples_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_every=10) as checkpoints:
        for step in (5, 10, 15, 20, 25, 30, 35):
            checkpoints.save(step, {})
    assert list_steps(tmp_path) == [10, 20, 30, 35] and len(os.listdir(tmp_path)) == 4


def test_the_best_are_kept_as_well(tmp_path: Path) -> None:
    losses = [5.0, 1.0, float("nan"), 4.0, 2.0, 3.0, 6.0]
    for best, expected in (("min", [1, 4, 6]), ("max", [0, 6])):
        folder = tmp_path / best
        for half in (losses[:4], losses[4:]):  # a second process reads the metrics of the first
            first = losses.index(half[0])
            with Checkpointer(folder, keep=1, keep_best=2, best=best) as checkpoints:
                for step, loss in enumerate(half, first):
                    checkpoints.save(step, {}, metric=loss)
        assert list_steps(folder) == expected


def test_a_step_saved_again_replaces_the_first_when_it_is_safe(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step, x in ((1, 0), (2, 1), (2, 2)):
            checkpoints.save(step, {"x": x})
        checkpoints.wait()
        assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000002-2"]
        found = checkpoints.load_latest({"x": 0})
    assert found is not None and found.step == 2 and found.state == {"x": 2}


def test_steps_are_ordered_as_numbers_and_can_be_chosen(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (10, 10**9, 10**10):
            checkpoints.save(step, {"x": step})
        found = checkpoints.load_latest({"x": 0})
        assert found is not None and found.step == 10**10
        chosen = checkpoints.load_step(10, {"x": 0})
        assert (chosen.step, chosen.state) == (10, {"x": 10})
        with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 10"):
            checkpoints.load_step(15, {"x": 0})


# What is refused ------------------------------------------------------------------------------

@pytest.mark.parametrize("options, words", [
    ({"keep": 0}, "keep is 0; expected a number above 0"), ({"keep_every": 0}, "keep_every is 0"),
    ({"timeout": -1.0}, "timeout is -1.0; expected a number above 0"),
    ({"best": "low"}, "best is 'low'; expected"), ({"keep_best": -1}, "keep_best is -1")])
def test_wrong_options_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        Checkpointer(tmp_path, **options)


def test_misuse_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make a folder in .*/file/folder"):
        Checkpointer(tmp_path / "file" / "folder")
    with Checkpointer(tmp_path / "new" / "folder") as checkpoints:
        with pytest.raises(ValueError, match="step is -1"):
            checkpoints.save(-1, {})
        with pytest.raises(ValueError, match="state/hook is of type builtins.function"):
            checkpoints.save(1, {"state": {"hook": lambda: 0}})
        assert os.listdir(tmp_path / "new" / "folder") == []
        checkpoints.save(1, {"seen": PerRank(4)})
    with pytest.raises(CheckpointError, match="after close"):
        checkpoints.save(2, {})


def test_a_state_that_does_not_match_is_refused_unchanged(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    words = r"model/weight is float32\[3, 3\], but was saved as float32\[4, 3\]"
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(3, 4), "epoch": 1})
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load_latest({"model": model, "epoch": 0})
    assert torch.equal(model.weight, before) and list_steps(tmp_path) == [1]


def test_a_save_that_no_load_would_find_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(30, {"x": 1})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(10, {"x": 2})
        words = "cannot save step 10 .*: the later checkpoint step-000000030 exists; "
        with pytest.raises(CheckpointError, match=words):
            checkpoints.wait()
    assert list_steps(tmp_path) == [30]


def test_a_checkpointer_made_before_torch_distributed_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    words = r"WORLD_SIZE is 2. Create it after setup_distributed\(\)"
    with pytest.raises(CheckpointError, match=words):
        Checkpointer(tmp_path)


# Other ranks and jobs -------------------------------------------------------------------------

def test_a_save_without_all_ranks_is_removed_by_the_next(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(*_: Any) -> Any:
        raise coordination.RankTimeout("rank 1 did not report", [1])

    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            with monkeypatch.context() as missing, \
                    pytest.raises(CheckpointError, match="rank 1 did not report"):
                missing.setattr(coordination.StoreCommunicator, "decide", decide)
                checkpoints.save(step, {"x": 0})
                checkpoints.wait()
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        checkpoints.save(4, {"x": 0})
    assert os.listdir(tmp_path) == ["step-000000004"]


def test_a_second_job_in_the_folder_is_noticed(
        tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as one, Checkpointer(tmp_path) as other:
        one.save(1, {})
        one.wait()
        assert log.text == ""
        other.save(2, {})
        other.wait()
        one.save(3, {})
        one.wait()
    assert "step-000000002" in log.text and "two jobs use the same checkpoint folder" in log.text


# The snapshot ---------------------------------------------------------------------------------

def test_memory_is_kept_from_save_to_save() -> None:
    snapshot = Snapshot()
    tensors = {"a": torch.rand(1000), "b": torch.rand(10, dtype=torch.float64),
               "c": torch.tensor([True])}
    snapshot.take(tensors)
    address = snapshot.bytes().data_ptr()
    tensors["a"].fill_(3.0)
    snapshot.take(tensors)
    assert snapshot.bytes().data_ptr() == address
    for name, place in snapshot.places.items():
        copied = snapshot.bytes()[place.start:place.end].view(place.dtype).view(place.shape)
        assert torch.equal(copied, tensors[name])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_common_tensors_are_shared_out_evenly(ranks: int) -> None:
    def meta(mebibytes: int) -> torch.Tensor:
        return torch.empty(mebibytes << 20, dtype=torch.uint8, device="meta")

    packed = Packed(common={str(number): meta(number) for number in range(60)},
                    main={"buffer": meta(1)})
    shares = [share_out(packed, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted([*packed.common, "buffer"])
    assert "buffer" in shares[0]
    sizes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
    assert max(sizes) - min(sizes) < 60 << 20 and max(sizes) < 1.1 * sum(sizes) / ranks


def test_a_small_state_has_one_writer() -> None:
    packed = Packed(common={"weight": torch.rand(1000), "bias": torch.rand(10)})
    assert [len(share_out(packed, rank, 4)) for rank in range(4)] == [2, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_state_on_a_gpu_may_change_at_once_too(tmp_path: Path) -> None:
    x = torch.zeros(50_000_000, device="cuda")
    torch.cuda.manual_seed(5)
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": x})
            x += 1
        expected = torch.rand(3, device="cuda")
        torch.rand(7, device="cuda")
        found = checkpoints.load_latest({"x": x})
    assert found is not None and found.step == 2
    assert bool((x == 1).all())
    assert torch.equal(torch.rand(3, device="cuda"), expected)

"""utils/checkpoint.py in one process: what the training loop sees of saving and loading."""
from __future__ import annotations

import json
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

from utils import checkpoint_files, checkpoint_format, checkpoint_owner, checkpoint_ranks
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, list_steps
from utils.checkpoint_snapshot import Snapshot, share_out
from utils.checkpoint_state import Packed

ROOT = Path(__file__).resolve().parents[2]


class Waiting:
    """The real disk, whose fsync waits until it is let go, and then may fail."""

    def __init__(self) -> None:
        self.go, self.error = threading.Event(), None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, file: int) -> None:
        assert self.go.wait(30)
        os.fsync(file)


class Training:
    """A model with dropout and batch norm, AdamW and a schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "losses": self.losses}

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.model(torch.rand(16, 6) * random.random()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.losses.append(loss.item())


def test_a_resumed_training_is_the_uninterrupted_one_to_the_last_bit(tmp_path: Path) -> None:
    whole = Training()
    random.seed(0)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_latest(whole.state()) is None
        whole.steps(5)
        checkpoints.save(5, whole.state())
        whole.steps(7)
    resumed = Training()
    resumed.steps(3)  # another history, which must not matter
    random.seed(99)
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.load_latest(resumed.state())
    assert found is not None and found.step == 5
    resumed.losses = found.state["losses"]
    resumed.steps(7)
    assert resumed.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert str(whole.optimizer.state_dict()) == str(resumed.optimizer.state_dict())


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Waiting()
    monkeypatch.setattr(checkpoint_files, "disk", disk)
    state = {"x": torch.zeros(1000), "list": [1]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        state["x"].fill_(7.0)  # type: ignore[attr-defined]
        state["list"].append(2)  # type: ignore[attr-defined]
        disk.go.set()
        found = checkpoints.load_latest({"x": state["x"], "list": []})
    assert found is not None and found.state["list"] == [1]
    assert not state["x"].any()  # type: ignore[attr-defined]


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Waiting()
    monkeypatch.setattr(checkpoint_files, "disk", disk)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        second = threading.Thread(target=checkpoints.save, args=(2, {}))
        second.start()
        second.join(0.2)
        assert second.is_alive() and checkpoint_files.names(tmp_path) == []
        disk.go.set()
        second.join(30)
        assert "step-000000001" in checkpoint_files.names(tmp_path)
    assert checkpoint_files.names(tmp_path) == ["step-000000001", "step-000000002"]


def test_the_last_k_and_every_nth_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_every=10) as checkpoints:
        for step in (5, 10, 15, 20, 25, 30, 35):
            checkpoints.save(step, {})
    assert [checkpoint_files.step_of(name) for name in checkpoint_files.names(tmp_path)] == [10, 20, 30, 35]
    assert len(os.listdir(tmp_path)) == 4


def test_a_step_that_is_saved_again_replaces_the_first_only_when_it_is_safe(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, {"x": 0})
        checkpoints.save(2, {"x": 1})
        checkpoints.save(2, {"x": 2})
        checkpoints.wait()
        assert checkpoint_files.names(tmp_path) == ["step-000000001", "step-000000002-2"]
        found = checkpoints.load_latest({"x": 0})
    assert found is not None and found.step == 2 and found.state == {"x": 2}


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(10**9, {})
        checkpoints.save(10**10, {})
        found = checkpoints.load_latest({})
    assert found is not None and found.step == 10**10


def test_what_a_save_without_all_ranks_left_is_removed_by_the_next(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(*_: Any) -> Any:
        raise checkpoint_ranks.Silence("rank 1 did not answer")

    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            with monkeypatch.context() as silent, pytest.raises(CheckpointError, match="rank 1 did not answer"):
                silent.setattr(checkpoint_ranks.Ranks, "decide", decide)
                checkpoints.save(step, {"x": 0})
                checkpoints.wait()
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        checkpoints.save(4, {"x": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000004"]


def test_a_process_of_another_user_that_proc_hides_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    host, boot, namespace, _, start = checkpoint_owner.owner().split(".")
    hidden = f"{host}.{boot}.{namespace}.{1 << 30}.{start}"
    assert checkpoint_owner.is_running(hidden) is False

    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert checkpoint_owner.is_running(hidden) is None


def test_what_interrupted_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = checkpoint_owner.owner().replace(f".{os.getpid()}.", f".{ended.pid}.")
    for name in (f".saving-{dead}.0123", f".saving-{checkpoint_owner.owner()}.0123", ".deleting-0123", ".mine",
                 "step-1", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_latest({}) is None
    assert sorted(os.listdir(tmp_path)) == [".mine", "notes", "step-1"]


def test_without_proc_a_save_of_another_process_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc")
    monkeypatch.setattr(Path, "read_text", missing)
    other = checkpoint_owner.owner().replace(f".{os.getpid()}.", f".{os.getppid()}.")
    (tmp_path / f".saving-{other}.0123").mkdir()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_latest({}) is None
    assert os.listdir(tmp_path) == [f".saving-{other}.0123"]


def test_close_raises_the_error_of_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Waiting()
    monkeypatch.setattr(checkpoint_files, "disk", disk)
    monkeypatch.setattr(disk, "rename", lambda *_: os.stat("/nowhere/at/all"), raising=False)
    disk.go.set()
    with pytest.raises(CheckpointError, match="cannot save step 3"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {})


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    disk = Waiting()
    monkeypatch.setattr(checkpoint_files, "disk", disk)
    monkeypatch.setattr(disk, "rename", lambda *_: os.stat("/nowhere/at/all"), raising=False)
    disk.go.set()
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {})
        print(1 / 0)
    assert "cannot save step 3" in caplog.text


def test_a_save_is_finished_when_the_training_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": torch.rand(1_000_000)})
        print(1 / 0)
    assert checkpoint_files.names(tmp_path) == ["step-000000003"]


def test_a_process_that_ends_without_close_finishes_its_save(tmp_path: Path) -> None:
    code = ("import sys, torch; from utils.checkpoint import Checkpointer\n"
            "Checkpointer(sys.argv[1]).save(1, {'x': torch.zeros(1_000_000)})")
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert checkpoint_files.names(tmp_path) == ["step-000000001"]


def test_a_second_job_in_the_folder_is_noticed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    with Checkpointer(tmp_path) as one, Checkpointer(tmp_path) as other:
        one.save(1, {})
        one.wait()
        assert caplog.text == ""
        other.save(2, {})
        other.wait()
        one.save(3, {})
        one.wait()
    assert "step-000000002" in caplog.text and "two jobs use one folder" in caplog.text


def test_a_state_that_does_not_fit_is_refused_and_the_checkpoint_stays(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(3, 4), "epoch": 1})
        with pytest.raises(CheckpointError, match=r"model/weight is float32\[3, 3\], but was saved as float32\[4, 3\]"):
            checkpoints.load_latest({"model": model, "epoch": 0})
    assert torch.equal(model.weight, before)
    assert os.listdir(tmp_path) == ["step-000000001"]


@pytest.mark.parametrize(("number", "writer"), [(checkpoint_format.FORMAT + 1, "a later"), (1, "an earlier")])
def test_a_checkpoint_of_another_format_is_refused_and_not_called_damaged(tmp_path: Path, number: int,
                                                                          writer: str) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.wait()
        manifest = tmp_path / "step-000000001" / checkpoint_files.MANIFEST
        fields = json.loads(manifest.read_text())["manifest"]
        manifest.write_bytes(checkpoint_format.render_manifest({**fields, "format": number}))
        with pytest.raises(CheckpointError, match=f"format {number}, of {writer} version of the kit; expected"):
            checkpoints.load_latest({})
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="state/hook is of type builtins.function"):
            checkpoints.save(1, {"state": {"hook": lambda: 0}})
    assert os.listdir(tmp_path) == []


def test_a_checkpointer_made_before_torch_distributed_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CheckpointError, match=r"WORLD_SIZE is 2. Make it after setup_distributed\(\)"):
        Checkpointer(tmp_path)


def test_the_best_are_kept_as_well(tmp_path: Path) -> None:
    losses = [5.0, 1.0, float("nan"), 4.0, 2.0, 3.0, 6.0]
    for best, expected in (("min", [1, 4, 6]), ("max", [0, 6])):
        folder = tmp_path / best
        for half in (losses[:4], losses[4:]):  # a second process knows the metrics of the first
            first = losses.index(half[0])
            with Checkpointer(folder, keep=1, keep_best=2, best=best) as checkpoints:
                for step, loss in enumerate(half, first):
                    checkpoints.save(step, {}, metric=loss)
        assert list_steps(folder) == expected
    with pytest.raises(ValueError, match="best is 'low'"):
        Checkpointer(tmp_path, best="low")


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"x": step})
        found = checkpoints.load_step(20, {"x": 0})
        assert (found.step, found.state) == (20, {"x": 20})
        with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 10, 20, 30"):
            checkpoints.load_step(15, {"x": 0})


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep_every": 0}, {"timeout": -1.0}])
def test_numbers_below_one_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        Checkpointer(tmp_path, **options)


def test_misuse_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make a folder in .*/file/folder"):
        Checkpointer(tmp_path / "file" / "folder")
    with Checkpointer(tmp_path / "new" / "folder") as checkpoints:
        with pytest.raises(ValueError, match="step is -1"):
            checkpoints.save(-1, {})
        checkpoints.save(1, {"seen": PerRank(4)})
    with pytest.raises(CheckpointError, match="after close"):
        checkpoints.save(2, {})


def test_a_save_that_no_load_would_find_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(30, {"x": 1})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(10, {"x": 2})
        with pytest.raises(CheckpointError, match="cannot save step 10 .*: step-000000030 is there already, which "):
            checkpoints.wait()
        assert os.listdir(tmp_path) == ["step-000000030"]


def test_memory_is_kept_from_save_to_save() -> None:
    snapshot = Snapshot()
    tensors = {"a": torch.rand(1000), "b": torch.rand(10, dtype=torch.float64), "c": torch.tensor([True])}
    snapshot.take(tensors)
    place = snapshot.bytes().data_ptr()
    tensors["a"].fill_(3.0)
    snapshot.take(tensors)
    assert snapshot.bytes().data_ptr() == place
    for name, dtype, shape, first, size in snapshot.layout:
        assert torch.equal(snapshot.bytes()[first:first + size].view(dtype).view(shape), tensors[name])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_is_common_is_shared_out_evenly_and_written_once(ranks: int) -> None:
    packed = Packed()
    packed.common = {str(number): torch.empty(number << 20, dtype=torch.uint8, device="meta") for number in range(60)}
    packed.main = {"buffer": torch.empty(1 << 20, dtype=torch.uint8, device="meta")}
    shares = [share_out(packed, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted([*packed.common, "buffer"])
    assert "buffer" in shares[0]
    sizes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
    assert max(sizes) - min(sizes) < 60 << 20
    assert max(sizes) < 1.1 * sum(sizes) / ranks


def test_a_small_state_has_one_writer() -> None:
    packed = Packed()
    packed.common = {"weight": torch.rand(1000), "bias": torch.rand(10)}
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

"""utils/checkpoint/checkpointer.py in one process: what a training loop sees of saving and loading."""
from __future__ import annotations

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

from tests.unit.checkpoint_states import ChangedDisk, bits
from utils import coordination
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, disk, list_steps
from utils.checkpoint.pack import Packed
from utils.checkpoint.snapshot import Snapshot, share_out

ROOT = Path(__file__).resolve().parents[2]


GPU = pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_save_runs_while_the_training_continues(
        device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def fsync(file: int) -> None:
        assert go.wait(30)
        os.fsync(file)

    monkeypatch.setattr(disk, "system", ChangedDisk(fsync=fsync))
    x, numbers = torch.zeros(50_000_000 if device == "cuda" else 1000, device=device), [1]
    random.seed(1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x, "list": numbers})
        x += 7
        numbers.append(2)
        drawn = [random.random(), torch.rand(1).item(), torch.rand(1, device=device).item()]
        second = threading.Thread(target=checkpoints.save, args=(2, {}))
        second.start()
        second.join(0.2)
        assert second.is_alive() and list_steps(tmp_path) == [], "a save waits for the one before"

        go.set()
        second.join(30)
        found = checkpoints.load_step(1, {"x": x, "list": []})
    assert found.state["list"] == [1] and not x.any()
    assert drawn == [random.random(), torch.rand(1).item(), torch.rand(1, device=device).item()]
    assert list_steps(tmp_path) == [1, 2]


def test_the_end_of_a_training_waits_for_its_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": torch.rand(1_000_000)})
        print(1 / 0)
    assert list_steps(tmp_path) == [3]

    monkeypatch.setattr(disk, "system", ChangedDisk(rename=refuse))
    with pytest.raises(CheckpointError, match="cannot save step 4"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, {})
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, {})
        print(1 / 0)
    assert "cannot save step 5" in caplog.text


def test_a_process_that_ends_without_close_finishes_its_save(tmp_path: Path) -> None:
    code = ("import sys, torch; from utils.checkpoint import Checkpointer\n"
            "Checkpointer(sys.argv[1]).save(1, {'x': torch.zeros(1_000_000)})")
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert list_steps(tmp_path) == [1]


@pytest.mark.parametrize("options, expected", [
    ({"keep": 2, "keep_every": 3}, [0, 3, 5, 6]), ({"keep": 1, "keep_best": 2}, [1, 4, 6]),
    ({"keep": 1, "keep_best": 2, "best": "max"}, [0, 6])])
def test_the_last_the_multiples_and_the_best_are_kept(
        options: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    losses = [5.0, 1.0, float("nan"), 4.0, 2.0, 3.0, 6.0]
    for steps in (range(4), range(4, 7)):  # a second process reads the metrics of the first
        with Checkpointer(tmp_path, **options) as checkpoints:
            for step in steps:
                checkpoints.save(step, {}, metric=losses[step])
    assert list_steps(tmp_path) == expected and len(os.listdir(tmp_path)) == len(expected)


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
        assert checkpoints.load_step(10, {"x": 0}).state == {"x": 10}
        with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 10"):
            checkpoints.load_step(15, {"x": 0})


@pytest.mark.parametrize("options, words", [
    ({"keep": 0}, "keep is 0; expected a number above 0"), ({"keep_every": 0}, "keep_every is 0"),
    ({"timeout": -1.0}, "timeout is -1.0; expected a number above 0"),
    ({"best": "low"}, "best is 'low'; expected"), ({"keep_best": -1}, "keep_best is -1")])
def test_wrong_options_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        Checkpointer(tmp_path, **options)


def test_misuse_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    with Checkpointer(folder) as checkpoints:
        with pytest.raises(ValueError, match="step is -1"):
            checkpoints.save(-1, {})
        with pytest.raises(ValueError, match="state/hook is of type builtins.function"):
            checkpoints.save(1, {"state": {"hook": lambda: 0}})
        assert os.listdir(folder) == []
        checkpoints.save(30, {"seen": PerRank(4)})
    with pytest.raises(CheckpointError, match="after close"):
        checkpoints.save(31, {})

    with Checkpointer(folder) as checkpoints:  # no load would find this save
        checkpoints.save(10, {})
        words = "cannot save step 10 .*: the later checkpoint step-000000030 exists; "
        with pytest.raises(CheckpointError, match=words):
            checkpoints.wait()
    assert list_steps(folder) == [30]

    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make a folder in .*/file/folder"):
        Checkpointer(tmp_path / "file" / "folder")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CheckpointError, match=r"WORLD_SIZE is 2. Create it after setup_distributed\(\)"):
        Checkpointer(tmp_path)


def test_all_mismatches_are_named_before_anything_is_changed(tmp_path: Path) -> None:
    model = nn.Linear(4, 6)
    before = bits(model.state_dict())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"m": nn.Linear(4, 5), "t": torch.zeros(3), "n": 1})
        with pytest.raises(CheckpointError) as error:
            checkpoints.load_latest({"m": model, "t": torch.zeros(3).int(), "extra": 2})
    for words in ("m/weight is float32[6, 4], but was saved as float32[5, 4]",
                  "t is int32[3], but was saved as float32[3]",
                  "state: the checkpoint lacks 'extra'", "state: only the checkpoint has 'n'"):
        assert words in str(error.value)
    assert bits(model.state_dict()) == before
    assert list_steps(tmp_path) == [1], "it is not called damaged"


def test_a_save_without_all_ranks_is_removed_by_the_next(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(*_: Any) -> Any:
        raise coordination.RankTimeout("rank 1 did not report", [1])

    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            with monkeypatch.context() as missing, pytest.raises(CheckpointError, match="rank 1 did not report"):
                missing.setattr(coordination.StoreCommunicator, "decide", decide)
                checkpoints.save(step, {"x": 0})
                checkpoints.wait()
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        checkpoints.save(4, {"x": 0})
    assert os.listdir(tmp_path) == ["step-000000004"]


def test_a_second_job_in_the_folder_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as one, Checkpointer(tmp_path) as other:
        for checkpoints, step in ((one, 1), (other, 2), (one, 3)):
            assert caplog.text == ""
            checkpoints.save(step, {})
            checkpoints.wait()
    assert "step-000000002" in caplog.text and "two jobs use the same checkpoint folder" in caplog.text


def test_memory_is_kept_from_save_to_save() -> None:
    snapshot, addresses = Snapshot(), set()
    for value in range(2):
        snapshot.take({"a": torch.full((1000,), value), "b": torch.tensor([True])})
        addresses.add(snapshot.bytes().data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_common_tensors_are_shared_out_evenly(ranks: int) -> None:
    def meta(mebibytes: int) -> torch.Tensor:
        return torch.empty(mebibytes << 20, dtype=torch.uint8, device="meta")

    packed = Packed(common={str(number): meta(number) for number in range(60)}, main={"buffer": meta(1)})
    shares = [share_out(packed, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted([*packed.common, "buffer"])
    assert "buffer" in shares[0]
    sizes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
    assert max(sizes) - min(sizes) < 60 << 20 and max(sizes) < 1.1 * sum(sizes) / ranks

    small = Packed(common={"weight": torch.rand(1000), "bias": torch.rand(10)})
    assert [len(share_out(small, rank, ranks)) for rank in range(ranks)] == [2, *[0] * (ranks - 1)]

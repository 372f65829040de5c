"""utils/checkpoint: what a training loop sees of saving and loading, and programs that read parts meanwhile."""
from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch import nn

from tests.unit.checkpoint_states import ChangedDisk, bits, read_safetensors, slow_disk
from tests.unit.programs import python
from utils import coordination
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, disk, export_safetensors, list_steps, load_part
from utils.checkpoint.format import rank_file_name


def test_a_save_runs_while_the_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_save_beside_training("cpu", tmp_path, monkeypatch)


def check_save_beside_training(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for tests/gpu/test_correctness.py."""
    go = threading.Event()
    monkeypatch.setattr(disk, "system", slow_disk(lambda: go.wait(30)))
    x, numbers = torch.zeros(50_000_000 if device == "cuda" else 1000, device=device), [1]
    z = torch.full((1000,), 1 + 2j, device=device)
    random.seed(1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x, "z": z.conj(), "list": numbers})
        x += 7
        z += 7
        numbers.append(2)
        drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.rand(1, device=device).item()]
        second = threading.Thread(target=checkpoints.save, args=(2, {}))
        second.start()
        second.join(0.2)
        assert second.is_alive() and list_steps(tmp_path) == [], "a save waits for the one before"

        go.set()
        second.join(30)
        found = checkpoints.load_step(1, {"x": x, "z": z.conj(), "list": []})
    assert found.state["list"] == [1] and not x.any() and (z == 1 + 2j).all()
    assert drawn == [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.rand(1, device=device).item()]
    assert list_steps(tmp_path) == [1, 2]


def test_the_end_of_a_training_waits_for_its_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": torch.rand(1_000_000)})
        print(1 / 0)
    assert list_steps(tmp_path) == [3]

    monkeypatch.setattr(disk, "system", ChangedDisk(rename=Mock(side_effect=PermissionError(13, "Permission denied"))))
    with pytest.raises(CheckpointError, match="cannot save step 4"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, {})
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, {})
        print(1 / 0)
    assert "cannot save step 5" in caplog.text


@pytest.mark.parametrize("moment", ["start", "wait"])
def test_a_signal_handler_that_raises_while_a_save_runs(
        moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As submitit's does: a thread that the interpreter's end surprises in the store would abort the process."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "checkpoint":
            return start(thread)
        start(threading.Timer(0.3, start, [thread]))
        raise SystemExit(144)

    monkeypatch.setattr(disk, "system", slow_disk(lambda: time.sleep(0.3)))
    earlier = signal.signal(signal.SIGALRM, lambda *_: sys.exit(144))
    with pytest.raises(SystemExit), Checkpointer(tmp_path) as checkpoints:
        if moment == "start":
            monkeypatch.setattr(threading.Thread, "start", interrupted)
        signal.setitimer(signal.ITIMER_REAL, 0.2 * (moment == "wait"))
        checkpoints.save_and_wait(3, {"x": torch.rand(1000)})
    signal.signal(signal.SIGALRM, earlier)
    assert list_steps(tmp_path) == [3]


def test_a_process_that_ends_without_close_finishes_its_save(tmp_path: Path) -> None:
    code = ("import sys, torch; from utils.checkpoint import Checkpointer\n"
            "Checkpointer(sys.argv[1]).save(1, {'x': torch.zeros(1_000_000)})")
    assert python("-c", code, str(tmp_path)).returncode == 0
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


def test_steps_are_ordered_as_numbers_and_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step, x in ((2, 0), (10, 1), (10**10, 2), (10**10, 3), (10**10, 4)):
            checkpoints.save(step, {"x": x})
        checkpoints.wait()
        assert sorted(os.listdir(tmp_path))[1:] == ["step-000000002", "step-000000010", "step-10000000000-3"]
        found = checkpoints.load_latest({"x": 0})
        assert found is not None and found.step == 10**10 and found.state == {"x": 4}
        assert checkpoints.load_step(10, {"x": 0}).state == {"x": 1}
        with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 2, 10"):
            checkpoints.load_step(15, {"x": 0})


def test_misuse_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    for name, value in (("keep", 0), ("keep_every", 0), ("timeout", -1.0), ("best", "low"), ("keep_best", -1)):
        with pytest.raises(ValueError, match=f"{name}.*{value}.*expected"):
            Checkpointer(folder, **{name: value})  # type: ignore[arg-type]

    with Checkpointer(folder) as checkpoints:
        with pytest.raises(ValueError, match="step is -1"):
            checkpoints.save(-1, {})
        assert os.listdir(folder) == []
        checkpoints.save(30, {})
    with pytest.raises(CheckpointError, match="after close"):
        checkpoints.save(31, {})

    with Checkpointer(folder) as checkpoints:  # no load would find this save
        with pytest.raises(CheckpointError, match="cannot save step 10 .*: the later checkpoint step-000000030 exists"):
            checkpoints.save_and_wait(10, {})
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
        words = (r"the checkpoint lacks 'extra'.*only the checkpoint has 'n'.*m/weight is float32\[6, 4\], but was "
                 r"saved as float32\[5, 4\].*t is int32\[3\], but was saved as float32\[3\]")
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load_latest({"m": model, "t": torch.zeros(3).int(), "extra": 2})
    assert bits(model.state_dict()) == before
    assert list_steps(tmp_path) == [1], "it is not called damaged"


def test_a_save_without_all_ranks_is_removed_by_the_next(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = Mock(side_effect=coordination.RankTimeout("rank 1 did not report", [1]))
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            with monkeypatch.context() as missing, pytest.raises(CheckpointError, match="rank 1 did not report"):
                missing.setattr(coordination.StoreCommunicator, "decide", timeout)
                checkpoints.save(step, {})
                checkpoints.wait()
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        checkpoints.save(4, {})
    assert os.listdir(tmp_path) == ["step-000000004"]


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of steps 10 and 20."""
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        for step in (10, 20):
            state = {"model": model_of(step), "epoch": step, "mine": PerRank(7), "big": torch.zeros(3_000_000),
                     "complex": torch.zeros(3, dtype=torch.complex64), "flag": torch.tensor(True)}
            checkpoints.save(step, state)
    return tmp_path / "checkpoints"


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def test_a_part_is_loaded_and_nothing_else_changes(folder: Path) -> None:
    (folder / ".saving-0123").mkdir()
    model = model_of(0)
    before, generator = content(folder), torch.get_rng_state()
    for options, expected in (({}, 20), ({"step": 10}, 10)):
        found = load_part(folder, {"model": model, "epoch": 0}, **options)
        assert found is not None and found.step == found.state["epoch"] == expected
        assert all(bool((parameter == expected).all()) for parameter in model.parameters())
    assert content(folder) == before and torch.equal(torch.get_rng_state(), generator)


def test_only_the_parts_asked_for_are_read(folder: Path) -> None:
    file = folder / "step-000000020" / rank_file_name(0)
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    first = json.loads(raw[8:start])["big"]["data_offsets"][0]
    raw[start + first + 6_000_000] ^= 1  # in a block that holds nothing else
    file.write_bytes(raw)
    for part, step in (({"model": model_of(0)}, 20), ({"big": torch.ones(3_000_000)}, 10)):
        found = load_part(folder, part)
        assert found is not None and found.step == step
    with pytest.raises(CheckpointError, match=f"cannot load .*{rank_file_name(0)}.* do not match their checksum"):
        load_part(folder, {"big": torch.ones(3_000_000)}, step=20)
    assert list_steps(folder) == [10, 20], "a reader quarantines nothing"


def test_what_is_missing_is_named(folder: Path) -> None:
    nothing = folder / "nothing"
    assert list_steps(nothing) == [] and load_part(nothing, {"model": model_of(0)}) is None
    with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 10, 20"):
        load_part(folder, {"epoch": 0}, step=15)
    with pytest.raises(CheckpointError, match="the checkpoint lacks 'ema'"):
        load_part(folder, {"ema": model_of(0)})
    with pytest.raises(ValueError, match="state is a Sequential; expected a dictionary"):
        load_part(folder, model_of(0))  # type: ignore[arg-type]
    with Checkpointer(nothing) as checkpoints:
        checkpoints.save_and_wait(1, [1])
    with pytest.raises(CheckpointError, match="the saved state is no dictionary of parts"):
        load_part(nothing, {"epoch": 0})


def test_a_reader_finds_one_while_a_training_deletes_them(tmp_path: Path) -> None:
    def read() -> list[int]:
        steps: list[int] = []
        while len(steps) < 100 or steps[-1] == 1:
            found = load_part(tmp_path, {"x": 0})
            assert found is not None and found.state["x"] == found.step
            steps.append(found.step)
        return steps

    with Checkpointer(tmp_path, keep=1) as checkpoints, ThreadPoolExecutor(1) as reader:
        checkpoints.save_and_wait(1, {"x": 1})
        reading = reader.submit(read)
        for step in itertools.count(2):
            checkpoints.save_and_wait(step, {"x": step})
            if reading.done():
                break
    steps = reading.result()
    assert steps == sorted(steps)



def test_files_follow_the_rules_of_safetensors(folder: Path, tmp_path: Path) -> None:
    metadata, arrays = read_safetensors(folder / "step-000000020" / rank_file_name(0))
    assert all(type(text) is str for text in metadata.values())
    assert arrays["complex"].shape == (24,), "safetensors has no complex numbers"
    assert arrays["flag"].tolist() is True and arrays["model/0.bias"].tolist() == [20.0] * 3

    target = tmp_path / "model.safetensors"
    target.write_text("an older one")
    assert export_safetensors(folder, target) == 20
    assert export_safetensors(folder, target, step=10) == 10

    metadata, arrays = read_safetensors(target)
    assert metadata == {"format": "pt"} and set(arrays) == set(model_of(0).state_dict())
    assert arrays["0.weight"].tolist() == [[10.0] * 4] * 3
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model.safetensors"]

    for file, part, words in (
            (target, "ema", "no part 'ema'; expected one of 'model', 'epoch'"),
            (target, "epoch", "'epoch' is a int; expected a model"),
            (tmp_path / "nowhere" / "file", "model", "cannot write")):
        with pytest.raises(CheckpointError, match=words):
            export_safetensors(folder, file, part=part)


def test_a_thread_that_cannot_start_costs_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks learn it at once: they would wait for this one until the time limit."""
    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RuntimeError, match="can't start new thread"):
                checkpoints.save(1, {"x": torch.ones(3)})
        assert "can't start new thread" in str(checkpoints.failure)
        checkpoints.save_and_wait(2, {"x": torch.ones(3)})
    assert list_steps(tmp_path) == [2]


@pytest.mark.parametrize(("scheduled", "said"), [
    (False, "optimizer: lr 0.1, here 0.5; optimizer: momentum"), (True, "")])
def test_settings_that_the_checkpoint_replaces_are_named(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, scheduled: bool, said: str) -> None:
    """A learning rate that a scheduler has changed is none: that is compared with the one it began with."""
    caplog.set_level("INFO")
    for lr, momentum in ((0.1, 0.9), (0.1 if scheduled else 0.5, 0.9 if scheduled else 0.0)):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr, momentum=momentum)
        state: dict[str, Any] = {"optimizer": optimizer}
        if scheduled:
            state["schedule"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with Checkpointer(tmp_path) as checkpoints:
            if checkpoints.load_latest(state) is None:
                optimizer.step()
                if scheduled:
                    state["schedule"].step()
                checkpoints.save_and_wait(1, state)
    found = [record.getMessage() for record in caplog.records if "with other settings" in record.getMessage()]
    assert len(found) == bool(said) and all(said in message for message in found)


SCHEDULES: list[tuple[str, str, str]] = [
    ("CosineAnnealingLR(o, 10)", "CosineAnnealingLR(o, 100)", "x/1: T_max 10, here 100"),
    ("StepLR(o, 3)", "StepLR(o, 3, gamma=0.5)", "x/1: gamma 0.1, here 0.5"),
    ("MultiStepLR(o, [2, 2])", "MultiStepLR(o, [2, 3])", "milestones [2, 2], here [2, 3]"),
    ("OneCycleLR(o, 0.3, total_steps=30)", "OneCycleLR(o, 0.3, total_steps=60)", "x/1: total_steps 30, here 60"),
    ("ReduceLROnPlateau(o)", "ReduceLROnPlateau(o, patience=2)", "x/1: patience 10, here 2"),
    ("SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 9)], [2])",
     "SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 5)], [2])", "x/1 scheduler 1: T_max 9, here 5"),
    *((same, same, "") for same in (
        "OneCycleLR(o, 0.3, total_steps=30)", "CyclicLR(o, 0.1, 0.3, 2)", "LambdaLR(o, lambda number: 0.9**number)",
        "PolynomialLR(o)", "CosineAnnealingWarmRestarts(o, 2, 2)", "ReduceLROnPlateau(o)",
        "ChainedScheduler([ConstantLR(o), CyclicLR(o, 0.1, 0.3)])",
        "SequentialLR(o, [LinearLR(o), OneCycleLR(o, 0.3, total_steps=9)], [2])"))]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize(("make", "remake", "said"), SCHEDULES)
def test_settings_of_a_scheduler_that_the_checkpoint_replaces_are_named(
        make: str, remake: str, said: str, optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """How far it has come, and what it has changed, is no setting."""
    caplog.set_level("INFO")
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    for build in (make, remake):
        trained = getattr(torch.optim, optimizer)(nn.Linear(2, 2).parameters(), lr=0.1, **options)
        schedule = eval(build, {**vars(torch.optim.lr_scheduler), "o": trained})
        with Checkpointer(tmp_path) as checkpoints:
            if checkpoints.load_latest({"x": [trained, schedule]}) is None:
                for _ in range(5):
                    trained.step()
                    schedule.step(*[1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
                checkpoints.save_and_wait(1, {"x": [trained, schedule]})
    found = [record.getMessage() for record in caplog.records if "with other settings" in record.getMessage()]
    assert len(found) == bool(said) and all(said in message for message in found)


@pytest.mark.parametrize(("saved", "here", "said"), [
    ("3", 3, "x/n: the text '3', here the number 3"), (3, "3", "here the text '3'"), ([1], (1,), "x/n: the list [1]"),
    (True, 1, "the truth value True"), ({"m": 1}, {"m": "1"}, "x/n/m: the number 1"),
    *((saved, here, "") for saved, here in (
        (0.5, None), (0.5, 1), (numpy.float64(1), 2.0), (torch.tensor(0.5), 0.5), ([1, "a"], []), ({"m": 1}, {})))])
def test_a_plain_value_of_another_type_is_named(
        saved: Any, here: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": {"n": saved}})
        checkpoints.load_latest({"x": {"n": here}})
    found = [record.getMessage() for record in caplog.records if "with other settings" in record.getMessage()]
    assert len(found) == bool(said) and all(said in message for message in found)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9]), (1, list(range(1, 10)))])
def test_steps_after_which_a_save_is_due(every: int, steps: list[int], tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=every) as checkpoints:
        assert [step for step in range(1, 10) if checkpoints.is_due(step)] == steps


@pytest.mark.parametrize("every", [0, "auto", True])
def test_every_is_a_number_of_steps(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a number of steps, such as 500"):
        Checkpointer(tmp_path, every=every)
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(ValueError, match="every="):
        checkpoints.is_due(1)


LOAD = """\
import re, sys
from pathlib import Path
import torch
from utils.checkpoint import Checkpointer

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

model = torch.nn.Sequential(*[torch.nn.Linear(1500, 1500) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with Checkpointer(sys.argv[1]) as checkpoints:
    if sys.argv[2] == "save":
        model(torch.ones(1, 1500)).sum().backward()
        optimizer.step()
        checkpoints.save_and_wait(1, state)
        sys.exit()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is used now
    before = kilobytes("VmHWM")
    checkpoints.load_latest(state)
    print((kilobytes("VmHWM") - before) / (6 * 1500 * 1501 * 12 / 1024))
"""


def test_a_load_needs_memory_for_the_checkpoint_once(tmp_path: Path) -> None:
    python("-c", LOAD, str(tmp_path), "save")
    done = python("-c", LOAD, str(tmp_path), "load")
    assert 0.5 < float(done.stdout) < 1.2, done

"""utils/checkpoint/reader.py: other programs read parts of checkpoints without changing the folder."""
from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.checkpoint_states import read_safetensors
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, export_safetensors, list_steps, load_part
from utils.checkpoint.format import rank_file_name

FILE = rank_file_name(0)


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of steps 10 and 20."""
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        for step in (10, 20):
            state = {"model": model_of(step), "epoch": step, "mine": PerRank(7), "big": torch.zeros(3_000_000)}
            checkpoints.save(step, state)
    return tmp_path / "checkpoints"


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def test_a_part_is_loaded_and_nothing_else_changes(folder: Path) -> None:
    (folder / ".saving-0123").mkdir()
    model = model_of(0)
    before, generator = content(folder), torch.get_rng_state()
    found = load_part(folder, {"model": model, "epoch": 0})
    assert found is not None and found.step == 20 and found.state["epoch"] == 20
    assert all(bool((parameter == 20).all()) for parameter in model.parameters())
    found = load_part(folder, {"model": model}, step=10)
    assert found is not None and found.step == 10 and bool((model[0].weight == 10).all())
    assert content(folder) == before and torch.equal(torch.get_rng_state(), generator)


def test_only_the_parts_asked_for_are_read(folder: Path) -> None:
    file = folder / "step-000000020" / FILE
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    first = json.loads(raw[8:start])["big"]["data_offsets"][0]
    raw[start + first + 6_000_000] ^= 1  # in a block that holds nothing else
    file.write_bytes(raw)
    for part, step in (({"model": model_of(0)}, 20), ({"big": torch.ones(3_000_000)}, 10)):
        found = load_part(folder, part)
        assert found is not None and found.step == step
    with pytest.raises(CheckpointError, match=f"cannot load .*{FILE}.* do not match their checksum"):
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


def test_a_reader_finds_one_while_a_training_deletes_them(tmp_path: Path) -> None:
    def read(_: int) -> int:
        found = load_part(tmp_path, {"x": 0})
        assert found is not None and found.state["x"] == found.step
        return found.step

    with Checkpointer(tmp_path, keep=1) as checkpoints, ThreadPoolExecutor(1) as reader:
        checkpoints.save_and_wait(1, {"x": 1})
        reading = reader.submit(lambda: list(map(read, range(100))))
        for step in itertools.count(2):
            checkpoints.save_and_wait(step, {"x": step})
            if reading.done():
                break
    steps = reading.result()
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_an_export_is_one_file_with_plain_names(folder: Path, tmp_path: Path) -> None:
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

"""utils/checkpoint/reader.py: other programs read parts of checkpoints without changing the folder."""
from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from utils.checkpoint import (
    Checkpointer,
    CheckpointError,
    PerRank,
    export_safetensors,
    list_steps,
    load_part,
)
from utils.checkpoint.format import parse_header, rank_file_name

FILE = rank_file_name(0)


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save_steps(folder: Path, *steps: int) -> None:
    with Checkpointer(folder, keep=len(steps)) as checkpoints:
        for step in steps:
            state = {"model": model_of(step), "epoch": step, "mine": PerRank(7),
                     "big": torch.zeros(3_000_000), "history": [1.5, (2, "x"), {3: None}]}
            checkpoints.save(step, state)


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
            for path in folder.rglob("*")}


def test_a_part_is_loaded_and_the_folder_does_not_change(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    (tmp_path / ".saving-0123").mkdir()
    before = content(tmp_path)
    model = model_of(0)
    generator = torch.get_rng_state()
    found = load_part(tmp_path, {"model": model, "epoch": 0})
    assert found is not None and found.step == 30 and found.state["epoch"] == 30
    assert all(bool((parameter == 30).all()) for parameter in model.parameters())
    found = load_part(tmp_path, {"model": model}, step=10)
    assert found is not None and found.step == 10 and bool((model[0].weight == 10).all())
    assert content(tmp_path) == before and torch.equal(torch.get_rng_state(), generator)
    assert list_steps(tmp_path) == [10, 20, 30]


def test_only_the_parts_asked_for_are_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    file = tmp_path / "step-000000001" / FILE
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    first = json.loads(raw[8:start])["big"]["data_offsets"][0]
    raw[start + first + 6_000_000] ^= 1  # in a block that holds nothing else
    file.write_bytes(raw)
    assert load_part(tmp_path, {"model": model_of(0)}) is not None
    assert load_part(tmp_path, {"big": torch.ones(3_000_000)}) is None, "damaged"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert list_steps(tmp_path / "nothing") == []
    assert load_part(tmp_path / "nothing", {"model": model_of(0)}) is None
    save_steps(tmp_path, 10, 20)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 10, 20"):
        load_part(tmp_path, {"epoch": 0}, step=15)
    with pytest.raises(CheckpointError, match="the checkpoint lacks 'ema'"):
        load_part(tmp_path, {"ema": model_of(0)})
    with pytest.raises(ValueError, match="state is a Sequential; expected a dictionary"):
        load_part(tmp_path, model_of(0))  # type: ignore[arg-type]

    (tmp_path / "step-000000020" / FILE).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{FILE} has 1 bytes instead of"):
        load_part(tmp_path, {"epoch": 0}, step=20)
    found = load_part(tmp_path, {"epoch": 0})
    assert found is not None and found.step == 10
    assert list_steps(tmp_path) == [10, 20], "a reader quarantines nothing"


def test_a_reader_finds_one_while_a_training_deletes_them(tmp_path: Path) -> None:
    stop = threading.Event()

    def train() -> None:
        with Checkpointer(tmp_path, keep=1) as checkpoints:
            step = 0
            while not stop.is_set():
                step += 1
                checkpoints.save(step, {"x": step})
                checkpoints.wait()

    training = threading.Thread(target=train)
    training.start()
    try:
        while not list_steps(tmp_path):
            pass
        steps = []
        for _ in range(100):
            found = load_part(tmp_path, {"x": 0})
            assert found is not None and found.state["x"] == found.step
            steps.append(found.step)
    finally:
        stop.set()
        training.join()
    assert steps == sorted(steps) and steps[0] < steps[-1]


def test_an_export_is_one_file_with_plain_names(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    target = tmp_path / "model.safetensors"
    target.write_text("an older one")
    assert export_safetensors(tmp_path, target) == 2
    assert export_safetensors(tmp_path, target, step=1) == 1

    raw = target.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    metadata, places = parse_header(raw[8:start], "file", len(raw) - start)
    assert metadata == {"format": "pt"} and set(places) == set(model_of(0).state_dict())
    place = places["0.weight"]
    data = bytearray(raw[start + place.start:start + place.end])
    weight = torch.frombuffer(data, dtype=place.dtype).view(place.shape)
    assert weight.shape == (3, 4) and bool((weight == 1).all())
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "step-000000001", "step-000000002"]

    for file, part, words in (
            (target, "ema", "no part 'ema'; expected one of 'model', 'epoch'"),
            (target, "epoch", "'epoch' is a int; expected a model"),
            (tmp_path / "nowhere" / "file", "model", "cannot write")):
        with pytest.raises(CheckpointError, match=words):
            export_safetensors(tmp_path, file, part=part)

"""utils/checkpoint_reader.py and the parsing of files: parts are read without changes, forged files are refused."""
from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from utils import checkpoint_files, checkpoint_format
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, export_safetensors, list_steps, load_part
from utils.checkpoint_sums import checksums

MUTATIONS = int(os.environ.get("DDPKIT_FUZZ", "500"))
PART = checkpoint_files.part_name(0)


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save_steps(folder: Path, *steps: int) -> None:
    with Checkpointer(folder, keep=len(steps)) as checkpoints:
        for step in steps:
            model = model_of(step)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state = {"model": model_of(step), "optimizer": optimizer, "epoch": step, "mine": PerRank(7),
                     "big": torch.zeros(3_000_000), "history": [1.5, (2, "x"), {3: None}]}
            checkpoints.save(step, state)


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


# Reading --------------------------------------------------------------------------------------------------------------

def test_a_part_is_loaded_and_the_folder_stays_as_it_is(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    (tmp_path / ".saving-0123").mkdir()
    before, generator = content(tmp_path), torch.get_rng_state()
    model = model_of(0)
    generator = torch.get_rng_state()
    found = load_part(tmp_path, {"model": model, "epoch": 0})
    assert found is not None and found.step == 30 and found.state["epoch"] == 30
    assert all(bool((parameter == 30).all()) for parameter in model.parameters())
    found = load_part(tmp_path, {"model": model}, step=10)
    assert found is not None and found.step == 10 and bool((model[0].weight == 10).all())
    assert content(tmp_path) == before and torch.equal(torch.get_rng_state(), generator)
    assert list_steps(tmp_path) == [10, 20, 30]


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    part = tmp_path / "step-000000001" / PART
    raw = bytearray(part.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    first = json.loads(raw[8:start])["big"]["data_offsets"][0]
    raw[start + first + 6_000_000] ^= 1  # the large tensor has more than a block of its own
    part.write_bytes(raw)
    assert load_part(tmp_path, {"model": model_of(0)}) is not None
    assert load_part(tmp_path, {"big": torch.ones(3_000_000)}) is None, "damaged"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert list_steps(tmp_path / "nothing") == [] and load_part(tmp_path / "nothing", {"model": model_of(0)}) is None
    save_steps(tmp_path, 10, 20)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15 .*; expected one of: 10, 20"):
        load_part(tmp_path, {"epoch": 0}, step=15)
    with pytest.raises(CheckpointError, match="the checkpoint lacks 'ema'"):
        load_part(tmp_path, {"ema": model_of(0)})
    with pytest.raises(ValueError, match="state is a Sequential; expected a dictionary"):
        load_part(tmp_path, model_of(0))  # type: ignore[arg-type]
    (tmp_path / "step-000000020" / PART).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{PART} has 1 bytes instead of"):
        load_part(tmp_path, {"epoch": 0}, step=20)
    found = load_part(tmp_path, {"epoch": 0})
    assert found is not None and found.step == 10
    assert list_steps(tmp_path) == [10, 20], "a reader sets nothing aside"


def test_a_reader_beside_a_training_that_deletes_always_finds_one(tmp_path: Path) -> None:
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
    metadata, fields = checkpoint_format.parse_header(raw[8:8 + int.from_bytes(raw[:8], "little")], "file",
                                                      len(raw) - 8 - int.from_bytes(raw[:8], "little"))
    assert metadata == {"format": "pt"} and set(fields) == set(model_of(0).state_dict())
    data = raw[8 + int.from_bytes(raw[:8], "little"):]
    weight = fields["0.weight"]
    read = torch.frombuffer(bytearray(data[weight.first:weight.end]), dtype=weight.dtype).view(weight.shape)
    assert bool((read == 1).all()) and read.shape == (3, 4)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "step-000000001", "step-000000002"]
    with pytest.raises(CheckpointError, match="no part 'ema'; expected one of 'model', 'optimizer'"):
        export_safetensors(tmp_path, target, part="ema")
    with pytest.raises(CheckpointError, match="'epoch' is a int; expected a model"):
        export_safetensors(tmp_path, target, part="epoch")
    with pytest.raises(CheckpointError, match="cannot write"):
        export_safetensors(tmp_path, tmp_path / "nowhere" / "file")


# Forged files -------------------------------------------------------------------------------------------------------

def forge(step: Path, manifest: dict[str, Any], header: Any = None) -> None:
    """Write a manifest, and a header whose checksums are right, beside the data that are there."""
    raw = (step / PART).read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little"):]
    if header is not None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)
        raw = len(text).to_bytes(8, "little") + text + data
        (step / PART).write_bytes(raw)
        whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        manifest["files"][0] |= {"size": len(raw), "blocks": checksums(whole)}
    (step / checkpoint_files.MANIFEST).write_bytes(checkpoint_format.render_manifest(manifest))


def manifest_of(step: Path) -> Any:
    return json.loads((step / checkpoint_files.MANIFEST).read_text())["manifest"]


def header_of(step: Path) -> Any:
    raw = (step / PART).read_bytes()
    return json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the intact step 1 and step 2, which is to be forged."""
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": torch.full((8,), float(step)), "n": {"y": torch.arange(4), "z": [step, None]}})
    return tmp_path


def loaded_step(folder: Path) -> int:
    x, y = torch.zeros(8), torch.zeros(4, dtype=torch.int64)
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.load_latest({"x": x, "n": {"y": y, "z": [0, None]}})
    assert found is not None
    return found.step


@pytest.mark.parametrize("field, value", [
    ("name", "../step-000000001/rank-00000.safetensors"), ("name", "/etc/passwd"), ("name", None), ("name", ["x"]),
    ("size", -1), ("size", True), ("size", 1 << 70), ("size", "8"), ("size", 1.5), ("blocks", {}), ("blocks", [[1]]),
    ("blocks", [[-8, "00"], [16, "00"]]), ("blocks", [[1 << 40, "00"]]), ("blocks", [[0, ""]]), ("replicated", 1)])
def test_a_forged_manifest_is_quarantined_and_the_field_named(
        field: str, value: Any, two: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = manifest_of(two / "step-000000002")
    manifest["files"][0][field] = value
    forge(two / "step-000000002", manifest)
    assert loaded_step(two) == 1
    assert f"manifest.json: files[0].{field} is" in caplog.text and "step-000000002.damaged" in caplog.text


def test_a_checkpoint_under_the_name_of_another_step_is_refused(two: Path) -> None:
    (two / "step-000000002").rename(two / "step-000000003")
    with pytest.raises(CheckpointError, match=r"manifest.json: step is 2; expected 3, as in the name of its folder"):
        loaded_step(two)


@pytest.mark.parametrize("changes, words", [
    ({"data_offsets": [-8, 24]}, "x.*data_offsets"), ({"data_offsets": [0, 1 << 62]}, "x.*data_offsets"),
    ({"data_offsets": [32, 0]}, "x.*data_offsets"), ({"data_offsets": [8, 40]}, "data_offsets"),
    ({"data_offsets": [0.0, 32]}, "x.*data_offsets"), ({"shape": [2, 2]}, "data_offsets"),
    ({"shape": [-8]}, "shape"), ({"shape": [1 << 40, 1 << 40]}, "shape"), ({"shape": "8"}, "shape"),
    ({"shape": [1] * 200 + [8]}, "shape"), ({"dtype": "F4096"}, "dtype"), ({"dtype": []}, "dtype")])
def test_a_forged_header_is_quarantined_and_the_field_named(
        changes: dict[str, Any], words: str, two: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = two / "step-000000002"
    header = header_of(step)
    header["x"] |= changes
    forge(step, manifest_of(step), header)
    assert loaded_step(two) == 1
    assert re.search(f"{PART}: .*{words}", caplog.text), caplog.text


@pytest.mark.parametrize("text", [
    b"[" * 100_000, b'{"x": 1, "x": 2}', b"\xff\xfe", b"null", b"NaN", b'{"__metadata__": []}', b'{"__metadata__": {}}',
    b'{"__metadata__": {"ddpkit": "[1"}}', b'{"x": ' + b"9" * 5000 + b"}"])
def test_a_header_that_is_none_is_quarantined(text: bytes, two: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = two / "step-000000002"
    forge(step, manifest_of(step), text)
    assert loaded_step(two) == 1
    assert PART in caplog.text


EVIL: list[Any] = [None, True, -1, 0, 1, 1 << 31, 1 << 63, 10 ** 400, 1.5, float("nan"), float("inf"), "", "..", "../x",
                   "/etc/passwd", "x" * 5000, "\0", "tensor", "load", [], {}, [[]], [None], {"tensor": "x"},
                   {"torch.dtype": "load"}, {"": {}}, {"dict": []}, {"per rank": "x"}, {"numpy": []}]


def mutate(tree: Any, rng: random.Random) -> Any:
    """Replace, delete, swap or wrap something at a random place."""
    places: list[tuple[Any, Any]] = []
    remaining = [tree]
    while remaining:
        one = remaining.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else list(range(len(one)))
            places += [(one, key) for key in keys]
            remaining += [one[key] for key in keys]
    owner, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del owner[key]
    elif kind == 1:
        other, other_key = rng.choice(places)
        owner[key] = json.loads(json.dumps(other[other_key]))
    elif kind == 2 and isinstance(owner, dict):
        owner[rng.choice(["", "..", "tensor", "x" * 300, "\0"])] = owner.pop(key)
    elif kind == 3:
        nested: Any = owner[key]
        for _ in range(rng.choice([1, 3, 600])):
            nested = [nested] if rng.random() < 0.5 else {"dict": nested}
        owner[key] = nested
    elif kind == 4 and type(owner[key]) is int:
        owner[key] += rng.choice([-1, 1, 8, 1 << 32])
    else:
        owner[key] = copy.deepcopy(rng.choice(EVIL))
    return tree


def test_only_checkpoint_errors_come_out_of_forged_files(two: Path) -> None:
    """DDPKIT_FUZZ: the number of mutations."""
    step, rng, ends = two / "step-000000002", random.Random(0), Counter[str]()
    files = {name: (step / name).read_bytes() for name in (checkpoint_files.MANIFEST, PART)}
    logging.getLogger("ddpkit").setLevel(logging.CRITICAL)
    try:
        for number in range(MUTATIONS):
            for name, raw in files.items():
                (step / name).write_bytes(raw)
            manifest, header = manifest_of(step), header_of(step)
            kind = ("manifest", "header", "tree", "bytes")[number % 4]
            with contextlib.suppress(RecursionError):  # of json, in this test
                for _ in range(rng.choice([1, 1, 2, 5])):
                    if kind == "manifest":
                        mutate(manifest, rng)
                    elif kind == "header":
                        mutate(header, rng)
                    elif kind == "tree":
                        header["__metadata__"]["ddpkit"] = json.dumps(
                            mutate(json.loads(header["__metadata__"]["ddpkit"]), rng))
            if kind == "bytes":
                raw = bytearray(files[rng.choice(list(files))])
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                (step / rng.choice(list(files))).write_bytes(raw)
            else:
                try:
                    forge(step, manifest, None if kind == "manifest" else header)
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                    continue  # what the forger itself cannot write
            x, y = torch.zeros(8), torch.zeros(4, dtype=torch.int64)
            state = {"x": x, "n": {"y": y, "z": [0, None]}}
            try:
                if number % 2:
                    found = load_part(two, state)
                else:
                    with Checkpointer(two) as checkpoints:
                        found = checkpoints.load_latest(state)
            except CheckpointError as error:
                assert "step-000000002" in str(error)
                assert not re.search(r"step-000000002( on rank 0 on \S+)?: [A-Z]\w+Error", str(error)), kind
                ends["error"] += 1
            else:
                assert found is not None and found.step in (1, 2)
                ends[f"step {found.step}"] += 1
                assert found.step != 1 or bool((x == 1).all())
            for aside in two.glob("*.damaged"):
                aside.rename(step)
    finally:
        logging.getLogger("ddpkit").setLevel(logging.NOTSET)
    assert sum(ends.values()) > MUTATIONS * 0.9 and ends["step 1"] and ends["error"] and ends["step 2"], ends

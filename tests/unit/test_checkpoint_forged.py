"""utils/checkpoint: files that somebody has changed end in a clear error and in nothing else."""
from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import json
import logging
import os
import random
import re
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from tests.unit.checkpoint_states import saved
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, load_part
from utils.checkpoint.checksums import checksums
from utils.checkpoint.format import FORMAT, MANIFEST, rank_file_name, render_manifest
from utils.checkpoint.pack import pack
from utils.checkpoint.restore import Restorer
from utils.checkpoint.rng import random_states, read_random_states, restore_random_states
from utils.checkpoint.unpack import unpack
from utils.checkpoint.values import StateError

MUTATIONS = int(os.environ.get("DDPKIT_FUZZ", "400"))
FILE = rank_file_name(0)


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)


class Mode(enum.Enum):
    WARM = 1
    COLD = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    rate: Any
    mode: Any


def training() -> dict[str, Any]:
    """Every kind of entry once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model, "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2), "tensor": torch.rand(2, 3).t(),
        "generator": torch.Generator(), "python": random.Random(1),
        "numpy": numpy.random.default_rng(1), "legacy": numpy.random.RandomState(1),
        "twister": numpy.random.Generator(numpy.random.MT19937(1)),
        "philox": numpy.random.Generator(numpy.random.Philox(1)),
        "mine": PerRank({"seen": 1, "x": torch.zeros(2)}), "config": Config(0.1, Mode.COLD),
        "point": Point(1, (2,)), "plain": {1: [1.5, None, {"a": (True, {3})}], (1, 2): b"bytes"},
        "long": "x" * 70_000, "huge": 10**40,
        "arrays": [numpy.ones((2, 3)), numpy.ma.array([1, 2], mask=[True, False]), numpy.float32(3)],
        "more": [Path("a"), Decimal(1), datetime(2024, 1, 1), timedelta(1), torch.float32,
                 torch.device("cpu"), 1j, collections.deque([1], 3), collections.Counter("ab"),
                 collections.defaultdict(list, {1: [2]}), collections.OrderedDict(a=1),
                 torch.Size([1]), frozenset({1}), range(3)],
    }


VALUES: list[Any] = [
    None, True, 0, 1, -1, 1 << 31, 2**62, 1 << 63, 2**70, 10**400, 1.5, 1e300, float("nan"),
    float("inf"), "", "..", "../x", "/etc/passwd", "x" * 5000, "\0", "tensor", "load", "0x", "O",
    "dict", "cuda", [], {}, [[]], [None], [[]] * 3, {"": {}}, {"tensor": "missing"},
    {"tensor": {}}, {"torch.dtype": "load"}, {"per rank": "mine"}, {"generator": "x"},
    {"object": 1}, {"deque": 1}, {"array": {"dtype": "O", "shape": [2]}}, {"numpy": []},
    {"int": "f" * 9000}, {"set": [[[]]]}, {"enum": "Mode", "member": "HOT"}, {"dict": []},
    {"dataclass": "Config", "fields": {}}, {"dict": [[{"dict": {}}, 1]]},
]


def mutate(tree: Any, rng: random.Random, deepest: int = 3) -> None:
    """Replace, delete, rename, copy, nest or change something at a random place."""
    places: list[tuple[Any, Any]] = []
    remaining = [tree]
    while remaining:
        owner = remaining.pop()
        for key in list(owner) if type(owner) is dict else range(len(owner)):
            places.append((owner, key))
            if type(owner[key]) in (dict, list) and len(owner[key]) < 100:  # not random.Random's
                remaining.append(owner[key])

    owner, key = rng.choice(places)
    value = owner[key]
    kind = rng.randrange(7)
    if kind == 0:
        del owner[key]
    elif kind == 1:
        other, other_key = rng.choice(places)
        owner[key] = copy.deepcopy(other[other_key])
    elif kind == 2 and type(owner) is dict:
        names = ["", "..", "tensor", "x", "x" * 300, "\0", "state", "OrderedDict", "object"]
        owner[rng.choice(names)] = owner.pop(key)
    elif kind == 3:
        for _ in range(rng.choice([1, deepest])):
            value = [value] if rng.random() < 0.5 else {"dict": value}
        owner[key] = value
    elif kind == 4 and type(value) in (int, float, str):
        owner[key] = f"{value[:-1]}~" if type(value) is str else value + rng.choice([-1, 1, 8, 2**40])
    else:
        owner[key] = copy.deepcopy(rng.choice(VALUES))


# Trees ----------------------------------------------------------------------------------------

def test_changed_trees_end_in_a_clear_error() -> None:
    tree, tensors, own = saved(training())
    text, rng, state = json.dumps({"tree": tree, "own": own}), random.Random(0), training()
    ends: collections.Counter[str] = collections.Counter()
    for number in range(1501):
        read = json.loads(text)
        for _ in range(rng.choice([1, 1, 2]) if number else 0):
            mutate(read, rng)
        if set(read) != {"tree", "own"} or type(read["own"]) is not dict:
            continue
        restores = number % 50 == 0
        try:
            restorer = Restorer(training() if restores else state, read["tree"], tensors, read["own"])
            ends["mismatches" if restorer.mismatches else "accepted"] += 1
            if restores and not restorer.mismatches:
                restorer.restore()
                ends["restored"] += 1
        except StateError as error:
            ends["refused"] += 1
            assert str(error)
    assert ends["refused"] > 150 and ends["mismatches"] > 150 and ends["restored"] > 2, ends


@pytest.mark.parametrize("tree", [
    {"torch.dtype": "load"}, {"torch.dtype": "Tensor"}, {"torch.device": "x"}, {"eval": "1"}, {},
    {"int": "12"}, {"Path": ["a"]}, {"complex": [1]}, {"bytes": "?"}, {"Decimal": "x"},
    {"datetime": ["x", 0]}, {"range": [1, 2]}, {"numpy scalar": "O", "bytes": ""},
    {"numpy scalar": "f8", "bytes": "AA=="}, {"numpy scalar": "M8[xx]", "bytes": ""},
    {"tensor": "t"}, {"tensor": "t", "dtype": "load", "shape": [4]},
    {"tensor": "t", "dtype": "float32", "shape": [5]},
    {"tensor": "t", "dtype": "float32", "shape": [2, -2]},
    {"tensor": "t", "dtype": "int64", "shape": [2]},
    {"tensor": "t", "dtype": "float32", "shape": [2, 2], "stride": [1, 10**12]},
    {"tensor": "t", "dtype": "float32", "shape": [0, 2**62, 4]},
    {"tensor": [], "dtype": "float32", "shape": []},
    {"array": {"dtype": "f8", "shape": [10**12]}, "data": {"tensor": "b"}},
    {"array": {"dtype": "O", "shape": [1]}, "data": {"tensor": "b"}},
    {"array": {"dtype": [["a", "O"]], "shape": [1]}, "data": {"tensor": "b"}},
    {"set": [[1]]}, {"deque": [], "maxlen": "x"}, {"tuple": {"a": 1}}, {"dict": 1}, {"object": "x"},
    {"defaultdict": [], "factory": "eval"}, {"defaultdict": [], "factory": []},
    {"torch.Size": ["x"]}, {"dict": {}, "metadata": {"dict": {}}}, {"generator": "random.Random"},
    {"enum": "Mode", "member": "WARM"}, {"long": "str", "data": {"tensor": "b"}},
], ids=lambda tree: json.dumps(tree)[:60])
def test_trees_that_are_never_written_are_refused_by_place(tree: Any) -> None:
    tensors = {"t": torch.zeros(4), "b": torch.full((8,), 255, dtype=torch.uint8)}
    with pytest.raises(StateError, match="^x/0"):
        unpack({"dict": {"x": [tree]}}, tensors)


def test_nesting_without_end_is_refused() -> None:
    tree: Any = []
    for _ in range(900):
        tree = {"tuple": [tree]}
    state = {"x": torch.zeros(1)}
    assert Restorer(state, {"dict": {"x": tree}}, {}, {}).mismatches
    for read in (lambda: unpack(tree, {}), lambda: Restorer({}, tree, {}, {}),
                 lambda: read_random_states(tree)):
        with pytest.raises(StateError):
            read()


# Random number generators ---------------------------------------------------------------------

def test_changed_generator_states_are_refused_before_one_is_set() -> None:
    before, rng, refused = random_states(), random.Random(0), 0
    text = json.dumps(pack(before).tree)
    for _ in range(300):
        tree = json.loads(text)
        mutate(tree, rng)
        try:
            restore_random_states(read_random_states(tree))
        except StateError as error:
            refused += 1
            assert str(error)
    assert refused > 30
    restore_random_states(before)


@pytest.mark.parametrize("state", [
    {"numpy": ["MT19937", [1] * 624, 10**6, 0, 0.0]}, {"numpy": ["MT19937", [1] * 624, -1, 0, 0.0]},
    {"numpy": 1}, {"numpy": ["PCG64", [1] * 624, 3, 0, 0.0]}, {"torch": b"short"},
    {"python": [3, [1], None]}, {"cuda": "x"}, [1],
], ids=lambda state: repr(state)[:40])
def test_a_generator_position_outside_its_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        read_random_states(pack(state).tree)


# Files ----------------------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The intact step 1, and step 2, which is to be forged."""
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(float(step)))
    return tmp_path


def state_of(value: float) -> dict[str, Any]:
    return {"x": torch.full((8,), float(value)), "n": {"y": torch.arange(4), "z": [value, None]}}


def loaded_step(folder: Path) -> int:
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.load_latest(state_of(0))
    assert found is not None
    return found.step


def read_manifest(step: Path) -> Any:
    return json.loads((step / MANIFEST).read_text())["manifest"]


def read_header(step: Path) -> Any:
    raw = (step / FILE).read_bytes()
    return json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])


def forge(step: Path, manifest: Any, header: Any = None) -> None:
    """Write a manifest, and a header with its right checksums before the data that is there."""
    if header is not None:
        raw = (step / FILE).read_bytes()
        data = raw[8 + int.from_bytes(raw[:8], "little"):]
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)
        raw = len(text).to_bytes(8, "little") + text + data
        (step / FILE).write_bytes(raw)
        whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        manifest["files"][0] |= {"size": len(raw), "blocks": checksums(whole)}
    (step / MANIFEST).write_bytes(render_manifest(manifest))


@pytest.mark.parametrize("field, value", [
    ("name", "../step-000000001/rank-00000.safetensors"), ("name", "/etc/passwd"), ("name", None),
    ("name", ["x"]), ("size", -1), ("size", True), ("size", 1 << 70), ("size", "8"), ("size", 1.5),
    ("blocks", {}), ("blocks", [[1]]), ("blocks", [[-8, "00"], [16, "00"]]),
    ("blocks", [[1 << 40, "00"]]), ("blocks", [[0, ""]]), ("replicated", 1)])
def test_a_forged_manifest_is_quarantined_and_the_field_named(
        field: str, value: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = read_manifest(folder / "step-000000002")
    manifest["files"][0][field] = value
    forge(folder / "step-000000002", manifest)
    assert loaded_step(folder) == 1
    assert f"manifest.json: files[0].{field} is" in caplog.text
    assert "quarantined as step-000000002.damaged" in caplog.text


@pytest.mark.parametrize("number, writer", [(FORMAT + 1, "a later"), (1, "an earlier")])
def test_another_format_is_refused_and_not_called_damaged(
        number: int, writer: str, folder: Path) -> None:
    step = folder / "step-000000002"
    forge(step, {**read_manifest(step), "format": number})
    words = f"format {number}, of {writer} version of the kit; expected format {FORMAT}"
    with pytest.raises(CheckpointError, match=words):
        loaded_step(folder)
    assert step.is_dir()


def test_a_checkpoint_under_the_name_of_another_step_is_refused(folder: Path) -> None:
    (folder / "step-000000002").rename(folder / "step-000000003")
    with pytest.raises(CheckpointError, match="manifest.json: step is 2; expected 3, as in the name"):
        loaded_step(folder)


@pytest.mark.parametrize("changes, words", [
    ({"data_offsets": [-8, 24]}, "x.*data_offsets"), ({"data_offsets": [0, 1 << 62]}, "x.*data_offs"),
    ({"data_offsets": [32, 0]}, "x.*data_offsets"), ({"data_offsets": [8, 40]}, "data_offsets"),
    ({"data_offsets": [0.0, 32]}, "x.*data_offsets"), ({"shape": [2, 2]}, "data_offsets"),
    ({"shape": [-8]}, "shape"), ({"shape": [1 << 40, 1 << 40]}, "shape"), ({"shape": "8"}, "shape"),
    ({"shape": [1] * 200 + [8]}, "shape"), ({"dtype": "F4096"}, "dtype"), ({"dtype": []}, "dtype")])
def test_a_forged_header_is_quarantined_and_the_field_named(
        changes: dict[str, Any], words: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = folder / "step-000000002"
    header = read_header(step)
    header["x"] |= changes
    forge(step, read_manifest(step), header)
    assert loaded_step(folder) == 1
    assert re.search(f"{FILE}: .*{words}", caplog.text), caplog.text


@pytest.mark.parametrize("text", [
    b"[" * 100_000, b'{"x": 1, "x": 2}', b"\xff\xfe", b"null", b"NaN", b'{"__metadata__": []}',
    b'{"__metadata__": {}}', b'{"__metadata__": {"ddpkit": "[1"}}', b'{"x": ' + b"9" * 5000 + b"}"],
    ids=lambda text: text[:20].decode(errors="replace"))
def test_a_header_that_is_none_is_quarantined(
        text: bytes, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = folder / "step-000000002"
    forge(step, read_manifest(step), text)
    assert loaded_step(folder) == 1
    assert FILE in caplog.text


def test_forged_files_end_in_checkpoint_errors(
        folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DDPKIT_FUZZ: number of mutations."""
    caplog.set_level(logging.CRITICAL, logger="ddpkit")
    step, rng = folder / "step-000000002", random.Random(0)
    ends: collections.Counter[str] = collections.Counter()
    intact = {name: (step / name).read_bytes() for name in (MANIFEST, FILE)}
    for number in range(MUTATIONS):
        for name, raw in intact.items():
            (step / name).write_bytes(raw)
        kind = ("manifest", "header", "tree", "bytes")[number % 4]
        if not forge_randomly(step, kind, rng, intact):
            continue
        state = state_of(0)
        try:
            if number % 2:
                found = load_part(folder, state)
            else:
                with Checkpointer(folder) as checkpoints:
                    found = checkpoints.load_latest(state)
        except CheckpointError as error:
            assert "step-000000002" in str(error)
            assert not re.search(r"step-000000002( on rank 0 on \S+)?: [A-Z]\w+Error", str(error)), kind
            ends["error"] += 1
        else:
            assert found is not None and found.step in (1, 2)
            ends[f"step {found.step}"] += 1
            assert found.step != 1 or bool((state["x"] == 1).all())
        for quarantined in folder.glob("*.damaged"):
            quarantined.rename(step)
    assert sum(ends.values()) > MUTATIONS * 0.9 and len(ends) == 3, ends


def forge_randomly(step: Path, kind: str, rng: random.Random, intact: dict[str, bytes]) -> bool:
    """Change the files of a checkpoint; whether this module can write what came out."""
    if kind == "bytes":
        name = rng.choice(list(intact))
        raw = bytearray(intact[name])
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (step / name).write_bytes(raw)
        return True
    manifest, header = read_manifest(step), read_header(step)
    tree = json.loads(header["__metadata__"]["ddpkit"])
    target = {"manifest": manifest, "header": header, "tree": tree}[kind]
    with contextlib.suppress(RecursionError):  # of json, in this test
        for _ in range(rng.choice([1, 1, 2, 5])):
            mutate(target, rng, deepest=600)
        if kind == "tree":
            header["__metadata__"]["ddpkit"] = json.dumps(tree)
    try:
        forge(step, manifest, None if kind == "manifest" else header)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, IndexError):
        return False
    return True

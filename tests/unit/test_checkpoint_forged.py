"""utils/checkpoint: files that somebody has changed end in a clear error and in nothing else."""
from __future__ import annotations

import collections
import contextlib
import copy
import json
import logging
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.unit.test_checkpoint_state import ARRAYS, PLAIN, Config, Frozen, Mode, Point
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, load_part
from utils.checkpoint.checksums import checksums
from utils.checkpoint.format import FORMAT, MANIFEST, rank_file_name, render_manifest
from utils.checkpoint.pack import pack
from utils.checkpoint.rng import read_random_states
from utils.checkpoint.unpack import unpack
from utils.checkpoint.values import StateError

MUTATIONS = int(os.environ.get("DDPKIT_FUZZ", "300"))
FILE = rank_file_name(0)


def training() -> dict[str, Any]:
    """Every kind of entry."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "x": torch.arange(8.0), "turned": torch.rand(2, 3).t(), "mine": PerRank({"seen": 1, "x": torch.zeros(2)}),
        "generators": [torch.Generator(), random.Random(1), numpy.random.RandomState(1), numpy.random.default_rng(1),
                       *(numpy.random.Generator(kind(1)) for kind in (numpy.random.MT19937, numpy.random.Philox))],
        "classes": [Config(0.1, Mode.COLD, [Point(1, (2,))]), Frozen(1, torch.zeros(1))],
        "plain": copy.deepcopy([value for value in PLAIN if sys.getsizeof(value) < 3000]), "long": "x" * 70_000,
        "arrays": copy.deepcopy(ARRAYS),
    }


def nested(levels: int) -> Any:
    tree: Any = []
    for _ in range(levels):
        tree = {"tuple": [tree]}
    return tree


@pytest.mark.parametrize("tree", [
    {"torch.dtype": "load"}, {"torch.dtype": "Tensor"}, {"eval": "1"}, {}, {"int": "12"}, {"bytes": "?"},
    {"datetime": ["x", 0]}, {"numpy scalar": "O", "bytes": ""}, {"numpy scalar": "f8", "bytes": "AA=="},
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
    {"enum": "Mode", "member": "WARM"}, {"long": "str", "data": {"tensor": "b"}}, nested(120),
], ids=lambda tree: json.dumps(tree)[:60])
def test_trees_that_are_never_written_are_refused_by_place(tree: Any) -> None:
    tensors = {"t": torch.zeros(4), "b": torch.full((8,), 255, dtype=torch.uint8)}
    with pytest.raises(StateError, match="^x/0"):
        unpack({"dict": {"x": [tree]}}, tensors)


@pytest.mark.parametrize("state", [
    {"numpy": ["MT19937", [1] * 624, 10**6, 0, 0.0]}, {"numpy": ["MT19937", [1] * 624, -1, 0, 0.0]},
    {"numpy": 1}, {"torch": b"short"}, {"python": [3, [1], None]}, {"cuda": "x"}, [1],
], ids=lambda state: repr(state)[:40])
def test_a_generator_position_outside_its_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        read_random_states(pack(state).tree)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The intact step 1, and step 2, which is to be forged."""
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, training())
    return tmp_path


def loaded_step(folder: Path) -> int:
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.load_latest(training())
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


@pytest.mark.parametrize("file, content, words", [
    *((MANIFEST, {field: value}, rf"manifest.json: files\[0\].{field} is") for field, value in (
        ("name", "../step-000000001/rank-00000.safetensors"), ("name", None), ("size", -1), ("size", True),
        ("size", 1 << 70), ("size", 1.5), ("blocks", {}), ("blocks", [[1]]), ("blocks", [[-8, "00"], [16, "00"]]),
        ("blocks", [[1 << 40, "00"]]), ("blocks", [[0, ""]]), ("replicated", 1))),
    *((FILE, {field: value}, f"{FILE}: .*x.*{words}") for field, value, words in (
        ("data_offsets", [-8, 24], "data_offsets"), ("data_offsets", [0, 1 << 62], "data_offsets"),
        ("data_offsets", [32, 0], "data_offsets"), ("data_offsets", [8, 40], "data_offsets"),
        ("data_offsets", [0.0, 32], "data_offsets"), ("shape", [2, 2], "data_offsets"), ("shape", [-8], "shape"),
        ("shape", [1 << 40, 1 << 40], "shape"), ("shape", "8", "shape"), ("shape", [1] * 200 + [8], "shape"),
        ("dtype", "F4096", "dtype"), ("dtype", [], "dtype"))),
    *((FILE, text, FILE) for text in (
        b"[" * 100_000, b'{"x": 1, "x": 2}', b"\xff\xfe", b"null", b"NaN", b'{"__metadata__": []}',
        b'{"__metadata__": {}}', b'{"__metadata__": {"ddpkit": "[1"}}', b'{"x": ' + b"9" * 5000 + b"}")),
], ids=lambda value: repr(value)[:30])
def test_forged_files_are_quarantined_and_the_field_named(
        file: str, content: Any, words: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = folder / "step-000000002"
    manifest, header = read_manifest(step), read_header(step)
    if isinstance(content, bytes):
        header = content
    else:
        (manifest["files"][0] if file == MANIFEST else header["x"]).update(content)
    forge(step, manifest, header if file == FILE else None)
    assert loaded_step(folder) == 1
    assert re.search(words, caplog.text), caplog.text
    assert "quarantined as step-000000002.damaged" in caplog.text


@pytest.mark.parametrize("changes, words", [
    ({"format": FORMAT + 1}, f"format {FORMAT + 1}, of a later version of the kit; expected format {FORMAT}"),
    ({"format": 1}, f"format 1, of an earlier version of the kit; expected format {FORMAT}"),
    ({"step": 3}, "manifest.json: step is 3; expected 2, as in the name")])
def test_another_format_or_step_is_refused_and_not_called_damaged(
        changes: dict[str, int], words: str, folder: Path) -> None:
    forge(folder / "step-000000002", {**read_manifest(folder / "step-000000002"), **changes})
    with pytest.raises(CheckpointError, match=words):
        loaded_step(folder)
    assert (folder / "step-000000002").is_dir()


VALUES: list[Any] = [
    None, True, 0, -1, 1 << 31, 2**62, 2**70, 10**400, 1e300, float("nan"), "", "../x", "/etc/passwd", "x" * 5000,
    "\0", "tensor", "load", "O", "cuda", [], {}, [[]], [[]] * 3, {"": {}}, {"tensor": "missing"}, {"tensor": {}},
    {"torch.dtype": "load"}, {"per rank": "mine"}, {"generator": "x"}, {"object": 1}, {"deque": 1}, {"numpy": []},
    {"array": {"dtype": "O", "shape": [2]}}, {"int": "f" * 9000}, {"set": [[[]]]}, {"dict": [[{"dict": {}}, 1]]},
    {"enum": "Mode", "member": "HOT"}, {"dataclass": "Config", "fields": {}}, nested(120),
]


def mutate(tree: Any, rng: random.Random) -> None:
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
    other, other_key = rng.choice(places)
    value = owner[key]
    kind = rng.randrange(6)
    if kind == 0:
        del owner[key]
    elif kind == 1 and type(owner) is dict:
        owner[rng.choice(["", "..", "tensor", "x", "x" * 300, "\0", "OrderedDict", "object"])] = owner.pop(key)
    elif kind == 2 and type(value) in (int, float, str):
        owner[key] = f"{value[:-1]}~" if type(value) is str else value + rng.choice([-1, 1, 8, 2**40])
    else:
        owner[key] = copy.deepcopy(rng.choice([other[other_key], [value], {"dict": value}, *VALUES]))


def forge_randomly(step: Path, kind: str, rng: random.Random) -> bool:
    """Change the files of a checkpoint; whether this module can write what came out."""
    manifest, header = read_manifest(step), read_header(step)
    trees = json.loads(header["__metadata__"]["ddpkit"])
    for _ in range(rng.choice([1, 1, 2, 5])):
        mutate({"manifest": manifest, "header": header, "trees": trees}[kind], rng)
    if kind == "trees":
        header["__metadata__"]["ddpkit"] = json.dumps(trees)
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, RecursionError, IndexError):
        forge(step, manifest, None if kind == "manifest" else header)
        return True
    return False


def test_random_changes_end_in_a_checkpoint_error_or_an_intact_step(
        folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DDPKIT_FUZZ: number of mutations."""
    caplog.set_level(logging.CRITICAL, logger="ddpkit")
    step, rng = folder / "step-000000002", random.Random(0)
    ends: collections.Counter[str] = collections.Counter()
    intact = {name: (step / name).read_bytes() for name in (MANIFEST, FILE)}
    for number in range(MUTATIONS):
        for name, raw in intact.items():
            (step / name).write_bytes(raw)
        kind = ("manifest", "header", "trees", "trees")[number % 4]
        if not forge_randomly(step, kind, rng):
            continue
        state = training()
        try:
            if number % 8 < 2:
                del state["mine"]
                found = load_part(folder, state)
            else:
                with Checkpointer(folder) as checkpoints:
                    found = checkpoints.load_latest(state)
        except CheckpointError as error:
            assert re.search("step-000000002|cannot restore step 2", str(error))
            assert not re.search(r"step-000000002( on rank 0 on \S+)?: [A-Z]\w+Error", str(error)), kind
            ends["error"] += 1
        else:
            assert found is not None
            ends[f"step {found.step}"] += 1
        for quarantined in folder.glob("*.damaged"):
            quarantined.rename(step)
    assert sum(ends.values()) > MUTATIONS * 0.8 and min(ends.values()) > MUTATIONS / 40, ends
    assert set(ends) == {"error", "step 1", "step 2"}

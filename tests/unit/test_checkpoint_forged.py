"""utils/checkpoint: files that somebody has changed end in a clear error and in nothing else."""
from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from utils.checkpoint import Checkpointer, CheckpointError, PerRank
from utils.checkpoint.checksums import checksums
from utils.checkpoint.entries import StateError
from utils.checkpoint.format import FORMAT, MANIFEST, rank_file_name, render_manifest
from utils.checkpoint.pack import pack
from utils.checkpoint.restore import Restorer
from utils.checkpoint.rng import read_random_states
from utils.checkpoint.unpack import unpack

FILE = rank_file_name(0)


def state() -> dict[str, Any]:
    return {"x": torch.arange(8.0), "sampler": {"epoch": 1}}


TOO_DEEP: Any = functools.reduce(lambda tree, _: {"tuple": [tree]}, range(120), [])


@pytest.mark.parametrize("tree", [
    {"torch.dtype": "load"}, {"eval": "1"}, {}, {"int": "x"}, {"bytes": "?"}, {"object": "x"}, TOO_DEEP,
    {"tensor": "t"}, {"tensor": "t", "dtype": "load", "shape": [4]}, {"tensor": "t", "dtype": "float32", "shape": [5]},
    {"tensor": "t", "dtype": "int64", "shape": [2]},
    {"tensor": "t", "dtype": "float32", "shape": [2, 2], "stride": [1, 10**12]},
    {"array": {"dtype": "O", "shape": [1]}}, {"numpy scalar": "O"}, {"tuple": {"a": 1}}, {"complex": "x"},
    {"OrderedDict": [[[1], 2]]}, {"per rank": "x"},
], ids=lambda tree: json.dumps(tree)[:60])
def test_trees_that_are_never_written_are_refused_by_place(tree: Any) -> None:
    with pytest.raises(StateError, match="^x/0"):
        unpack({"dict": {"x": [tree]}}, {"t": torch.zeros(4)})


def test_a_part_that_this_rank_has_not_saved_is_a_mismatch() -> None:
    assert "lacks this rank's part" in str(Restorer([PerRank(1)], [{"per rank": "x"}], {}, {}).mismatches)


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
            checkpoints.save(step, state())
    return tmp_path


def loaded_step(folder: Path) -> int:
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.load_latest(state())
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
        ("name", "../step-000000001/rank-00000.safetensors"), ("size", -1), ("size", True), ("size", 1 << 70),
        ("blocks", {}), ("blocks", [[1]]), ("blocks", [[-8, "00"], [16, "00"]]), ("blocks", [[0, ""]]),
        ("replicated", 1))),
    *((FILE, {field: value}, f"{FILE}: .*x.*{words}") for field, value, words in (
        ("data_offsets", [-8, 24], "data_offsets"), ("data_offsets", [0, 1 << 62], "data_offsets"),
        ("data_offsets", [32, 0], "data_offsets"), ("data_offsets", [8, 40], "data_offsets"),
        ("shape", [2, 2], "data_offsets"), ("shape", [-8], "shape"), ("shape", [1 << 40, 1 << 40], "shape"),
        ("shape", [1] * 200 + [8], "shape"), ("dtype", "F4096", "dtype"), ("dtype", [], "dtype"))),
    *((FILE, {"__metadata__": {"ddpkit": text}}, f"{FILE}: __metadata__.ddpkit") for text in (
        "[1", "{}", '{"own": {}, "local": [1], "random": {}}', '{"own": {}, "local": [], "random": {}}')),
    *((FILE, text, FILE) for text in (
        b"[" * 100_000, b'{"x": 1, "x": 2}', b"\xff\xfe", b"null", b"NaN", b'{"__metadata__": []}',
        b'{"__metadata__": {}}', b'{"x": ' + b"9" * 5000 + b"}")),
    (FILE, b'{"x": ["F32", [8], [0, 32]]}', "x.* is .*; expected an object"),
], ids=lambda value: repr(value)[:30])
def test_forged_files_are_quarantined_and_the_field_named(
        file: str, content: Any, words: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = folder / "step-000000002"
    manifest, header = read_manifest(step), read_header(step)
    if isinstance(content, bytes):
        header = content
    else:
        in_header = header if "__metadata__" in content else header["x"]
        (manifest["files"][0] if file == MANIFEST else in_header).update(content)
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

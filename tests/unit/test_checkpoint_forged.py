"""utils/checkpoint: files that somebody has changed end in a clear error and in nothing else."""
from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from utils.checkpoint import Checkpointer, CheckpointError, PerRank
from utils.checkpoint.entries import StateError
from utils.checkpoint.format import FORMAT, MANIFEST, render_manifest
from utils.checkpoint.pack import pack
from utils.checkpoint.restore import Restorer
from utils.checkpoint.rng import read_random_states
from utils.checkpoint.unpack import unpack


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


def forge(step: Path, changes: dict[str, int]) -> None:
    """Change fields of a manifest, and its checksum with them."""
    manifest = json.loads((step / MANIFEST).read_text())["manifest"]
    (step / MANIFEST).write_bytes(render_manifest({**manifest, **changes}))


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[" * 100_000, b"null", b"\xff\xfe", b'{"manifest": {"format": 3}, "crc32": "0"}\n'])
def test_a_manifest_that_does_not_match_its_checksum_is_quarantined(
        content: bytes, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "step-000000002" / MANIFEST).write_bytes(content)
    assert loaded_step(folder) == 1
    assert "manifest.json: its text does not match its checksum" in caplog.text
    assert "quarantined as step-000000002.damaged" in caplog.text


@pytest.mark.parametrize("changes, words", [
    ({"format": FORMAT + 1}, f"format {FORMAT + 1}, of a later version of the kit; expected format {FORMAT}"),
    ({"format": 1}, f"format 1, of an earlier version of the kit; expected format {FORMAT}"),
    ({"step": 3}, "manifest.json: step is 3; expected 2, as in the name")])
def test_another_format_or_step_is_refused_and_not_called_damaged(
        changes: dict[str, int], words: str, folder: Path) -> None:
    forge(folder / "step-000000002", changes)
    with pytest.raises(CheckpointError, match=words):
        loaded_step(folder)
    assert (folder / "step-000000002").is_dir()

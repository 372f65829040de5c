"""Checkpoints on disk: their names, and their manifests."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .format import MANIFEST, Damaged, Manifest, Unreadable, parse_manifest
from .rank_file import open_regular_file

# step-000001200, and step-000001200-2 when that step was saved a second time
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")
QUARANTINED = ".damaged"  # is added to the name of a damaged checkpoint
_QUARANTINED_NAME = re.compile(rf"{_NAME.pattern}{re.escape(QUARANTINED)}(?:-\d+)?")
_MAX_MANIFEST_BYTES = 1 << 30
_SHOWN_STEPS = 10


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints, oldest step first."""
    return sorted(filter(_NAME.fullmatch, os.listdir(folder)), key=_order)


def quarantined_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints that were found damaged."""
    return sorted(filter(_QUARANTINED_NAME.fullmatch, os.listdir(folder)))


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return _order(name)[0]


def name_after(step: int, names: Sequence[str]) -> str:
    """Return the name of a checkpoint that comes after all others of its step."""
    count = 1 + max((_order(name)[1] for name in names if step_of(name) == step), default=0)
    return f"step-{step:09d}" + (f"-{count}" if count > 1 else "")


def newest_by_step(names: Sequence[str]) -> dict[int, str]:
    """Return the name for each step; if a step was saved twice, the second.

    names: from checkpoint_names().
    """
    return {step_of(name): name for name in names}


def show_steps(names: Sequence[str]) -> str:
    """Return the last steps of these checkpoints for a message, or "none"."""
    return ", ".join(str(step_of(name)) for name in names[-_SHOWN_STEPS:]) or "none"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, fully checked.

    Raises Damaged, Unreadable or OSError.
    """
    if not os.path.lexists(folder):
        raise Unreadable(
            f"{folder} is missing, although rank 0 sees it; expected a folder on a file system "
            "that all hosts share. Choose one"
        )
    with open_regular_file(folder / MANIFEST) as (file, size):
        if size > _MAX_MANIFEST_BYTES:
            what = f"{MANIFEST} has {size} bytes; expected at most {_MAX_MANIFEST_BYTES}"
            raise Damaged(MANIFEST, what)
        with open(file, "rb", closefd=False) as opened:
            manifest = parse_manifest(opened.read(size + 1))

    if _NAME.fullmatch(folder.name) and manifest["step"] != step_of(folder.name):
        raise Unreadable(
            f"{MANIFEST}: step is {manifest['step']}; expected {step_of(folder.name)}, as in the "
            "name of its folder. Restore the folder's name"
        )
    return manifest


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1]), int(match[2] or 1)

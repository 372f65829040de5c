"""Read the files of a checkpoint, and compare what they hold with a state."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from .entries import StateError, Tree
from .format import Manifest, slice_name
from .rank_file import read_data, read_header
from .restore import Restorer
from .rng import read_random_states
from .slices import Box, Needed, layouts, tensor_entries

_SHOWN_MISMATCHES = 8


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or restored.

    From a Checkpointer it is the same on every rank.
    """


class PermanentError(CheckpointError):
    """Every later save would fail in the same way."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded. state: as given to the load, restored."""

    step: int
    state: Any


class RankMetadata(TypedDict, total=False):
    """The trees in a rank's file; see Packed."""

    tree: Tree  # of the whole state; in the file of rank 0
    own: dict[str, Tree]  # of the rank's PerRank parts
    random: Tree  # states of the rank's random number generators
    versions: dict[str, str]  # in the file of rank 0


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory that matches a state, which is not changed yet."""

    step: int
    world_size: int
    restorer: Restorer
    random: dict[str, Any] | None  # of this rank; None if another number of ranks saved it
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Return the versions of what decides the bits of a training."""
    return {"torch": torch.__version__, "Python": platform.python_version()}


def changed_versions(saved: Mapping[str, str]) -> list[str]:
    """Return the versions that differ: "torch 2.13.0, here 2.15.0"."""
    return [
        f"{name} {saved[name]}, here {here}"
        for name, here in versions().items()
        if name in saved and saved[name] != here
    ]


def load(
    folder: Path,
    manifest: Manifest,
    state: Any,
    rank: int | None,
    world_size: int,
    *,
    parts: Collection[str] | None = None,
) -> LoadedCheckpoint:
    """Read and check a checkpoint, and compare it with the state. Nothing is changed yet.

    rank: whose PerRank parts and buffers to take, if as many ranks saved it; None for rank 0's
        buffers alone.
    parts: keys of the saved state; default: all.
    Raises Damaged, Unreadable, StateError, OSError or CheckpointError.
    """
    contents = read_contents(folder, manifest, rank, world_size, parts, state)
    restorer = Restorer(state, contents.tree, contents.tensors, contents.own)
    if restorer.mismatches:
        shown = "; ".join(restorer.mismatches[:_SHOWN_MISMATCHES])
        more = len(restorer.mismatches) - _SHOWN_MISMATCHES
        raise CheckpointError(
            f"the state does not match: {shown}{f'; and {more} more' if more > 0 else ''}. "
            "Resume with what was saved, or start in another folder"
        )
    return LoadedCheckpoint(
        manifest["step"],
        manifest["world_size"],
        restorer,
        contents.random,
        contents.versions,
    )


@dataclass(frozen=True)
class Contents:
    """What the files of a checkpoint hold for one rank."""

    tree: Tree  # of the state, or of the chosen parts
    part_names: list[str]  # all parts, if some were chosen
    own: dict[str, Tree] | None  # as of Restorer
    tensors: dict[str, Tensor]
    random: dict[str, Any] | None
    versions: dict[str, str]


def read_contents(
    folder: Path,
    manifest: Manifest,
    rank: int | None,
    world_size: int,
    parts: Collection[str] | None,
    state: Any = None,
) -> Contents:
    """Read what one rank needs; arguments as for load()."""
    files = manifest["files"]
    is_same_size = rank is not None and len(files) == world_size
    mine = rank if is_same_size and rank is not None else 0
    headers = {number: read_header(folder, files[number]) for number in {0, mine}}
    of_rank_0: RankMetadata = headers[0].metadata
    of_mine: RankMetadata = headers[mine].metadata

    tree = of_rank_0["tree"]
    part_names: list[str] = []
    if parts is not None:
        tree, part_names = _cut(tree, parts)
    own = of_mine["own"] if is_same_size else None
    random = read_random_states(of_mine["random"]) if is_same_size else None

    entries = {entry["tensor"]: entry for entry in tensor_entries([tree, own])}
    found = layouts(state, tree) if "torch.distributed.tensor" in sys.modules else {}
    # The comparison with the state reports other shapes.
    layout = {
        name: tensor_layout
        for name, tensor_layout in found.items()
        if [*tensor_layout.shape] == entries[name]["shape"]
    }
    needed = {name: Needed(entry, layout.get(name)) for name, entry in entries.items()}

    boxes = {name: entry.box for name, entry in needed.items()}
    for number, slices in slices_by_file(manifest, boxes, mine).items():
        header = headers.get(number) or read_header(folder, files[number])
        pieces = []
        for names, box in slices:
            for name in names:
                key = name if box is None else slice_name(name, box.offsets)
                if key not in header.places:
                    raise StateError(f"{files[number]['name']} lacks {key}")
                pieces.append(needed[name].piece(box, header.places[key].start))
        read_data(folder, files[number], pieces)
        for name in {name for names, _ in slices for name in names}:
            needed[name].copy_parts()
    tensors = {name: part.tensor() for name, part in needed.items()}
    return Contents(tree, part_names, own, tensors, random, of_rank_0["versions"])


def slices_by_file(
    manifest: Manifest, boxes: Mapping[str, Box], mine: int
) -> dict[int, list[tuple[list[str], Box | None]]]:
    """Return what to read of each rank's file: the slices, and the tensors that have such a slice.

    boxes: what is needed of each tensor.
    mine: the rank whose file has the tensors that every file has.
    The slice is None where the file has the whole tensors.
    """
    whole: dict[int, list[str]] = {}
    alike: dict[tuple[int, Box], list[str]] = {}  # most tensors have a layout in common
    for name, box in boxes.items():
        if 0 in box.sizes:
            continue
        if name in manifest["sharded"]:
            alike.setdefault((manifest["sharded"][name], box), []).append(name)
        else:
            whole.setdefault(manifest["whole"].get(name, mine), []).append(name)

    found: dict[int, list[tuple[list[str], Box | None]]] = {
        rank: [(names, None)] for rank, names in whole.items()
    }
    for (layout, box), names in alike.items():
        for rank, offsets, sizes in manifest["layouts"][layout]:
            held = Box(tuple(offsets), tuple(sizes))
            if 0 not in box.overlap(held).sizes:
                found.setdefault(rank, []).append((names, held))
    return found


def _cut(tree: Tree, parts: Collection[str]) -> tuple[Tree, list[str]]:
    """Return the tree of a state with these parts alone, and the names of all its parts."""
    content = tree.get("dict") if type(tree) is dict else None
    if type(content) is not dict:
        raise StateError("the saved state is no dictionary of parts. Load it with a Checkpointer")
    chosen = {name: part for name, part in content.items() if name in parts}
    return {"dict": chosen}, list(content)

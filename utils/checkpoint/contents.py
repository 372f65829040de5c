"""Read the files of a checkpoint, and compare what they hold with a state."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from .entries import StateError, Tree
from .format import Manifest, StoredTensor
from .rank_file import read_metadata, read_tensors
from .restore import Restorer
from .rng import read_random_states
from .slices import Box, assemble, layouts, like, shard_of, tensor_entries

_SHOWN_MISMATCHES = 8


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or restored.

    From a Checkpointer it is the same on every rank.
    """


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
    random: list[dict[str, Any]]  # of this rank, or of all ranks if their number has changed
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
    random: list[dict[str, Any]]
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

    @functools.cache
    def metadata(number: int) -> RankMetadata:
        return cast(RankMetadata, read_metadata(folder, files[number]))

    tree = metadata(0)["tree"]
    part_names: list[str] = []
    if parts is not None:
        tree, part_names = _cut(tree, parts)
    own = metadata(mine)["own"] if is_same_size else None
    ranks = [] if rank is None else [mine] if is_same_size else range(len(files))
    random = [read_random_states(metadata(one)["random"]) for one in ranks]

    entries = {entry["tensor"]: entry for entry in tensor_entries([tree, own])}
    found = layouts(state, tree) if "torch.distributed.tensor" in sys.modules else {}
    # The comparison with the state reports other shapes.
    layout = {name: one for name, one in found.items() if [*one.shape] == entries[name]["shape"]}
    boxes = {
        name: shard_of(layout[name], (name,)).box if name in layout else Box.of_whole(one["shape"])
        for name, one in entries.items()
    }

    stored: dict[str, list[tuple[Box, Tensor]]] = {name: [] for name in entries}
    for number in sorted(range(len(files)), key=lambda number: number == mine):  # it comes last
        chosen = {}
        for key, place in files[number]["tensors"].items():
            one = StoredTensor(*place)
            box = Box(tuple(one.offsets), tuple(one.sizes))
            is_foreign = number != mine and key in files[number]["local"]
            if one.name in entries and not is_foreign and boxes[one.name].meets(box):
                chosen[key] = one.name, box
        for key, tensor in read_tensors(folder, files[number], chosen).items() if chosen else ():
            name, box = chosen[key]
            if "sharded" not in entries[name]:
                stored[name].clear()  # of rank 0, whose local tensors have the same names
            stored[name].append((box, tensor))

    tensors = {}
    for name, entry in entries.items():
        whole = assemble(entry, boxes[name], stored[name])
        tensors[name] = like(layout[name], whole) if name in layout else whole
    return Contents(tree, part_names, own, tensors, random, metadata(0)["versions"])


def _cut(tree: Tree, parts: Collection[str]) -> tuple[Tree, list[str]]:
    """Return the tree of a state with these parts alone, and the names of all its parts."""
    content = tree.get("dict") if type(tree) is dict else None
    if type(content) is not dict:
        raise StateError("the saved state is no dictionary of parts. Load it with a Checkpointer")
    chosen = {name: part for name, part in content.items() if name in parts}
    return {"dict": chosen}, list(content)

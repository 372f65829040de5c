"""Read the files of a checkpoint, and compare what they hold with a state."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from .entries import StateError, Tree
from .format import Manifest, SliceEntry
from .rank_file import read_rank_file
from .restore import Restorer
from .rng import read_random_states
from .slices import Box, assemble, layouts, like, shard_of, tensor_entries

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KEY = "ddpkit"  # of the kit's part in the metadata of a file
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
    local: list[str]  # tensors that only this rank restores; none are listed for rank 0
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


def render_metadata(trees: RankMetadata) -> dict[str, str]:
    """Return the metadata of a rank's file."""
    return {_KEY: json.dumps(trees)}


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
    contents = Contents(folder, manifest, rank, world_size, parts, state)
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


class Contents:
    """What the files of a checkpoint hold for one rank; arguments as for load().

    tree: of the state, or of the chosen parts. part_names: all parts, if some were chosen.
    own: trees of the rank's PerRank parts; None if another number of ranks saved them.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        rank: int | None,
        world_size: int,
        parts: Collection[str] | None,
        state: Any = None,
    ) -> None:
        self.tree: Tree = None
        self.tensors: dict[str, Tensor] = {}
        self.part_names: list[str] = []
        self.versions: dict[str, str] = {}
        is_same_size = rank is not None and manifest["world_size"] == world_size
        of_this_rank: dict[str, Tensor] = {}
        metadata_by_rank: dict[int, RankMetadata] = {}
        chosen: set[str] = set()

        sharded = any(entry["slices"] for entry in manifest["files"])
        needed = _Needed()

        def choose(metadata: dict[str, str]) -> set[str]:
            trees: RankMetadata = json.loads(metadata[_KEY])
            if self.tree is None:  # rank 0's file, which is the first, has the tree
                self.tree = trees["tree"]
                if parts is not None:
                    self.tree, self.part_names = _cut(self.tree, parts)
                chosen.update(_strings(self.tree))
                needed.find(self.tree, state)
            own = _strings(trees["own"]) if is_same_size else set()
            return chosen | own | needed.keys(entry["slices"])

        for number, entry in enumerate(manifest["files"]):
            all_ranks = rank is not None and not is_same_size  # their generators are needed
            has_slices = number > 0 and bool(needed.keys(entry["slices"]))
            if not (entry["replicated"] or number in (0, rank) or all_ranks or has_slices):
                continue
            selects = sharded or parts is not None
            raw, held = read_rank_file(folder, entry, choose if selects else None)
            metadata = metadata_by_rank[number] = json.loads(raw[_KEY])
            if number == 0 and not selects:
                self.tree = metadata["tree"]
                needed.find(self.tree, state)
            needed.take(held, entry["slices"])
            self.versions |= metadata.get("versions", {})
            if is_same_size and number == rank:
                of_this_rank = held
            else:
                local = set(metadata["local"])
                self.tensors.update((name, one) for name, one in held.items() if name not in local)

        # Local tensors have the same names in the files of all ranks.
        self.tensors.update(of_this_rank)
        needed.assemble(self.tensors)
        self.own: dict[str, Tree] | None = None
        ranks: list[int] = []
        if rank is not None:
            ranks = [rank] if is_same_size else sorted(metadata_by_rank)
            self.own = metadata_by_rank[rank]["own"] if is_same_size else None
        self.random = [read_random_states(metadata_by_rank[one]["random"]) for one in ranks]


class _Needed:
    """The boxes of sharded tensors that this rank needs, and what was read of them."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Any]] = {}  # trees, by name
        self._layouts: dict[str, DTensor] = {}  # of the present state; others are needed whole
        self._boxes: dict[str, Box] = {}
        self._parts: dict[str, list[tuple[Box, Tensor]]] = {}

    def find(self, tree: Tree, state: Any) -> None:
        """Find out which boxes the present state needs."""
        self._entries = {entry["tensor"]: entry for entry in tensor_entries(tree)}
        if "torch.distributed.tensor" in sys.modules:
            shapes = {name: entry["shape"] for name, entry in self._entries.items()}
            # The comparison with the state reports other shapes.
            self._layouts = {
                name: layout
                for name, layout in layouts(state, tree).items()
                if list(layout.shape) == shapes[name]
            }
        for name, entry in self._entries.items():
            box = Box((0,) * len(entry["shape"]), tuple(entry["shape"]))
            if (layout := self._layouts.get(name)) is not None:
                box = shard_of(layout, (name,)).box
            self._boxes[name] = box

    def keys(self, slices: Mapping[str, SliceEntry]) -> set[str]:
        """Return the names of a file's slices that are needed."""
        return {
            key
            for key, (name, offsets, sizes) in slices.items()
            if name in self._boxes
            and self._boxes[name].overlap(Box(tuple(offsets), tuple(sizes))) is not None
        }

    def take(self, held: dict[str, Tensor], slices: Mapping[str, SliceEntry]) -> None:
        """Remove the slices from the tensors of a file, and keep them."""
        for key, (name, offsets, sizes) in slices.items():
            if (part := held.pop(key, None)) is not None:
                box = Box(tuple(offsets), tuple(sizes))
                self._parts.setdefault(name, []).append((box, part))

    def assemble(self, tensors: dict[str, Tensor]) -> None:
        """Add the sharded tensors, and give all of them the layouts of the present state."""
        for name, entry in self._entries.items():
            layout = self._layouts.get(name)
            if name in tensors and layout is not None:  # it was whole
                whole = Box((0,) * len(entry["shape"]), tuple(entry["shape"]))
                self._parts[name] = [(whole, tensors[name])]
            if "sharded" in entry or layout is not None:
                local = assemble(entry, self._boxes[name], self._parts.pop(name, []))
                tensors[name] = local if layout is None else like(layout, local)


def _cut(tree: Tree, parts: Collection[str]) -> tuple[Tree, list[str]]:
    """Return the tree of a state with these parts alone, and the names of all its parts."""
    content = tree.get("dict") if type(tree) is dict else None
    if type(content) is not dict:
        raise StateError("the saved state is no dictionary of parts. Load it with a Checkpointer")
    chosen = {name: part for name, part in content.items() if name in parts}
    return {"dict": chosen}, list(content)


def _strings(tree: Tree) -> set[str]:
    """Return all strings in a tree. The names of its tensors are among them."""
    found: set[str] = set()
    remaining = [tree]
    while remaining:
        inner = remaining.pop()
        if type(inner) is str:
            found.add(inner)
        elif type(inner) is dict:
            remaining.extend(inner.values())
        elif type(inner) is list:
            remaining.extend(inner)
    return found

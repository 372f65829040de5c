"""Read checkpoints without changing their folder: list the steps, load one or a part of it, export a model.

For evaluations, exports and other programs beside a training. They need no process group, and may run while the
training saves into the same folder.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from . import checkpoint_files as files
from .checkpoint_fitting import Fitting
from .checkpoint_random import read_random_states
from .checkpoint_state import unpack
from .checkpoint_values import Unfit
from .logging import get_logger

_log = get_logger(__name__)
KEY = "ddpkit"  # of our part in the metadata of a file
ATTEMPTS, PAUSE_SECONDS = 20, 0.1  # to read, while another process deletes checkpoints


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or restored; in a Checkpointer it is the same on every rank."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded."""

    step: int
    state: Any  # as given to the load, restored


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: what was compared with a state, and the states of the generators of the ranks."""

    step: int
    fitting: Fitting
    random: list[dict[str, Any]]
    world_size: int


# --- for programs beside the training

def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the checkpoints in the folder, in ascending order. An empty list if there is no folder."""
    try:
        return sorted({files.step_of(name) for name in files.names(Path(folder))})
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {folder}: {files.cause(error)}") from error


def load_part(folder: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None) -> Restored | None:
    """Load the parts of a checkpoint that `state` names, such as {"model": model}; nothing else is read.

    The parts are restored in place, as Checkpointer.load_latest() does it. Buffers are those of rank 0.
    Generators of random numbers, PerRank parts and the folder stay as they are.

    step: default: the newest that is intact, or None if there is none. A step that is named has to be there and
    intact. Raises CheckpointError.
    """
    if type(state) is not dict:
        raise ValueError(f"state is a {type(state).__name__}; expected a dictionary of the parts to load, such as "
                         '{"model": model}')

    def load(path: Path) -> Restored:
        loaded = read(path, files.read_manifest(path), state, None, 1, parts=list(state))
        return Restored(loaded.step, loaded.fitting.restore())
    found: Restored | None = _newest(Path(folder), step, load)
    return found


def export_safetensors(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, part: str = "model",
                       step: int | None = None) -> int:
    """Write the tensors of one part into a single safetensors file under their plain names; return the step.

    Other programs read the file with safetensors.torch.load_file(), and model.load_state_dict() takes the result.
    part: key in the saved state. step: default: the newest that is intact. An existing file is replaced when the new
    one is complete. Raises CheckpointError.
    """
    def load(path: Path) -> tuple[int, dict[str, Tensor]]:
        manifest = files.read_manifest(path)
        held = _Parts(path, manifest, 1, None, [part])
        if part not in held.names:
            raise Unfit(f"it has no part {part!r}; expected one of {', '.join(map(repr, held.names))}. Choose one")
        return manifest["step"], _plain(unpack(held.tree, held.tensors)[part], part)

    found = _newest(Path(folder), step, load)
    if found is None:
        raise CheckpointError(f"there is no intact checkpoint in {folder}. Choose the folder of a training")
    target = Path(file).absolute()
    try:
        files.write_plain(target, found[1])
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {files.cause(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"cannot export {part!r} of step {found[0]} in {folder}: {error}") from error
    return int(found[0])


def _plain(state: Any, part: str) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        raise Unfit(f"{part!r} is a {type(state).__name__}; expected a model. Name another part")
    tensors = {str(name): one for name, one in state.items() if isinstance(one, Tensor)}
    left_out = [str(name) for name in state if str(name) not in tensors]
    if not tensors:
        raise Unfit(f"{part!r} holds no tensors under plain names; expected a model. Name another part")
    if left_out:
        _log.warning("left out of the export, as they are no tensors: %s", ", ".join(left_out[:8]))
    return tensors


def _newest(folder: Path, step: int | None, load: Any) -> Any:
    """What load() returns for the newest intact checkpoint, or for that of the step."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS)
        try:
            listed = files.names(folder)
        except FileNotFoundError:
            listed = []
        except OSError as error:
            raise CheckpointError(f"cannot list the checkpoints in {folder}: {files.cause(error)}") from error
        if step is not None:
            chosen = [name for name in listed if files.step_of(name) == step]
            if not chosen:
                there = ", ".join(str(files.step_of(name)) for name in listed[-10:]) or "none"
                raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; expected one of: {there}. "
                                      "Choose one of these")
            listed = chosen[-1:]
        gone = False
        for name in reversed(listed):
            try:
                return load(folder / name)
            except (files.Damaged, files.Unreadable, OSError) as problem:
                if not os.path.lexists(folder / name):  # deleted by the training meanwhile
                    gone = True
                    break
                reason = (problem.strerror or str(problem)) if isinstance(problem, OSError) else str(problem)
                if step is not None or not isinstance(problem, files.Damaged):
                    raise CheckpointError(f"cannot load {folder / name}: {reason}") from problem
                _log.warning("damaged checkpoint %s: %s; going back to the one before", folder / name, reason)
            except (Unfit, CheckpointError) as problem:
                raise CheckpointError(f"cannot load {folder / name}: {problem}") from problem
            except Exception as problem:
                raise CheckpointError(f"cannot load {folder / name}: {type(problem).__name__}: {problem}") from problem
        if not gone:
            return None
    raise CheckpointError(f"the checkpoints in {folder} are deleted faster than they can be read. Keep more of them")


# --- for these and for the Checkpointer

def read(folder: Path, manifest: dict[str, Any], state: Any, rank: int | None, world_size: int, *,
         parts: Collection[str] | None = None) -> Loaded:
    """Read and check a checkpoint and compare it with the state. Nothing is changed yet.

    rank: whose PerRank parts and buffers to take, if `world_size` is that of the checkpoint; None: rank 0's buffers.
    parts: keys of the saved state; default: all. Raises Damaged, Unreadable, Unfit, OSError or CheckpointError.
    """
    held = _Parts(folder, manifest, world_size, rank, parts)
    fitting = Fitting(state, held.tree, held.tensors, held.own)
    if fitting.problems:
        more = len(fitting.problems) - 8
        raise CheckpointError(f"the state does not fit: {'; '.join(fitting.problems[:8])}"
                              f"{f'; and {more} more' if more > 0 else ''}. Resume with what was saved, or start in "
                              "another folder")
    return Loaded(manifest["step"], fitting, held.random, manifest["world_size"])


class _Parts:
    """What the files of a checkpoint hold for one rank."""

    def __init__(self, folder: Path, manifest: dict[str, Any], world_size: int, rank: int | None,
                 parts: Collection[str] | None) -> None:
        same = rank is not None and manifest["world_size"] == world_size
        self.tensors: dict[str, Tensor] = {}
        self.tree: Any = None
        self.names: list[str] = []
        own: dict[str, Tensor] = {}
        trees_by_rank: dict[int, dict[str, Any]] = {}
        wanted: set[str] = set()

        def choose(metadata: dict[str, str]) -> set[str]:
            if self.tree is None:  # in the file of rank 0, which is the first
                self.tree, self.names = _cut(_trees(metadata, 0)["tree"], parts or ())
                wanted.update(_strings(self.tree))
            return wanted

        for number, entry in enumerate(manifest["files"]):
            if entry["replicated"] or number == 0 or (not same and rank is not None) or number == rank:
                metadata, held = files.read_part(folder, entry, choose if parts is not None else None)
                trees = trees_by_rank[number] = _trees(metadata, number)
                if same and number == rank:
                    own = held
                else:
                    local = set(trees["local"])
                    self.tensors.update((name, one) for name, one in held.items() if name not in local)
                if number == 0 and parts is None:
                    self.tree = trees["tree"]
        self.tensors.update(own)  # what each rank has of its own has the same names in the file of every rank
        self.own = trees_by_rank[rank]["own"] if same and rank is not None else None
        ranks = [] if rank is None else [rank] if same else sorted(trees_by_rank)
        self.random = [read_random_states(trees_by_rank[one]["random"]) for one in ranks]


def _trees(metadata: dict[str, str], rank: int) -> dict[str, Any]:
    file = files.part_name(rank)
    try:
        trees = json.loads(metadata[KEY])
    except (KeyError, ValueError, RecursionError) as error:
        raise files.Damaged(f"{file}: __metadata__.{KEY} is invalid: {type(error).__name__}: {str(error)[:200]}"
                            ) from None
    kinds = {"own": dict, "local": list, "random": dict}
    for name, kind in kinds.items():
        if type(trees) is not dict or type(trees.get(name)) is not kind:
            raise files.Damaged(f"{file}: __metadata__.{KEY}.{name} is not what was written; expected a "
                                f"{kind.__name__}")
    if not all(type(name) is str for name in trees["local"]):
        raise files.Damaged(f"{file}: __metadata__.{KEY}.local is not what was written; expected names")
    if rank == 0 and "tree" not in trees:
        raise files.Damaged(f"{file}: __metadata__.{KEY}.tree is missing")
    answer: dict[str, Any] = trees
    return answer


def _cut(tree: Any, parts: Collection[str]) -> tuple[Any, list[str]]:
    """The tree of a state with these parts alone, and the names of all that it had."""
    content = tree.get("dict") if type(tree) is dict else None
    if type(content) is not dict:
        raise Unfit("the saved state is no dictionary of parts. Load it with a Checkpointer")
    return {"dict": {name: one for name, one in content.items() if name in parts}}, list(content)


def _strings(tree: Any) -> set[str]:
    """All texts in a tree; the names of its tensors are among them."""
    found: set[str] = set()
    remaining = [tree]
    while remaining:
        one = remaining.pop()
        if type(one) is str:
            found.add(one)
        elif type(one) is dict:
            remaining.extend(one.values())
        elif type(one) is list:
            remaining.extend(one)
    return found

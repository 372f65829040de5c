"""Read checkpoints without changing their folder: list steps, load parts, export a model.

These functions are for evaluations, exports and other programs that are not the training. They
need no process group, and may run while the training saves into the same folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..log import get_logger
from . import disk
from .contents import CheckpointError, Restored, load, read_contents
from .entries import StateError
from .format import Damaged, Unreadable
from .rank_file import write_safetensors
from .storage import checkpoint_names, read_manifest, step_of
from .unpack import unpack

# A training may delete a checkpoint while it is read: then the newest is looked for again.
ATTEMPTS, PAUSE_SECONDS = 20, 0.1

_log = get_logger(__name__)
_SHOWN_STEPS = 10
_SHOWN_NAMES = 8
_Loaded = TypeVar("_Loaded")


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the checkpoints in a folder, in ascending order.

    The list is empty if there is no folder. Raises CheckpointError.
    """
    return sorted({step_of(name) for name in _list_names(Path(folder))})


def load_part(
    folder: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None
) -> Restored | None:
    """Load the parts of a checkpoint that `state` names, such as {"model": model}.

    Nothing else is read. The parts are restored in place, as by Checkpointer.load_latest().
    Buffers are those of rank 0. Random number generators, PerRank parts and the folder do not
    change.

    step: a step that has to be there and intact. Default: the newest intact one; None is returned
        if there is none.
    Raises CheckpointError.
    """
    if type(state) is not dict:
        raise ValueError(
            f"state is a {type(state).__name__}; expected a dictionary of the parts to load, such "
            'as {"model": model}'
        )

    def load_from(path: Path) -> Restored:
        loaded = load(path, read_manifest(path), state, None, 1, parts=list(state))
        return Restored(loaded.step, loaded.restorer.restore())

    return _load_newest(Path(folder), step, load_from)


def export_safetensors(
    folder: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    part: str = "model",
    step: int | None = None,
) -> int:
    """Write the tensors of one part into a safetensors file, under their plain names.

    safetensors.torch.load_file() reads the file, and model.load_state_dict() takes the result. An
    existing file is replaced when the new one is complete. Returns the step.

    part: key in the saved state.
    step: default: the newest that is intact.
    Raises CheckpointError.
    """

    def load_from(path: Path) -> tuple[int, dict[str, Tensor]]:
        manifest = read_manifest(path)
        contents = read_contents(path, manifest, None, 1, [part])
        if part not in contents.part_names:
            parts = ", ".join(map(repr, contents.part_names))
            raise StateError(f"it has no part {part!r}; expected one of {parts}. Choose one")
        value = unpack(contents.tree, contents.tensors)[part]
        return manifest["step"], _plain_tensors(value, part)

    found = _load_newest(Path(folder), step, load_from)
    if found is None:
        raise CheckpointError(
            f"there is no intact checkpoint in {folder}. Choose the folder of a training"
        )
    found_step, tensors = found
    target = Path(file).absolute()
    try:
        write_safetensors(target, tensors)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {disk.explain(error)}") from error
    except ValueError as error:
        raise CheckpointError(
            f"cannot export {part!r} of step {found_step} in {folder}: {error}"
        ) from error
    return found_step


def show_steps(names: list[str]) -> str:
    """Return the last steps of these checkpoints for a message, or "none"."""
    return ", ".join(str(step_of(name)) for name in names[-_SHOWN_STEPS:]) or "none"


def _plain_tensors(value: Any, part: str) -> dict[str, Tensor]:
    if not isinstance(value, dict):
        raise StateError(
            f"{part!r} is a {type(value).__name__}; expected a model. Name another part"
        )
    tensors = {str(name): item for name, item in value.items() if isinstance(item, Tensor)}
    if not tensors:
        raise StateError(
            f"{part!r} holds no tensors under plain names; expected a model. Name another part"
        )
    others = [str(name) for name in value if str(name) not in tensors]
    if others:
        shown = ", ".join(others[:_SHOWN_NAMES])
        _log.warning("not exported, because they are no tensors: %s", shown)
    return tensors


def _list_names(folder: Path) -> list[str]:
    try:
        return checkpoint_names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints in {folder}: {disk.explain(error)}"
        ) from error


def _load_newest(
    folder: Path, step: int | None, load_from: Callable[[Path], _Loaded]
) -> _Loaded | None:
    """Return what load_from() returns for the newest intact checkpoint, or for that of a step."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS)
        names = _list_names(folder)
        if step is not None:
            chosen = [name for name in names if step_of(name) == step]
            if not chosen:
                raise CheckpointError(
                    f"there is no checkpoint of step {step} in {folder}; expected one of: "
                    f"{show_steps(names)}. Choose one of these"
                )
            names = chosen[-1:]
        try:
            return _load_first_intact(folder, names[::-1], step is None, load_from)
        except FileNotFoundError:
            continue
    raise CheckpointError(
        f"the checkpoints in {folder} are deleted faster than they can be read. Keep more of them"
    )


def _load_first_intact(
    folder: Path, names: list[str], skip_damaged: bool, load_from: Callable[[Path], _Loaded]
) -> _Loaded | None:
    """Return what load_from() returns for the first intact one of these checkpoints.

    Raises FileNotFoundError when the training deletes one meanwhile.
    """
    for name in names:
        path = folder / name
        try:
            return load_from(path)
        except (Damaged, Unreadable, OSError) as error:
            if not os.path.lexists(path):
                raise FileNotFoundError(path) from error
            reason = str(error)
            if isinstance(error, OSError):
                reason = error.strerror or reason
            if not skip_damaged or not isinstance(error, Damaged):
                raise CheckpointError(f"cannot load {path}: {reason}") from error
            _log.warning("damaged checkpoint %s: %s; the one before is loaded", path, reason)
        except (StateError, CheckpointError) as error:
            raise CheckpointError(f"cannot load {path}: {error}") from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"cannot load {path}: {what}") from error
    return None

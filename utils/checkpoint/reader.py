"""Read checkpoints without changing their folder: list steps, load parts, export a model.

These functions are for evaluations, exports and other programs that are not the training. They
need no process group, and may run while the training saves into the same folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..coordination import StoreCommunicator
from ..log import get_logger
from . import disk
from .entries import StateError
from .folder import ReadFolder, step_of
from .format import Manifest
from .load import CheckpointError, Restored, load, load_newest, read_contents
from .pack import unpack
from .rank_file import write_safetensors

_log = get_logger(__name__)
_SHOWN_NAMES = 8
_Loaded = TypeVar("_Loaded")


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the checkpoints in a folder, in ascending order.

    The list is empty if there is no folder. Raises CheckpointError.
    """
    found = _folder(folder)
    try:
        return sorted({step_of(name) for name in found.list()})
    except OSError as error:
        raise CheckpointError(found.explain("cannot look for checkpoints", error)) from error


def load_part(
    folder: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None
) -> Restored | None:
    """Load the parts of a checkpoint that `state` names, such as {"model": model}.

    Nothing else is read. The parts are restored in place, as by Checkpointer.load_latest(), with
    rank 0's buffers. Random number generators, PerRank parts and the folder do not change.

    step: load this step, which must exist and be intact. Default: the newest intact one; returns
        None if the folder never had one.
    Raises CheckpointError.
    """
    if type(state) is not dict:
        raise ValueError(
            f"state is a {type(state).__name__}; expected a dictionary of the parts to load, such "
            'as {"model": model}'
        )

    def load_from(path: Path, manifest: Manifest) -> Restored:
        loaded = load(path, manifest, state, None, 1, parts=list(state))
        return Restored(loaded.step, loaded.restorer.restore())

    return _find(folder, step, load_from)


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
    step: default: the newest intact one.
    Raises CheckpointError.
    """

    def load_from(path: Path, manifest: Manifest) -> tuple[int, dict[str, Tensor]]:
        contents = read_contents(path, manifest, None, 1, [part])
        if part not in contents.part_names:
            parts = ", ".join(map(repr, contents.part_names))
            raise StateError(f"it has no part {part!r}; expected one of {parts}. Choose one")
        value = unpack(contents.tree, contents.tensors)[part]
        return manifest["step"], _plain_tensors(value, part)

    found = _find(folder, step, load_from)
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}. Choose the folder of a training"
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


def _folder(path: str | os.PathLike[str]) -> ReadFolder:
    return ReadFolder(Path(path), socket.gethostname())


def _find(
    path: str | os.PathLike[str],
    step: int | None,
    load_from: Callable[[Path, Manifest], _Loaded],
) -> _Loaded | None:
    return load_newest("read", StoreCommunicator("read"), _folder(path), load_from, step)

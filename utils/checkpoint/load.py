"""Load the same intact checkpoint on all ranks: all read it, and rank 0 decides on its use."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from ..coordination import StoreCommunicator
from ..log import get_logger
from .contents import CheckpointError, LoadedCheckpoint, Restored, changed_versions
from .entries import StateError
from .folder import CheckpointFolder, ReadFolder
from .format import Damaged, Manifest, Unreadable
from .lock import FolderInUse
from .rng import restore_random_states
from .storage import read_manifest, show_steps, step_of

ATTEMPTS, PAUSE_SECONDS = 20, 0.1  # a training may delete a checkpoint while another reads it

_log = get_logger(__name__)
_Loaded = TypeVar("_Loaded")
_SHOWN_CHANGES = 8
_PRECEDENCE = ("gone", "error", "damaged")


class _Listing(TypedDict):
    names: list[str]  # of the checkpoints, oldest first
    error: str


class _Report(TypedDict):
    """What a rank found in a checkpoint; the first one in the order of _PRECEDENCE decides."""

    status: Literal["gone", "error", "damaged", "intact"]
    detail: str  # the reason, or the checksum of the manifest


def load_newest(
    topic: str,
    ranks: StoreCommunicator,
    folder: ReadFolder,
    load_from: Callable[[Path, Manifest], _Loaded],
    step: int | None,
) -> _Loaded | None:
    """Return what load_from() returns for the newest checkpoint that is intact on all ranks.

    None if there is none. A damaged checkpoint is set aside.

    step: load the checkpoint of this step, and no other.
    Raises CheckpointError, and CoordinationError if the ranks cannot agree.
    """
    for attempt in range(ATTEMPTS):
        attempt_topic = f"{topic}/{attempt}"
        listing = ranks.broadcast(attempt_topic, lambda: _list(folder, step))
        if listing["error"]:
            raise CheckpointError(listing["error"])

        is_last = attempt == ATTEMPTS - 1
        for number, name in enumerate(reversed(listing["names"])):
            report, loaded = _load(name, folder, load_from, is_last)
            decision = ranks.decide(
                f"{attempt_topic} {number}", report, lambda reports: _decide(reports, folder)
            )
            if decision["status"] == "intact":
                return loaded
            if decision["status"] == "gone":  # another process deletes old checkpoints
                time.sleep(PAUSE_SECONDS)
                break
            if decision["status"] == "error" or step is not None:
                raise CheckpointError(f"cannot load {decision['detail']}")
            if ranks.rank == 0:
                folder.set_aside(name, decision["detail"])
        else:
            return None
    return None


def restore(
    loaded: LoadedCheckpoint, ranks: StoreCommunicator, folder: CheckpointFolder
) -> Restored:
    """Restore the state and the random number generators of this rank.

    Raises CheckpointError.
    """
    try:
        state = loaded.restorer.restore()
    except StateError as error:
        raise CheckpointError(
            f"cannot restore step {loaded.step} in {folder.path} on {ranks.name}: {error}"
        ) from error

    changes = [*loaded.restorer.changes, *changed_versions(loaded.versions)]
    if changes and ranks.rank == 0:
        _log.info(
            "step %d was saved with other settings: %s. The saved ones are used, but for versions",
            loaded.step,
            "; ".join(changes[:_SHOWN_CHANGES]),
        )
    if loaded.random is not None:
        missing = restore_random_states(loaded.random)
        if missing:
            _log.warning(
                "the saved generators of %s do not exist in this process: random numbers will "
                "differ from those of an uninterrupted run",
                ", ".join(missing),
            )
    elif ranks.rank == 0:
        _log.warning(
            "step %d was saved by %d ranks and continues with %d: the generators stay as they are",
            loaded.step,
            loaded.world_size,
            ranks.world_size,
        )
    return Restored(loaded.step, state)


def digest(value: Any) -> str:
    """Return 16 bytes in hexadecimal that identify a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _list(folder: ReadFolder, step: int | None) -> _Listing:
    """List the checkpoints on rank 0."""
    try:
        names = folder.list()
    except FolderInUse as error:
        return {"names": [], "error": str(error)}
    except OSError as error:
        return {"names": [], "error": folder.explain("cannot look for checkpoints", error)}
    if step is None:
        return {"names": names, "error": ""}
    chosen = [name for name in names if step_of(name) == step]
    message = (
        f"there is no checkpoint of step {step} in {folder.path}; expected one of: "
        f"{show_steps(names)}. Choose one of these"
    )
    return {"names": chosen[-1:], "error": "" if chosen else message}


def _load(
    name: str,
    folder: ReadFolder,
    load_from: Callable[[Path, Manifest], _Loaded],
    is_last: bool,
) -> tuple[_Report, _Loaded | None]:
    """Read and check all that this rank needs, and report what it found.

    is_last: report an error for a checkpoint that is gone.
    """
    path = folder.path / name
    try:
        manifest = read_manifest(path)
        loaded = load_from(path, manifest)
        return {"status": "intact", "detail": manifest["crc32"]}, loaded
    except Exception as error:  # the other ranks need to know
        if not is_last and not os.path.lexists(path):
            return {"status": "gone", "detail": ""}, None
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = f"{error.strerror}. Make it readable, or move it away"
        elif isinstance(error, Damaged | Unreadable | StateError | CheckpointError):
            reason = str(error)
        status: Literal["damaged", "error"] = "damaged" if isinstance(error, Damaged) else "error"
        return {"status": status, "detail": f"{path} on {folder.owner}: {reason}"}, None


def _decide(reports: Sequence[_Report], folder: ReadFolder) -> _Report:
    for status in _PRECEDENCE:
        for report in reports:
            if report["status"] == status:
                return report
    if any(report != reports[0] for report in reports):
        error = (
            f"from {folder.path}: the ranks do not see the same checkpoint. Choose a folder on a "
            "file system that all hosts share"
        )
        return {"status": "error", "detail": error}
    return reports[0]

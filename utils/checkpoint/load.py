"""Load the same intact checkpoint on all ranks: all read it, and rank 0 decides on its use."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from ..coordination import StoreCommunicator
from ..log import get_logger
from .contents import CheckpointError, LoadedCheckpoint, Restored, changed_versions, load
from .entries import StateError
from .folder import CheckpointFolder
from .format import Damaged, Unreadable
from .lock import FolderInUse
from .reader import ATTEMPTS, PAUSE_SECONDS, show_steps
from .rng import derive_random_states, restore_random_states
from .storage import read_manifest, step_of

_log = get_logger(__name__)


class _Listing(TypedDict):
    names: list[str]  # of the checkpoints, oldest first
    error: str


class _Report(TypedDict):
    """What a rank found in a checkpoint. In this order the first one found decides for all."""

    status: Literal["gone", "error", "damaged", "intact"]
    detail: str  # the reason, or a digest of the manifest


_SHOWN_CHANGES = 8
_PRECEDENCE = ("gone", "error", "damaged")


def load_on_all_ranks(
    topic: str,
    ranks: StoreCommunicator,
    folder: CheckpointFolder,
    state: Any,
    step: int | None,
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that is intact on all ranks; None if there is none.

    Nothing in the state is changed yet. A damaged checkpoint is quarantined.

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
            report, loaded = _load(name, ranks, folder, state, is_last)
            decision = ranks.decide(
                f"{attempt_topic} {number}", report, lambda reports: _decide(reports, folder)
            )
            if decision["status"] == "intact":
                return loaded
            if decision["status"] == "gone":  # another process deletes old checkpoints
                time.sleep(PAUSE_SECONDS)
                break
            if decision["status"] == "error":
                raise CheckpointError(decision["detail"])
            if step is not None:
                raise CheckpointError(f"damaged checkpoint {decision['detail']}")
            if ranks.rank == 0:
                folder.quarantine(name, decision["detail"])
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
    if loaded.world_size == ranks.world_size:
        missing = restore_random_states(loaded.random[0])
        if missing:
            _log.warning(
                "the saved generators of %s do not exist in this process: random numbers will "
                "differ from those of an uninterrupted run",
                ", ".join(missing),
            )
        return Restored(loaded.step, state)

    reseeded = derive_random_states(loaded.random, ranks.rank, ranks.world_size)
    if ranks.rank == 0:
        generators = "the generators had the same state on all ranks, and continue in it"
        if reseeded:
            generators = (
                f"the generators of {', '.join(reseeded)} differed between the ranks and get new "
                "states, derived from the saved ones"
            )
        _log.warning(
            "step %d was saved by %d ranks and continues with %d: %s",
            loaded.step,
            loaded.world_size,
            ranks.world_size,
            generators,
        )
    return Restored(loaded.step, state)


def digest(value: Any) -> str:
    """Return 16 bytes in hexadecimal that identify a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _list(folder: CheckpointFolder, step: int | None) -> _Listing:
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
    if chosen:
        return {"names": chosen[-1:], "error": ""}
    message = (
        f"there is no checkpoint of step {step} in {folder.path}; expected one of: "
        f"{show_steps(names)}. Choose one of these"
    )
    return {"names": [], "error": message}


def _load(
    name: str, ranks: StoreCommunicator, folder: CheckpointFolder, state: Any, is_last: bool
) -> tuple[_Report, LoadedCheckpoint | None]:
    """Read and check all that this rank needs, and report what it found.

    is_last: report an error for a checkpoint that is gone.
    """
    path = folder.path / name
    where = f"{path} on {ranks.name}"
    try:
        manifest = read_manifest(path)
        loaded = load(path, manifest, state, ranks.rank, ranks.world_size)
        return {"status": "intact", "detail": digest(manifest)}, loaded
    except Exception as error:  # the other ranks need to know
        if not is_last and not os.path.lexists(path):
            return {"status": "gone", "detail": ""}, None
        if isinstance(error, Damaged):
            return {"status": "damaged", "detail": f"{where}: {error}"}, None
        if isinstance(error, OSError):
            reason = f"{error.strerror}. Make it readable, or move it away"
            return {"status": "error", "detail": f"cannot read {where}: {reason}"}, None
        known = isinstance(error, Unreadable | StateError | CheckpointError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        return {"status": "error", "detail": f"cannot load {where}: {reason}"}, None


def _decide(reports: Sequence[_Report], folder: CheckpointFolder) -> _Report:
    for status in _PRECEDENCE:
        for report in reports:
            if report["status"] == status:
                return report
    if any(report != reports[0] for report in reports):
        error = (
            f"the ranks do not see the same checkpoint in {folder.path}. Choose a folder on a "
            "file system that all hosts share"
        )
        return {"status": "error", "detail": error}
    return reports[0]

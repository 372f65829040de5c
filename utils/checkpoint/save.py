"""Write one checkpoint from all ranks, in a background thread on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..calls import CallsOfAllRanks
from ..coordination import StoreCommunicator
from .entries import StateError
from .folder import CheckpointFolder, LaterStep
from .format import FORMAT, FileEntry, Manifest, rank_file_name
from .load import CheckpointError, PermanentError, RankMetadata
from .lock import FolderInUse
from .rank_file import BackgroundChecksums, write_rank_file
from .slices import Box
from .snapshot import ReplicaSample, Snapshot, find_divergence

# How long an error lasts. _TEMPORARY: a retry may succeed. _FINAL: this save would fail again.
# _PERMANENT: so would every later save, because the script is wrong and not the disk.
_TEMPORARY, _FINAL, _PERMANENT = range(3)
_Failure = tuple[int, str]  # (one of these, message)


@dataclass(frozen=True)
class SaveJob:
    """This rank's part of one save; its tensors are in the snapshot."""

    step: int
    turn: int  # counts saves and loads
    start: float  # time.monotonic() at the call
    checksums: BackgroundChecksums
    metadata: RankMetadata
    digest: str  # covers step, names, shapes and types; must be equal on all ranks
    sample: ReplicaSample  # sample of values that must be equal on all ranks
    whole: list[str]  # tensors in this rank's file that all ranks restore
    sharded: dict[str, int]  # sharded tensor -> index of its layout
    boxes: list[Box | None]  # layout -> slice that this rank writes
    metric: float | None
    retry_until: float  # rank 0's time.monotonic()


@dataclass(frozen=True)
class RefusedJob:
    """Stands for a save that a rank cannot join, because its state cannot be saved."""

    turn: int
    problem: str
    step: int = -1
    retry_until: float = 0.0


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, equal on all ranks. error: None if the checkpoint is safe."""

    error: CheckpointError | None
    try_again: bool  # whether there is time for a retry


class _Begun(TypedDict):
    """The message of rank 0 before the files are written."""

    temporary: str  # name of the temporary folder
    failure: _Failure | None


class SaveReport(TypedDict, total=False):
    """A rank's report after it has written its file: `failure`, or all other fields."""

    failure: _Failure | None
    entry: FileEntry
    whole: list[str]  # see SaveJob
    boxes: list[Box | None]
    digest: str
    replicas: str  # ReplicaSample.digests()


class _Decision(TypedDict):
    """The decision of rank 0 when all ranks have reported."""

    failure: _Failure | None
    try_again: bool


def check_calls(calls: CallsOfAllRanks, step: int) -> None:
    """Raise PermanentError if some ranks do not call save(). Rank 0 calls this while it waits."""
    remedy = (
        "expected a call on all ranks, each of which writes its part. Call it on all ranks at the "
        "same step, not under `if job.is_main`"
    )
    if problem := calls.problem(f"calls save() at step {step}", remedy):
        raise PermanentError(problem)


def write_checkpoint(
    job: SaveJob | RefusedJob,
    snapshot: Snapshot,
    ranks: StoreCommunicator,
    folder: CheckpointFolder,
    calls: CallsOfAllRanks,
    reported: Callable[[], object],
) -> SaveResult:
    """Write this rank's part of a checkpoint; rank 0 commits it when all ranks are done.

    reported: called when this rank is done, and only waits for the others.
    Raises CoordinationError if the ranks cannot agree. On rank 0, raises PermanentError if other
    ranks do not call save().
    """
    topic = f"save {job.turn}"
    begun = ranks.broadcast(f"{topic} folder", lambda: _begin(job, folder))
    temporary = folder.path / begun["temporary"]
    report = SaveReport(failure=begun["failure"])
    if begun["failure"] is None:
        try:
            report = _write_file(job, snapshot, temporary / rank_file_name(ranks.rank))
        except Exception as error:  # reported, because the other ranks wait
            report = SaveReport(failure=_explain(error, job, folder))
    reported()

    try:
        decision = ranks.decide(
            topic,
            report,
            lambda reports: _commit(job, temporary, reports, folder),
            waiting=lambda: check_calls(calls, job.step),
        )
    except PermanentError:
        folder.discard(temporary)
        raise
    finally:  # rank 0 decides first: another rank may still be writing
        folder.end(temporary)
    if ranks.rank == 0:
        ranks.forget(f"{topic} folder")
        calls.forget()

    problem = None
    if (failure := decision["failure"]) is not None:
        problem = (PermanentError if failure[0] == _PERMANENT else CheckpointError)(failure[1])
    return SaveResult(problem, decision["try_again"])


def _begin(job: SaveJob | RefusedJob, folder: CheckpointFolder) -> _Begun:
    """Make the temporary folder on rank 0."""
    temporary, failure = "", None
    try:
        temporary = folder.begin(_accepted(job).step).name
    except Exception as error:
        failure = _explain(error, job, folder)
    return {"temporary": temporary, "failure": failure}


def _write_file(job: SaveJob | RefusedJob, snapshot: Snapshot, path: Path) -> SaveReport:
    accepted = _accepted(job)
    entry = write_rank_file(
        path,
        snapshot.places,
        snapshot.bytes(),
        accepted.checksums,
        accepted.metadata,
    )
    return {
        "failure": None,
        "entry": entry,
        "whole": accepted.whole,
        "boxes": accepted.boxes,
        "digest": accepted.digest,
        "replicas": accepted.sample.digests(),
    }


def _commit(
    job: SaveJob | RefusedJob,
    temporary: Path,
    reports: Sequence[SaveReport],
    folder: CheckpointFolder,
) -> _Decision:
    """Commit the files of all ranks on rank 0, or delete them."""
    failures = [failure for report in reports if (failure := report["failure"]) is not None]
    try:
        if not failures:
            accepted = _accepted(job)
            _compare(accepted, reports)
            folder.commit(temporary, make_manifest(accepted, reports))
            return {"failure": None, "try_again": False}
    except Exception as error:
        failures = [_explain(error, job, folder)]
    if temporary != folder.path:
        folder.discard(temporary)

    severity, text = max(failures)[0], failures[0][1]
    if len({text for _, text in failures}) > 1:
        text += f" ({len(failures) - 1} more ranks failed too)"
    text += ". The checkpoints before it are untouched"
    has_time = time.monotonic() < job.retry_until
    return {"failure": (severity, text), "try_again": has_time and severity == _TEMPORARY}


def make_manifest(job: SaveJob, reports: Sequence[SaveReport]) -> Manifest:
    """Return the manifest of the files that all ranks have written."""
    layouts: list[list[tuple[int, Sequence[int], Sequence[int]]]] = [[] for _ in job.boxes]
    for rank, report in enumerate(reports):
        for layout, box in zip(layouts, report["boxes"], strict=True):
            if box is not None:
                layout.append((rank, *box))
    return {
        "format": FORMAT,
        "step": job.step,
        "world_size": len(reports),
        "metric": job.metric,
        "files": [report["entry"] for report in reports],
        "whole": {name: rank for rank, report in enumerate(reports) for name in report["whole"]},
        "sharded": job.sharded,
        "layouts": layouts,
    }


def _compare(job: SaveJob, reports: Sequence[SaveReport]) -> None:
    """Raise PermanentError if a rank's state differs from rank 0's."""
    replicas = [report["replicas"] for report in reports]
    for rank, report in enumerate(reports):
        is_same_size = len(replicas[rank]) == len(replicas[0])
        if report["digest"] != reports[0]["digest"] and is_same_size:
            raise PermanentError(
                f"rank {rank} saves a different step, or tensors with different names, shapes or "
                "types, than rank 0. Save the same state on all ranks; wrap per-rank values in "
                "PerRank"
            )
    if problem := find_divergence(job.sample.names, replicas):
        raise PermanentError(problem)


def _accepted(job: SaveJob | RefusedJob) -> SaveJob:
    if isinstance(job, RefusedJob):
        raise StateError(job.problem)
    return job


def _explain(error: Exception, job: SaveJob | RefusedJob, folder: CheckpointFolder) -> _Failure:
    what = f"cannot save step {job.step}"
    if isinstance(error, StateError):  # from a RefusedJob
        return _FINAL, str(error)
    if isinstance(error, LaterStep | FolderInUse):
        return _PERMANENT, str(error)
    if isinstance(error, PermanentError):
        return _PERMANENT, f"{what} in {folder.path}: {error}"
    if isinstance(error, OSError):
        return _TEMPORARY, folder.explain(what, error)
    return _TEMPORARY, f"{what} in {folder.path} on {folder.owner}: {type(error).__name__}: {error}"

"""Write one checkpoint from all ranks: what a save does in the background thread of each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from ..coordination import StoreCommunicator
from .checksums import BackgroundChecksums
from .contents import CheckpointError, RankMetadata
from .folder import CheckpointFolder, LaterStep
from .format import FileEntry, rank_file_name
from .lock import FolderInUse
from .rank_file import write_rank_file
from .replicas import ReplicaSample, find_divergence
from .snapshot import Snapshot

# "temporary": this save may be tried again; "final": it would fail again; "permanent": so would
# every later save, because it is an error of the script and not of the disk.
Severity = Literal["temporary", "final", "permanent"]


class PermanentError(CheckpointError):
    """Every later save would fail in the same way."""


@dataclass(frozen=True)
class SaveJob:
    """One save of this rank, whose tensors are in the snapshot."""

    step: int
    turn: int  # number of this save among all saves and loads
    start: float  # time.monotonic()
    checksums: BackgroundChecksums
    metadata: RankMetadata
    digest: str  # of the step, names, shapes and types, which have to be equal on all ranks
    sample: ReplicaSample  # of the values that have to be equal on all ranks
    local: list[str]  # tensors of its file that only this rank restores
    slices: dict[str, tuple[str, tuple[int, ...]]]  # as of write_rank_file()
    metric: float | None
    retry_until: float  # time.monotonic() of rank 0
    interval: int  # steps between saves, as rank 0 proposes


@dataclass(frozen=True)
class RefusedJob:
    """The place of a save on a rank whose state cannot be saved, so that all ranks learn why."""

    turn: int
    problem: str
    retry_until: float = 0.0
    interval: int = 0


@dataclass(frozen=True)
class SaveResult:
    """What the ranks agreed on. error: None if the checkpoint is safe on disk."""

    error: CheckpointError | None
    try_again: bool  # whether there is time to save this step again
    interval: int  # that of rank 0; 0 where it could not save


class _Failure(TypedDict):
    error: str
    severity: Severity


class _Begun(TypedDict):
    """What rank 0 sends before the files are written."""

    temporary: str  # name of the temporary folder
    failure: _Failure | None
    interval: int


class _Report(TypedDict):
    """What each rank reports after it has written its file."""

    entry: FileEntry | None
    digest: str
    replicas: str  # digests of a ReplicaSample
    failure: _Failure | None


class _Decision(TypedDict):
    """What rank 0 decides when all ranks have reported."""

    failure: _Failure | None
    try_again: bool


def write_checkpoint(
    job: SaveJob | RefusedJob,
    snapshot: Snapshot,
    ranks: StoreCommunicator,
    folder: CheckpointFolder,
    reported: Callable[[], object],
) -> SaveResult:
    """Write this rank's part of a checkpoint; rank 0 commits it when all ranks are done.

    reported: called when this rank is done and only waits for the others.
    Raises CoordinationError if the ranks cannot agree.
    """
    topic = f"save {job.turn}"
    begun = ranks.broadcast(f"{topic} folder", lambda: _begin(job, ranks, folder))
    temporary = folder.path / begun["temporary"]

    failure = begun["failure"]
    if failure is not None:
        report = _Report(entry=None, digest="", replicas="", failure=failure)
    elif isinstance(job, RefusedJob):
        report = _Report(entry=None, digest="", replicas="", failure=_refusal(job))
    else:
        report = _write_file(job, snapshot, temporary, ranks, folder)
    reported()

    try:
        decision = ranks.decide(
            topic, report, lambda reports: _commit(job, temporary, reports, folder)
        )
    finally:  # also where another rank has not reported: it may still be writing
        folder.end(temporary)
    if ranks.rank == 0:
        ranks.forget(f"{topic} folder")

    error = None
    if (failure := decision["failure"]) is not None:
        is_permanent = failure["severity"] == "permanent"
        error = (PermanentError if is_permanent else CheckpointError)(failure["error"])
    return SaveResult(error, decision["try_again"], begun["interval"])


def _begin(job: SaveJob | RefusedJob, ranks: StoreCommunicator, folder: CheckpointFolder) -> _Begun:
    """Make the temporary folder on rank 0."""
    temporary, failure = "", None
    if isinstance(job, RefusedJob):
        failure = _refusal(job)
    else:
        try:
            temporary = folder.begin(job.step).name
        except (LaterStep, FolderInUse) as error:
            failure = _Failure(error=str(error), severity="permanent")
        except OSError as error:
            message = folder.explain(f"cannot save step {job.step}", error)
            failure = _Failure(error=message, severity="temporary")
    return {"temporary": temporary, "failure": failure, "interval": job.interval}


def _write_file(
    job: SaveJob,
    snapshot: Snapshot,
    temporary: Path,
    ranks: StoreCommunicator,
    folder: CheckpointFolder,
) -> _Report:
    what = f"cannot save step {job.step}"
    try:
        entry = write_rank_file(
            temporary / rank_file_name(ranks.rank),
            snapshot.places,
            snapshot.bytes(),
            job.checksums,
            job.metadata,
            local=job.local,
            slices=job.slices,
        )
        replicas = job.sample.digests()
        return {"entry": entry, "digest": job.digest, "replicas": replicas, "failure": None}
    except OSError as error:
        message = folder.explain(what, error)
    except Exception as error:  # the other ranks need to know
        message = f"{what} in {folder.path} on {ranks.name}: {type(error).__name__}: {error}"
    failure: _Failure = {"error": message, "severity": "temporary"}
    return {"entry": None, "digest": "", "replicas": "", "failure": failure}


def _commit(
    job: SaveJob | RefusedJob, temporary: Path, reports: Sequence[_Report], folder: CheckpointFolder
) -> _Decision:
    """Commit the files of all ranks on rank 0, or delete them."""
    failure = _find_failure(job, reports, folder)
    if failure is None and isinstance(job, SaveJob):
        files = [report["entry"] for report in reports if report["entry"] is not None]
        try:
            folder.commit(temporary, job.step, files, job.metric)
            return {"failure": None, "try_again": False}
        except OSError as error:
            message = folder.explain(f"cannot save step {job.step}", error)
            failure = {"error": message, "severity": "temporary"}

    assert failure is not None
    if temporary != folder.path:
        folder.discard(temporary)
    failure["error"] += ". The checkpoints before it are untouched"
    has_time = time.monotonic() < job.retry_until
    return {"failure": failure, "try_again": has_time and failure["severity"] == "temporary"}


def _find_failure(
    job: SaveJob | RefusedJob, reports: Sequence[_Report], folder: CheckpointFolder
) -> _Failure | None:
    """Return the failure of the first rank that reports one, with the worst severity of all."""
    failures = [report["failure"] for report in reports if report["failure"] is not None]
    if failures:
        error = failures[0]["error"]
        if len({failure["error"] for failure in failures}) > 1:
            error += f" ({len(failures) - 1} more ranks failed too)"
        found = {failure["severity"] for failure in failures}
        levels: list[Severity] = ["permanent", "final", "temporary"]
        return {"error": error, "severity": next(level for level in levels if level in found)}

    return _find_difference(job, reports, folder) if isinstance(job, SaveJob) else None


def _find_difference(
    job: SaveJob, reports: Sequence[_Report], folder: CheckpointFolder
) -> _Failure | None:
    """Return a failure if a rank saves another state than rank 0."""
    replicas = [report["replicas"] for report in reports]
    problem = ""
    for rank, report in enumerate(reports):
        is_same_size = len(replicas[rank]) == len(replicas[0])
        if report["digest"] != reports[0]["digest"] and is_same_size:
            problem = (
                f"rank {rank} saves a different step, or tensors with different names, shapes or "
                "types, than rank 0. Save the same state on all ranks; wrap per-rank values in "
                "PerRank"
            )
            break
    problem = problem or find_divergence(job.sample.names, replicas)
    if not problem:
        return None
    error = f"cannot save step {job.step} in {folder.path}: {problem}"
    return {"error": error, "severity": "permanent"}


def _refusal(job: RefusedJob) -> _Failure:
    return {"error": job.problem, "severity": "final"}

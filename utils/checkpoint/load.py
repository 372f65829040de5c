"""Load the same intact checkpoint on all ranks: all read it, and rank 0 decides whether to use it.

load_newest() finds the checkpoint, restore() puts it into the state. load() and read_contents()
read the files of one checkpoint and compare them with the state; they need no other rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor

from ..coordination import StoreCommunicator
from ..log import get_logger
from .entries import StateError, Tree
from .folder import CheckpointFolder, ReadFolder, read_manifest, show_steps, step_of
from .format import Damaged, Manifest, Unreadable, slice_name
from .lock import FolderInUse
from .rank_file import check_file, read_data, read_header
from .restore import Restorer
from .rng import read_random_states, restore_random_states
from .slices import Box, Needed, layouts, tensor_entries

ATTEMPTS, PAUSE_SECONDS = 20, 0.1  # a training may delete a checkpoint while another reads it

_log = get_logger(__name__)
_Loaded = TypeVar("_Loaded")
_SHOWN_CHANGES = 8
_SHOWN_CHECKPOINTS = 4
_Status = Literal["gone", "error", "damaged", "intact"]
_PRECEDENCE: tuple[_Status, ...] = ("gone", "error", "damaged")


class _Listing(TypedDict):
    names: list[str]  # names of checkpoints, oldest first
    quarantined: list[str]  # names of damaged checkpoints; filled only if there is no other
    error: str


class _Report(TypedDict):
    """What a rank found in a checkpoint; the first status in _PRECEDENCE decides."""

    status: _Status
    detail: str  # the reason, or the checksum of the manifest
    file: str  # name of the damaged file
    host: str


class _SecondReading(TypedDict):
    """A damaged file, and a second rank that reads it before it counts as damaged for all."""

    file: str
    first: int  # the rank that found the damage
    second: int
    report: _Report  # report of the first rank


class _Decision(TypedDict):
    status: _Status
    detail: str
    readings: list[_SecondReading]


def load_newest(
    topic: str,
    ranks: StoreCommunicator,
    folder: ReadFolder,
    load_from: Callable[[Path, Manifest], _Loaded],
    step: int | None,
) -> _Loaded | None:
    """Return what load_from() returns for the newest checkpoint that is intact on all ranks.

    None if there never was one. A checkpoint is quarantined if a second rank finds it damaged, too.

    step: load only the checkpoint of this step.
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
            if decision["status"] == "damaged":
                decision = _read_again(
                    f"{attempt_topic} {number} again", ranks, decision, name, folder
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
            if damaged := listing["names"] or listing["quarantined"]:
                raise CheckpointError(_all_damaged(folder.path, damaged))
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

    if ranks.rank == 0 and (changes := loaded.restorer.changes):
        _log.info(
            "step %d was saved with other settings: %s. The saved ones are used. To train with "
            "those of the script, set them again after the load",
            loaded.step,
            "; ".join(changes[:_SHOWN_CHANGES]),
        )
    if ranks.rank == 0 and (changes := changed_versions(loaded.versions)):
        _log.info("step %d was saved with other versions: %s", loaded.step, "; ".join(changes))
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
        quarantined = [] if names else folder.list_quarantined()
    except FolderInUse as error:
        return {"names": [], "quarantined": [], "error": str(error)}
    except OSError as error:
        problem = folder.explain("cannot look for checkpoints", error)
        return {"names": [], "quarantined": [], "error": problem}
    if step is None:
        return {"names": names, "quarantined": quarantined, "error": ""}
    chosen = [name for name in names if step_of(name) == step]
    message = (
        f"there is no checkpoint of step {step} in {folder.path}; expected one of: "
        f"{show_steps(names)}. Choose one of these"
    )
    return {"names": chosen[-1:], "quarantined": [], "error": "" if chosen else message}


def _load(
    name: str,
    folder: ReadFolder,
    load_from: Callable[[Path, Manifest], _Loaded],
    is_last: bool,
) -> tuple[_Report, _Loaded | None]:
    """Read and check what this rank needs, and report the result.

    is_last: whether a missing checkpoint is reported as an error.
    """
    path = folder.path / name
    try:
        manifest = read_manifest(path)
        loaded = load_from(path, manifest)
    except Exception as error:  # reported, because the other ranks wait
        return _report_of(error, path, folder, is_last), None
    return _Report(status="intact", detail=manifest["crc32"], file="", host=_host()), loaded


def _report_of(error: Exception, path: Path, folder: ReadFolder, is_last: bool) -> _Report:
    if not is_last and not os.path.lexists(path):
        return {"status": "gone", "detail": "", "file": "", "host": _host()}
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        reason = f"{error.strerror}. Make it readable, or move it away"
    elif isinstance(error, Damaged | Unreadable | StateError | CheckpointError):
        reason = str(error)
    return {
        "status": "damaged" if isinstance(error, Damaged) else "error",
        "detail": f"{path} on {folder.owner}: {reason}",
        "file": error.file if isinstance(error, Damaged) else "",
        "host": _host(),
    }


def _host() -> str:
    return socket.gethostname()


def _decide(reports: Sequence[_Report], folder: ReadFolder) -> _Decision:
    for status in _PRECEDENCE:
        for report in reports:
            if report["status"] == status:
                readings = _second_readings(reports) if status == "damaged" else []
                return {
                    "status": report["status"],
                    "detail": report["detail"],
                    "readings": readings,
                }
    if any(report["detail"] != reports[0]["detail"] for report in reports):
        error = (
            f"from {folder.path}: the ranks do not see the same checkpoint. Choose a folder on a "
            "file system that all hosts share"
        )
        return {"status": "error", "detail": error, "readings": []}
    return {"status": "intact", "detail": reports[0]["detail"], "readings": []}


# --- a second rank reads files that look damaged


def _second_readings(reports: Sequence[_Report]) -> list[_SecondReading]:
    """Choose a second rank for each damaged file: on another host if possible, else another rank.

    Prefers ranks that have found no damage themselves; a single rank reads again itself.
    """
    first: dict[str, int] = {}
    for rank, report in enumerate(reports):
        if report["status"] == "damaged":
            first.setdefault(report["file"], rank)
    readings: list[_SecondReading] = []
    for file, reader in first.items():
        ranks = sorted(
            range(len(reports)),
            key=lambda rank: (
                reports[rank]["host"] == reports[reader]["host"],
                rank == reader,
                reports[rank]["status"] == "damaged",
                rank,
            ),
        )
        readings.append(
            {"file": file, "first": reader, "second": ranks[0], "report": reports[reader]}
        )
    return readings


def _read_again(
    topic: str, ranks: StoreCommunicator, decision: _Decision, name: str, folder: ReadFolder
) -> _Decision:
    """Decide whether a checkpoint is damaged, or the rank that read it is at fault."""
    path, reports = folder.path / name, list[_Report]()
    for reading in decision["readings"]:
        if reading["second"] == ranks.rank:
            reports.append(_read_file(path, reading["file"], folder))

    def conclude(reports_by_rank: Sequence[list[_Report]]) -> _Decision:
        of_rank = [iter(reports) for reports in reports_by_rank]
        second = [next(of_rank[reading["second"]]) for reading in decision["readings"]]
        for status in _PRECEDENCE[::-1]:  # damage that two ranks found decides
            for reading, report in zip(decision["readings"], second, strict=True):
                if report["status"] == status:
                    detail = (
                        reading["report"]["detail"] if status == "damaged" else report["detail"]
                    )
                    return {"status": report["status"], "detail": detail, "readings": []}
        problems = [
            _suspect(path, reading, report)
            for reading, report in zip(decision["readings"], second, strict=True)
        ]
        return {"status": "error", "detail": "; ".join(problems), "readings": []}

    return ranks.decide(topic, reports, conclude)


def _read_file(path: Path, name: str, folder: ReadFolder) -> _Report:
    """Read a whole file, and report the result."""
    try:
        manifest = read_manifest(path)
        for entry in manifest["files"]:
            if entry["name"] == name:
                check_file(path, entry)
    except Exception as error:  # reported, because the other ranks wait
        return _report_of(error, path, folder, is_last=False)
    return {"status": "intact", "detail": manifest["crc32"], "file": name, "host": _host()}


def _suspect(path: Path, reading: _SecondReading, report: _Report) -> str:
    host = reading["report"]["host"]
    reader = f"rank {reading['second']} on {report['host']} finds it intact"
    if reading["second"] == reading["first"]:
        reader = "a second time, it finds it intact"
    return (
        f"{path}: rank {reading['first']} on {host} finds {reading['file']} damaged, and {reader}; "
        f"expected the same bytes. Suspect {host}: its memory, or its client of the file system. "
        f"Start again without {host}, and test it. Nothing was renamed"
    )


def _all_damaged(folder: Path, names: Sequence[str]) -> str:
    shown = ", ".join(names[-_SHOWN_CHECKPOINTS:])
    more = ", and older ones" if len(names) > _SHOWN_CHECKPOINTS else ""
    return (
        f"all checkpoints in {folder} are damaged ({shown}{more}); expected an intact one. "
        "Copy one from a backup into the folder. To start from the beginning, move the damaged "
        "ones away, or choose another folder"
    )


_SHOWN_MISMATCHES = 8


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or restored.

    A Checkpointer raises the same one on every rank.
    """


class PermanentError(CheckpointError):
    """Every later save would fail in the same way."""


@dataclass(frozen=True)
class Restored:
    """A loaded checkpoint. state: the state passed to the load, restored."""

    step: int
    state: Any


class RankMetadata(TypedDict, total=False):
    """The trees in a rank's file; see Packed."""

    tree: Tree  # tree of the whole state; only in rank 0's file
    own: dict[str, Tree]  # trees of the rank's PerRank parts
    random: Tree  # states of the rank's random number generators
    versions: dict[str, str]  # package -> version; only in rank 0's file


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory that matches a state; the state is not changed yet."""

    step: int
    world_size: int
    restorer: Restorer
    random: dict[str, Any] | None  # None if another number of ranks saved the checkpoint
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the bits of a training."""
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
    """Read and check a checkpoint, and compare it with the state, which does not change yet.

    rank: use this rank's PerRank parts and buffers, if the number of ranks is as saved; None:
        use rank 0's buffers, and no PerRank parts.
    parts: keys of the saved state to load; default: all.
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
    """The contents of a checkpoint's files for one rank."""

    tree: Tree  # tree of the state, or of its chosen parts
    part_names: list[str]  # names of all parts, if some were chosen
    own: dict[str, Tree] | None  # see Restorer
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
    """Read the contents that one rank needs; arguments as for load()."""
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
    # Another shape gets no layout here; the comparison with the state reports it.
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
    """Return what to read from each rank's file: names of tensors, and the slice they share.

    boxes: the part of each tensor that is needed.
    mine: the rank whose file provides the tensors that every file has.
    The slice is None if the file has the whole tensors.
    """
    whole: dict[int, list[str]] = {}
    alike: dict[tuple[int, Box], list[str]] = {}  # most tensors share a layout
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
    """Return a state's tree with only these parts, and the names of all its parts."""
    content = tree.get("dict") if type(tree) is dict else None
    if type(content) is not dict:
        raise StateError("the saved state is no dictionary of parts. Load it with a Checkpointer")
    chosen = {name: part for name, part in content.items() if name in parts}
    return {"dict": chosen}, list(content)

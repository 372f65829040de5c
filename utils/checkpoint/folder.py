"""The folder of a training's checkpoints: names, manifests, and the changes that rank 0 makes.

A power cut at any moment leaves a checkpoint complete under its name, or not there at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..log import get_logger
from ..ranges import name_ranks
from . import disk, lock
from .format import MANIFEST, Damaged, Manifest, Unreadable, parse_manifest, render_manifest
from .rank_file import open_regular_file

_log = get_logger(__name__)
_SHOWN_FOLDERS = 4  # folder names in a message
_SAVING, _DELETING = ".saving-", ".deleting-"

_open_folders: set[Path] = set()  # temporary folders that this process writes into


class LaterStep(Exception):
    """The folder has a later step, so load_latest() would not find a save of this step."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay in the folder; the fields are arguments of Checkpointer."""

    keep: int
    keep_every: int | None
    keep_best: int
    best: str

    def __post_init__(self) -> None:
        for name, number in (("keep", self.keep), ("keep_every", self.keep_every)):
            if number is not None and number <= 0:
                raise ValueError(f"{name} is {number}; expected a number above 0")
        if self.keep_best < 0 or self.best not in ("min", "max"):
            raise ValueError(
                f"keep_best is {self.keep_best}, best is {self.best!r}; expected 0 or more, "
                "'min' or 'max'"
            )


class FolderReport(TypedDict):
    """Which folder a rank names."""

    path: str
    inode: int | None  # compared, since a shared folder may have different paths on different hosts


def report_folder(path: Path) -> FolderReport:
    """Return which folder this rank names."""
    inode = None
    with contextlib.suppress(OSError):
        inode = os.stat(path).st_ino
    return {"path": str(path), "inode": inode}


def folder_problem(reports: Sequence[FolderReport]) -> str:
    """Return a message if the ranks name different folders; "" if not. reports: by rank."""
    first, ranks = reports[0], dict[str, list[int]]()
    for rank, report in enumerate(reports):
        is_same_folder = report["inode"] is not None and report["inode"] == first["inode"]
        ranks.setdefault(first["path"] if is_same_folder else report["path"], []).append(rank)
    if len(ranks) == 1:
        return ""
    names = [f"{name_ranks(same)}: {path}" for path, same in ranks.items()]
    shown = "; ".join(names[:_SHOWN_FOLDERS]) + "; ..." * (len(names) > _SHOWN_FOLDERS)
    return (
        f"the ranks name {len(ranks)} different folders for checkpoints ({shown}). Expected one. "
        "Choose the name on rank 0 and broadcast it"
    )


class ReadFolder:
    """The folder as programs see it that change nothing in it.

    owner: names the reader in messages, such as "rank 0 on node7".
    """

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self.owner = path, owner

    def explain(self, what: str, error: OSError) -> str:
        """Return a message: what failed, where, and why."""
        return f"{what} in {self.path} on {self.owner}: {disk.explain(error)}"

    def list_quarantined(self) -> list[str]:
        """Return the names of the checkpoints that were found damaged. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return quarantined_names(self.path)
        return []

    def list(self) -> list[str]:
        """Return the names of the checkpoints, oldest first. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return checkpoint_names(self.path)
        return []

    def set_aside(self, name: str, reason: str) -> None:
        """Log that a checkpoint is damaged."""
        _log.warning("damaged checkpoint %s", reason)


class CheckpointFolder(ReadFolder):
    """The folder as the training changes it, one job at a time. path: absolute."""

    def __init__(self, path: Path, retention: Retention, owner: str) -> None:
        super().__init__(path, owner)
        self._retention = retention
        self._is_locked = False
        self._metrics: dict[str, float | None] = {}  # name of a checkpoint -> its metric

    # --- at a save

    def begin(self, step: int) -> Path:
        """Make a temporary folder for the files. Raises OSError, LaterStep or FolderInUse."""
        if not self.path.is_dir():
            self.path.mkdir()  # not mkdir -p: the parents' file system may not be mounted
            _log.warning(
                "%s was removed during the training, with the checkpoints in it; it is made again",
                self.path,
            )
        self._lock()
        later = [name for name in checkpoint_names(self.path) if step_of(name) > step]
        if later:
            raise LaterStep(
                f"cannot save step {step} in {self.path}: the later checkpoint {later[-1]} exists; "
                "load_latest() would load it. Expected no later step. Load it before training, or "
                "move it"
            )
        self._remove_leftovers()
        temporary = self.path / f"{_SAVING}{secrets.token_hex(8)}"
        disk.system.mkdir(temporary)
        _open_folders.add(temporary)
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> None:
        """Make the files of all ranks, already on disk, the newest checkpoint of their step.

        Raises OSError.
        """
        for entry in manifest["files"]:
            size = os.stat(temporary / entry["name"]).st_size
            if size != entry["size"]:
                what = f"{entry['name']} has {size} bytes after {entry['size']} were written"
                raise OSError(errno.EIO, what)
        disk.write_file(temporary / MANIFEST, memoryview(render_manifest(manifest)))
        disk.sync_folder(temporary)
        name = name_after(manifest["step"], checkpoint_names(self.path))
        disk.system.rename(temporary, self.path / name)
        self.end(temporary)
        disk.sync_folder(self.path)
        self._metrics[name] = manifest["metric"]

    def discard(self, temporary: Path) -> None:
        """Delete the temporary folder of a failed save, as far as possible."""
        with contextlib.suppress(OSError):
            disk.remove(temporary)

    @staticmethod
    def end(temporary: Path) -> None:
        """Note that this process no longer writes there, so the next save may delete it."""
        _open_folders.discard(temporary)

    def delete_old(self) -> None:
        """Delete the checkpoints that need not be kept, as far as possible."""
        failure = None
        try:
            names = checkpoint_names(self.path)
            for name in set(names) - self._kept(names):
                try:
                    # Renamed first, so that no reader finds a checkpoint that is half deleted.
                    deleting = self.path / f"{_DELETING}{secrets.token_hex(8)}"
                    disk.system.rename(self.path / name, deleting)
                    disk.remove(deleting)
                except OSError as error:
                    failure = error
        except OSError as error:
            failure = error
        if failure is not None:
            _log.warning("%s", self.explain("cannot delete an old checkpoint", failure))

    def _kept(self, names: Sequence[str]) -> set[str]:
        """Return the names that the retention keeps, and the targets of links among them."""
        rules, newest = self._retention, newest_by_step(names)
        kept = set(list(newest.values())[-rules.keep :])
        every = rules.keep_every
        kept |= {name for step, name in newest.items() if every and step % every == 0}
        if rules.keep_best:
            found = {name: self._metric(name) for name in newest.values()}
            metrics = {name: metric for name, metric in found.items() if metric is not None}
            ranked = sorted(metrics, key=lambda name: metrics[name], reverse=rules.best == "max")
            kept |= set(ranked[: rules.keep_best])
        links = [self.path / name for name in kept if (self.path / name).is_symlink()]
        return kept | {Path(os.path.realpath(link)).name for link in links}

    def _metric(self, name: str) -> float | None:
        if name not in self._metrics:
            self._metrics[name] = None
            with contextlib.suppress(Damaged, Unreadable, OSError):
                self._metrics[name] = read_manifest(self.path / name)["metric"]
        return self._metrics[name]

    # --- at a load

    def list(self) -> list[str]:
        """Remove files of interrupted saves; return the names of the checkpoints, oldest first.

        Raises OSError or FolderInUse.
        """
        self._lock()
        self._remove_leftovers()
        return checkpoint_names(self.path)

    def set_aside(self, name: str, reason: str) -> None:
        """Quarantine a damaged checkpoint under another name, and log it."""
        target, count = self.path / f"{name}{QUARANTINED}", 1
        while os.path.lexists(target):
            count += 1
            target = self.path / f"{name}{QUARANTINED}-{count}"
        try:
            disk.system.rename(self.path / name, target)
            disk.sync_folder(self.path)
            what = f"It is quarantined as {target.name}"
        except OSError as error:
            what = f"It could not be renamed: {error.strerror}"
        _log.warning("damaged checkpoint %s. %s", reason, what)

    # --- one job at a time

    def _lock(self) -> None:
        """Lock the folder until close(), also if it was removed and made again."""
        if not (self._is_locked and lock.is_held(self.path)):
            self._is_locked = lock.acquire(self.path)

    def close(self) -> None:
        """Let another job use the folder."""
        if self._is_locked:
            self._is_locked = False
            lock.release(self.path)

    def _remove_leftovers(self) -> None:
        """Delete files of interrupted deletions and, if no other job saves, of interrupted saves.

        Links are removed, and their targets stay.
        """
        try:
            for name in os.listdir(self.path):
                path = self.path / name
                is_save = name.startswith(_SAVING) and path not in _open_folders
                if name.startswith(_DELETING) or is_save and self._is_locked:
                    disk.remove(path)
        except OSError as error:
            _log.warning("%s", self.explain("cannot remove what an interrupted save left", error))


# step-000001200, and step-000001200-2 when that step was saved a second time
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")
QUARANTINED = ".damaged"  # suffix of a damaged checkpoint's name
_QUARANTINED_NAME = re.compile(rf"{_NAME.pattern}{re.escape(QUARANTINED)}(?:-\d+)?")
_MAX_MANIFEST_BYTES = 1 << 30
_SHOWN_STEPS = 10


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints, oldest step first."""
    return sorted(filter(_NAME.fullmatch, os.listdir(folder)), key=_order)


def quarantined_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints that were found damaged."""
    return sorted(filter(_QUARANTINED_NAME.fullmatch, os.listdir(folder)))


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return _order(name)[0]


def name_after(step: int, names: Sequence[str]) -> str:
    """Return the name of a checkpoint that comes after all others of its step."""
    count = 1 + max((_order(name)[1] for name in names if step_of(name) == step), default=0)
    return f"step-{step:09d}" + (f"-{count}" if count > 1 else "")


def newest_by_step(names: Sequence[str]) -> dict[int, str]:
    """Return the name for each step; if a step was saved twice, the second.

    names: from checkpoint_names().
    """
    return {step_of(name): name for name in names}


def show_steps(names: Sequence[str]) -> str:
    """Return the last steps of these checkpoints for a message, or "none"."""
    return ", ".join(str(step_of(name)) for name in names[-_SHOWN_STEPS:]) or "none"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, fully checked.

    Raises Damaged, Unreadable or OSError.
    """
    if not os.path.lexists(folder):
        raise Unreadable(
            f"{folder} is missing, although rank 0 sees it; expected a folder on a file system "
            "that all hosts share. Choose one"
        )
    with open_regular_file(folder / MANIFEST) as (file, size):
        if size > _MAX_MANIFEST_BYTES:
            what = f"{MANIFEST} has {size} bytes; expected at most {_MAX_MANIFEST_BYTES}"
            raise Damaged(MANIFEST, what)
        with open(file, "rb", closefd=False) as opened:
            manifest = parse_manifest(opened.read(size + 1))

    if _NAME.fullmatch(folder.name) and manifest["step"] != step_of(folder.name):
        raise Unreadable(
            f"{MANIFEST}: step is {manifest['step']}; expected {step_of(folder.name)}, as in the "
            "name of its folder. Restore the folder's name"
        )
    return manifest


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1]), int(match[2] or 1)

"""Keep the folder of a training's checkpoints: what rank 0 does in it at a save and at a load."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..log import get_logger
from . import disk, lock, storage
from .format import Damaged, FileEntry, Unreadable

_log = get_logger(__name__)


class LaterStep(Exception):
    """A later step is in the folder, so load_latest() would not find a save of this step."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay in the folder; the arguments are those of Checkpointer."""

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


class CheckpointFolder:
    """The folder of a training's checkpoints, for one job at a time.

    path: absolute.
    rank_name: of this rank in messages, such as "rank 0 on node7".
    """

    def __init__(self, path: Path, retention: Retention, rank_name: str) -> None:
        self.path = path
        self._retention = retention
        self._rank_name = rank_name
        self._is_locked = False
        self._metrics: dict[str, float | None] = {}  # by the name of the checkpoint

    def explain(self, what: str, error: OSError) -> str:
        """Return a message: what failed, where, and why."""
        return f"{what} in {self.path} on {self._rank_name}: {disk.explain(error)}"

    # --- at a save

    def begin(self, step: int) -> Path:
        """Make the temporary folder of a save. Raises OSError, LaterStep or FolderInUse."""
        if not self.path.is_dir():
            self.path.mkdir()  # not its parents: their file system may not be mounted
            _log.warning(
                "%s was removed during the training, with the checkpoints in it; it is made again",
                self.path,
            )
        self._lock()
        names = storage.checkpoint_names(self.path)
        later = [name for name in names if storage.step_of(name) > step]
        if later:
            raise LaterStep(
                f"cannot save step {step} in {self.path}: the later checkpoint {later[-1]} exists; "
                "load_latest() would load it. Expected no later step. Load it before training, or "
                "move it"
            )
        self._remove_leftovers()
        return storage.begin(self.path)

    def commit(
        self, temporary: Path, step: int, files: Sequence[FileEntry], metric: float | None
    ) -> str:
        """Make the files of all ranks a checkpoint; return its name. Raises OSError."""
        name = storage.commit(temporary, step, files, metric)
        self._metrics[name] = metric
        return name

    def discard(self, temporary: Path) -> None:
        """Delete the temporary folder of a save that failed, as far as possible."""
        with contextlib.suppress(OSError):
            disk.remove(temporary)

    def delete_old(self) -> None:
        """Delete the checkpoints that need not be kept. An OSError is logged."""
        retention = self._retention
        try:
            best = self._best_names() if retention.keep_best else []
            storage.delete_old(self.path, retention.keep, retention.keep_every, best)
        except OSError as error:
            _log.warning("%s", self.explain("cannot delete an old checkpoint", error))

    def _best_names(self) -> list[str]:
        """Return the checkpoints with the best metrics."""
        names = storage.checkpoint_names(self.path)
        self._metrics = {
            name: self._metrics[name] if name in self._metrics else self._read_metric(name)
            for name in names
        }
        metrics = {
            name: metric
            for name in storage.newest_by_step(names).values()
            if (metric := self._metrics[name]) is not None
        }
        highest_first = self._retention.best == "max"
        ranked = sorted(metrics, key=lambda name: metrics[name], reverse=highest_first)
        return ranked[: self._retention.keep_best]

    def _read_metric(self, name: str) -> float | None:
        try:
            return storage.read_manifest(self.path / name)["metric"]
        except (Damaged, Unreadable, OSError):
            return None

    # --- at a load

    def list(self) -> list[str]:
        """Remove what interrupted saves left; return the names of the checkpoints, oldest first.

        Raises OSError or FolderInUse.
        """
        self._lock()
        self._remove_leftovers()
        return storage.checkpoint_names(self.path)

    def quarantine(self, name: str, reason: str) -> None:
        """Rename a damaged checkpoint so that it is not read again, and log it."""
        try:
            what = f"It is quarantined as {storage.quarantine(self.path, name).name}"
        except OSError as error:
            what = f"It could not be renamed: {error.strerror}"
        _log.warning("damaged checkpoint %s. %s; the one before is loaded", reason, what)

    # --- one job at a time

    def _lock(self) -> None:
        """Lock the folder until close(), also where it was removed and made again."""
        if not (self._is_locked and lock.is_held(self.path)):
            self._is_locked = lock.acquire(self.path)

    def close(self) -> None:
        """Let another job use the folder."""
        if self._is_locked:
            self._is_locked = False
            lock.release(self.path)

    def _remove_leftovers(self) -> None:
        """Remove what interrupted saves left, where no other job can be saving."""
        try:
            storage.remove_leftovers(self.path, self._is_locked)
        except OSError as error:
            _log.warning("%s", self.explain("cannot remove what an interrupted save left", error))

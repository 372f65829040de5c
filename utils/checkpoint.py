"""Checkpoints that survive: written beside the training loop, whole or not at all, and found again by themselves.

Not here: files and checksums (checkpoint_files.py), the state taken apart (checkpoint_state.py), generators
(checkpoint_random.py), what the ranks tell each other (checkpoint_ranks.py).
"""
from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import operator
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from . import checkpoint_files as files
from .checkpoint_fitting import Fitting
from .checkpoint_random import derive_random_states, random_states, read_random_states, restore_random_states
from .checkpoint_ranks import Message, Ranks, Silence
from .checkpoint_snapshot import ReplicaFinder, Snapshot, share_out
from .checkpoint_state import PerRank, pack
from .checkpoint_sums import Sums
from .checkpoint_values import Unfit
from .logging import get_logger

__all__ = ["CheckpointError", "Checkpointer", "PerRank", "Restored"]

_log = get_logger(__name__)
_LAST_SECONDS, _FAREWELL_SECONDS = 60.0, 10.0  # for this rank's and the other ranks' part, when training ends early
_KEY = "ddpkit"  # of our part in the metadata of a file


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or restored; the same on every rank."""


@dataclass(frozen=True)
class Restored:
    """What load_latest() found."""

    step: int
    state: Any  # as given to load_latest(), with its plain data replaced by what was saved


class Checkpointer:
    """Saves the state of a training and finds the newest intact one again. Every rank makes one and calls the same.

        with Checkpointer("checkpoints", keep=3) as checkpoints:
            found = checkpoints.load_latest({"model": ddp, "optimizer": optimizer, "epoch": 0})
            ...
            checkpoints.save(step, {"model": ddp, "optimizer": optimizer, "epoch": epoch})

    A state is a nest of dictionaries, lists and tuples of: objects with state_dict() and load_state_dict() (models, DDP
    or compiled ones as the plain model; optimizers, schedulers, scalers, samplers), tensors, torch.Generators, numbers,
    strings, None. It is written once, as rank 0 has it, and restored so on all ranks, with these exceptions:

    - Every rank writes and restores its own: what is in PerRank(...); the states of the random number generators of
      Python, torch, the GPU and numpy, which need not be named; buffers up to 1 MiB, such as the running statistics
      of BatchNorm, of models that are trained under DistributedDataParallel. With another number of ranks, all ranks
      get the buffers of rank 0.
    - The ranks share the work of writing the parameters that are trained under DistributedDataParallel, and the states
      of their optimizers. A model that has a communication hook is written by rank 0 alone. If your own code lets such
      parameters differ between ranks (optimizer steps without an exchange of gradients), rank 0's are not what is
      saved: put model.state_dict() into the state instead of the model.

    A model is trained under DistributedDataParallel if it is one over all ranks, or the module inside, and an optimizer
    in the same state has its parameters.

    folder: on a file system that all hosts share; made if it is missing; for one job at a time. keep: so many of the
    last checkpoints stay, and with keep_every those of its multiples as well; 2 or more leave one to go back to when
    the last is damaged. timeout: seconds in which all ranks have to be done with a save or a load.

    The first save takes longer, because the memory for the copy is new; it is as much as this rank's part.

    Each checkpoint is a folder step-000001200 of safetensors files, one per rank, and a manifest with their checksums.
    A ValueError tells of a state that cannot be saved, a CheckpointError of everything else.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, *, keep_every: int | None = None,
                 timeout: float = 1800.0) -> None:
        for name, number in (("keep", keep), ("keep_every", keep_every), ("timeout", timeout)):
            if number is not None and number <= 0:
                raise ValueError(f"{name} is {number}; expected a number above 0")
        self.folder = Path(folder).absolute()
        self.seconds: float | None = None  # that the last save took, from save() until it was safe on disk
        self._keep, self._keep_every = keep, keep_every
        self._ranks = Ranks(timeout)
        self._turn = 0  # of saves and loads, the same on all ranks
        self._snapshot = Snapshot()
        self._replicas = ReplicaFinder()
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # this rank's part of the save in flight
        self._failure: Exception | None = None
        self._known: set[str] | None = None  # on rank 0: the checkpoints that are expected in the folder
        self._closed = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(self._explain("cannot make a folder", error)) from error
        atexit.register(self._end)

    # --- saving

    def save(self, step: int, state: Any) -> None:
        """Copy the state, and write it in the background; called by all ranks at the same step.

        Waits first until the save before is on disk. If that one failed, raises its CheckpointError and saves nothing;
        the caller may go on, and the next save is tried again. The state may change as soon as this returns.
        """
        if self._closed:
            raise CheckpointError("save() was called after close(). Close the Checkpointer at the end of the training")
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step is {step}; expected 0 or more")
        self.wait()
        start = time.monotonic()
        packed = pack(state, self._replicas.find(state))
        rank = self._ranks.rank
        share = share_out(packed, rank, self._ranks.world_size)
        self._snapshot.take({**share, **packed.local, **packed.mine})
        trees = {"random": pack(random_states()).tree, "own": packed.own,
                 "local": sorted([*packed.local, *packed.mine]) if rank else []}
        if rank == 0:
            trees["tree"] = packed.tree
        shapes = [(kind, name, str(one.dtype), tuple(one.shape)) for kind, tensors in (
            ("common", packed.common), ("main", packed.main), ("local", packed.local)) for name, one in tensors.items()]
        job = _Job(step, self._turn, start, Sums(self._snapshot.bytes), trees, _digest([step, shapes]),
                   replicated=bool(share) or rank == 0)
        self._turn += 1
        self._written.clear()
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in flight is safe on disk. Raises its CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(str(failure)) from failure

    def close(self) -> None:
        """Wait for the save in flight; raises its CheckpointError if it failed. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end)
        try:
            self.wait()
        finally:
            self._snapshot = Snapshot()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _end(self) -> None:
        """Close without raising: an error may have ended the training, and the other ranks may be gone."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end)
        if self._thread is not None and self._thread.is_alive():  # in a forked process it is not
            self._written.wait(_LAST_SECONDS)
            self._thread.join(_FAREWELL_SECONDS)
            self._ranks.given_up.set()
            self._thread.join(_FAREWELL_SECONDS)
        if self._failure is not None and self._ranks.rank != 0:  # rank 0 told it when it happened
            _log.error("%s", self._failure)

    def _run(self, job: _Job) -> None:
        try:
            self._write(job)
        except Exception as error:  # told at the next save, wait or close
            self._failure = error
            if self._ranks.rank == 0:
                _log.error("%s", error)
        finally:
            job.sums.go.set()  # where nothing was written, its thread waits still
            self._written.set()

    def _write(self, job: _Job) -> None:
        ranks, topic, temporary = self._ranks, f"save {job.turn}", Path()
        told = ranks.share(f"{topic} folder", lambda: self._begin(job.step))
        if "error" not in told:
            temporary = self.folder / told["name"]
        mine = told if "error" in told else self._write_part(job, temporary)
        self._written.set()
        verdict = ranks.decide(topic, mine, lambda parts: self._commit(temporary, job.step, parts))
        if ranks.rank == 0:
            ranks.forget(f"{topic} folder")
        if "error" in verdict:
            raise CheckpointError(verdict["error"])
        self.seconds = time.monotonic() - job.start
        if ranks.rank == 0:
            try:
                files.retire(self.folder, self._keep, self._keep_every)
                self._known = set(files.names(self.folder))
            except OSError as error:
                _log.warning("%s", self._explain("cannot delete an old checkpoint", error))

    def _begin(self, step: int) -> Message:
        try:
            if self._known is None:
                self._tidy()
            later = [name for name in files.names(self.folder) if files.step_of(name) > step]
            if later:
                return {"error": f"cannot save step {step} in {self.folder}: {later[-1]} is there already, which "
                                 "load_latest() would take. Load it before training, move it away, or choose another "
                                 "folder"}
            return {"name": files.begin(self.folder).name}
        except OSError as error:
            return {"error": self._explain(f"cannot save step {step}", error)}

    def _tidy(self) -> None:
        files.remove_leftovers(self.folder)
        self._known = set(files.names(self.folder))

    def _write_part(self, job: _Job, temporary: Path) -> Message:
        try:
            entry = files.write_part(temporary / files.part_name(self._ranks.rank), self._snapshot.layout,
                                     self._snapshot.bytes(), job.sums, {_KEY: json.dumps(job.trees)})
            return {"entry": {**entry, "replicated": job.replicated}, "digest": job.digest}
        except OSError as error:
            return {"error": self._explain(f"cannot save step {job.step}", error)}
        except Exception as error:  # the other ranks have to know
            return {"error": f"cannot save step {job.step} in {self.folder} on {self._ranks.here}: "
                             f"{type(error).__name__}: {error}"}

    def _commit(self, temporary: Path, step: int, parts: Sequence[Message]) -> Message:
        errors = [part["error"] for part in parts if "error" in part]
        others = [rank for rank, part in enumerate(parts) if not errors and part["digest"] != parts[0]["digest"]]
        if others:
            errors = [f"cannot save step {step} in {self.folder}: rank {others[0]} saves another step than rank 0, or "
                      "tensors of other names, shapes or types. Save the same on all ranks, what differs in PerRank"]
        if not errors:
            try:
                strange = sorted(set(files.names(self.folder)) - (self._known or set()))
                if strange:
                    _log.warning("%s in %s was not written by this run: two jobs use one folder. Give each its own",
                                 strange[-1], self.folder)
                return {"name": files.commit(temporary, step, self._ranks.world_size, [one["entry"] for one in parts])}
            except OSError as error:
                errors = [self._explain(f"cannot save step {step}", error)]
                self._known = None  # the rename may have been done
        if temporary.name:
            with contextlib.suppress(OSError):
                files.remove(temporary)
        more = f" ({len(errors) - 1} more ranks failed too)" if len(errors) > 1 else ""
        return {"error": f"{errors[0]}{more}. The checkpoints before it are untouched"}

    def _explain(self, what: str, error: OSError) -> str:
        return f"{what} in {self.folder} on {self._ranks.here}: {files.cause(error)}"

    # --- loading

    def load_latest(self, state: Any) -> Restored | None:
        """Restore the newest intact checkpoint in place, on all ranks the same; None when there is none.

        state: nested as the one that was saved. Objects, tensors and generators in it are restored in place; the rest
        is only a pattern, and comes back with the saved values in Restored.state. The random number generators are set
        as they were at save(); under another number of ranks those that differed between ranks get new states, and
        PerRank parts are refused. What does not fit is refused before anything is changed.

        Making the iterator of a DataLoader draws from torch's generator, once more when an epoch is resumed in its
        middle: give the DataLoader a generator of its own, so that all other random numbers stay as they were.

        On three or more ranks DistributedDataParallel goes on with the same bits only after training.settle().

        A damaged checkpoint is named with the reason, kept with .damaged at its name, and the one before is taken. So
        do all ranks when one of them finds damage. Needs memory for the whole checkpoint on every rank.
        """
        self.wait()
        topic = f"load {self._turn}"
        self._turn += 1
        try:
            listed = self._ranks.share(topic, self._list)
            for number, name in enumerate(reversed(listed.get("names", []))):
                found: list[_Read] = []
                verdict = self._ranks.decide(f"{topic} {number}", self._look(name, state, found), self._judge)
                if "damaged" in verdict:
                    if self._ranks.rank == 0:
                        self._set_aside(name, verdict["damaged"])
                    continue
                if "error" in verdict:
                    raise CheckpointError(verdict["error"])
                return self._restore(found[0])
        except Silence as error:
            raise CheckpointError(f"cannot load from {self.folder}: {error}") from error
        if "error" in listed:
            raise CheckpointError(listed["error"])
        return None

    def _list(self) -> Message:
        try:
            listed = files.names(self.folder)
        except OSError as error:
            return {"error": self._explain("cannot look for checkpoints", error)}
        try:
            self._tidy()
        except OSError as error:
            _log.warning("%s", self._explain("cannot remove what an interrupted save left", error))
        return {"names": listed}

    def _look(self, name: str, state: Any, found: list[_Read]) -> Message:
        """Read and check all that this rank needs. Nothing is changed yet: another rank may have found damage."""
        where = f"{self.folder / name} on {self._ranks.here}"
        try:
            manifest = files.read_manifest(self.folder / name)
            read = self._read(self.folder / name, manifest, state)
        except files.Damaged as damage:
            return {"damaged": f"{where}: {damage}"}
        except (files.Unreadable, Unfit) as problem:
            return {"error": f"cannot load {where}: {problem}"}
        except OSError as error:
            return {"error": f"cannot read {where}: {error.strerror}. Make it readable, or move it away"}
        if read.fitting.problems:
            shown = "; ".join(read.fitting.problems[:8])
            more = len(read.fitting.problems) - 8
            return {"error": f"the state does not fit to {where}: {shown}{f'; and {more} more' if more > 0 else ''}. "
                             "Resume with what was saved, or start in another folder"}
        found.append(read)
        return {"manifest": _digest(manifest)}

    def _read(self, folder: Path, manifest: dict[str, Any], state: Any) -> _Read:
        same = manifest["world_size"] == self._ranks.world_size
        tensors: dict[str, Tensor] = {}
        mine: dict[str, Tensor] = {}
        trees: dict[str, Any] = {}
        by_rank: dict[int, dict[str, Any]] = {}
        for rank, entry in enumerate(manifest["files"]):
            if entry["replicated"] or not same or rank == self._ranks.rank:
                metadata, held = files.read_part(folder, entry)
                by_rank[rank] = json.loads(metadata[_KEY])
                if same and rank == self._ranks.rank:
                    mine = held
                else:
                    local = set(by_rank[rank]["local"])
                    tensors.update((name, one) for name, one in held.items() if name not in local)
                trees.update(by_rank[rank] if rank == 0 else {})
        tensors.update(mine)  # what each rank has of its own has the same names in the file of every rank
        own = by_rank[self._ranks.rank]["own"] if same else None
        saved = [read_random_states(one["random"]) for one in by_rank.values()] if not same else [
            read_random_states(by_rank[self._ranks.rank]["random"])]
        return _Read(manifest["step"], Fitting(state, trees["tree"], tensors, own), saved, manifest["world_size"])

    def _judge(self, answers: Sequence[Message]) -> Message:
        for kind in ("error", "damaged"):
            told = [answer for answer in answers if kind in answer]
            if told:
                return told[0]
        if any(answer != answers[0] for answer in answers):
            return {"error": f"the ranks do not see the same checkpoint in {self.folder}. Choose a folder on a file "
                             "system that all hosts share"}
        return answers[0]

    def _set_aside(self, name: str, reason: str) -> None:
        try:
            kept = f"It is kept as {files.set_aside(self.folder, name).name}"
            self._known = set(files.names(self.folder))
        except OSError as error:
            kept = f"It could not be renamed: {error.strerror}"
        _log.warning("damaged checkpoint %s. %s; going back to the one before", reason, kept)

    def _restore(self, read: _Read) -> Restored:
        ranks = self._ranks
        try:
            restored = read.fitting.restore()
        except Unfit as error:
            raise CheckpointError(f"cannot restore step {read.step} in {self.folder} on {ranks.here}: "
                                  f"{error}") from error
        if read.world_size == ranks.world_size:
            missing = restore_random_states(read.random[0])
            if missing:
                _log.warning("the generators of %s were saved but are not here: random numbers will be others than in "
                             "a run without interruption", ", ".join(missing))
        else:
            derived = derive_random_states(read.random, ranks.rank, ranks.world_size)
            if ranks.rank == 0:
                _log.warning("step %d was saved by %d ranks and goes on with %d: %s", read.step, read.world_size,
                             ranks.world_size, f"the generators of {', '.join(derived)} differed between the ranks and "
                             "get new states, derived from the saved ones" if derived else
                             "the generators were alike on all ranks, and go on as they were")
        return Restored(read.step, restored)


@dataclass(frozen=True)
class _Job:
    """What one save hands over to its thread."""

    step: int
    turn: int
    start: float
    sums: Sums
    trees: dict[str, Any]
    digest: str  # of what has to be the same on all ranks
    replicated: bool  # whether this rank's file holds a part of that


@dataclass(frozen=True)
class _Read:
    """A checkpoint in memory that is whole and fits."""

    step: int
    fitting: Fitting
    random: list[dict[str, Any]]
    world_size: int


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()

"""Checkpoints that survive: written beside the training loop, whole or not at all, and found again by themselves.

Not here: files and checksums (checkpoint_files.py), the state taken apart (checkpoint_state.py), generators
(checkpoint_random.py), what the ranks tell each other (checkpoint_ranks.py), programs that only read
(checkpoint_reader.py).
"""
from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import operator
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from . import checkpoint_files as files
from .checkpoint_random import derive_random_states, random_states, restore_random_states
from .checkpoint_ranks import Message, Ranks, Silence
from .checkpoint_reader import (
    ATTEMPTS,
    KEY,
    PAUSE_SECONDS,
    CheckpointError,
    Loaded,
    Restored,
    export_safetensors,
    list_steps,
    load_part,
    read,
)
from .checkpoint_snapshot import ReplicaFinder, Snapshot, share_out
from .checkpoint_state import PerRank, pack
from .checkpoint_sums import Sums
from .checkpoint_values import Unfit
from .logging import get_logger

__all__ = ["CheckpointError", "Checkpointer", "PerRank", "Restored", "export_safetensors", "list_steps", "load_part"]

_log = get_logger(__name__)
_LAST_SECONDS, _FAREWELL_SECONDS = 60.0, 10.0  # for this rank's and the other ranks' part, when training ends early
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 5.0


class _Permanent(CheckpointError):
    """A save that fails in the same way each time: an error of the script, not of the disk."""


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

    folder: on a file system that all hosts share; made if it is missing; for one job at a time. Other programs read it
    with list_steps(), load_part() and export_safetensors().
    keep: so many of the last checkpoints stay; 2 or more leave one to go back to when the last is damaged.
    keep_every: those of its multiples stay as well. keep_best: so many with the best metric stay as well; best: whether
    these have the lowest ("min") or the highest ("max") metric given to save().
    timeout: seconds in which all ranks have to be done with a save or a load.

    A save that fails, for example because no space is left, does not end the training: rank 0 logs the error, what was
    written is removed, and the next save is tried. The attribute `failure` is the CheckpointError of the last save that
    has ended, or None if it is safe; wait() makes it the same on all ranks, and raises it. Save the last state with
    save_and_wait(), which tries again and raises at last.

    The first save takes longer, because the memory for the copy is new; it is as much as this rank's part.

    Each checkpoint is a folder step-000001200 of safetensors files, one per rank, and a manifest with their checksums.
    A ValueError tells of a state that cannot be saved, a CheckpointError of everything else.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, *, keep_every: int | None = None,
                 keep_best: int = 0, best: str = "min", timeout: float = 1800.0) -> None:
        for name, number in (("keep", keep), ("keep_every", keep_every), ("timeout", timeout)):
            if number is not None and number <= 0:
                raise ValueError(f"{name} is {number}; expected a number above 0")
        if keep_best < 0 or best not in ("min", "max"):
            raise ValueError(f"keep_best is {keep_best}, best is {best!r}; expected 0 or more, 'min' or 'max'")
        self.folder = Path(folder).absolute()
        self.seconds: float | None = None  # that the last save took, from save() until it was safe on disk
        self.failure: CheckpointError | None = None  # of the last save, the same on all ranks; None if it is safe
        self._keep, self._keep_every, self._keep_best, self._best = keep, keep_every, keep_best, best
        self._metrics: dict[str, float | None] = {}  # of the checkpoints in the folder, for rank 0
        self._timeout = timeout
        try:
            self._ranks = Ranks(timeout)
        except Silence as error:
            raise CheckpointError(str(error)) from error
        self._turn = 0  # of saves and loads, the same on all ranks
        self._snapshot = Snapshot()
        self._replicas = ReplicaFinder()
        self._thread: threading.Thread | None = None
        self._written = threading.Event()  # this rank's part of the save in flight
        self._pending: CheckpointError | None = None  # a failure that no call has raised yet
        self._again = False  # whether save_and_wait() has time to try again, the same on all ranks
        self._known: set[str] | None = None  # on rank 0: the checkpoints that are expected in the folder
        self._closed = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(self._explain("cannot make a folder", error)) from error
        atexit.register(self._end)

    # --- saving

    def save(self, step: int, state: Any, *, metric: float | None = None) -> None:
        """Copy the state, and write it in the background; called by all ranks at the same step.

        Waits first until the save before is on disk. If that one failed, this one is tried all the same. The state may
        change as soon as this returns.

        metric: of this state, for keep_best; rank 0's counts. NaN is never among the best.
        Raises ValueError for a state that cannot be saved: then no rank saves it, and the others find the reason in
        `failure`. Raises CheckpointError where the save before failed in a way that no further try can mend: the
        ranks saved different states, or a later step is in the folder.
        """
        self._save(step, state, metric, 0.0)

    def save_and_wait(self, step: int, state: Any, *, metric: float | None = None, retry_seconds: float = 60.0) -> None:
        """Save, and return when the checkpoint is safe on disk. Use it for the last save before the process ends.

        If it fails it is tried again for `retry_seconds`, by the clock of rank 0. Then raises CheckpointError, on all
        ranks, so that the training does not end as if it had been saved.
        """
        end, pause = time.monotonic() + retry_seconds, _FIRST_RETRY_SECONDS
        while True:
            self._save(step, state, metric, end)
            self._finish()
            if self.failure is None or not self._again:
                return self.wait()
            time.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)

    def _save(self, step: int, state: Any, metric: float | None, retry_until: float) -> None:
        if self._closed:
            raise CheckpointError("save() was called after close(). Close the Checkpointer at the end of the training")
        self._check_ranks()
        self._finish()
        pending, self._pending = self._pending, None
        if isinstance(pending, _Permanent):
            raise pending
        start, turn = time.monotonic(), self._turn
        self._turn += 1  # also where this rank fails, so that all ranks stay in step
        try:
            job = self._prepare(step, state, metric, turn, start, retry_until)
        except Exception as error:
            problem = (f"cannot save step {step!r:.50} in {self.folder} on {self._ranks.here}: "
                       f"{type(error).__name__}: {error}")
            self._start(_Job(-1, turn, start, Sums(self._snapshot.bytes), {}, "", False, None, 0.0, problem))
            raise
        self._start(job)

    def _prepare(self, step: int, state: Any, metric: float | None, turn: int, start: float,
                 retry_until: float) -> _Job:
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step is {step}; expected 0 or more")
        number = None if metric is None else float(metric)
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
        return _Job(step, turn, start, Sums(self._snapshot.bytes), trees, _digest([step, shapes]),
                    bool(share) or rank == 0, number if number is not None and math.isfinite(number) else None,
                    retry_until)

    def _start(self, job: _Job) -> None:
        self._written.clear()
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True, name="checkpoint")
        self._thread.start()

    def _check_ranks(self) -> None:
        try:
            self._ranks.check()
        except Silence as error:
            raise CheckpointError(str(error)) from error

    def _finish(self) -> None:
        """Wait until the save in flight has ended, well or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until the save in flight is safe on disk. Raises its CheckpointError if it failed, once."""
        self._finish()
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending

    def close(self) -> None:
        """Wait for the save in flight. A second call does nothing.

        Raises CheckpointError if the last save failed, unless wait() has raised it already.
        """
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
        if self._pending is not None and self._ranks.rank != 0:  # rank 0 logged it when it happened
            _log.error("%s", self._pending)

    def _run(self, job: _Job) -> None:
        self.failure, self._again = None, False
        try:
            self._write(job)
        except Exception as error:
            self.failure = error if isinstance(error, CheckpointError) else CheckpointError(str(error))
            self.failure.__cause__ = None if error is self.failure else error
            if not job.problem:  # which save() has raised already
                self._pending = self.failure
            self._known = None  # look for what it left before the next save
            if self._ranks.rank == 0:
                _log.error("%s", error)
        finally:
            job.sums.go.set()  # where nothing was written, its thread waits still
            self._written.set()

    def _write(self, job: _Job) -> None:
        ranks, topic, temporary = self._ranks, f"save {job.turn}", Path()
        begun = ranks.share(f"{topic} folder", lambda: _final(job.problem) if job.problem else self._begin(job.step))
        if "error" not in begun:
            temporary = self.folder / begun["name"]
        mine = begun if "error" in begun else _final(job.problem) if job.problem else self._write_part(job, temporary)
        self._written.set()
        try:
            result = ranks.decide(topic, mine, lambda parts: self._commit(temporary, job, parts))
        finally:  # also where another rank did not respond, which may still write
            files.abandon(temporary)
        if ranks.rank == 0:
            ranks.forget(f"{topic} folder")
        self._again = bool(result.get("again"))
        if "error" in result:
            raise (_Permanent if result.get("permanent") else CheckpointError)(result["error"])
        self.seconds = time.monotonic() - job.start
        if ranks.rank == 0:
            try:
                files.retire(self.folder, self._keep, self._keep_every, self._best_names())
                self._known = set(files.names(self.folder))
            except OSError as error:
                _log.warning("%s", self._explain("cannot delete an old checkpoint", error))

    def _best_names(self) -> list[str]:
        if not self._keep_best:
            return []
        listed = files.names(self.folder)
        for name in listed:
            if name not in self._metrics:
                try:
                    self._metrics[name] = files.read_manifest(self.folder / name)["metric"]
                except (files.Damaged, files.Unreadable, OSError):
                    self._metrics[name] = None
        self._metrics = {name: self._metrics[name] for name in listed}
        newest = {files.step_of(name): name for name in listed}
        metrics = {name: metric for name in newest.values() if (metric := self._metrics[name]) is not None}
        return sorted(metrics, key=lambda name: metrics[name], reverse=self._best == "max")[:self._keep_best]

    def _begin(self, step: int) -> Message:
        try:
            if not self.folder.is_dir():
                self.folder.mkdir()  # not its parents: their file system may not be mounted
                _log.warning("%s was removed during the training, with the checkpoints in it; it is made again",
                             self.folder)
            if self._known is None:
                self._known = set(files.names(self.folder))
            later = [name for name in files.names(self.folder) if files.step_of(name) > step]
            if later:
                return {"error": f"cannot save step {step} in {self.folder}: {later[-1]} is there already, which "
                                 "load_latest() would take. Load it before training, move it away, or choose another "
                                 "folder", "final": True, "permanent": True}
            temporary = files.begin(self.folder)
            self._remove_leftovers(temporary)
            return {"name": temporary.name}
        except OSError as error:
            return {"error": self._explain(f"cannot save step {step}", error)}

    def _remove_leftovers(self, temporary: Path | None = None) -> None:
        try:
            running = files.remove_leftovers(self.folder, temporary, self._timeout)
        except OSError as error:
            _log.warning("%s", self._explain("cannot remove what an interrupted save left", error))
        else:
            if running and temporary is not None:
                _log.warning("another process is saving in %s (%s): two jobs use one folder. Give each its own",
                             self.folder, running[0])

    def _write_part(self, job: _Job, temporary: Path) -> Message:
        try:
            entry = files.write_part(temporary / files.part_name(self._ranks.rank), self._snapshot.layout,
                                     self._snapshot.bytes(), job.sums, {KEY: json.dumps(job.trees)})
            return {"entry": {**entry, "replicated": job.replicated}, "digest": job.digest}
        except OSError as error:
            return {"error": self._explain(f"cannot save step {job.step}", error)}
        except Exception as error:  # the other ranks have to know
            return {"error": f"cannot save step {job.step} in {self.folder} on {self._ranks.here}: "
                             f"{type(error).__name__}: {error}"}

    def _commit(self, temporary: Path, job: _Job, parts: Sequence[Message]) -> Message:
        step = job.step
        failed = [part for part in parts if "error" in part]
        errors = [part["error"] for part in failed]
        more = f" ({len(errors) - 1} more ranks failed too)" if len(set(errors)) > 1 else ""
        flags = {"again": not any(part.get("final") for part in failed) and time.monotonic() < job.retry_until,
                 "permanent": any(part.get("permanent") for part in failed)}
        others = [rank for rank, part in enumerate(parts) if not errors and part["digest"] != parts[0]["digest"]]
        if others:
            flags = {"again": False, "permanent": True}
            errors = [f"cannot save step {step} in {self.folder}: rank {others[0]} saves another step than rank 0, or "
                      "tensors of other names, shapes or types. Save the same on all ranks, what differs in PerRank"]
        if not errors:
            try:
                strange = sorted(set(files.names(self.folder)) - (self._known or set()))
                if strange:
                    _log.warning("%s in %s was not written by this run: two jobs use one folder. Give each its own",
                                 strange[-1], self.folder)
                name = files.commit(temporary, step, self._ranks.world_size, [one["entry"] for one in parts],
                                    job.metric)
                self._metrics[name] = job.metric
                return {"name": name}
            except OSError as error:
                errors = [self._explain(f"cannot save step {step}", error)]
        if temporary.name:
            with contextlib.suppress(OSError):
                files.remove(temporary)
        return {"error": f"{errors[0]}{more}. The checkpoints before it are untouched", **flags}

    def _explain(self, what: str, error: OSError) -> str:
        return f"{what} in {self.folder} on {self._ranks.here}: {files.cause(error)}"

    # --- loading

    def load_latest(self, state: Any) -> Restored | None:
        """Restore the newest intact checkpoint in place, on all ranks the same; None when there is none.

        state: nested as the one that was saved. Objects, tensors, generators, containers and numpy arrays of the same
        shape and type are restored in place. What cannot change (numbers, strings, arrays of another shape) is replaced
        in the container that holds it: read state["best"] afterwards, not a variable that was put into it.

        The random number generators are set as they were at save(); under another number of ranks those that differed
        between ranks get new states, and PerRank parts are refused. What does not fit is refused before anything is
        changed.

        Making the iterator of a DataLoader draws from torch's generator, once more when an epoch is resumed in its
        middle: give the DataLoader a generator of its own, so that all other random numbers stay as they were.

        On three or more ranks the bits are the same only after training.prime_ddp_buckets(), called before this.

        A damaged checkpoint is named with the reason, kept with .damaged at its name, and the one before is taken. So
        do all ranks when one of them finds damage. Needs memory for the whole checkpoint on every rank.

        What another process that still runs is writing into the folder is left alone; what a killed one left is
        removed. A program that is not the training uses load_part() instead, which changes nothing in the folder.
        """
        return self._load(state, None)

    def load_step(self, step: int, state: Any) -> Restored:
        """As load_latest(), but the checkpoint of this step. Raises CheckpointError if it is missing or damaged.

        Before the training saves in the same folder, later steps have to be moved away.
        """
        found = self._load(state, operator.index(step))
        assert found is not None
        return found

    def _load(self, state: Any, step: int | None) -> Restored | None:
        self._check_ranks()
        self._finish()
        turn = f"load {self._turn}"
        self._turn += 1
        try:
            for attempt in range(ATTEMPTS):
                topic = f"{turn}/{attempt}"
                listed = self._ranks.share(topic, lambda: self._list(step))
                if "error" in listed:
                    raise CheckpointError(listed["error"])
                for number, name in enumerate(reversed(listed["names"])):
                    found: list[Loaded] = []
                    mine = self._look(name, state, found, last=attempt == ATTEMPTS - 1)
                    result = self._ranks.decide(f"{topic} {number}", mine, self._combine)
                    if "gone" in result:  # another process deletes old ones here
                        time.sleep(PAUSE_SECONDS)
                        break
                    if "damaged" in result and step is None:
                        if self._ranks.rank == 0:
                            self._set_aside(name, result["damaged"])
                        continue
                    if "error" in result or "damaged" in result:
                        raise CheckpointError(result.get("error") or f"damaged checkpoint {result['damaged']}")
                    return self._restore(found[0])
                else:
                    return None
            return None
        except Silence as error:
            raise CheckpointError(f"cannot load from {self.folder}: {error}") from error

    def _list(self, step: int | None) -> Message:
        try:
            listed = files.names(self.folder)
        except OSError as error:
            return {"error": self._explain("cannot look for checkpoints", error)}
        self._remove_leftovers()
        self._known = set(listed)
        if step is None:
            return {"names": listed}
        chosen = [name for name in listed if files.step_of(name) == step]
        if chosen:
            return {"names": chosen[-1:]}
        there = ", ".join(str(files.step_of(name)) for name in listed[-10:]) or "none"
        return {"error": f"there is no checkpoint of step {step} in {self.folder}; expected one of: {there}. Choose "
                         "one of these"}

    def _look(self, name: str, state: Any, found: list[Loaded], last: bool) -> Message:
        """Read and check all that this rank needs. Nothing is changed yet: another rank may have found damage."""
        path = self.folder / name
        where = f"{path} on {self._ranks.here}"
        try:
            manifest = files.read_manifest(path)
            found.append(read(path, manifest, state, self._ranks.rank, self._ranks.world_size))
            return {"manifest": _digest(manifest)}
        except Exception as problem:  # the other ranks have to know
            if not last and not os.path.lexists(path):
                return {"gone": True}
            if isinstance(problem, files.Damaged):
                return {"damaged": f"{where}: {problem}"}
            if isinstance(problem, OSError):
                return {"error": f"cannot read {where}: {problem.strerror}. Make it readable, or move it away"}
            known = isinstance(problem, files.Unreadable | Unfit | CheckpointError)
            return {"error": f"cannot load {where}: {'' if known else f'{type(problem).__name__}: '}{problem}"}

    def _combine(self, answers: Sequence[Message]) -> Message:
        for kind in ("gone", "error", "damaged"):
            found = [answer for answer in answers if kind in answer]
            if found:
                return found[0]
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

    def _restore(self, read: Loaded) -> Restored:
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
    metric: float | None
    retry_until: float  # by the clock of rank 0
    problem: str = ""  # why this rank has nothing to write


def _final(problem: str) -> Message:
    """The report of a rank that would fail at each further try."""
    return {"error": problem, "final": True}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()

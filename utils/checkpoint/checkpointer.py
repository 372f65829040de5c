"""Checkpointer: saves a training's state in the background, and loads the newest intact one.

The order in which a save writes its files is in the docstring of this package (__init__.py).
"""

from __future__ import annotations

import atexit
import math
import operator
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ..calls import CallsOfAllRanks
from ..consistency import training_watch
from ..coordination import CoordinationError, StoreCommunicator
from ..launch_protocol import report_checkpoint
from ..log import get_logger
from .counters import UnsavedCounters
from .entries import StateError, check_state, unwrap, walk
from .folder import CheckpointFolder, Retention, folder_problem, report_folder
from .format import Manifest, slice_name
from .load import (
    CheckpointError,
    LoadedCheckpoint,
    PermanentError,
    RankMetadata,
    Restored,
    digest,
    load,
    load_newest,
    restore,
    versions,
)
from .optimizers import unchecked_optimizers
from .pack import Packed, pack
from .rank_file import BackgroundChecksums
from .rng import random_states
from .save import RefusedJob, SaveJob, check_calls, write_checkpoint
from .snapshot import ReplicaSample, Snapshot, replicated_parameters, share_out

_log = get_logger(__name__)

# Seconds to wait when the training ends early: for this rank's part of the save, then for the rest.
_OWN_PART_TIMEOUT, _OTHER_RANKS_TIMEOUT = 60.0, 10.0
_FIRST_RETRY_PAUSE_SECONDS, _LONGEST_RETRY_PAUSE_SECONDS = 0.5, 5.0


class Checkpointer:
    """Saves the state of a training, and finds the newest intact one again.

    Every rank makes one and calls the same methods:

        with Checkpointer("checkpoints", keep=3) as checkpoints:
            state = {"model": ddp, "optimizer": optimizer, "epoch": 0}
            found = checkpoints.load_latest(state)
            ...
            checkpoints.save(step, state)

    A state is a nest of dictionaries, lists and tuples of: objects with state_dict() and
    load_state_dict() (models, optimizers, schedulers, scalers, samplers; a DDP or compiled model is
    saved as the plain model), tensors, numpy arrays, numbers, strings, None. pack.py has the
    complete list. DTensors (FSDP2, HSDP, tensor parallelism) are saved in slices, each by one rank,
    and loaded into any number of ranks and any layout. The rest of the state is written once, as
    rank 0 has it, and restored on all ranks, except:

    - Every rank writes and restores its own PerRank(...) parts, its global random number generators
      (Python, torch, the GPU, numpy; they need not be named), and the buffers of modules up to
      1 MiB, such as the running statistics of BatchNorm. With another number of ranks, all ranks
      get the buffers of rank 0.
    - The ranks share the work of writing the parameters of a DistributedDataParallel module in the
      state, compiled or not, and the state of its optimizer in the same state. Rank 0 writes other
      models: the module inside DistributedDataParallel, parameters that it ignores or that were
      frozen when it was made, a model with a communication hook or on only some of the ranks. If
      your own code makes the parameters differ between ranks (optimizer steps without an exchange
      of gradients), put ddp.module into the state, so that rank 0's are saved. Samples of these
      tensors show ranks that have diverged by mistake: the save fails and names the rank, and the
      next save() raises.

    A save that fails, for example because no space is left, does not end the training: rank 0 logs
    the error, the files are removed, and the next save is tried. Save the last state with
    save_and_wait(), which tries again and finally raises. The first save takes longer, because the
    memory for the copy is new. It is as large as this rank's part. With CUDA it is pinned: torch
    rounds it up to a power of two, and in torch 2.13 does not do so with
    PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64.

    folder: the same folder on all ranks, in a file system that all hosts share. It is made if it
        is missing. One job at a time may use it: a second job is refused while the first one's
        rank 0 runs (lock.py). Other programs read it with list_steps(), load_part() and
        export_safetensors().
    keep: number of newest checkpoints to keep. With 2 or more, one is left if the last is damaged.
    keep_every: also keep steps that are multiples of this number.
    keep_best: also keep this number of checkpoints with the best metric.
    best: "min" if the lowest metric is the best, "max" if the highest is.
    every: steps between two saves, for is_due().
    timeout: seconds in which all ranks must finish a save or a load.

    Attributes: failure is the CheckpointError of the last save that has ended, or None if it is
    safe; after wait() it is the same on all ranks. seconds is the time that the last save took
    until it was safe on disk.

    Raises ValueError for a state that cannot be saved, and CheckpointError for all other failures.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        *,
        keep_every: int | None = None,
        keep_best: int = 0,
        best: str = "min",
        every: int | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}; expected a number above 0")
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every is {every!r}; expected a number of steps, such as 500")
        retention = Retention(keep, keep_every, keep_best, best)
        self._every = every
        self.folder = Path(folder).absolute()
        self.seconds: float | None = None
        self.failure: CheckpointError | None = None
        try:
            self._ranks = StoreCommunicator.of_process_group("checkpoint", timeout_seconds=timeout)
        except CoordinationError as error:
            raise CheckpointError(
                f"cannot create a Checkpointer: {error}. Create it after setup_distributed(). "
                "A program that a rank starts uses load_part(), or unsets WORLD_SIZE"
            ) from error
        self._folder = CheckpointFolder(self.folder, retention, self._ranks.name)

        self._calls = CallsOfAllRanks(self._ranks)
        self._turn = 0  # number of saves and loads, equal on all ranks
        self._snapshot = Snapshot()
        self._counters = UnsavedCounters()
        self._own_part_written = threading.Event()
        # Thread.join() would not do: if a signal handler raises in it, the thread counts as ended.
        self._ended = threading.Event()  # set while no save is in flight
        self._ended.set()
        self._pid = os.getpid()
        self._unraised: CheckpointError | None = None  # a failure that no call has raised yet
        self._logged: set[str] = set()  # failures since the last safe checkpoint, each logged once
        self._try_again = False  # whether save_and_wait() has time to retry; equal on all ranks
        self._closed = self._checked_state = self._checked_folder = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = self._folder.explain("cannot make a folder", error)
            raise CheckpointError(message) from error
        atexit.register(self._close_without_raising)

    # --- saving

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step. Raises ValueError without `every`."""
        if self._every is None:
            raise ValueError("is_due() needs Checkpointer(every=...): a number of steps")
        return step % self._every == 0

    def save(self, step: int, state: Any, *, metric: float | None = None) -> None:
        """Copy the state and write it in the background. All ranks call it at the same step.

        First waits until the previous save has ended. The state may change as soon as this returns.

        metric: the metric of this state, for keep_best; rank 0's counts. NaN is never the best.

        Raises ValueError for a state that cannot be saved. Then no rank saves it, and the others
        find the reason in `failure`. Raises CheckpointError if the previous save failed and every
        later one would: other ranks did not call save() or saved different states, the ranks have
        diverged or name different folders, or a later step is in the folder.
        """
        self._save(step, state, metric, 0.0)

    def save_and_wait(
        self, step: int, state: Any, *, metric: float | None = None, retry_seconds: float = 60.0
    ) -> None:
        """Save, and return when the checkpoint is safe on disk; for the last save of a process.

        retry_seconds: how long a failed save is tried again, by the clock of rank 0. After that,
            CheckpointError is raised on all ranks: the training must not end as if it had saved.
        """
        end, pause = time.monotonic() + retry_seconds, _FIRST_RETRY_PAUSE_SECONDS
        while True:
            self._save(step, state, metric, end)
            self._join()
            if self.failure is None or not self._try_again:
                return self.wait()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_PAUSE_SECONDS)

    def wait(self) -> None:
        """Wait until the save in flight is safe on disk. Raises its CheckpointError, once."""
        self._join()
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save in flight. A second call does nothing.

        Raises CheckpointError if the last save failed, unless wait() has raised it already.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_without_raising)
        try:
            self.wait()
        finally:
            self._calls.close(reports=True)
            self._snapshot = Snapshot()
            self._folder.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_without_raising()

    def _close_without_raising(self) -> None:
        """Close after an error has ended the training; the other ranks may have ended, too."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_without_raising)
        if os.getpid() == self._pid and not self._ended.is_set():  # a forked child has no thread
            self._own_part_written.wait(_OWN_PART_TIMEOUT)
            if not self._ended.wait(_OTHER_RANKS_TIMEOUT):
                self._ranks.cancel()
                self._ended.wait(_OTHER_RANKS_TIMEOUT)
        if os.getpid() == self._pid:
            self._calls.close(reports=False)
            self._folder.close()
        if self._unraised is not None and self._ranks.rank != 0:  # rank 0 has logged it
            _log.error("%s", self._unraised)

    def _save(self, step: int, state: Any, metric: float | None, retry_until: float) -> None:
        if self._closed:
            raise CheckpointError(
                "save() was called after close(). Close the Checkpointer at the end of the training"
            )
        self._check_ranks()
        self._join()
        previous, self._unraised = self._unraised, None
        if isinstance(previous, PermanentError):
            raise previous

        start, turn = time.monotonic(), self._turn
        self._turn += 1  # counts a failure on this rank, too, like all other ranks
        self._calls.call(turn)
        try:
            job = self._prepare(step, state, metric, turn, start, retry_until)
        except Exception as error:
            problem = (
                f"cannot save step {step!r:.50} in {self.folder} on {self._ranks.name}: "
                f"{type(error).__name__}: {error}"
            )
            self._start(RefusedJob(turn, problem))
            raise
        self._start(job)

    def _prepare(
        self,
        step: int,
        state: Any,
        metric: float | None,
        turn: int,
        start: float,
        retry_until: float,
    ) -> SaveJob:
        """Copy this rank's part of the state into the snapshot."""
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step is {step}; expected 0 or more")
        number = None if metric is None else float(metric)
        finite = number is not None and math.isfinite(number)

        packed = pack(state, replicated_parameters(state))
        self._check_once(state)
        self._check_counters(state, packed, step)
        rank = self._ranks.rank
        share = share_out(packed, rank, self._ranks.world_size)
        sample = ReplicaSample(packed)
        slices = {
            slice_name(name, shard.box.offsets): shard.local
            for name, shard in packed.shards.items()
            if shard.is_written
        }
        self._snapshot.take({**share, **packed.of("local", "mine"), **slices})
        layouts = {shard.layout: shard for shard in packed.shards.values()}
        numbers = {layout: number for number, layout in enumerate(layouts)}
        sharded = {name: numbers[shard.layout] for name, shard in packed.shards.items()}

        metadata: RankMetadata = {
            "random": pack(random_states()).tree,
            "own": packed.own,
        }
        if rank == 0:
            metadata["tree"] = packed.tree
            metadata["versions"] = versions()
        return SaveJob(
            step,
            turn,
            start,
            BackgroundChecksums(self._snapshot.bytes),
            metadata,
            _digest_of_shapes(step, packed, sharded),
            sample,
            whole=[name for name in share if packed.kinds[name] != "local"],
            sharded=sharded,
            boxes=[shard.box if shard.is_written else None for shard in layouts.values()],
            metric=number if finite else None,
            retry_until=retry_until,
        )

    def _check_once(self, state: Any) -> None:
        """Log what the training uses but the state lacks."""
        if self._checked_state or self._ranks.rank:
            return
        self._checked_state = True
        values = [value for _, value in walk(state)]
        watch = training_watch.watch
        if watch and (missing := watch.missing_from([unwrap(value) for value in values])):
            _log.warning(
                "the saved state lacks %s: it starts anew after a resume. Put it into the state",
                ", ".join(missing),
            )
        if unchecked := unchecked_optimizers(state):
            _log.warning(
                "the saved state has no names for all parameters of %s: a resume cannot check that "
                "they come in the same order. Put the model into the state, or give the optimizer "
                "model.named_parameters()",
                ", ".join(unchecked),
            )

    def _check_counters(self, state: Any, packed: Packed, step: int) -> None:
        """Log numbers that change in training but are not saved."""
        if self._ranks.rank == 0 and (unsaved := self._counters.find(state, packed, step)):
            _log.warning(
                "the saved state lacks %s: after a resume it starts at its initial value, unless "
                "the script sets it. Make it a buffer, return it from get_extra_state() of its "
                "module, or put it into the state",
                ", ".join(unsaved),
            )

    def _start(self, job: SaveJob | RefusedJob) -> None:
        self._own_part_written.clear()
        self._ended.clear()
        try:
            threading.Thread(target=self._run, args=(job,), daemon=True, name="checkpoint").start()
        except RuntimeError:  # no thread left: the other ranks wait for this one
            self._run(job)

    def _run(self, job: SaveJob | RefusedJob) -> None:
        """Write the checkpoint, in the background thread."""
        self.failure, self._try_again = None, False
        try:
            if problem := self._folder_problem(lambda: check_calls(self._calls, job.step)):
                raise PermanentError(problem)
            result = write_checkpoint(
                job,
                self._snapshot,
                self._ranks,
                self._folder,
                self._calls,
                self._own_part_written.set,
            )
            self._try_again = result.try_again
            if result.error is not None:
                raise result.error
            if isinstance(job, SaveJob):
                self.seconds = time.monotonic() - job.start
            self._logged.clear()
            if self._ranks.rank == 0:
                if isinstance(job, SaveJob):
                    report_checkpoint(job.step)
                self._folder.delete_old()
        except Exception as error:
            self._note_failure(error, job)
        finally:
            if isinstance(job, SaveJob):
                job.checksums.start()  # nothing may have been written; start() ends the thread
            self._own_part_written.set()
            self._ended.set()

    def _note_failure(self, error: Exception, job: SaveJob | RefusedJob) -> None:
        if isinstance(error, CheckpointError):
            self.failure = error
        else:
            self.failure = CheckpointError(str(error))
            self.failure.__cause__ = error
        if isinstance(job, SaveJob):  # save() has raised a RefusedJob's problem itself
            self._unraised = self.failure
        if self._ranks.rank == 0 and str(error) not in self._logged:
            self._logged.add(str(error))
            if self._try_again:
                seconds = max(0, job.retry_until - time.monotonic())
                _log.error("%s. Trying again for %.0f s", error, seconds)
            else:
                _log.error("%s", error)

    def _join(self) -> None:
        """Wait until no save is in flight."""
        self._ended.wait()

    def _check_ranks(self) -> None:
        try:
            self._ranks.check_world_size()
        except CoordinationError as error:
            raise CheckpointError(
                f"this Checkpointer was created for one rank: {error}. Create it after "
                "setup_distributed()"
            ) from error

    def _folder_problem(self, waiting: Callable[[], object] = lambda: None) -> str:
        """Return what is wrong if the ranks name different folders, else "". Compares once."""
        if self._checked_folder or self._ranks.world_size == 1:
            return ""
        report = report_folder(self.folder)
        try:
            problem = self._ranks.decide("folder", report, folder_problem, waiting=waiting)
        except CoordinationError as error:
            raise CheckpointError(f"cannot use {self.folder}: {error}") from error
        self._checked_folder = not problem
        return problem

    # --- loading

    def load_latest(self, state: Any) -> Restored | None:
        """Restore the newest intact checkpoint in place; return None if there never was one.

        All ranks restore the same one.

        A state that does not match is refused before anything is changed. A damaged checkpoint is
        logged with the reason and quarantined under a name with .damaged, and the one before is
        loaded. All ranks do so if one of them finds damage, and a second rank, on another host if
        possible, reads the same. If the second rank finds the file intact, nothing is renamed, and
        the error names the host to suspect. If all checkpoints are damaged, load_latest() raises
        until they are moved away. Every rank needs memory for the whole checkpoint.

        Random number generators are set as they were at save(). With another number of ranks,
        the generators stay as they are, and PerRank parts are refused. Iterating
        over a DataLoader draws from torch's generator, once more if an epoch is resumed in its
        middle: give the DataLoader a generator of its own, so that all other random numbers stay
        the same. On three or more ranks the bits are the same only if
        training.prime_ddp_buckets() was called before this, and with torch.compile only if all
        batches have one size (drop_last=True) or with dynamic=False.

        Files of interrupted saves are removed. The load is refused while another job uses the
        folder. A program other than the training uses load_part(), which leaves the folder alone.

        state: nested like the saved state. Objects, tensors, generators, containers, and numpy
            arrays of the same shape and type are restored in place. Values that cannot change in
            place (numbers, strings, arrays of another shape) are replaced in their container: read
            state["best"] afterwards, not a variable that was put into it.
        Raises CheckpointError.
        """
        return self._load(state, None)

    def load_step(self, step: int, state: Any) -> Restored:
        """Restore the checkpoint of this step, otherwise as load_latest().

        Move later steps away before the training saves into the same folder.
        Raises CheckpointError if the checkpoint is missing or damaged.
        """
        found = self._load(state, operator.index(step))
        assert found is not None
        return found

    def _load(self, state: Any, step: int | None) -> Restored | None:
        self._check_ranks()
        self._join()
        if problem := self._folder_problem():
            raise CheckpointError(problem)
        try:
            check_state(state)  # also without a checkpoint: the first save would be too late
        except StateError as error:
            raise CheckpointError(f"cannot load into this state: {error}") from error

        def load_from(path: Path, manifest: Manifest) -> LoadedCheckpoint:
            return load(path, manifest, state, self._ranks.rank, self._ranks.world_size)

        topic = f"load {self._turn}"
        self._turn += 1
        try:
            loaded = load_newest(topic, self._ranks, self._folder, load_from, step)
        except CoordinationError as error:
            raise CheckpointError(f"cannot load from {self.folder}: {error}") from error
        found = None if loaded is None else restore(loaded, self._ranks, self._folder)
        if self._ranks.rank == 0:
            self._counters.note(state)
        return found


def _digest_of_shapes(step: int, packed: Packed, sharded: dict[str, int]) -> str:
    """Return a digest of the step, names, shapes and types; it must be equal on all ranks."""
    shapes = [
        (packed.kinds[name], name, str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in packed.of("common", "main", "local").items()
    ]
    layouts = [(name, number, packed.shards[name].layout[0]) for name, number in sharded.items()]
    return digest([step, shapes, layouts])

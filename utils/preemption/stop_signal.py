"""Stop all ranks at the same step: StopSignal, which the training loop checks after every step.

    with setup_distributed() as dist, StopSignal(dist, save_seconds=20) as stop:
        for step in range(first, last):
            ...                               # one optimizer step
            if stop.should_stop():            # every rank, after every step
                with stop.saving():
                    save(step)
                break
    if stop.stopped and dist.is_main:
        requeue()
    sys.exit(stop.exit_status)

Exit status 0: the training is done. EXIT_REQUEUE: it has saved, and the next job continues it. Any
other status: an error. srun, mpiexec and the job script pass the status on; torchrun turns it into
1. Under scripts/launch.py rank 0 reports that all ranks have saved, and ddpkit launch exits with
EXIT_REQUEUE under any launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..job.notation import STOP_FILE
from ..launch_protocol import EXIT_REQUEUE, REPORT, report_saved
from ..log import get_logger
from .agreement import StopAgreement
from .sources import (
    SignalCatcher,
    Source,
    SourceThreads,
    StopFile,
    TimeLimit,
    WakeUpPipe,
    scheduler_time_left,
)
from .workers import begin_forked_child

if TYPE_CHECKING:
    from ..calls import CallsOfAllRanks
    from ..coordination import StoreCommunicator
    from ..distributed import Distributed

_log = get_logger(__name__)
_CLOSE_TIMEOUT = 10.0  # seconds to wait for the thread
_MAX_CHECKS_PER_SECOND = 5000  # sum over all ranks, because one process serves the store
_numbers = itertools.count()  # identify StopSignals, which every rank creates in the same order
_open: StopSignal | None = None  # at most one, because signal handlers belong to the process


class StopSignal:
    """Request a save and stop on every rank at the same step boundary. A context manager.

    Requests come from SIGUSR1, SIGUSR2 or SIGTERM on any rank, from request() on any rank, and on
    rank 0 from the time limit or a file. Then the ranks agree, in about 0.3 s, on the
    next boundary that none of them has passed.

    Every rank creates one StopSignal at the same place of the program, in its main thread, and
    calls should_stop() equally often. If the ranks take different numbers of steps (an evaluation),
    use `requested` instead. Leave the StopSignal after everything that saves, and before dist.

    SIGUSR1 and SIGUSR2 that arrived since this package was imported count as well. After close()
    they are kept for the next StopSignal.

    reason: why a stop was requested. stopped: whether should_stop() has returned True.
    """

    def __init__(
        self,
        dist: Distributed | None = None,
        *,
        save_seconds: float = 60.0,
        margin: float = 30.0,
        time_left: Callable[[], float | None] | None = None,
        file: str | os.PathLike[str] | None = None,
        poll_seconds: float = 10.0,
        rank_timeout: float = 60.0,
    ) -> None:
        """Catch the signals and start watching.

        dist: from setup_distributed(); None for a single process.
        save_seconds: expected duration of a save. saving() replaces it by a measurement.
        margin: seconds to keep before the time limit, besides the save and the longest step.
        time_left: returns the seconds until the time limit, or None; a thread of rank 0 calls it.
            Default: query the scheduler.
        file: request a stop when this file appears or is touched. DDPKIT_STOP_FILE, which
            `ddpkit submit stop` touches, is watched as well.
        poll_seconds: time between two checks of the file.
        rank_timeout: seconds to wait at a boundary for all ranks. Usually it takes milliseconds.

        Raises ValueError for a bad argument, and RuntimeError outside of the main thread or while
        another StopSignal is open.
        """
        global _open
        for name, seconds in (
            ("save_seconds", save_seconds),
            ("margin", margin),
            ("poll_seconds", poll_seconds),
            ("rank_timeout", rank_timeout),
        ):
            if not 0 <= seconds < 1e7:
                raise ValueError(f"{name} is {seconds!r}; expected seconds, 0 or more. Correct it")
        _check_main_thread("A StopSignal is made")
        if _open is not None:
            raise RuntimeError(
                "Another StopSignal is open in this process. Only one can catch the signals. Close "
                "it first, or use that one"
            )

        self.save_seconds, self.margin = save_seconds, margin
        self.stopped = False
        self._rank = dist.rank if dist else 0
        self._world_size = dist.world_size if dist else 1
        self._first_call: float | None = None
        self._last_call = 0.0
        self._steps = 0
        self._longest_step = 0.0
        self._saved_within_step = 0.0  # seconds of the present step spent in a save
        self._measured_a_save = False
        under_launch_py = REPORT in os.environ
        self._status_after_stop = 0 if self._rank and under_launch_py else EXIT_REQUEUE

        self._wake_up = WakeUpPipe()
        communicator = _communicator(dist)
        self._calls = _calls(communicator)
        self._agreement = StopAgreement(communicator, self._wake_up.wake, rank_timeout, self._calls)
        self._signals = SignalCatcher(self._agreement.request, self._wake_up)
        _open = self
        self._thread = threading.Thread(target=self._watch, name="stop signal", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

        sources: list[Source] = []
        self._time_limit: TimeLimit | None = None  # None except on rank 0
        if self._rank == 0:
            time_left = time_left or scheduler_time_left()
            if time_left is not None:
                self._time_limit = TimeLimit(time_left, lambda: self.reserve_seconds, poll_seconds)
                sources.append(self._time_limit)
            if file is not None:
                sources.append(StopFile(Path(file), poll_seconds))
            if path := os.environ.get(STOP_FILE):
                sources.append(StopFile(Path(path), poll_seconds))
        self._sources = SourceThreads(self._agreement.request, sources)

    def should_stop(self) -> bool:
        """Return whether to save and stop now; all ranks get the same result at their n-th call.

        Once True, it stays True. A call takes about a microsecond in a tight loop. After a real
        step it takes some tens of microseconds, because the step's data displace its own from the
        caches (tests/bench/bench_stop.py measures both). Only after a request does it wait, some
        milliseconds until the ranks have agreed.

        Raises RuntimeError if the ranks cannot agree: a rank hangs, has failed or has ended, or
        does not call should_stop().
        """
        now = time.monotonic()
        if self._first_call is None:
            self._first_call = now
        else:
            step_seconds = now - self._last_call - self._saved_within_step
            self._longest_step = max(self._longest_step, step_seconds)
        self._last_call, self._saved_within_step = now, 0.0
        self._steps += 1
        if self._steps == 1 and self._calls is not None:
            self._calls.call(0)

        if self._agreement.pass_boundary() and not self.stopped:
            self.stopped = True
            self._warn_of_short_run(now - self._first_call)
        return self.stopped

    def _warn_of_short_run(self, seconds: float) -> None:
        """Log if the time limit leaves less time for steps than is reserved for the save."""
        reserve = self.reserve_seconds
        if self._time_limit is not None and self._time_limit.is_near and seconds < reserve:
            _log.warning(
                "this job makes %d step%s: the start and the %.0f s that are kept for the save "
                "take up most of its time limit. Request more time, or lower save_seconds=%.0f and "
                "margin=%.0f of StopSignal",
                self._steps,
                "s" * (self._steps > 1),
                reserve,
                self.save_seconds,
                self.margin,
            )

    @property
    def requested(self) -> bool:
        """Whether this rank knows that the ranks will stop, or have stopped.

        Ranks may learn it at different moments. Use it to leave a loop in which the ranks take
        different numbers of steps. If such a rank then joins a collective of all ranks, its next
        should_stop() returns True, as on all ranks.
        """
        return self._agreement.boundary is not None

    @property
    def reason(self) -> str:
        """Why a stop was requested; "" without a request."""
        return self._agreement.reason

    @property
    def exit_status(self) -> int:
        """The status for sys.exit(): EXIT_REQUEUE after a stop, else 0.

        Under ddpkit launch it is 0, too, once rank 0 has reported the stop on leaving StopSignal.
        The launcher in between then sees no failure, for which it would end or restart the other
        ranks. It is 1 on rank 0 if another rank has failed.
        """
        return self._status_after_stop if self.stopped else 0

    @property
    def reserve_seconds(self) -> float:
        """Seconds before the time limit at which a stop is requested."""
        return self.save_seconds + self.margin + self._longest_step

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure save_seconds around a save and all that must finish before the process may end.

        The first measurement replaces the initial value; later ones can only raise it. A
        Checkpointer writes in the background: set save_seconds from its `seconds` instead.
        """
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start

        self._saved_within_step += seconds
        self.save_seconds = max(seconds, self.save_seconds) if self._measured_a_save else seconds
        self._measured_a_save = True

    def request(self, reason: str) -> None:
        """Request a stop of all ranks. Any rank and any thread may call it, more than once."""
        self._agreement.request(reason)

    def _watch(self) -> None:
        """Agree with the other ranks when a stop is requested here or elsewhere."""
        pause = min(2.0, max(0.2, self._world_size / _MAX_CHECKS_PER_SECOND))
        try:
            while not self._agreement.closed:
                self._agreement.advance()
                self._agreement.check_calls()
                self._signals.wait(pause)
        except RuntimeError as error:
            _log.warning(
                "a stop can no longer be agreed on: the store that rank 0 or torchrun serves is "
                "no longer reachable (%s)",
                str(error).splitlines()[0],
            )
            self._agreement.fail(error)

    def close(self) -> None:
        """Restore the signals' previous handlers. A second call does nothing.

        A SIGTERM that arrives later ends the process as it would without a StopSignal. Finish
        saving first.
        """
        self._close(orderly=True)

    def _close_at_exit(self) -> None:
        # An uncaught exception has set sys.last_type.
        self._close(orderly=not hasattr(sys, "last_type"))

    def _close(self, orderly: bool) -> None:
        global _open
        if self._agreement.closed:
            return
        _check_main_thread("A StopSignal is closed")

        self._agreement.close()
        if self._calls is not None:
            self._calls.close(reports=False)  # a rank without batches leaves without a call
        self._sources.close()
        self._signals.restore()
        _open = None
        atexit.unregister(self._close_at_exit)
        self._thread.join(_CLOSE_TIMEOUT)
        if self._thread.is_alive():  # the store does not respond
            return
        self._wake_up.close()

        all_saved = self._agreement.leave(orderly)
        if self.stopped and self._rank == 0 and all_saved is not None:
            self._status_after_stop = _report_stop() if all_saved else 1

    def _abandon_in_child(self) -> None:
        """Become a closed StopSignal in a forked child. Its threads exist in the parent only."""
        self._agreement.closed = True  # without the lock: a thread of the parent may hold it
        atexit.unregister(self._close_at_exit)
        self._signals.restore_in_child()

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0, EXIT_REQUEUE)
        self._close(orderly=error is None or is_exit)


def _communicator(dist: Distributed | None) -> StoreCommunicator | None:
    number = next(_numbers)
    if dist is None or dist.world_size == 1:
        return None

    from ..coordination import StoreCommunicator  # imports torch, not needed by one process

    # A separate connection: it need not wait while the script waits in its store.
    store = dist.store.clone()  # type: ignore[attr-defined, unused-ignore]
    return StoreCommunicator(f"stop/{number}", dist.rank, dist.world_size, store)


def _calls(communicator: StoreCommunicator | None) -> CallsOfAllRanks | None:
    if communicator is None:
        return None
    from ..calls import CallsOfAllRanks  # imports torch

    return CallsOfAllRanks(communicator, of_steps=True)


def _report_stop() -> int:
    """Report to ddpkit launch that all ranks have saved; return this process's exit status."""
    return 0 if report_saved() else EXIT_REQUEUE


def _check_main_thread(what: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{what} in the thread {threading.current_thread().name!r}. Python lets only the main "
            "thread set signal handlers. Do it there"
        )


def _in_forked_child() -> None:
    global _open
    if _open is not None:
        _open._abandon_in_child()
        _open = None
    begin_forked_child()


os.register_at_fork(after_in_child=_in_forked_child)

"""Stopping in good time: StopSignal asks all ranks to stop at the same step; requeue() and the exit status come after.

Not here: what rank 0 looks at besides signals (stop_sources.py), the way back into the queue (requeue.py), saving
(checkpoint.py). A loop that may be stopped:

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

Exit status 0: the training is done. EXIT_REQUEUE: it has saved and wants to go on in the next job. Anything else: an
error. srun, mpiexec and the job script pass it on, and torchrun makes 1 of it. Under scripts/launch.py rank 0 tells it
as soon as all ranks have saved, and launch.py ends with EXIT_REQUEUE whatever is between them.
"""
from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from . import held_signals
from .launch import report
from .launch.report import EXIT_REQUEUE as EXIT_REQUEUE
from .logging import get_logger
from .requeue import requeue as requeue
from .stop_sources import Sources

if TYPE_CHECKING:
    from .distributed import Distributed

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_log = get_logger(__name__)
_NEVER = 1 << 62
_PATIENCE_SECONDS = 60.0  # that a rank waits at a boundary for the answers of all ranks, which take milliseconds
_LEAVE_SECONDS = 10.0  # rank 0 serves the store: it leaves last, but waits no longer than this
_numbers = itertools.count()
_open: StopSignal | None = None  # at most one: signal handlers belong to the process
_shielded = 0  # the process that shield_worker() was called in


class StopSignal:
    """Says "stop now?" at a step boundary, with the same answer on every rank at the same boundary.

    SIGUSR1 and SIGUSR2 that came since the package was imported count as well. After close() they are remembered for
    the next StopSignal.

    A stop is asked for by SIGUSR1, SIGUSR2 or SIGTERM on any rank, by request() on any rank, and on rank 0 by the time
    limit, a file or a command. Then the ranks agree, in about 0.3 s, on the next boundary that none of them has passed.

    Every rank makes one StopSignal at the same place of the program, in its main thread, and calls should_stop()
    equally often. In a loop where the ranks take different numbers of steps (an evaluation), use `requested` instead.

    It is a context manager: leave it after all that saves, but before dist.

    dist: what setup_distributed() returned; None for a process that is alone.
    save_seconds: how long a save takes. The first use of saving() replaces this guess, longer ones raise it.
    margin: seconds to leave besides the save and the longest step, before the time limit.
    time_left: called by a thread of rank 0: seconds until the time limit, or None. Default: the scheduler is asked.
    file: a stop is asked for when it appears or is touched. One that is there at the start has to be touched again.
    command: a stop is asked for when it exits with 0. poll_seconds: how often file and command are looked at.

    How the ranks agree, without a collective: each counts the boundaries that it has passed. One thread per rank looks
    into the store of the process group a few times a second, and sleeps on a pipe into which signals write. Who wants
    a stop says so in the store; each thread then forbids its rank the next boundary p + 1 and tells it; who answers
    last writes down the greatest of them, S; all stop at S. No rank has passed S, since none passes what it was
    forbidden, and S is not lower. Neither the length of steps nor different clocks matter; the ranks' main threads may
    wait for each other in collectives meanwhile, as it is other threads that answer.
    """

    def __init__(self, dist: Distributed | None = None, *, save_seconds: float = 60.0, margin: float = 30.0,
                 time_left: Callable[[], float | None] | None = None, file: str | os.PathLike[str] | None = None,
                 command: Sequence[str] = (), poll_seconds: float = 10.0) -> None:
        for name, seconds in (("save_seconds", save_seconds), ("margin", margin), ("poll_seconds", poll_seconds)):
            if not 0 <= seconds < 1e7:
                raise ValueError(f"{name} is {seconds!r}; expected seconds, 0 or more. Correct it")
        if isinstance(command, str):
            raise ValueError(f"command is the text {command!r}; expected a list of words. Write {command.split()!r}")
        path = None if file is None else Path(file)
        _check_thread("A StopSignal is made")
        if _open is not None:
            raise RuntimeError("Another StopSignal is open in this process. Only one can hold the signals. Close it "
                               "first, or use that one")
        self.save_seconds, self.margin = save_seconds, margin
        self.reason = ""  # why a stop was asked for
        self.stopped = False  # whether should_stop() has said so
        self._rank, self._world_size = (dist.rank, dist.world_size) if dist else (0, 1)
        self._store: Any = dist._store if dist else None
        self._status = 0 if self._rank and report.VARIABLE in os.environ else EXIT_REQUEUE  # after a stop
        self._name = f"ddpkit/stop/{next(_numbers)}"
        self._lock = threading.RLock()  # a signal handler may call request() in the middle of should_stop()
        self._changed = threading.Condition(self._lock)
        self._passed = 0  # boundaries answered with False
        self._limit = _NEVER  # boundaries below it may be passed without a thought
        self._stop_at: int | None = None
        self._answered = self._closing = False
        self._wish: str | None = None  # this rank's own reason
        self._lost: RuntimeError | None = None
        self._last_time: float | None = None
        self._longest_step = self._saving_seconds = 0.0
        self._measured = False
        self._catch_signals()
        self._listener = threading.Thread(target=self._listen, name="stop signal", daemon=True)
        self._listener.start()
        atexit.register(self._close_at_exit)
        self._sources: Sources | None = None
        if self._rank == 0:  # it alone, since clocks differ, and a file system shows a new file to others later
            self._sources = Sources(self.request, self._reserve, time_left, path, command, poll_seconds)

    # What the loop asks ---------------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether to save and stop now: the same answer on every rank at its n-th call, and True ever after.

        About a microsecond in a tight loop, and some 10 after a real step, whose data have displaced its own from the
        caches of the core (scripts/bench_stop.py measures both). It waits only after a stop was asked for, some
        milliseconds until the ranks have agreed.
        RuntimeError when they cannot: a rank hangs or has ended.
        """
        now = time.monotonic()
        if self._last_time is not None:
            self._longest_step = max(self._longest_step, now - self._last_time - self._saving_seconds)
        self._last_time, self._saving_seconds = now, 0.0
        with self._lock:
            step = self._passed + 1
            if step < self._limit:
                self._passed = step
                return False
            settled = self._changed.wait_for(lambda: self._stop_at is not None or self._lost or self._closing,
                                             _PATIENCE_SECONDS)
            if self._stop_at is not None:
                self.stopped = step >= self._stop_at
            elif self._answered and not self._closing:
                raise RuntimeError(self._no_agreement(bool(settled))) from self._lost
            if not self.stopped:
                self._passed = step
            return self.stopped

    @property
    def requested(self) -> bool:
        """Whether this rank knows already that the ranks will stop, or have stopped.

        Ranks may see it at different moments. A rank that leaves a loop for it, where other ranks have other numbers of
        steps, and then takes part in a collective of all ranks, gets True from the next should_stop(), as do all.
        """
        return self._stop_at is not None

    @property
    def exit_status(self) -> int:
        """For sys.exit(): EXIT_REQUEUE after a stop, else 0.

        Under launch.py 0 as well, as rank 0 tells it of the stop when it leaves the StopSignal: what is between sees no
        failure for which it would end the other ranks, or start them again. 1 on rank 0 when another rank has failed.
        """
        return self._status if self.stopped else 0

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, with all that has to be over before the process may end: measures save_seconds.

        A Checkpointer writes in the background: with one, set save_seconds by what it says in `seconds` instead.
        """
        start = time.monotonic()
        yield
        took = time.monotonic() - start
        self._saving_seconds += took  # no part of the step
        self.save_seconds = max(took, self.save_seconds) if self._measured else took
        self._measured = True

    def request(self, reason: str) -> None:
        """Ask all ranks to stop. Any rank and any thread may call it, once or often."""
        with self._lock:
            if self._closing:
                return
            if self._wish is None:
                self._wish = f"{reason}, rank {self._rank} on {socket.gethostname()}"
            self._limit = 0  # this rank's next boundary is not passed without an agreement
            self._wake()

    def _reserve(self) -> float:
        """Seconds before the time limit at which a stop has to be asked for."""
        return self.save_seconds + self.margin + self._longest_step

    # Signals --------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        global _open
        self._ears, self._mouth = os.pipe()
        for end in (self._ears, self._mouth):
            os.set_blocking(end, False)
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        # The interpreter writes into it at once, while the handler waits until the main thread runs Python again.
        self._wakeup_before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        _open = self
        # The starter of a rank blocks them until exec(); in a container with its own environment no rank knows of it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number in held_signals.take():  # while torch was imported, or between two StopSignals
            self.request(number.name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not held_signals.remember:
            before(number, frame)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
            os.write(self._mouth, b"\0")

    def _hear(self) -> None:
        """Read what was written into the pipe: numbers of signals, by the interpreter."""
        heard = os.read(self._ears, 4096)
        for number in SIGNALS:
            if number in heard:
                self.request(number.name)
        numbers = heard.replace(b"\0", b"")
        if numbers and self._wakeup_before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wakeup_before, numbers)

    # Agreement ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._ears, select.POLLIN)
        pause = min(2.0, max(0.2, self._world_size / 5000))  # so that rank 0 answers at most 5000 questions a second
        try:
            while not self._closing:
                if poll.poll(pause * 1000):
                    self._hear()
                if self._stop_at is None and (self._wish is not None or self._others_want()):
                    self._agree()
        except RuntimeError as error:  # what torch raises when the store is gone
            _log.warning("a stop can no longer be agreed on: the store that rank 0 or torchrun serves is gone (%s)",
                         str(error).splitlines()[0])
            with self._lock:
                self._lost = error
                self._changed.notify_all()

    def _key(self, name: object) -> str:
        return f"{self._name}/{name}"

    def _others_want(self) -> bool:
        return self._world_size > 1 and bool(self._store.check([self._key("want")]))

    def _agree(self) -> None:
        if self._world_size == 1:
            self.reason = self._wish or ""
            return self._settle(self._forbid_next())
        self.reason = self._store.compare_set(self._key("want"), "", self._wish or "").decode()  # the first one's
        self._answer("")
        pause = max(0.002, self._world_size / 20000)
        while not self._closing:
            if self._store.check([self._key("agreed")]):
                return self._settle(int(self._store.get(self._key("agreed"))))
            time.sleep(pause)
            pause = max(pause, min(1.5 * pause, 0.05))

    def _forbid_next(self) -> int:
        with self._lock:
            self._answered, self._limit = True, self._passed + 1
            return self._limit

    def _answer(self, mark: str) -> None:
        """Forbid this rank its next boundary and tell it; who is last of all ranks says what was agreed."""
        self._store.set(self._key(self._rank), f"{self._forbid_next()}{mark}")
        if self._store.add(self._key("answers"), 1) == self._world_size:
            self._store.set(self._key("agreed"), str(max(number for number, _ in self._answers())))

    def _answers(self) -> list[tuple[int, bool]]:
        """Of each rank the boundary that it was forbidden, and whether it had left its loop by then."""
        texts = [text.decode() for text in self._store.multi_get([self._key(r) for r in range(self._world_size)])]
        return [(int(text.rstrip("!")), text.endswith("!")) for text in texts]

    def _settle(self, boundary: int) -> None:
        with self._lock:
            self._stop_at = self._limit = boundary
            self._changed.notify_all()
        if self._rank == 0:
            _log.info("stop asked for (%s): all ranks stop at step boundary %d", self.reason, boundary)

    def _no_agreement(self, lost: bool) -> str:
        what = f"A stop was asked for ({self.reason}), but the ranks could not agree on a step: "
        if lost:
            return (f"{what}the store that rank 0 or torchrun serves is gone. It has to live until all ranks have "
                    "left their StopSignal. Look for the message of rank 0")
        silent: list[int] = []
        with contextlib.suppress(RuntimeError):
            silent = [rank for rank in range(self._world_size) if not self._store.check([self._key(rank)])]
        who = ", ".join(map(str, silent[:16])) + (" ..." if len(silent) > 16 else "")
        return (f"{what}no answer within {_PATIENCE_SECONDS:g} s from rank {who or 'unknown'}. Every rank has to "
                "have an open StopSignal. Look for the messages of those that did not answer: they hang or have ended")

    # The end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the signals back to the handlers that were there before. A second call does nothing.

        A SIGTERM that comes later ends the process as it would have without StopSignal: first end what saves.
        """
        self._close(orderly=True)

    def _close_at_exit(self) -> None:
        self._close(orderly=not hasattr(sys, "last_type"))  # which an exception sets that nobody has caught

    def _close(self, orderly: bool) -> None:
        global _open
        if self._closing:
            return
        _check_thread("A StopSignal is closed")
        with self._lock:
            self._closing = True  # after this nobody else writes into the pipe
            self._changed.notify_all()
            self._wake()
        if self._sources is not None:
            self._sources.ended.set()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python
        _open = None
        atexit.unregister(self._close_at_exit)
        self._listener.join(_LEAVE_SECONDS)
        if self._listener.is_alive():  # it waits for a store that does not answer
            return
        for end in (self._ears, self._mouth):
            os.close(end)
        failed = int(not orderly) if self._world_size == 1 else None
        if self._world_size > 1 and self._lost is None:
            with contextlib.suppress(RuntimeError):
                failed = self._leave(orderly)
        if self.stopped and self._rank == 0 and failed is not None:
            self._status = 1 if failed else 0 if report.tell_saved() else EXIT_REQUEUE

    def _leave(self, orderly: bool) -> int | None:
        """Answer for ever, since others may still ask; rank 0, which may serve the store, goes last.

        Returns on rank 0 how many ranks left by an exception; None while some have not left.
        """
        if not self._answered:
            self._answer("!")
        if not orderly:
            self._store.add(self._key("failed"), 1)
        left = self._store.add(self._key("left"), 1)
        limit = time.monotonic() + (_LEAVE_SECONDS if orderly and self._rank == 0 else 0)
        while left < self._world_size and time.monotonic() < limit:
            time.sleep(0.005)
            left = self._store.add(self._key("left"), 0)
        if self._rank == 0 and left == self._world_size:
            answers = self._answers()
            calls = [boundary - 1 for boundary, _ in answers]
            if all(left for _, left in answers) and len(set(calls)) > 1:
                _log.warning("the ranks called should_stop() different numbers of times: rank %d %d times, rank %d %d "
                             "times. A stop would not have been at the same step. Call it equally often on all ranks",
                             calls.index(min(calls)), min(calls), calls.index(max(calls)), max(calls))
        return int(self._store.add(self._key("failed"), 0)) if left == self._world_size else None

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._close(orderly=error is None or isinstance(error, SystemExit) and error.code in (None, 0, EXIT_REQUEUE))


def shield_worker(worker_id: int = 0) -> None:
    """For DataLoader(worker_init_fn=shield_worker): the worker outlives what asks its rank to stop.

    Schedulers send SIGTERM and SIGUSR1 to all processes of a job. A worker would die of them, and its rank then fails
    before it reaches a boundary. Shielded, it ends by SIGTERM from its own rank alone. What multiprocessing forks while
    a StopSignal is open is shielded from the start; those that it spawns need this.
    """
    global _shielded
    if _shielded == os.getpid():
        return
    _shielded = os.getpid()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler of its own torch would replace
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="wait for SIGTERM", daemon=True).start()


def _check_thread(what: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{what} in the thread {threading.current_thread().name!r}. Python lets only the main "
                           "thread set signal handlers. Do it there")


def _in_forked_child() -> None:
    """A child shares the pipe and the handlers: without this its signals would stop its parent's run."""
    global _open
    if _open is not None:
        signal.set_wakeup_fd(-1)
        atexit.unregister(_open._close_at_exit)
        _open._closing = True
        before, _open = _open._before, None
        if sys._getframe(1).f_globals.get("__name__") == "multiprocessing.popen_fork":
            return shield_worker()  # now: it may take a worker a while to come to its init function
        for number, handler in before.items():
            ignored = number != signal.SIGTERM and handler == signal.SIG_DFL  # a job's signals reach its children too
            signal.signal(number, signal.SIG_IGN if ignored or handler is None else handler)


os.register_at_fork(after_in_child=_in_forked_child)

"""Keep the child processes of multiprocessing, such as DataLoader workers, alive during a stop.

Schedulers send SIGTERM and SIGUSR1 to all processes of a job. If a worker ends, its rank fails
before it has saved. A shielded worker ignores SIGUSR1 and SIGUSR2. It ends on SIGTERM only if its
own rank sends it, as Process.terminate() does.

Only sigwaitinfo() shows who sent a signal, and only if no thread handles SIGTERM. But numpy, torch
and OpenBLAS (in a C handler of fork()) start threads before any code of the worker runs. All
threads and processes inherit the mask of blocked signals. SIGTERM is therefore blocked in the
thread that starts the process: the child, or the fork server and then its children, start with it
blocked.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_shields_children = False  # True while a StopSignal is open
_shielded_process = 0  # pid of a shielded process: a worker may call shield_worker() twice
_thread = threading.local()  # attribute starts_child: this thread runs Process.start()


def shield_worker(worker_id: int = 0) -> None:
    """Let a DataLoader worker outlive a stop of its rank; for DataLoader(worker_init_fn=...).

    Schedulers send SIGTERM and SIGUSR1 to all processes of a job. They terminate an unshielded
    worker, and its rank fails before it reaches a step boundary. Only SIGTERM from its own rank
    terminates a shielded worker. Workers that start while a StopSignal is open are shielded
    without this call; only workers that start earlier need it.
    """
    rank = multiprocessing.parent_process()  # under forkserver, os.getppid() is the server
    _shield(rank.pid if rank is not None and rank.pid is not None else os.getppid())


def shield_children(shields: bool) -> None:
    """Start or stop to shield the processes that multiprocessing starts."""
    global _shields_children
    _shields_children = shields


def begin_forked_child() -> None:
    """Shield a forked child, if multiprocessing has forked it for this rank."""
    shields, starts_child = _shields_children, getattr(_thread, "starts_child", False)
    shield_children(False)
    _thread.starts_child = False
    if _shielded_process:  # the parent is a shielded worker; SIGTERM ends its child
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if starts_child:
        _begin_child(os.getppid(), shields)


class _ChildSetup:
    """An attribute of a Process: calls _begin_child() when a spawned child unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int, bool], None], tuple[int, bool]]:
        return _begin_child, (os.getpid(), _shields_children)


def _begin_child(rank: int, shields: bool) -> None:
    if shields:
        _shield(rank)
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _shield(rank: int) -> None:
    global _shielded_process
    if _shielded_process == os.getpid():
        return
    _shielded_process = os.getpid()

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Block it instead of handling it, because torch installs its own handler in the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    # If the worker started before the StopSignal, an older thread may still handle SIGTERM.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    for target, argument in ((_exit_on_sigterm_from, rank), (_exit_on_second_sigterm, read_end)):
        name = "wait for SIGTERM"
        threading.Thread(target=target, args=(argument,), name=name, daemon=True).start()


def _exit_on_sigterm_from(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


def _exit_on_second_sigterm(read_end: int) -> None:
    """Ignore the first SIGTERM, whose sender is unknown. A rank that exits sends a second one."""
    received = 0
    while received < 2:
        received += os.read(read_end, 64).count(signal.SIGTERM)
    os._exit(0)


def _wrap_start(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    @functools.wraps(start)
    def start_with_signals_blocked(process: BaseProcess) -> None:
        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        if method != "fork":
            resource_tracker.ensure_running()  # start() would do it, and thereby unblock SIGTERM
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        _thread.starts_child = True
        process._child_setup = _ChildSetup()  # type: ignore[attr-defined]
        try:
            start(process)  # does not return in a forked child
        finally:
            with contextlib.suppress(AttributeError):
                del process._child_setup  # type: ignore[attr-defined]
            _thread.starts_child = False
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    return start_with_signals_blocked


# multiprocessing has no hook that runs before the fork server or a spawned interpreter starts.
BaseProcess.start = _wrap_start(BaseProcess.start)  # type: ignore[method-assign, assignment]

"""Start a rank below the process that srun or an mpiexec has started, and report its end.

A native launcher reports one exit status for all ranks. Hydra, PRRTE and srun each lose some
signals on the way. So the process that the launcher has started does not become the program. It
starts the program as a child, stays, and reports to ddpkit launch how the rank has ended. Then it
ends in the same way, so that the launcher sees the same end. Both are in one process group:
launchers signal the whole group.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ...channel import Channel, Loop, Message
from ...host import process
from .child_processes import HANDLER_SECONDS, HELD
from .event_loop import STOP_SIGNALS
from .ignored_stops import IgnoredStops
from .nested import LONGEST_SECONDS, GroupWatch
from .stopped_ranks import StoppedRanks, hang_limit

_ORPHAN_SECONDS = 1.0  # lets a rank end by itself once launcher and launch are gone
_LAUNCHER_SECONDS = 1.0  # interval of checks that the launcher's process still runs
_SEND_SECONDS = 5.0  # time limit for handing a last report to the kernel
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def start(execute: Callable[[], NoReturn]) -> int:
    """Start the rank by `execute`; return its process id. The rank is killed if this process is.

    This process keeps the launcher's descriptors open, such as PMI_FD: Hydra kills both processes
    once it is closed, but the end of the rank must be reported first.
    """
    parent = os.getpid()
    stops = {*STOP_SIGNALS, signal.SIGQUIT}
    before = {number: signal.getsignal(number) for number in stops}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    executed, write_end = os.pipe()  # exec() closes the other end
    pid = os.fork()
    if pid:
        os.close(write_end)
        os.read(executed, 1)
        for number in stops:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(executed)
        return pid
    try:
        import ctypes

        with suppress(OSError, AttributeError):  # macOS has no prctl()
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before
            os.kill(os.getpid(), signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        execute()
    finally:
        os._exit(1)


class RankParent:
    """Wait for the rank, and report on it.

    status: exit status as a shell reports it; None while the rank runs. Reports: the signals in
    HELD that the rank handles, the groups that ranks of this host form, the end of the rank, and
    the loss of the launcher's process on this host.
    """

    def __init__(self, pid: int, peer: Channel, watch: GroupWatch, *, forwards: bool) -> None:
        """peer: connection to the launch. forwards: whether to pass stop signals on to the rank."""
        self._pid, self._peer, self._watch = pid, peer, watch
        self._launcher = os.getppid()
        self._launcher_name = process.name(self._launcher)
        self._handled: list[int] = []
        self._started = time.monotonic()
        self._next_look = 0.0
        self._kill_at = math.inf
        self.status: int | None = None
        self._forwards = forwards
        self._ignored = IgnoredStops(
            lambda _: peer.send({"kind": "ignored"}),
            lambda pids: process.kill(pids, process.session(pid)),
        )
        self._stopped = StoppedRanks(
            hang_limit(os.environ),
            lambda pid, why, seconds: peer.send(
                {"kind": "stopped", "pid": pid, "why": why, "seconds": seconds}
            ),
        )
        for number in STOP_SIGNALS if forwards else (signal.SIGTERM,):
            signal.signal(number, lambda received, _: self._note_stop(received))

    def run(self) -> None:
        """Wait until the rank has ended, and report its end to the launch."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        loop = Loop()
        loop.add(read_end, lambda _: _drain(read_end))
        with suppress(OSError, AttributeError):  # Linux before 5.3, macOS
            loop.add(descriptor := os.pidfd_open(self._launcher), lambda _: loop.remove(descriptor))
        self._peer.attach(loop, lambda *_: None, lambda _: None)
        while not self._has_ended():
            now = time.monotonic()
            self._report_launcher(now)
            for message in self._watch.messages(now):
                self._peer.send(message)
            seconds = self._watch.next_look or LONGEST_SECONDS
            stop = self._ignored.check([self._pid], now)
            held = self._stopped.check([self._pid], now)
            due = self._seconds_to_kill(now)
            loop.run_once(seconds, self._report_handlers(now), due, stop, held)
        signal.set_wakeup_fd(-1)
        self._peer.detach()
        if self._watch.ended_without_group():
            self._peer.send({"kind": "copies", "running": False}, _SEND_SECONDS)
        report: Message = {"kind": "exit", "status": self.status, "at": time.time()}
        self._peer.send(report, _SEND_SECONDS)
        self._peer.receive()  # unread data would make the kernel discard what was sent
        self._peer.close()

    def _has_ended(self) -> bool:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            self.status = code if code >= 0 else 128 - code
        return bool(pid)

    def _report_launcher(self, now: float) -> None:
        """Report once that the launcher's process is gone; end the rank if the launch is, too."""
        if self._launcher_name and os.getppid() != self._launcher:
            parent = self._launcher, self._launcher_name
            self._launcher_name = ""
            self._peer.send({"kind": "orphaned", "parent": parent})
        if not self._launcher_name and self._peer.closed:
            self._kill_at = min(self._kill_at, now + _ORPHAN_SECONDS)
            if now >= self._kill_at:
                process.kill([self._pid], process.session(self._pid))

    def _seconds_to_kill(self, now: float) -> float:
        return _LAUNCHER_SECONDS if self._kill_at == math.inf else max(0.0, self._kill_at - now)

    def _report_handlers(self, now: float) -> float | None:
        """Report the signals that the rank handles by now; return the seconds until the next look.

        A program without handlers is checked less and less often.
        """
        if len(self._handled) == len(HELD):
            return None
        if now >= self._next_look:
            handled = [int(each) for each in HELD if process.awaits_signal(self._pid, each)]
            if handled != self._handled:
                self._handled = handled
                self._peer.send({"kind": "handled", "signals": handled})
            self._next_look = now + max(HANDLER_SECONDS, (now - self._started) / 20)
        return self._next_look - now

    def _note_stop(self, number: int) -> None:
        """Note a signal from the launcher; pass it on if the rank may not have received it."""
        self._ignored.signalled(number, time.monotonic())
        if self._forwards:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)


def _drain(descriptor: int) -> None:
    os.read(descriptor, 4096)


def end_like(status: int) -> NoReturn:
    """End this process as the rank has ended: with its exit status, or by its signal."""
    if status > 128:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core of interest is the rank's
            signal.signal(status - 128, signal.SIG_DFL)
        with suppress(OSError, ValueError):
            os.kill(os.getpid(), status - 128)
    os._exit(status)

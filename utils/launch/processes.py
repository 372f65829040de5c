"""Processes of one host: started, signalled, ended with all that they started, and never left behind.

Not here: which ones they are (plan.py), those of other hosts (control.py).
"""
from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO

from .. import held_signals
from .outcome import say

MARK = "DDPKIT_LAUNCH"  # in the environment of every process of a launch: the ids of the launches around it
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL


class Signals:
    """Catches stops and the ends of children, and wakes a select() on fileno(). A context manager."""

    def __init__(self) -> None:
        self.stops: list[int] = []  # caught and not yet looked at
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in FORWARDED:
            # What was ignored on purpose stays so: nohup ignores SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.stops.append(number)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> list[int]:
        """The stops since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        taken, self.stops = self.stops, []
        return taken


class Processes:
    """The processes that a launch has on this host. A context manager: on leaving, none of them is left.

    launch_id: a word of no other launch. A keeper, a process of its own, ends them too should this one be killed.
    """

    def __init__(self, launch_id: str) -> None:
        self._id = launch_id
        self._children: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, int] = {}  # process id -> index
        self._unstarted: list[tuple[int, int]] = []
        self._kill_at: float | None = None

    def __enter__(self) -> Processes:
        self._keeper = _Keeper(self._id)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        clear(self._survivors, PATIENCE if self._running else 2.0)
        self._collect()
        self._keeper.close()

    def start(self, words: Sequence[str], environ: Mapping[str, str], *, stdout: int | IO[bytes] | None = None,
              stderr: int | IO[bytes] | None = None, new_session: bool = False,
              pass_fds: Sequence[int] = (), stdin: bytes = b"",
              hold_signals: bool = False) -> subprocess.Popen[bytes] | None:
        """Start a process, the next by index, in a process group of its own. None where it could not be started.

        hold_signals: for ranks and torchrun: SIGUSR1 and SIGUSR2 stay pending until a script with a StopSignal takes
        them.
        new_session: away from the signals that PBS and terminals send to a whole session. stdin: a short text that
        it can read; it cannot read ours.
        """
        index = len(self._children) + len(self._unstarted)
        marked = {**environ, MARK: "/".join(filter(None, [environ.get(MARK), self._id]))}
        hold_signals = hold_signals and held_signals.handles_stops(words)
        if hold_signals:
            marked[held_signals.VARIABLE] = "1"

        def prepare() -> None:
            if not new_session:
                os.setpgrp()
            if hold_signals:
                held_signals.block()

        source = _readable(stdin)
        try:
            # The group has to be there before anything is signalled, hence in the child before it becomes the program.
            child = subprocess.Popen(words, stdin=source, stdout=stdout, stderr=stderr, env=marked,
                                     start_new_session=new_session, pass_fds=pass_fds,
                                     preexec_fn=None if new_session and not hold_signals else prepare)
        except OSError as error:
            say(f"{words[0]} could not be started: {error.strerror}. Expected a program, or a script whose name ends "
                "in .py")
            self._unstarted.append((index, 127 if error.errno == errno.ENOENT else 126))
            return None
        finally:
            os.close(source)
        self._children.append(child)
        self._running[child.pid] = index
        self._keeper.add(child.pid)
        return child

    @property
    def running(self) -> bool:
        return bool(self._running or self._unstarted)

    def ended(self) -> list[tuple[int, int]]:
        """Those that ended since the last call: (index, exit status), 128 + N for signal N."""
        found, self._unstarted = self._unstarted, []
        for child in self._children:
            if child.pid in self._running and (code := child.poll()) is not None:
                found.append((self._running.pop(child.pid), code if code >= 0 else 128 - code))
        return found

    def signal(self, number: int, *, to_their_children: bool = False) -> None:
        """Signal each process that runs, but not what it has started: workers of a data loader would die of it.

        to_their_children: of torchrun, which passes some signals on and not others, its workers instead.
        """
        parents = dict.fromkeys(self._running, False)
        children = [(pid, parent) for pid, parent in _parents() if parent in parents] if to_their_children else []
        for pid, parent in children:
            parents[parent] = True
            _signal_all([pid], number)
        # torchrun would die of SIGUSR1; while it has no workers yet a request to end is for itself.
        if not to_their_children or number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            _signal_all([pid for pid, done in parents.items() if not done], number)

    def end(self, now: float) -> None:
        """Ask all of them to end; kill_late() kills those that are still there after a while."""
        if self._kill_at is None:
            self._kill_at = now + PATIENCE
            _signal_all(self._survivors(), signal.SIGTERM)

    def kill_late(self, now: float) -> float | None:
        """Kill what end() asked in vain. Returns the seconds until this is due, None where it is not."""
        if self._kill_at is None or not self.running:
            return None
        if now >= self._kill_at:
            _signal_all(self._survivors(), signal.SIGKILL)
            self._kill_at = now + 0.5
        return self._kill_at - now

    def _survivors(self) -> list[int]:
        self._collect()
        return survivors(self._id, self._running)

    def _collect(self) -> None:
        for child in self._children:
            child.poll()


def _readable(text: bytes) -> int:
    """A descriptor from which the text can be read, and then the end."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return reader


def clear(find: Callable[[], list[int]], patience: float) -> None:
    """End the processes that `find` names: SIGTERM, and SIGKILL after `patience` seconds, until there are none."""
    kill_at, give_up_at = time.monotonic() + patience, time.monotonic() + patience + 10
    asked: set[int] = set()
    while (found := find()) and time.monotonic() < give_up_at:
        late = time.monotonic() >= kill_at
        _signal_all(found if late else [pid for pid in found if pid not in asked],
                    signal.SIGKILL if late else signal.SIGTERM)
        asked.update(found)
        time.sleep(0.02)


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def survivors(launch_id: str, groups: Mapping[int, int] | Sequence[int]) -> list[int]:
    """Processes of this host that belong to the launch, whatever session they are in and whoever is their parent.

    Without /proc (macOS) the leaders of the groups only.
    """
    if not os.path.isdir("/proc/self"):
        return [pid for pid in groups if _exists(pid)]
    found, own = [], os.getpid()
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == MARK.encode() and launch_id.encode() in value.split(b"/") and pid != own:
                    found.append(pid)
    return found


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def _parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) for all processes of this host."""
    if not os.path.isdir("/proc/self"):
        return
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            yield pid, int(file.read().rpartition(b")")[2].split()[1])


class _Keeper:
    """A process that outlives this one for as long as it takes to end what this one has started.

    It is in a session of its own, so that what kills this one does not reach it, and holds nothing of it open.
    """

    def __init__(self, launch_id: str) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(self._writer)
                _keep(reader, launch_id)
                code = 0
            finally:
                os._exit(code)
        os.close(reader)

    def add(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._writer, b"%d\n" % pid)

    def close(self) -> None:
        """All have ended: the keeper may go."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"over\n")
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _keep(reader: int, launch_id: str) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, reader)
    os.closerange(reader + 1, 256)
    told = b""
    while chunk := os.read(reader, 4096):
        told += chunk
    lines = told.split()
    if b"over" not in lines:
        started = [int(line) for line in lines]
        clear(lambda: survivors(launch_id, started), PATIENCE)

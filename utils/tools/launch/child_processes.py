"""Start, signal and end the processes of a launch on this host, and never leave one behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from ...host import process
from .event_loop import STOP_SIGNALS
from .launch_result import print_error

# In the environment of every process of a launch: "OUTER/INNER", the ids of the launches around it.
LAUNCH_VARIABLE = "DDPKIT_LAUNCH"
TERMINATE_SECONDS = 5.0  # seconds from SIGTERM to SIGKILL
_LEFTOVER_SECONDS = 2.0  # less time for children that ended processes have left behind
_POLL_SECONDS = 0.02
# Signals held back until a rank handles them: by default they end a rank that still imports torch.
HELD = (signal.SIGUSR1, signal.SIGUSR2)
HANDLER_SECONDS = 0.2  # seconds between two checks for a handler


class Processes:
    """The processes of a launch on this host. A context manager: none is left after it.

    If this process is killed, a reaper process ends them.
    """

    def __init__(self, launch_id: str) -> None:
        """launch_id: a word that no other launch has."""
        self._id = launch_id
        self._children: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, int] = {}  # process id -> index
        self._unstarted: list[tuple[int, int]] = []  # index and exit status
        self._kill_at: float | None = None
        # Signal in HELD -> whether it is for torchrun's workers, and the processes that have
        # received it.
        self._held: dict[int, tuple[bool, set[int]]] = {}

    def __enter__(self) -> Processes:
        self._reaper = _Reaper(self._id)
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._find, TERMINATE_SECONDS if self._running else _LEFTOVER_SECONDS)
        self._poll()
        self._reaper.close()

    def start(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: bytes | int = b"",
        cpus: Collection[int] = (),
    ) -> subprocess.Popen[bytes] | None:
        """Start a process in its own session; None where it could not be started.

        Processes are numbered from 0 in the order of these calls. PBS and terminals signal a whole
        session, but each stop must reach a process once, by signal() or stop().

        stdin: text for the child, or a descriptor that it reads. cpus: CPUs to bind the process to;
        empty: it inherits the CPUs of this process.
        """
        index = len(self._children) + len(self._unstarted)
        environ = {**environ, LAUNCH_VARIABLE: launch_path(environ, self._id)}

        def bind() -> None:
            with suppress(OSError):  # without the binding, the process is slower, not wrong
                os.sched_setaffinity(0, cpus)

        source = os.dup(stdin) if isinstance(stdin, int) else _readable(stdin)
        try:
            child = subprocess.Popen(
                words,
                stdin=source,
                stdout=stdout,
                stderr=stderr,
                env=environ,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=bind if cpus else None,
            )
        except OSError as error:
            print_error(
                f"{words[0]} could not be started: {error.strerror}. Expected a program, or a "
                "script whose name ends in .py"
            )
            # As a shell does: 127 not found, 126 not executable.
            self._unstarted.append((index, 127 if error.errno == errno.ENOENT else 126))
            return None
        finally:
            os.close(source)
        self._children.append(child)
        self._running[child.pid] = index
        self._reaper.add(child.pid)
        return child

    @property
    def running(self) -> bool:
        """Whether a process runs, or the end of one was not yet returned by ended()."""
        return bool(self._running or self._unstarted)

    @property
    def indices(self) -> dict[int, int]:
        """The running processes: process id -> index."""
        return dict(self._running)

    def ended(self) -> list[tuple[int, int]]:
        """Return (index, exit status) of each process that has ended since the last call.

        The status is 128 + N for signal N.
        """
        found, self._unstarted = self._unstarted, []
        for child in self._children:
            if child.pid in self._running and (code := child.poll()) is not None:
                found.append((self._running.pop(child.pid), code if code >= 0 else 128 - code))
        return found

    def signal(self, number: int) -> None:
        """Signal each running process, but not its children, such as workers."""
        _signal(self._running, number)

    def stop(self, number: int, *, to_workers: bool) -> None:
        """Pass a stop signal on to each rank; a signal in HELD waits until the rank handles it.

        to_workers: signal the workers of each torchrun directly. torchrun itself passes on neither
        SIGUSR1 nor SIGUSR2, and after SIGTERM ends its workers within 30 seconds.
        """
        if number in HELD:
            self._held[number] = to_workers, set()
            return
        targets = self._targets(to_workers)
        if to_workers:  # a torchrun without workers gets the request to end itself
            with_workers = set(map(process.parent, targets))
            targets += [pid for pid in self._running if pid not in with_workers]
        _signal(targets, number)

    def pass_on_held(self) -> float | None:
        """Signal the processes that now have a handler; return the seconds until the next call."""
        for number, (to_workers, signalled) in list(self._held.items()):
            targets = self._targets(to_workers)
            ready = {pid for pid in targets if process.awaits_signal(pid, number)} - signalled
            _signal(ready, number)
            signalled |= ready
            if targets and signalled.issuperset(targets):
                del self._held[number]
        return HANDLER_SECONDS if self._held else None

    def _targets(self, to_workers: bool) -> list[int]:
        if not to_workers:
            return list(self._running)
        parents = process.parents_by_pid()
        return [pid for pid, parent in parents.items() if parent in self._running]

    def end(self, now: float, seconds: float = TERMINATE_SECONDS) -> None:
        """Terminate all processes. kill_late() kills what still runs after these seconds."""
        if self._kill_at is None:
            self._kill_at = now + seconds
            _signal(self._find(), signal.SIGTERM)

    def kill_late(self, now: float) -> float | None:
        """Kill what still runs after end(); return the seconds until this is due, or None."""
        if self._kill_at is None or not self.running:
            return None
        if now >= self._kill_at:
            _signal(self._find(), signal.SIGKILL)
            self._kill_at = now + 0.5
        return self._kill_at - now

    def _find(self) -> list[int]:
        self._poll()
        return find_processes(self._id, self._running)

    def _poll(self) -> None:
        for child in self._children:
            child.poll()


def _readable(text: bytes) -> int:
    """Return a descriptor from which the text can be read, then end of file."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    if hasattr(os, "memfd_create"):  # a pipe may take 4 KiB only, and has no reader yet
        memory = os.memfd_create("stdin")
        with open(os.dup(memory), "wb") as file:
            file.write(text)
        os.lseek(memory, 0, os.SEEK_SET)
        return memory
    read_end, write_end = os.pipe()
    os.write(write_end, text)
    os.close(write_end)
    return read_end


def end_all(find: Callable[[], list[int]], seconds: float) -> None:
    """End the processes that find() returns: by SIGTERM, and by SIGKILL after some seconds."""
    kill_at = time.monotonic() + seconds
    give_up_at = kill_at + 10
    signalled: set[int] = set()
    while (found := find()) and time.monotonic() < give_up_at:
        if time.monotonic() >= kill_at:
            _signal(found, signal.SIGKILL)
        else:
            _signal([pid for pid in found if pid not in signalled], signal.SIGTERM)
        signalled.update(found)
        time.sleep(_POLL_SECONDS)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def launch_path(environ: Mapping[str, str], launch_id: str) -> str:
    """Return the value of LAUNCH_VARIABLE below a launch: the launches around it, and itself."""
    return "/".join(filter(None, [environ.get(LAUNCH_VARIABLE), launch_id]))


def find_processes(launch_id: str, started: Iterable[int]) -> list[int]:
    """Find the processes of a launch on this host, in any session and under any parent.

    started: process ids that the launch has started; without /proc (macOS) only these are found.
    """
    pids = process.process_ids()
    if not pids:
        return [pid for pid in started if _exists(pid)]
    variable, launch = LAUNCH_VARIABLE.encode(), launch_id.encode()
    return [
        pid
        for pid in pids
        if pid != os.getpid() and launch in process.environment(pid).get(variable, b"").split(b"/")
    ]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class _Reaper:
    """A process that ends the children of this process if this process is killed.

    It has its own session, so that signals to this process do not reach it. It holds no descriptor
    of this process open.
    """

    def __init__(self, launch_id: str) -> None:
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(self._write_end)
                _reap(read_end, launch_id)
                code = 0
            finally:
                os._exit(code)
        os.close(read_end)

    def add(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"%d\n" % pid)

    def close(self) -> None:
        """End the reaper: all processes have ended."""
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"done\n")
        os.close(self._write_end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _reap(read_end: int, launch_id: str) -> None:
    """Wait until the parent closes the pipe; end its processes unless it has written "done"."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, read_end)
    os.closerange(read_end + 1, 256)

    received = b""
    while chunk := os.read(read_end, 4096):
        received += chunk
    lines = received.split()
    if b"done" not in lines:
        started = [int(line) for line in lines]
        end_all(lambda: find_processes(launch_id, started), TERMINATE_SECONDS)

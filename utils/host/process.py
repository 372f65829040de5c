"""Read /proc: parents, command lines, variables, ports, signals and resource use of processes.

All readers of /proc use read(). Without /proc (macOS) all results are empty, and nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn


def read(path: str) -> bytes:
    """Return the content of a file; empty if it cannot be read or its process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:  # unbuffered is twice as fast
            return file.read()
    except OSError:
        return b""


def process_ids() -> list[int]:
    """Return the ids of all processes that /proc shows; empty without /proc."""
    return _numbers_in("/proc")


def thread_ids(pid: int | str = "self") -> list[int]:
    """Return the ids of a process's threads; empty without /proc."""
    return _numbers_in(f"/proc/{pid}/task")


def _numbers_in(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    except OSError:
        return []


# What a process is -------------------------------------------------------------------------------


def stat(folder: str) -> tuple[str, list[str]]:
    """Return a process's name (comm) and the fields after it; see proc_pid_stat(5).

    folder: of a process or a thread, such as /proc/self. Empty if there is no such process.
    """
    # "12 (a b) S 7 ...": the name may contain spaces and parentheses.
    content = read(f"{folder}/stat").decode(errors="replace")
    found, _, rest = content.partition("(")[2].rpartition(")")
    return found, rest.split()


def name(pid: int) -> str:
    """Return a process's name (comm), at most 15 characters; empty if there is none."""
    return stat(f"/proc/{pid}")[0]


def parent(pid: int) -> int | None:
    """Return the parent's process id; None if there is no such process."""
    fields = stat(f"/proc/{pid}")[1]
    return int(fields[1]) if fields else None


def session(pid: int) -> int | None:
    """Return the session of a process; None if there is no such process."""
    fields = stat(f"/proc/{pid}")[1]
    return int(fields[3]) if fields else None


def start_time(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot.

    None if there is no such process, or only its exit status is left.
    """
    fields = stat(f"/proc/{pid}")[1]
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def age() -> float:
    """Return the age of this process in seconds; 0.0 without /proc."""
    started = start_time(os.getpid())
    if started is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def status(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by key; empty if there is no such process."""
    lines = read(f"/proc/{pid}/status").decode(errors="replace").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def why_stopped(pid: int) -> str:
    """Return why a process does not run: stopped by a signal or a debugger; "" if it runs."""
    found = status(pid)
    tracer = int(found.get("TracerPid", "0"))
    if tracer:
        return f"held by a debugger ({name(tracer)}, pid {tracer})"
    return "stopped by a signal (SIGSTOP or SIGTSTP)" if found.get("State", "")[:1] == "T" else ""


def command_line(pid: int) -> str:
    """Return the words of a command, separated by spaces; empty if there is no such process.

    The program is reduced to its base name, because a folder's name may contain spaces.
    """
    program, *arguments = read(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0")
    if program.startswith("/"):
        program = os.path.basename(program)
    return " ".join([program, *arguments])


# Parents and descendants -------------------------------------------------------------------------


def parent_pids() -> Iterator[int]:
    """Yield the process ids of this process's ancestors, nearest first."""
    pid: int | None = os.getppid()
    while pid:
        yield pid
        pid = parent(pid)


def parents_by_pid() -> dict[int, int]:
    """Return process id -> parent's process id, for all processes of this host."""
    parents = ((pid, parent(pid)) for pid in process_ids())
    return {pid: found for pid, found in parents if found is not None}


def with_descendants(pids: Iterable[int]) -> list[int]:
    """Return these processes and all their descendants."""
    parents, family = parents_by_pid(), list(pids)
    for parent in family:  # the list grows: a shell that waits, and the programs it has started
        family += [pid for pid, parent_pid in parents.items() if parent_pid == parent]
    return family


def kill(pids: Iterable[int], session_id: int | None) -> None:
    """Kill these processes and their descendants in a session, but not this process.

    A process in a session of its own was detached on purpose.
    """
    for pid in with_descendants(pids):
        if pid != os.getpid() and session(pid) == session_id:
            with contextlib.suppress(OSError):  # the process may have ended
                os.kill(pid, signal.SIGKILL)


def end(exit_status: int) -> NoReturn:
    """End this process and all its descendants at once."""
    kill([os.getpid()], os.getsid(0))
    os._exit(exit_status)


# What a process has done -------------------------------------------------------------------------


class Schedule(NamedTuple):
    """How the kernel has scheduled a thread."""

    run_seconds: float  # seconds on a core
    ready_seconds: float  # seconds of waiting for a core
    runs: int  # number of times it got a core


def schedule(thread_id: int, pid: int | str = "self") -> Schedule:
    """Return a thread's scheduling statistics; zeros if /proc does not show them."""
    fields = read(f"/proc/{pid}/task/{thread_id}/schedstat").split()  # in nanoseconds
    if len(fields) != 3:
        return Schedule(0.0, 0.0, 0)
    return Schedule(int(fields[0]) / 1e9, int(fields[1]) / 1e9, int(fields[2]))


# This host ---------------------------------------------------------------------------------------


def boot_id() -> str:
    """Return an id of this boot of this host; empty without /proc."""
    return system_setting("kernel/random/boot_id")


def system_setting(path: str) -> str:
    """Return a kernel setting such as "net/core/somaxconn"; empty without /proc."""
    return read(f"/proc/sys/{path}").decode(errors="replace").strip()


def namespace(kind: str) -> str:
    """Return the namespace of this process, such as "net:[4026531840]"; empty without /proc.

    kind: "net", "pid" or another name in /proc/self/ns.
    """
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def work_done() -> tuple[float, float, bool, int]:
    """Return the work of this process: CPU seconds, megabytes of I/O, whether a thread waits for a
    disk now, and how often its main thread was woken up.

    The first two include all descendants. CPU seconds include the time in which other Python
    threads of this process waited for a core. They decrease when a thread or a child ends. Zeros
    without /proc.
    """
    # Threads of gloo are left out: they look for work a hundred times a second.
    main = threading.main_thread()  # after a fork, its native_id is still the parent's
    own = {os.getpid() if thread is main else thread.native_id for thread in threading.enumerate()}
    own.discard(threading.get_native_id())
    seconds = megabytes = 0.0
    for pid in with_descendants([os.getpid()]):
        ticks = map(int, stat(f"/proc/{pid}")[1][11:15])  # includes children that have ended
        seconds += sum(ticks) / os.sysconf("SC_CLK_TCK")
        threads = own if pid == os.getpid() else {pid}
        seconds += sum(schedule(thread, pid).ready_seconds for thread in threads if thread)
        amounts = (line.partition(b": ") for line in read(f"/proc/{pid}/io").splitlines())
        megabytes += sum(int(n) for key, _, n in amounts if key in (b"rchar", b"wchar")) / 1e6
    states = (stat(f"/proc/self/task/{thread}")[1][:1] for thread in thread_ids())
    return seconds, megabytes, ["D"] in states, schedule(os.getpid()).runs


def environment(pid: int) -> dict[bytes, bytes]:
    """Return a process's initial variables; empty if they may not be read."""
    words = read(f"/proc/{pid}/environ").split(b"\0")
    variables = (word.partition(b"=") for word in words)
    return {variable: value for variable, equals, value in variables if equals}


def thread_names(pid: int) -> list[str]:
    """Return the names (comm) of a process's threads; empty if there is none."""
    return [stat(f"/proc/{pid}/task/{thread}")[0] for thread in thread_ids(pid)]


def has_loaded_torch(pid: int) -> bool:
    """Whether a process has loaded libtorch; false if its memory map may not be read."""
    return b"/libtorch" in read(f"/proc/{pid}/maps")


def uses_tcp_port(port: int, pid: int | str = "self") -> bool:
    """Whether a TCP socket on a process's host uses this port, in any state.

    The side that closes a connection first keeps the port for a minute (TIME_WAIT).
    """
    tables = [read(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    return any(b":%04X " % port in table for table in tables)


def ignores_signal(pid: int, number: int) -> bool:
    """Whether a process ignores a signal; false without /proc."""
    return bool(int(status(pid).get("SigIgn", "0"), 16) >> (number - 1) & 1)


class Mount(NamedTuple):
    """A file system that this process sees."""

    device: str  # "0:42", as os.stat() has it
    folder: str  # where it is mounted
    file_system: str  # "lustre"


def mounts() -> list[Mount]:
    """Return the mounted file systems, the newest last; [] without /proc."""
    found = []
    for line in read("/proc/self/mountinfo").decode(errors="replace").splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
        mount, _, file_system = line.partition(" - ")
        _, _, device, _, folder, *_ = mount.split(" ")
        found.append(Mount(device, folder.replace("\\040", " "), file_system.split(" ")[0]))
    return found


def awaits_signal(pid: int, number: int) -> bool:
    """Whether a process handles a signal, or blocks it to wait for it; true without /proc.

    For signals other than SIGCHLD and SIGCONT, the default action would end or stop the process.
    """
    fields = status(pid)
    masks = [int(fields[key], 16) for key in ("SigBlk", "SigCgt") if key in fields]
    return not masks or any(mask >> (number - 1) & 1 for mask in masks)

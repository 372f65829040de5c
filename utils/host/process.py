"""Read /proc: the parents, command lines, start times and environments of processes.

This is the only reader of /proc. Without /proc (macOS) nothing is found and nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import NoReturn

_IPV4_IN_IPV6 = "0000000000000000FFFF0000"  # ::ffff:0:0/96


def process_ids() -> list[int]:
    """Return the ids of all processes that /proc shows; empty without /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def parents_by_pid() -> dict[int, int]:
    """Return the parent's process id for each process of this host."""
    parents = ((pid, parent(pid)) for pid in process_ids())
    return {pid: found for pid, found in parents if found is not None}


def parent_pids() -> Iterator[int]:
    """Yield the process ids of this process's ancestors, nearest first."""
    pid: int | None = os.getppid()
    while pid:
        yield pid
        pid = parent(pid)


def parent_command_lines(pids: Iterable[int] | None = None) -> Iterator[str]:
    """Yield the command lines of this process's ancestors, nearest first.

    pids: the ancestors to look at; None for all of them.
    """
    for pid in parent_pids() if pids is None else pids:
        text = command_line(pid)
        if text is None:
            return
        yield text


def command_line(pid: int) -> str | None:
    """Return the words of a command, separated by spaces; None where there is no such process.

    The program is reduced to its base name, because a folder's name may contain spaces.
    """
    content = _read(f"/proc/{pid}/cmdline")
    if content is None:
        return None
    program, *arguments = content.decode(errors="replace").split("\0")
    if program.startswith("/"):
        program = os.path.basename(program)
    return " ".join([program, *arguments])


def name(pid: int) -> str:
    """Return a process's name (comm), at most 15 characters; empty where there is none."""
    return _stat(f"/proc/{pid}/stat")[0]


def parent(pid: int) -> int | None:
    """Return the process id of a process's parent; None where there is no such process."""
    fields = _stat(f"/proc/{pid}/stat")[1]
    return int(fields[1]) if fields else None


def session(pid: int) -> int | None:
    """Return the session of a process; None where there is no such process."""
    fields = _stat(f"/proc/{pid}/stat")[1]
    return int(fields[3]) if fields else None


def children(pid: int) -> dict[int, int | None]:
    """Return the start times of the processes that a process has started, by their ids."""
    found: dict[int, int | None] = {}
    for thread in thread_ids(pid):
        words = (_read(f"/proc/{pid}/task/{thread}/children") or b"").split()
        found |= {int(child): start_time(int(child)) for child in words}
    return found


def with_descendants(pids: Iterable[int]) -> list[int]:
    """Return the processes and all that they have started, directly or not."""
    parents, family = parents_by_pid(), list(pids)
    for parent in family:  # grows: a shell that waits, and the programs that it has started
        family += [pid for pid, parent_pid in parents.items() if parent_pid == parent]
    return family


def kill(pids: Iterable[int], session_id: int | None) -> None:
    """Kill processes and all that they have started in a session, but not this process.

    What has a session of its own was detached on purpose.
    """
    for pid in with_descendants(pids):
        if pid != os.getpid() and session(pid) == session_id:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)


def end(status: int) -> NoReturn:
    """End this process at once, and all that it has started."""
    kill([os.getpid()], os.getsid(0))
    os._exit(status)


def start_time(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot.

    None where there is no such process, or only its exit status is left.
    """
    fields = _stat(f"/proc/{pid}/stat")[1]
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def environment(pid: int) -> dict[bytes, bytes]:
    """Return the variables a process was started with; empty where they may not be read."""
    content = _read(f"/proc/{pid}/environ") or b""
    variables = (word.partition(b"=") for word in content.split(b"\0"))
    return {variable: value for variable, equals, value in variables if equals}


def mapped_files(pid: int) -> list[str]:
    """Return the paths of the files, such as shared libraries, that a process has in its memory."""
    content = (_read(f"/proc/{pid}/maps") or b"").decode(errors="replace")
    # "7f3c1a000000-7f3c1a021000 r--p 00000000 08:01 1234   /usr/lib/libpmix.so.2"
    columns = (line.split(maxsplit=5) for line in content.splitlines())
    return list(dict.fromkeys(line[5] for line in columns if len(line) == 6))


def thread_ids(pid: int | str = "self") -> list[int]:
    """Return the ids of a process's threads; empty without /proc."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def thread_names(pid: int) -> list[str]:
    """Return the names (comm) of a process's threads; empty where there is none."""
    found = [_read(f"/proc/{pid}/task/{thread}/comm") for thread in thread_ids(pid)]
    return [(content or b"").decode(errors="replace").rstrip("\n") for content in found]


def sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; empty where they may not be read."""
    folder, inodes = f"/proc/{pid}/fd", set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                kind, _, inode = os.readlink(f"{folder}/{descriptor}").partition(":")
                if kind == "socket":
                    inodes.add(inode.strip("[]"))
    return inodes


def tcp_connections(pid: int) -> dict[str, tuple[str, str]]:
    """Return the ends, local and remote, of the TCP sockets of a process's host, by inode.

    An end is an address and a port in hexadecimal digits, as /proc/net/tcp has them; IPv6 addresses
    that stand for IPv4 ones are written as these.
    """
    found = {}
    for name in ("tcp", "tcp6"):
        for line in (_read(f"/proc/{pid}/net/{name}") or b"").decode().splitlines()[1:]:
            fields = line.replace(_IPV4_IN_IPV6, "").split()
            found[fields[9]] = (fields[1], fields[2])
    return found


def uses_tcp_port(port: int, pid: int | str = "self") -> bool:
    """Return whether a TCP socket of a process's host has this port at one end, in any state.

    The end that closes a connection first keeps it for a minute (TIME_WAIT).
    """
    tables = [_read(f"/proc/{pid}/net/{name}") or b"" for name in ("tcp", "tcp6")]
    return any(b":%04X " % port in table for table in tables)


def thread_turns(thread_name: str) -> dict[int, tuple[str, str]]:
    """Return the state of each thread of that name, and how often it has run on a core.

    The state: "R" runs or is ready, "S" sleeps.
    """
    turns = {}
    for thread in thread_ids():
        found, fields = _stat(f"/proc/self/task/{thread}/stat")
        if fields and found == thread_name:
            schedule = (_read(f"/proc/self/task/{thread}/schedstat") or b"").decode()
            turns[thread] = (fields[0], schedule)
    return turns


def stopped_state(pid: int) -> str:
    """Return why a process does not run: "stopped by a signal" or that of a debugger, else ""."""
    status = (_read(f"/proc/{pid}/status") or b"").decode(errors="replace")
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    tracer = int(values.get("TracerPid", "0"))
    if tracer:
        return f"held by a debugger ({name(tracer)}, pid {tracer})"
    return "stopped by a signal (SIGSTOP or SIGTSTP)" if values.get("State", "")[:1] == "T" else ""


def cpu_use(pids: Collection[int]) -> dict[int, float]:
    """Return how much of the next quarter of a second main threads run, or are ready to run."""

    def busy_seconds() -> dict[int, float]:
        fields = {pid: (_read(f"/proc/{pid}/schedstat") or b"").split()[:2] for pid in pids}
        return {pid: sum(map(int, times)) / 1e9 for pid, times in fields.items()}

    start, before = time.monotonic(), busy_seconds()
    if pids:
        time.sleep(0.25)
    after, seconds = busy_seconds(), time.monotonic() - start
    return {pid: (after[pid] - before[pid]) / seconds for pid in pids}


def work_done() -> tuple[float, float, bool]:
    """Return CPU seconds, megabytes of I/O, and whether a thread of this process waits for a disk.

    The first two include all descendants. CPU seconds include the time in which
    other Python threads of this process waited for a core. They decrease when a thread or a child
    ends. Zeros without /proc.
    """
    # Not the threads of gloo: they look for work a hundred times a second.
    main = threading.main_thread()  # its native_id is that of the parent after a fork
    own = {os.getpid() if one is main else one.native_id for one in threading.enumerate()}
    own.discard(threading.get_native_id())
    ticks = waited = 0
    megabytes = 0.0
    for pid in with_descendants([os.getpid()]):
        fields = _stat(f"/proc/{pid}/stat")[1]
        ticks += sum(map(int, fields[11:15]))  # with the children that have ended
        for thread in own if pid == os.getpid() else {pid}:
            schedule = (_read(f"/proc/{pid}/task/{thread}/schedstat") or b"").split()
            waited += sum(map(int, schedule[1:2]))
        content = _read(f"/proc/{pid}/io") or b""
        amounts = (line.partition(b": ") for line in content.splitlines())
        megabytes += sum(int(n) for key, _, n in amounts if key in (b"rchar", b"wchar")) / 1e6
    states = (_stat(f"/proc/self/task/{thread}/stat")[1][:1] for thread in thread_ids())
    return ticks / os.sysconf("SC_CLK_TCK") + waited / 1e9, megabytes, ["D"] in states


def thread_seconds() -> tuple[float, float]:
    """Return how long this thread has run, and how long it was ready while others had the cores.

    Where /proc does not show the second number, it is 0.
    """
    fields = (_read("/proc/thread-self/schedstat") or b"").split()  # in nanoseconds
    if len(fields) != 3:
        return time.thread_time(), 0.0
    return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def caught_signals(pid: int | str = "self") -> int:
    """Return the signals that a process has a handler for, as a bit mask: signal 1 is bit 0."""
    for line in (_read(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(b"SigCgt:"):
            return int(line.split()[1], 16)
    return 0


def awaits_signal(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, or blocks it to wait for it; true without /proc.

    The default action of other signals than SIGCHLD and SIGCONT would end or stop it.
    """
    text = (_read(f"/proc/{pid}/status") or b"").decode()
    masks = re.findall(r"^Sig(?:Blk|Cgt):\s*(\w+)", text, re.MULTILINE)
    return not masks or any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def boot_id() -> str:
    """Return what distinguishes this boot of this host from all others; empty without /proc."""
    return system_setting("kernel/random/boot_id")


def system_setting(path: str) -> str:
    """Return a setting of the kernel, such as "net/core/somaxconn"; empty without /proc."""
    return (_read(f"/proc/sys/{path}") or b"").decode(errors="replace").strip()


def namespace(kind: str) -> str:
    """Return the namespace of this process, such as "net:[4026531840]"; empty without /proc.

    kind: "net", "pid" or another name in /proc/self/ns.
    """
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _stat(path: str) -> tuple[str, list[str]]:
    """Return a process's name and the fields behind it, from the state on; see proc_pid_stat(5)."""
    # "12 (a b) S 7 ...": the name may contain spaces and parentheses.
    content = (_read(path) or b"").decode(errors="replace")
    found, _, rest = content.partition("(")[2].rpartition(")")
    return found, rest.split()


def _read(path: str) -> bytes | None:
    """Return a file's content; None where it cannot be read or its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def import_path(name: str, file: str) -> tuple[str, str]:
    """Return the folder for sys.path from which a module of this package can be imported, and as
    what, in a Python without site-packages: an editable installation gives the package another
    name than its folder has.

    name, file: __name__ and __file__ of the module.
    """
    folder = os.path.splitext(os.path.abspath(file))[0]
    names: list[str] = []
    for _ in range(name.count(".") + 1):
        folder, last = os.path.split(folder)
        names.insert(0, last)
    return folder, ".".join(names)

"""Read /proc for ddpkit launch: variables, threads, libraries, ports and signals of processes."""

from __future__ import annotations

from ...host import process


def environment(pid: int) -> dict[bytes, bytes]:
    """Return the variables a process was started with; empty where they may not be read."""
    words = process.read(f"/proc/{pid}/environ").split(b"\0")
    variables = (word.partition(b"=") for word in words)
    return {variable: value for variable, equals, value in variables if equals}


def thread_names(pid: int) -> list[str]:
    """Return the names (comm) of a process's threads; empty where there is none."""
    return [process.stat(f"/proc/{pid}/task/{thread}")[0] for thread in process.thread_ids(pid)]


def has_loaded_torch(pid: int) -> bool:
    """Return whether a process has libtorch in its memory; false where that may not be read."""
    return b"/libtorch" in process.read(f"/proc/{pid}/maps")


def uses_tcp_port(port: int, pid: int | str = "self") -> bool:
    """Return whether a TCP socket of a process's host has this port at one end, in any state.

    The end that closes a connection first keeps it for a minute (TIME_WAIT).
    """
    tables = [process.read(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    return any(b":%04X " % port in table for table in tables)


def ignores_signal(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; false without /proc."""
    return bool(int(process.status(pid).get("SigIgn", "0"), 16) >> (number - 1) & 1)


def awaits_signal(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, or blocks it to wait for it; true without /proc.

    The default action of other signals than SIGCHLD and SIGCONT would end or stop it.
    """
    status = process.status(pid)
    masks = [int(status[key], 16) for key in ("SigBlk", "SigCgt") if key in status]
    return not masks or any(mask >> (number - 1) & 1 for mask in masks)

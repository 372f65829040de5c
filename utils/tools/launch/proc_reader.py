"""Read /proc for launch.py: the variables, threads, connections and signals of other processes."""

from __future__ import annotations

import os
from contextlib import suppress

from ...host import process

_IPV4_IN_IPV6 = "0000000000000000FFFF0000"  # ::ffff:0:0/96


def environment(pid: int) -> dict[bytes, bytes]:
    """Return the variables a process was started with; empty where they may not be read."""
    words = process.read(f"/proc/{pid}/environ").split(b"\0")
    variables = (word.partition(b"=") for word in words)
    return {variable: value for variable, equals, value in variables if equals}


def thread_names(pid: int) -> list[str]:
    """Return the names (comm) of a process's threads; empty where there is none."""
    return [process.stat(f"/proc/{pid}/task/{thread}")[0] for thread in process.thread_ids(pid)]


def sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; empty where they may not be read."""
    folder, inodes = f"/proc/{pid}/fd", set()
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):  # closed meanwhile
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
        for line in process.read(f"/proc/{pid}/net/{name}").decode().splitlines()[1:]:
            fields = line.replace(_IPV4_IN_IPV6, "").split()
            found[fields[9]] = (fields[1], fields[2])
    return found


def uses_tcp_port(port: int, pid: int | str = "self") -> bool:
    """Return whether a TCP socket of a process's host has this port at one end, in any state.

    The end that closes a connection first keeps it for a minute (TIME_WAIT).
    """
    tables = [process.read(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    return any(b":%04X " % port in table for table in tables)


def awaits_signal(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, or blocks it to wait for it; true without /proc.

    The default action of other signals than SIGCHLD and SIGCONT would end or stop it.
    """
    status = process.status(pid)
    masks = [int(status[key], 16) for key in ("SigBlk", "SigCgt") if key in status]
    return not masks or any(mask >> (number - 1) & 1 for mask in masks)

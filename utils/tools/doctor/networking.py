"""Connect the hosts of a check with each other: addresses, listeners, exchange of data."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from ...host import gloo, network
from .check import Exchange, RankPlace, Ranks

Key = TypeVar("Key")
Value = TypeVar("Value")
SHOWN_HOSTS = 8
ALL_PAIRS_HOSTS = 32  # up to this number, each host is measured with every other one
NO_DATA = ("sent data do not arrive", "data do not return")
_BACKLOG = 1024
_CONNECT_SECONDS = 4.0
_BULK_BYTES = 12_000  # full-size packets, without waiting for an acknowledgement


def data_address(address: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Return the address that this rank's collectives use.

    It belongs to the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if that is set there
    and is not loopback; see interface_problem().
    address: this host's address on the way to rank 0, the default.
    """
    present = {
        name: address
        for name, address in network.interfaces().items()
        if not network.is_loopback(address)
    }
    chosen = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[:1]
    chosen += nccl_interfaces(environ.get("NCCL_SOCKET_IFNAME", ""), present)
    for name in chosen:
        if name in present:
            return present[name]
    if address and not network.is_loopback(address):
        return address
    return next(iter(network.local_addresses()), "127.0.0.1")


def nccl_interfaces(value: str, present: Iterable[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME allows: "eth,ib", "=eth0", "^docker,lo".

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    words = [word for word in value.lstrip("^=").split(",") if word]
    if not words or value.startswith("^"):
        return []
    is_exact = value.startswith("=")
    return [
        name
        for name in present
        if any(name == word if is_exact else name.startswith(word) for word in words)
    ]


def interface_problem(environ: Mapping[str, str] = os.environ, *, hosts: int = 1) -> str:
    """Return why gloo or NCCL finds no interface on this host that leads to the others; or "".

    hosts: number of hosts in this run.
    """
    host, present = socket.gethostname(), [name for _, name in socket.if_nameindex()]
    of_gloo, of_nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    used = nccl_interfaces(of_nccl, present)
    for setting, names in (
        (f"GLOO_SOCKET_IFNAME={of_gloo}", of_gloo.split(",")[:1]),
        (f"NCCL_SOCKET_IFNAME={of_nccl}", used),
    ):
        if hosts > 1 and names == ["lo"]:
            return (
                f"{setting} is the loopback interface of {host}, which no other host can reach. "
                "Unset it, or name the interface that connects the hosts"
            )
    if not of_nccl or of_nccl.startswith("^") or used:
        return gloo.interface_problem()
    return (
        f"NCCL_SOCKET_IFNAME={of_nccl}, but {host} has no such interface; it has "
        f"{', '.join(present)}. Unset it, or name one of these"
    )


def listen(address: str) -> socket.socket:
    """Return a socket that listens at an address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    return listener


def serve(listener: socket.socket, respond: Callable[[socket.socket], None]) -> None:
    """Call respond() for each connection, in separate threads, until the listener is closed."""

    def respond_once(connected: socket.socket) -> None:
        with connected:
            try:
                respond(connected)
            except OSError:  # the other side reports it
                pass

    def accept() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=respond_once, args=(connected,), daemon=True).start()

    threading.Thread(target=accept, daemon=True, name="doctor listener").start()


def stop(listener: socket.socket) -> None:
    """Close a listener, even if a thread waits for a connection."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    listener.close()


def connect_hosts(ranks: Ranks, address: str) -> Exchange[dict[int, str]]:
    """Exchange 12 KB in both directions with this host's partners, while they do the same.

    address: this host's. Returns host number -> problem or "", for each host that listens. Only
    the first rank of a host connects.
    """
    is_first = ranks.me.local_rank == 0
    listener = listen(address) if is_first else None
    if listener:
        serve(listener, respond)
    gathered = yield listener and listener.getsockname()[:2]
    places = {place.node: gathered[place.rank] for place in ranks.hosts}
    others = partners(len(places), ranks.me.node) if is_first else []
    jobs = {
        node: partial(_exchange, *places[node])
        for node in others
        if places[node] and places[node][0] != address
    }
    found = in_threads(jobs, 2 * _CONNECT_SECONDS)
    yield True
    if listener:
        stop(listener)
    return {
        node: found.get(node, "timed out" if node in jobs else "same address")
        for node in others
        if places[node]
    }


def _exchange(address: str, port: int) -> str:
    try:
        connected = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timed out"
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return "no route" if unreachable else str(error.strerror or error)
    problem = NO_DATA[0]
    with connected, contextlib.suppress(OSError):
        connected.sendall(bytes(_BULK_BYTES))
        _receive(connected, 1)
        problem = NO_DATA[1]
        _receive(connected, _BULK_BYTES)
        problem = ""
    return problem


def respond(connected: socket.socket) -> None:
    """Serve the other side of _exchange()."""
    connected.settimeout(2 * _CONNECT_SECONDS)
    _receive(connected, _BULK_BYTES)
    connected.sendall(b"r")
    connected.sendall(bytes(_BULK_BYTES))
    connected.recv(1)  # returns when the other side has closed


def _receive(connected: socket.socket, size: int) -> None:
    while size:
        chunk = connected.recv(size)
        if not chunk:
            raise ConnectionError("the other host closed the connection")
        size -= len(chunk)


def in_threads(
    jobs: Mapping[Key, Callable[[], Value]], seconds: float, threads: int = 64
) -> dict[Key, Value]:
    """Run functions in threads; return the results that exist after a time limit.

    Unfinished functions go on in the background, and do not keep the process from ending.
    """
    waiting: queue.SimpleQueue[tuple[Key, Callable[[], Value]]] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[Key, Value]] = queue.SimpleQueue()
    for item in jobs.items():
        waiting.put(item)

    def work() -> None:
        while True:
            try:
                key, function = waiting.get_nowait()
            except queue.Empty:
                return
            finished.put((key, function()))

    for _ in range(min(threads, len(jobs))):
        threading.Thread(target=work, daemon=True, name="doctor worker").start()
    limit = time.monotonic() + seconds
    results: dict[Key, Value] = {}
    while len(results) < len(jobs):
        try:
            key, value = finished.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            break
        results[key] = value
    return results


def partners(hosts: int, node: int) -> list[int]:
    """Return the hosts that a host exchanges data with: all others, or some of many.

    For many hosts: those at the distances 1, 2, 4, ... on a ring.
    """
    if hosts <= ALL_PAIRS_HOSTS:
        return [other for other in range(hosts) if other != node]
    distances = [1 << power for power in range(hosts.bit_length() - 1)]
    around = {(node + sign * distance) % hosts for distance in distances for sign in (1, -1)}
    return sorted(around - {node})


def names_of(hosts: Sequence[str]) -> str:
    """Return host names for a message: "h1, h2 and 5 more"."""
    shown = list(hosts[:SHOWN_HOSTS])
    more = len(hosts) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def show(places: Sequence[RankPlace]) -> str:
    """Return "rank 3 on h2", or "ranks 2, 3 on h2 and 4, 5 on h3", with at most eight ranks."""
    on_host: dict[str, list[int]] = {}
    for place in places[:SHOWN_HOSTS]:
        on_host.setdefault(place.host, []).append(place.rank)
    shown = " and ".join(
        f"{', '.join(map(str, ranks))} on {host}" for host, ranks in on_host.items()
    )
    more = f" and {len(places) - SHOWN_HOSTS} more" if len(places) > SHOWN_HOSTS else ""
    return f"rank{'s' * (len(places) > 1)} {shown}{more}"

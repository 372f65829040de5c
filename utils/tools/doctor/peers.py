"""Connect the hosts of a check with each other: addresses, listeners, and what TCP knows."""

from __future__ import annotations

import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ...host import gloo, network, process
from .check import RankPlace

Key = TypeVar("Key")
Value = TypeVar("Value")
SHOWN_HOSTS = 8
ALL_PAIRS_HOSTS = 32  # up to this number each host is measured with each
_BACKLOG = 1024
_TRIES = 20  # to find a free port in a part of the range


def data_address(address: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Return the address that this rank's collectives use.

    It belongs to the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if one is set there,
    and not loopback, see interface_problem().
    address: this host's address on the way to rank 0, which counts otherwise.
    """
    present = {
        name: one for name, one in network.interfaces().items() if not network.is_loopback(one)
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
    """Return why gloo or NCCL find no interface on this host that leads to the others.

    Returns "" if they find one. hosts: of this run.
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


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, port))
    listener.listen(_BACKLOG)
    return listener


def listen_spread(address: str, count: int) -> list[socket.socket]:
    """Return listeners spread over the ports that the kernel gives to gloo and NCCL.

    A firewall may open a part of them only.
    """
    limits = process.system_setting("net/ipv4/ip_local_port_range").split()
    low, high = map(int, limits) if len(limits) == 2 else (32768, 60999)
    listeners = [listen(address)]
    width = (high - low) // count
    for number in range(1, count):
        start = low + number * width
        for port in random.sample(range(start, start + width), min(_TRIES, width)):
            try:
                listeners.append(listen(address, port))
                break
            except OSError:  # another program has it
                continue
    return listeners


def serve(listener: socket.socket, respond: Callable[[socket.socket], None]) -> None:
    """Call respond() with each connection, each in a thread, until the listener is closed."""

    def respond_once(connected: socket.socket) -> None:
        with connected:
            try:
                respond(connected)
            except OSError:  # the other end reports it
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
    """Close a listener, also where a thread waits for a connection."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    listener.close()


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """Return a connection without delays for small messages. Raises OSError."""
    connected = socket.create_connection((address, port), timeout=seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def receive(connected: socket.socket, size: int) -> bytes:
    """Return that many bytes. Raises ConnectionError where the connection ends before."""
    content = bytearray()
    while len(content) < size:
        chunk = connected.recv(size - len(content))
        if not chunk:
            raise ConnectionError("the other host closed the connection")
        content += chunk
    return bytes(content)


class TcpInfo(NamedTuple):
    """What the kernel knows of a connection.

    round_trip: the smallest one, in seconds; None before Linux 4.6. It contains no delay by a busy
    host, because the kernel itself acknowledges packets. sent, sent_again: segments with data.
    """

    round_trip: float | None
    sent: int
    sent_again: int


def tcp_info(connected: socket.socket) -> TcpInfo:
    """Read TCP_INFO; see struct tcp_info in linux/tcp.h."""
    content = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    sent_again = struct.unpack_from("I", content, 100)[0] if len(content) >= 104 else 0
    if len(content) < 160:
        return TcpInfo(None, 0, sent_again)
    microseconds, _, sent = struct.unpack_from("3I", content, 148)
    known = microseconds < 0xFFFFFFFF
    return TcpInfo(microseconds / 1e6 if known else None, sent, sent_again)


def in_threads(
    jobs: Mapping[Key, Callable[[], Value]], seconds: float, threads: int = 64
) -> dict[Key, Value]:
    """Run functions in threads; return the results that there are after a time limit.

    What takes longer goes on in the background, and does not keep the process from ending.
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

    Of many: those at the distances 1, 2, 4, ... on a ring of all hosts.
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
    """Return "rank 3 on h2", or "ranks 2, 3 on h2 and 4, 5 on h3", at most eight of them."""
    on_host: dict[str, list[int]] = {}
    for one in places[:SHOWN_HOSTS]:
        on_host.setdefault(one.host, []).append(one.rank)
    shown = " and ".join(
        f"{', '.join(map(str, ranks))} on {host}" for host, ranks in on_host.items()
    )
    more = f" and {len(places) - SHOWN_HOSTS} more" if len(places) > SHOWN_HOSTS else ""
    return f"rank{'s' * (len(places) > 1)} {shown}{more}"

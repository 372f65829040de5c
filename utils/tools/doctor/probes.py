"""Try connections between hosts by TCP, and count the UDP packets that arrive from each host."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .peers import connect, in_threads, receive, tcp_info

PORTS = 4  # that each host listens at
CONNECT_SECONDS = 4.0
NO_DATA = ("sent data do not arrive", "data do not return")
_TRIPS = 3
_BULK_BYTES = 12_000  # packets of full size, without waiting for an acknowledgement
_SIZES = (576, 1280, 1400, 1500, 4092)  # packets with their headers, in bytes
_PASSES = 3
_PAUSE_SECONDS = 0.02
_ARRIVE_SECONDS = 0.5
_HEADER_BYTES = 28  # of IP and UDP
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h
_PROBE = struct.Struct("!8sII")  # magic, node, size
_MAGIC = b"ddpkit-p"


def connect_all(
    others: Mapping[int, Mapping[str, Any]], own_address: str
) -> list[tuple[int, str, list[int]]]:
    """Connect to all ports of other hosts at once, and exchange data over the first one.

    others: number of a host, its "address" and "ports". Returns for each host its number, the
    problem or "", and the ports that did not respond.
    """
    jobs = {
        (node, port): partial(_try, place["address"], port, port == place["ports"][0])
        for node, place in others.items()
        for port in place["ports"]
        if place["address"] != own_address
    }
    results = in_threads(jobs, 2 * CONNECT_SECONDS)
    found: list[tuple[int, str, list[int]]] = []
    for node, place in others.items():
        of_node = {port: results.get((node, port), "timed out") for port in place["ports"]}
        failed = [port for port, problem in of_node.items() if problem]
        first = of_node[place["ports"][0]]
        problem = first if first in NO_DATA or len(failed) == len(of_node) else ""
        if place["address"] == own_address:
            problem = "same address"
        found.append((node, problem, failed))
    return found


def round_trips(others: Mapping[int, Mapping[str, Any]]) -> dict[int, float | None]:
    """Return the round trips to other hosts, as the kernel measures them when it connects."""

    def measure(place: Mapping[str, Any]) -> float | None:
        trips = []
        for _ in range(_TRIPS):
            with contextlib.suppress(OSError):
                with connect(place["address"], place["ports"][0], CONNECT_SECONDS) as connected:
                    trips.append(tcp_info(connected).round_trip)
        return min((trip for trip in trips if trip is not None), default=None)

    jobs = {node: partial(measure, place) for node, place in others.items()}
    return in_threads(jobs, CONNECT_SECONDS)


def _try(address: str, port: int, has_data: bool) -> str:
    """Connect, and send and receive some packets; return the problem, or ""."""
    try:
        connected = connect(address, port, CONNECT_SECONDS)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timed out"
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return "no route" if unreachable else str(error.strerror or error)
    problem = NO_DATA[0]
    with connected, contextlib.suppress(OSError):
        if has_data:
            connected.sendall(bytes(_BULK_BYTES))
            receive(connected, 1)
            problem = NO_DATA[1]
            receive(connected, _BULK_BYTES)
        return ""
    return problem


def respond(connected: socket.socket) -> None:
    """Serve the other end of connect_all()."""
    connected.settimeout(2 * CONNECT_SECONDS)
    receive(connected, _BULK_BYTES)
    connected.sendall(b"r")
    connected.sendall(bytes(_BULK_BYTES))
    connected.recv(1)  # until the other end has closed


class Probes:
    """UDP packets of several sizes, sent to the partners and counted as they arrive."""

    def __init__(self, address: str, node: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        if family == socket.AF_INET:
            self._socket.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        self._node = node
        self._count: Counter[int] = Counter()
        self._largest: Counter[int] = Counter()
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._receive, daemon=True, name="doctor probes").start()

    def send(self, others: Mapping[int, Mapping[str, Any]], mtu: int) -> None:
        """Send packets up to the MTU of the interface to each partner, several times."""
        sizes = [*(size for size in _SIZES if size < mtu), min(mtu, 65_000)]
        for _ in range(_PASSES):
            for place in others.values():
                for size in sizes:
                    content = _PROBE.pack(_MAGIC, self._node, size)
                    content += bytes(size - _HEADER_BYTES - len(content))
                    with contextlib.suppress(OSError):  # no route: nothing arrives
                        self._socket.sendto(content, (place["address"], place["udp"]))
            time.sleep(_PAUSE_SECONDS)

    def received(self, expected: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return what has arrived from each host. Waits shortly for packets on their way."""
        limit = time.monotonic() + _ARRIVE_SECONDS
        while time.monotonic() < limit and any(self._count[one] < _PASSES for one in expected):
            time.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread
        return [(node, self._count[node], self._largest[node]) for node in expected]

    def _receive(self) -> None:
        with self._socket:
            while True:
                try:
                    content = self._socket.recv(1 << 16)
                except OSError:
                    return
                if len(content) < _PROBE.size:
                    if not content:  # shut down
                        return
                    continue
                magic, node, size = _PROBE.unpack_from(content)
                if magic == _MAGIC:
                    self._count[node] += 1
                    self._largest[node] = max(size, self._largest[node])

"""Measure the link between two hosts: round trip, bandwidth in both directions, lost packets.

The lower host of a pair leads, and the higher one follows its commands.
"""

from __future__ import annotations

import contextlib
import functools
import math
import select
import socket
import statistics
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...host import process
from ..host_pairs import Pair
from .peers import connect, in_threads, listen, receive, serve, stop, tcp_info

_CONNECT_SECONDS = 4.0
_WAIT_SECONDS = 12.0  # until the partner has ended its previous round
_RESPONSE_SECONDS = 5.0
_PINGS = 40
_PING_SECONDS = 0.3
_FAR_SECONDS = 0.05  # a longer round trip is reported by the check of connections
_FIRST_BYTES, _LAST_BYTES = 1 << 16, 1 << 26
_LONG_ENOUGH_SECONDS = 0.04  # of the transfer that counts
_LARGEST_SHARE = 0.9  # of the time without a core: the threads may wait at the same time
_LEAST_IDLE = 0.1  # share of the time of all cores of a host
_BATCH, _BATCHES = 30, 20  # UDP packets
_BATCH_SECONDS = 0.6  # for all batches of one direction
_GRACE_SECONDS = 0.02
_PACKET_BYTES = 1000
_COMMAND = struct.Struct("!cI")
_REPORT = struct.Struct("!d")
_COUNTS = struct.Struct("!II")
_PACKET = struct.Struct("!8sII")  # magic, node, batch
_MAGIC = b"ddpkit-l"


@dataclass(frozen=True)
class Measured:
    """One link, seen from the lower of its two hosts, a. Seconds, and bytes per second.

    a_to_b, b_to_a: bandwidth; None where the round trip is too long for a measurement.
    busy: share of the time, in each direction, in which the hosts had no core for it.
    probes, lost: UDP packets from a to b and back; no probes where UDP does not pass.
    segments, sent_again: of TCP, in both directions. times: how often the link was measured.
    """

    a: int
    b: int
    round_trip: float
    jitter: float
    a_to_b: float | None = None
    b_to_a: float | None = None
    busy: tuple[float, float] = (0.0, 0.0)
    probes: tuple[int, int] = (0, 0)
    lost: tuple[int, int] = (0, 0)
    segments: int = 0
    sent_again: int = 0
    times: int = 1

    @property
    def pair(self) -> Pair:
        """The two hosts."""
        return self.a, self.b

    def other(self, node: int) -> int:
        """Return the other one of the two hosts."""
        return self.b if node == self.a else self.a

    @property
    def bandwidth(self) -> float | None:
        """That of the slower direction."""
        if self.a_to_b is None or self.b_to_a is None:
            return None
        return min(self.a_to_b, self.b_to_a)

    @property
    def possible_bandwidth(self) -> float:
        """What the slower direction could have with idle cores at both ends."""
        there, back = self.a_to_b or 0.0, self.b_to_a or 0.0
        return min(there / (1 - self.busy[0]), back / (1 - self.busy[1]))


class LinkEnd:
    """This host's end of its links: a TCP connection for each, and one socket for UDP."""

    def __init__(self, address: str, node: int) -> None:
        self._node = node
        self._listener = listen(address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._udp = socket.socket(family, socket.SOCK_DGRAM)
        self._udp.bind((address, 0))
        self._udp.setblocking(False)
        ports = (self._listener.getsockname()[1], self._udp.getsockname()[1])
        self.place = {"address": address, "tcp": ports[0], "udp": ports[1]}
        self._connections: dict[int, socket.socket] = {}
        self._udp_places: dict[int, tuple[str, int]] = {}
        serve(self._listener, self._keep)

    def connect(self, places: Mapping[int, Any], pairs: Sequence[Pair]) -> None:
        """Connect to the higher host of each pair; the lower ones connect to this host."""
        self._udp_places = {
            node: (place["address"], place["udp"]) for node, place in places.items() if place
        }
        higher = [b for a, b in pairs if a == self._node and places.get(b)]
        jobs = {node: functools.partial(self._connect_one, places[node]) for node in higher}
        found = in_threads(jobs, _CONNECT_SECONDS + 1)
        self._connections.update((node, one) for node, one in found.items() if one)

    def measure(self, pair: Pair, limit: float = math.inf) -> Measured | None:
        """Measure a link; the result is on its lower host, and None on the other one.

        limit: monotonic seconds, after which the partner does not begin.
        """
        a, b = pair
        other = b if self._node == a else a
        connected = self._connections.get(other)
        if connected is None:
            return None
        # The partner may still have to end its previous round.
        connected.settimeout(max(1.0, min(_WAIT_SECONDS, limit + 1.0 - time.monotonic())))
        try:
            if self._node == a:
                return self._lead(connected, pair)
            self._follow(connected, other)
        except (OSError, struct.error):
            with contextlib.suppress(OSError):
                connected.close()
            self._connections.pop(other)
        return None

    def close(self) -> None:
        """Close all connections."""
        stop(self._listener)
        for connected in self._connections.values():
            connected.close()
        self._udp.close()

    def _connect_one(self, place: Mapping[str, Any]) -> socket.socket | None:
        try:
            connected = connect(place["address"], place["tcp"], _CONNECT_SECONDS)
            connected.sendall(struct.pack("!I", self._node))
            receive(connected, 1)
        except OSError:  # the check of connections reports it
            return None
        return connected

    def _keep(self, connected: socket.socket) -> None:
        connected.settimeout(_CONNECT_SECONDS)
        (node,) = struct.unpack("!I", receive(connected, 4))
        self._connections[node] = socket.socket(fileno=connected.detach())
        self._connections[node].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[node].settimeout(_WAIT_SECONDS)
        self._connections[node].sendall(b"k")

    # The leader sends commands: P a ping, S it sends bytes, R it receives bytes, U it has sent a
    # batch of packets, D it expects one, I asks for the follower's TCP_INFO, E is the end.

    def _lead(self, connected: socket.socket, pair: Pair) -> Measured:
        _ping(connected)  # waits for the partner
        connected.settimeout(_RESPONSE_SECONDS)
        before = tcp_info(connected)
        started = time.monotonic()
        trips: list[float] = []
        while len(trips) < _PINGS and time.monotonic() < started + _PING_SECONDS:
            trips.append(_ping(connected))
        trips.sort()
        middle = statistics.median(trips)
        found = Measured(*pair, middle, trips[int(0.9 * (len(trips) - 1))] - middle)
        if trips[0] < _FAR_SECONDS:
            there, busy_there = _transfer(connected, b"S", trips[0])
            back, busy_back = _transfer(connected, b"R", trips[0])
            found = replace(found, a_to_b=there, b_to_a=back, busy=(busy_there, busy_back))
            there_sent, there_lost = self._lose(connected, pair[1], b"U")
            back_sent, back_lost = self._lose(connected, pair[1], b"D")
            found = replace(found, probes=(there_sent, back_sent), lost=(there_lost, back_lost))
        connected.sendall(_COMMAND.pack(b"I", 0))
        segments, sent_again = _COUNTS.unpack(receive(connected, _COUNTS.size))
        after = tcp_info(connected)
        connected.sendall(_COMMAND.pack(b"E", 0))
        return replace(
            found,
            segments=segments + after.sent - before.sent,
            sent_again=sent_again + after.sent_again - before.sent_again,
        )

    def _lose(self, connected: socket.socket, other: int, command: bytes) -> tuple[int, int]:
        """Send batches of packets in one direction; return how many were sent and lost."""
        limit = time.monotonic() + _BATCH_SECONDS
        sent = lost = 0
        for batch in range(1, _BATCHES + 1):
            if command == b"U":
                self._send_batch(other, batch)
            connected.sendall(_COMMAND.pack(command, batch))
            (arrived,) = struct.unpack("!I", receive(connected, 4))
            if command == b"D":
                arrived = self._count_batch(other, batch)
            sent, lost = sent + _BATCH, lost + _BATCH - arrived
            if sent == lost:  # a firewall
                return 0, 0
            if time.monotonic() > limit:
                break
        return sent, lost

    def _follow(self, connected: socket.socket, other: int) -> None:
        before = tcp_info(connected)
        while True:
            command, number = _COMMAND.unpack(receive(connected, _COMMAND.size))
            connected.settimeout(_RESPONSE_SECONDS)
            if command == b"E":
                return
            if command == b"P":
                connected.sendall(b"p")
            elif command in b"SR":
                busy = _Busy()
                (_sink if command == b"S" else _source)(connected, number)
                connected.sendall(_REPORT.pack(busy.share()))
            elif command == b"U":
                connected.sendall(struct.pack("!I", self._count_batch(other, number)))
            elif command == b"D":
                self._send_batch(other, number)
                connected.sendall(struct.pack("!I", _BATCH))
            elif command == b"I":
                after = tcp_info(connected)
                counts = (after.sent - before.sent, after.sent_again - before.sent_again)
                connected.sendall(_COUNTS.pack(*counts))

    def _send_batch(self, other: int, batch: int) -> None:
        content = _PACKET.pack(_MAGIC, self._node, batch).ljust(_PACKET_BYTES, b"\0")
        for _ in range(_BATCH):
            with contextlib.suppress(OSError):
                self._udp.sendto(content, self._udp_places[other])

    def _count_batch(self, other: int, batch: int) -> int:
        """Count the packets of a batch. They have been sent before, so none is far away."""
        count = 0
        while count < _BATCH:
            if not select.select([self._udp], [], [], _GRACE_SECONDS)[0]:
                break
            with contextlib.suppress(OSError, struct.error):
                content = self._udp.recv(_PACKET_BYTES)
                count += _PACKET.unpack_from(content) == (_MAGIC, other, batch)
        return count


class _Busy:
    """How busy this host is while something is measured."""

    def __init__(self) -> None:
        self._started, self._waited = time.monotonic(), process.thread_seconds()[1]
        self._idle, self._total = process.cpu_seconds()

    def share(self) -> float:
        """Return the share of the time since then in which this thread lacked a core.

        The kernel needs cores, too. If none was idle, the share is the largest that counts.
        """
        idle, total = process.cpu_seconds()
        if idle - self._idle < _LEAST_IDLE * (total - self._total):
            return _LARGEST_SHARE
        seconds = max(1e-6, time.monotonic() - self._started)
        return (process.thread_seconds()[1] - self._waited) / seconds


def _ping(connected: socket.socket) -> float:
    started = time.perf_counter()
    connected.sendall(_COMMAND.pack(b"P", 0))
    receive(connected, 1)
    return time.perf_counter() - started


def _transfer(connected: socket.socket, command: bytes, round_trip: float) -> tuple[float, float]:
    """Return bytes per second in one direction, and the share of time without a core for it.

    The size grows until the transfer takes long enough: a buffer on the way hides a slow link. The
    last size counts, and its faster transfer: the first one may have met another program.
    """
    size = _FIRST_BYTES
    found: list[tuple[float, float]] = []
    while len(found) < 2:
        started, busy = time.perf_counter(), _Busy()
        connected.sendall(_COMMAND.pack(command, size))
        (_source if command == b"S" else _sink)(connected, size)
        (busy_there,) = _REPORT.unpack(receive(connected, _REPORT.size))
        seconds = max(1e-6, time.perf_counter() - started - round_trip)
        if seconds > _LONG_ENOUGH_SECONDS or size >= _LAST_BYTES:
            found.append((size / seconds, min(_LARGEST_SHARE, busy.share() + busy_there)))
        else:
            found.clear()
            size = min(4 * size, _LAST_BYTES)
    return max(found)


def _source(connected: socket.socket, size: int) -> None:
    content = memoryview(bytes(min(size, 1 << 20)))
    for start in range(0, size, len(content)):
        connected.sendall(content[: size - start])


def _sink(connected: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        count = connected.recv_into(buffer[:size])
        if not count:
            raise ConnectionError("the other host closed the connection")
        size -= count

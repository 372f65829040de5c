"""Join the ranks of this run of `doctor`, and gather JSON values of all ranks at rank 0.

Rank 0 sends them to every rank. No torch, unless torchrun has started the ranks. What the ranks
report when they join cannot make them differ: the checks compare them later.

Each rank needs a connection to rank 0 only, so that a bad link between two other hosts does not
hang the exchange. Each rank also sends a heartbeat: nobody waits for a rank that has been stopped,
or whose host has vanished.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import channel
from ...channel import Channel, Loop, PeerServer, Secret
from ...connection import Message
from ...host import process
from ...launch_error import LaunchError
from ...launchers.detect import Detection, find_launcher
from ...launchers.launcher import Placement
from ...launchers.rank_variables import without_inherited
from ...monitor.monitor import Monitor
from ...startup.address import Rendezvous, agree
from ...startup.reports import RankReport, make_report
from .check import RankPlace

# A rank that does not find rank 0 explains why, before rank 0 ends the launch.
EARLIER_SECONDS = 4.0
_PLACES_SECONDS = 20.0
_SEND_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
# How much longer than the time limit a rank waits for rank 0: by then rank 0 has ended or hangs.
_GRACE_SECONDS = 30.0
_SEGMENT_BYTES = 500
_HEARTBEAT_SECONDS = 1.0
_BEAT: Message = {"kind": "beat", "progress": 0, "entered": 0, "location": ""}
SILENT_SECONDS = 10.0  # without a heartbeat: the process is stopped, or cannot be reached


class Rank0Lost(RuntimeError):
    """Rank 0 has ended or does not respond."""


class Gathered:
    """The values of one topic. Missing values are None.

    values: by rank. ended: the ranks whose connection to rank 0 has ended.
    """

    def __init__(self, values: list[Any], ended: Sequence[int] = ()) -> None:
        self.values = values
        self.ended = set(ended)


class Exchange:
    """This rank's connection to rank 0. A thread receives, so that any thread may gather."""

    def __init__(self, rank: int, world_size: int, address: str, port: int, secret: Secret) -> None:
        """Connect to the server on rank 0. Raises Rank0Lost if that fails."""
        self.rank = rank
        self._world_size = world_size
        self._received: dict[str, Gathered] = {}
        self._change = threading.Condition()
        self._send_lock = threading.Lock()
        self._lost = ""
        try:
            self._connection = channel.prove(
                _connect(address, port),
                secret,
                "doctor",
                index=rank,
                size=world_size,
                seconds=_CONNECT_SECONDS,
            )
        except OSError as error:
            raise Rank0Lost(
                f"rank {rank} on {socket.gethostname()} cannot connect to rank 0 at {address} port "
                f"{port} again: {error}. Check for rank 0's own message"
            ) from None
        self._send(_BEAT)
        self._closed = threading.Event()
        threading.Thread(target=self._receive, daemon=True, name="doctor exchange").start()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="doctor beat").start()

    def gather(
        self, topic: str, value: Any, seconds: float, ranks: Sequence[int] | None = None
    ) -> Gathered:
        """Send a value, and wait for the values of all ranks, or of these.

        topic: used once, by all these ranks. seconds: time limit for the others. Raises Rank0Lost.
        """
        members = None if ranks is None else list(ranks)
        fields = {"topic": topic, "value": value, "seconds": float(seconds), "ranks": members}
        self._send({"kind": "gather", **fields})
        limit = time.monotonic() + seconds + _GRACE_SECONDS
        with self._change:
            while topic not in self._received:
                left = limit - time.monotonic()
                if self._lost or left <= 0:
                    raise Rank0Lost(
                        f"rank {self.rank} on {socket.gethostname()} lost rank 0: "
                        f"{self._lost or 'it does not respond'}. Check for rank 0's own message"
                    )
                self._change.wait(left)
            return self._received.pop(topic)

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        # The thread closes the socket: it may be waiting for it.
        with contextlib.suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: Message) -> None:
        with self._send_lock:
            self._connection.send(message, _SEND_SECONDS)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(_HEARTBEAT_SECONDS):
            self._send(_BEAT)

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.receive_one(3600.0)
            except TimeoutError:
                continue
            with self._change:
                if message is None:
                    self._lost = self._connection.problem
                elif message["kind"] == "gathered":
                    self._received[message["topic"]] = Gathered(message["values"], message["ended"])
                self._change.notify_all()
            if message is None:
                return


def _connect(address: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = found[0]
    connected = socket.socket(family, kind, protocol)
    try:
        _use_small_packets(connected)
        connected.settimeout(_CONNECT_SECONDS)
        connected.connect(target)
    except OSError:
        connected.close()
        raise
    return connected


def _use_small_packets(one: socket.socket) -> None:
    """Let a path that drops large packets carry the facts about it. Before connect()."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


class _Topic:
    """Values that are being gathered."""

    def __init__(self, members: set[int]) -> None:
        self.members = members
        self.values: dict[int, Any] = {}
        self.deadline = float("inf")
        self.message: Message | None = None  # to the ranks, when it is complete


class Server(PeerServer):
    """Rank 0's end of all connections. A thread serves them until close()."""

    def __init__(self, listener: socket.socket, world_size: int, secret: Secret) -> None:
        """listener: a listening socket, which is closed in the end."""
        self._world_size = world_size
        self._rank_of: dict[Channel, int] = {}
        self._connection_of: dict[int, Channel] = {}
        self._topics: dict[str, _Topic] = {}
        self._heard = dict.fromkeys(range(world_size), time.monotonic())  # the last time, by rank
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self._closing = False
        _use_small_packets(listener)
        super().__init__(listener, Loop(), secret, world_size)
        self._thread = threading.Thread(target=self._run, daemon=True, name="doctor server")
        self._thread.start()

    def wait_for_others(self, seconds: float) -> None:
        """Wait until all ranks but rank 0 have closed their connections."""
        if self._world_size > 1:
            self._all_ended.wait(seconds)

    def close(self) -> None:
        """End all connections."""
        self._closing = True
        self._thread.join(2)

    def _run(self) -> None:
        while not self._closing:
            self._loop.run_once(self._pause())
            self._complete_topics()
        super().close()
        self._listener.close()

    def _pause(self) -> float:
        deadlines = [one.deadline for one in self._topics.values() if one.message is None]
        return min(0.2, max(0.0, min(deadlines, default=1.0) - time.monotonic()))

    def receive(self, peer: Channel, message: Message) -> None:
        rank = self._rank_of.setdefault(peer, peer.session.hello["index"])
        self._connection_of[rank] = peer
        self._heard[rank] = time.monotonic()
        if message["kind"] == "gather":
            self._add(rank, message)

    def lost(self, peer: Channel) -> None:
        self._ended.add(self._rank_of[peer])
        if len(self._ended - {0}) == self._world_size - 1:
            self._all_ended.set()

    def _add(self, rank: int, message: Message) -> None:
        members = message["ranks"]
        topic = self._topics.setdefault(
            message["topic"], _Topic(set(range(self._world_size) if members is None else members))
        )
        if topic.message is not None:  # a late rank
            self._connection_of[rank].send(topic.message)
            return
        topic.values[rank] = message["value"]
        topic.deadline = min(topic.deadline, time.monotonic() + message["seconds"])

    def _complete_topics(self) -> None:
        now = time.monotonic()
        for name, topic in self._topics.items():
            if topic.message is not None:
                continue
            missing = topic.members - set(topic.values) - self._ended
            present = [rank for rank in missing if now < self._heard[rank] + SILENT_SECONDS]
            if present and now < topic.deadline:
                continue
            topic.message = {
                "kind": "gathered",
                "topic": name,
                "values": [topic.values.get(rank) for rank in range(self._world_size)],
                "ended": sorted(self._ended),
            }
            for rank in topic.values:
                if rank not in self._ended:
                    self._connection_of[rank].send(topic.message)
            topic.values = {}


@dataclass
class JoinedDoctor:
    """The ranks of this run, as seen from one of them.

    everyone: by rank. address: this host's address on the way to rank 0.
    notes: on rank 0, what the user should know about the launch.
    """

    placement: Placement
    everyone: tuple[RankPlace, ...]
    address: str = "127.0.0.1"
    notes: tuple[str, ...] = ()
    _exchange: Exchange | None = None
    _server: Server | None = None
    _monitor: Monitor | None = None

    @property
    def me(self) -> RankPlace:
        """This rank."""
        return self.everyone[self.placement.rank]

    def gather(
        self, topic: str, value: Any, seconds: float, ranks: Sequence[int] | None = None
    ) -> Gathered:
        """Return the values of all ranks, or of these, as Exchange.gather() does."""
        if self._exchange is None:
            return Gathered([value])
        return self._exchange.gather(topic, value, seconds, ranks)

    def close(self) -> None:
        """Leave: rank 0 as the last one, because its exit status may end the others."""
        if self._monitor is not None:
            self._monitor.leave("")
        if self._server is not None:
            self._server.wait_for_others(3.0)
            self._server.close()
        if self._exchange is not None:
            self._exchange.close()


def join(timeout: float) -> JoinedDoctor:
    """Join the other ranks. timeout: seconds, after which rank 0 names the missing ranks.

    Raises LaunchError when a rank is missing, or the launch contradicts itself.
    """
    detection = find_launcher()
    placement = detection.placement
    if placement.world_size == 1:
        return JoinedDoctor(placement, (RankPlace(0, socket.gethostname(), 0, 0),))

    seconds = timeout if placement.rank == 0 else max(timeout / 2, timeout - EARLIER_SECONDS)
    detection = Detection(detection.launcher, placement.replace(notes=()), detection.reason)
    # host_cores: placement.py reports on the cores, which is a note of the start otherwise.
    report: RankReport = {**make_report(detection.placement, bind=False), "host_cores": 1}
    found = _agree(detection, report, time.monotonic() + seconds)
    assert found.monitor is not None  # of every launch with several ranks
    found.monitor.started()

    server = None
    if found.listener is not None:
        server = Server(found.listener, placement.world_size, found.secret)
    exchange = Exchange(
        placement.rank, placement.world_size, found.rank_0_addr, found.master_port, found.secret
    )
    here = [socket.gethostname(), process.boot_id(), process.namespace("net")]
    hosts = exchange.gather("places", here, _PLACES_SECONDS).values
    return JoinedDoctor(
        placement,
        _places(hosts),
        found.local_addr,
        found.notes if placement.rank == 0 else (),
        exchange,
        server,
        found.monitor,
    )


def _agree(detection: Detection, report: RankReport, deadline: float) -> Rendezvous:
    launcher, timeout = detection.launcher, deadline - time.monotonic()
    if launcher.has_store(os.environ):
        from ...startup.store import agree_by_agent_store  # imports torch

        return agree_by_agent_store(detection, report, deadline)[0]
    environ = without_inherited(os.environ)
    return agree(detection.placement, report, launcher=launcher, timeout=timeout, environ=environ)


def _places(hosts: Sequence[Sequence[str] | None]) -> tuple[RankPlace, ...]:
    """Return the place of each rank. hosts: what identifies the host of each rank, by rank.

    Raises LaunchError where a rank has not reported its host.
    """
    if None in hosts:
        missing = [rank for rank, host in enumerate(hosts) if host is None]
        raise LaunchError(
            f"{len(missing)} of {len(hosts)} ranks joined, but then did not report their host: "
            f"{', '.join(map(str, missing[:16]))}. Check for messages of these ranks"
        )
    nodes: dict[tuple[str, ...], int] = {}
    ranks_on: dict[int, int] = {}
    places = []
    for rank, host in enumerate(hosts):
        assert host is not None
        node = nodes.setdefault(tuple(host), len(nodes))
        places.append(RankPlace(rank, host[0], node, ranks_on.get(node, 0)))
        ranks_on[node] = ranks_on.get(node, 0) + 1
    return tuple(places)

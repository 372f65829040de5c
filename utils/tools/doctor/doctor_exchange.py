"""Join the ranks of this run of `doctor`. Rank 0 then requests steps of checks, and they reply.

Each rank is connected only to rank 0, so that a bad link between two other hosts does not hang the
exchange. A rank runs each step in a separate thread, and responds even if a step hangs. No torch,
unless torchrun has started the ranks. The ranks' start-up reports are made equal here: the checks
compare the ranks later.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

from ... import channel
from ...channel import Channel, Loop, Message, PeerServer, Secret
from ...errors import LaunchError
from ...host import process
from ...launchers.detect import Detection, find_launcher
from ...launchers.launcher import Placement
from ...startup.address import Rendezvous, agree
from ...startup.reports import RankReport, make_report
from .check import RankPlace, Ranks

# Seconds for a rank that does not find rank 0 to explain why, before rank 0 ends the launch.
EARLIER_SECONDS = 4.0
_PLACES_SECONDS = 20.0
_SEND_SECONDS = _CONNECT_SECONDS = 10.0
_BEGIN_SECONDS = 5.0
# A process that misses all of these probes is stopped. A process that loads a library holds the
# GIL.
_PROBES, _PROBE_SECONDS = 5, 5.0
_RANK_0_SECONDS = 600.0  # seconds without a request, after which rank 0 hangs
_HOST_LOST_SECONDS = 60
_SEGMENT_BYTES = 500
_BEGIN, _RESPOND = "begin", "respond"  # requests besides checks
_NO_STEP, _FIRST = 0, 1  # message numbers: not in reply to a request; the first one

# Runs a step. Arguments: the ranks, the check, and the ranks' values since its last step (or None).
Step = Callable[[Ranks, str, "list[Any] | None"], Any]


class Rank0Lost(RuntimeError):
    """Rank 0 has ended or does not respond."""


class Lead(PeerServer):
    """Rank 0's side of the connections. everyone: indexed by rank. notes: for the user."""

    def __init__(self, placement: Placement, found: Rendezvous) -> None:
        """Wait for the ranks. Raises LaunchError if one has not reported its host."""
        assert found.listener is not None
        self.placement, self.notes = placement, found.notes
        self._of_start = found.connections
        self._channels: dict[int, Channel] = {}
        self._ended: set[int] = set()
        self._number, self._replies = _FIRST, dict[int, Any]()  # latest request
        self._heard: set[int] = set()  # ranks heard from since the last call of responding()
        self._unanswered = Counter[int]()  # probes, not seconds: rank 0 may have waited for its GIL
        _use_small_packets(found.listener)
        super().__init__(found.listener, Loop(), found.secret, placement.world_size)
        ranks = range(placement.world_size)
        self._wait(ranks, _PLACES_SECONDS, self._replies)
        self.everyone = _places([self._replies.get(rank) for rank in ranks])
        places = [[place.rank, place.host, place.node, place.local_rank] for place in self.everyone]
        self.request(ranks, _BEGIN, places, _BEGIN_SECONDS)

    def request(
        self, ranks: Collection[int], what: str, values: list[Any] | None, seconds: float
    ) -> dict[int, Any]:
        """Request a step from these ranks; return the replies that arrive in time, by rank.

        Ranks that have ended, or whose process has not responded for 25 s, are not waited for.
        """
        self._number, self._replies = self._number + 1, {}
        self._unanswered.clear()
        self._send(ranks, self._number, what, values)
        self._wait(ranks, seconds, self._replies)
        return self._replies

    def responding(self, ranks: Collection[int]) -> Collection[int]:
        """Return the ranks whose process responds, even if a step hangs."""
        self._heard.clear()
        self._send(ranks, _NO_STEP, _RESPOND, None)
        self._wait(ranks, math.inf, self._heard)
        return self._heard & set(ranks)

    def has_ended(self, rank: int) -> bool:
        return rank in self._ended

    def close(self) -> None:
        """Leave. Rank 0 leaves last, because its exit status may end the other ranks."""
        for rank in self._channels.keys() - self._ended:
            self._channels[rank].send({"kind": "end", "cause": ""})
        for connection in self._of_start:
            connection.close()
        limit = time.monotonic() + 3.0
        while self._channels.keys() - self._ended and time.monotonic() < limit:
            self._loop.run_once(0.2)
        super().close()
        self._listener.close()

    def _send(self, ranks: Collection[int], number: int, what: str, values: Any) -> None:
        message = {"kind": "request", "number": number, "what": what, "values": values}
        for rank in set(ranks) & self._channels.keys() - self._ended:
            self._channels[rank].send(message)

    def _wait(self, ranks: Collection[int], seconds: float, arrived: Container[int]) -> None:
        """Wait until each of these ranks has arrived, has ended or is stopped."""
        now = time.monotonic()
        limit, probe = now + seconds, now + _PROBE_SECONDS
        while now < limit and (waiting := [rank for rank in ranks if rank not in arrived]):
            waiting = [rank for rank in waiting if rank not in self._ended]
            if now >= probe:
                self._unanswered.update(waiting)
                self._send(waiting, _NO_STEP, _RESPOND, None)
                probe = now + _PROBE_SECONDS
            if all(self._unanswered[rank] >= _PROBES for rank in waiting):
                return
            self._loop.run_once(max(0.0, min(limit, probe) - now))
            now = time.monotonic()

    def receive(self, peer: Channel, message: Message) -> None:
        rank = peer.session.hello["index"]
        self._channels[rank] = peer
        self._heard.add(rank)
        self._unanswered[rank] = 0
        if message["number"] == self._number:
            self._replies[rank] = message["value"]

    def lost(self, peer: Channel) -> None:
        self._ended.add(peer.session.hello["index"])


def join(timeout: float, step: Step) -> Lead | None:
    """Join the other ranks. Return rank 0's side; on another rank, run its steps until the end.

    timeout: seconds until rank 0 names the missing ranks. Raises LaunchError if a rank is missing
    or the launch contradicts itself; on other ranks, Rank0Lost.
    """
    detection = find_launcher()
    placement = detection.placement
    if placement.world_size == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        port, key = listener.getsockname()[1], Secret(os.urandom(16))
        unused: Any = None
        found = Rendezvous(unused, master_port=port, listener=listener, secret=key)
    else:
        seconds = timeout if placement.rank == 0 else max(timeout / 2, timeout - EARLIER_SECONDS)
        detection = detection._replace(placement=placement.replace(notes=()))
        # host_cores is 1 to avoid a start-up note about cores; placement.py reports on them.
        report: RankReport = {**make_report(detection.placement, bind=False), "host_cores": 1}
        found = _agree(detection, report, time.monotonic() + seconds)
    if placement.rank == 0:
        threading.Thread(target=_reply, args=(placement, found, step), daemon=True).start()
        return Lead(placement, found)
    try:
        _reply(placement, found, step)
    finally:
        for connection in found.connections:
            connection.close()
    return None


def _agree(detection: Detection, report: RankReport, deadline: float) -> Rendezvous:
    launcher, agent = detection.launcher, None
    if launcher.has_store(os.environ):
        from ...startup.store import agent_store  # imports torch

        agent = agent_store(detection, deadline)
    return agree(
        detection.placement,
        report,
        launcher=launcher,
        timeout=deadline - time.monotonic(),
        environ=detection.environ,
        name_service=agent,
    )


def _reply(placement: Placement, found: Rendezvous, step: Step) -> None:
    """Connect this rank, and run the steps that rank 0 requests. Raises Rank0Lost."""
    here = f"rank {placement.rank} on {socket.gethostname()}"
    address, port = found.rank_0_addr, found.master_port
    try:
        peer = channel.prove(
            _connect(address, port),
            found.secret,
            "doctor",
            index=placement.rank,
            size=placement.world_size,
            seconds=_CONNECT_SECONDS,
        )
    except OSError as error:
        raise Rank0Lost(
            f"{here} cannot connect to rank 0 at {address} port {port} again: {error}. Check for "
            "rank 0's own message"
        ) from None
    peer.keep_alive(_HOST_LOST_SECONDS)
    lock = threading.Lock()

    def send(number: int, value: Any) -> None:
        with lock:
            peer.send({"kind": "reply", "number": number, "value": value}, _SEND_SECONDS)

    def run(number: int, what: str, values: list[Any] | None) -> None:
        send(number, step(ranks, what, values))

    send(_FIRST, [socket.gethostname(), process.boot_id(), process.namespace("net")])
    problem = "it does not respond"
    with contextlib.suppress(TimeoutError):
        while (message := peer.receive_one(_RANK_0_SECONDS)) and message["kind"] != "end":
            number, what, values = (message[name] for name in ("number", "what", "values"))
            if what == _BEGIN:
                everyone = tuple(RankPlace(*fields) for fields in values)
                ranks = Ranks(everyone[placement.rank], everyone, found.local_addr)
            if what in (_BEGIN, _RESPOND):
                send(number, None)
            else:
                args = (number, what, values)
                threading.Thread(target=run, args=args, daemon=True, name=f"check {what}").start()
        if message:
            peer.close()
            return
        problem = peer.problem
    raise Rank0Lost(f"{here} lost rank 0: {problem}. Check for rank 0's own message")


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


def _use_small_packets(connection: socket.socket) -> None:
    """Let facts pass over a path that drops large packets. Call before connect()."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


def _places(hosts: Sequence[Sequence[str] | None]) -> tuple[RankPlace, ...]:
    """Return the place of each rank. hosts: identifies the host of each rank."""
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

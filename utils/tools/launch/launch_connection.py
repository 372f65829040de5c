"""Send and receive the messages between the processes of a launch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypedDict, cast

from ... import channel, connection
from ...channel import Channel, Loop, PeerServer, Secret
from .host_ranks import HostProcess, RankMask

LOST_SECONDS = 30  # without any TCP response from the other host
CONNECT_SECONDS = 60.0
REFUSED_SECONDS = 5.0
_POLL_SECONDS = 60.0


class JoinReport(TypedDict, total=False):
    """What a rank of a native launcher reports when it joins the launch."""

    reached: str  # the address by which it has reached launch.py
    host: list[str]  # the host's name, and what distinguishes it from another of that name
    rank: int
    world_size: int
    local_rank: int | None  # None where the launcher does not set it
    process: tuple[int, int | None, str]  # process id, start time, namespace of process ids
    port: int  # of rank 0: reserved on its host
    cores: RankMask
    problem: str  # why the rank cannot start; empty where it can


class StartOrder(TypedDict):
    """What an agent starts on its host."""

    launch_id: str
    host: str  # of launch.py
    environ: dict[str, str]
    output_dir: str
    watched_ranks: int  # for nested.GroupWatch
    processes: list[HostProcess]


class Message(TypedDict, total=False):
    """One message. Each has one of these keys; more may be added."""

    # agent -> coordinator
    # Of the first message: index of its host in the plan, the address by which it has reached
    # launch.py, name of its host
    hello: tuple[int, str, str]
    ready: tuple[str, int]  # why the ranks cannot start, or ""; a port that is reserved there
    output: tuple[int, str, int]  # stream (1 or 2), text, index of the process
    exit: tuple[int, int]  # index of the process, exit status
    # Also from a host with native ranks, see nested.GroupWatch:
    group: tuple[int, int]  # a rank that has one without the others; its size
    copies: bool  # no rank of the host has formed a group: they run (true), or have ended
    done: bool  # all processes have ended and all output was sent
    # coordinator -> agent
    check: tuple[str, str, int | None]  # arguments of host_readiness.problem_with()
    start: StartOrder
    signal: tuple[int, bool]  # number; whether it is for torchrun's workers only
    end: bool  # end all processes
    # rank -> launch.py, and the response
    join: JoinReport
    variables: dict[str, str]
    num_hosts: int  # of the launch; beside `variables`
    cores: list[RankMask]  # of the host, by local rank; beside `variables`
    watched_ranks: int  # for nested.GroupWatch
    # Of the ranks of the host, for the one that starts the watch there; beside `variables`
    processes: list[tuple[int, int | None, str]]
    handled: list[int]  # the signals of HELD that all ranks of the host handle
    ended: bool  # all ranks of the host have
    failed: bool


def send(peer: Channel, message: Message, timeout: float = 0.0) -> None:
    """Send a message, or keep what the kernel does not take within `timeout` seconds."""
    peer.send({"kind": "launch", "content": message}, timeout)


def wait_for_message(peer: Channel) -> Message | None:
    """Wait for the next message, however long; None when the other end is gone."""
    while True:
        with suppress(TimeoutError):
            message = peer.receive_one(_POLL_SECONDS)
            return cast(Message, message["content"]) if message else None


def peer_address(peer: Channel) -> str:
    """Return the address of the other end, as this host sees it."""
    return str(peer.socket.getpeername()[0])


def connect(
    addresses: Sequence[str], port: int, secret: str, role: str
) -> tuple[Channel, str] | None:
    """Connect to launch.py; return the connection and the address that worked.

    None where launch.py is gone, or cannot be reached within CONNECT_SECONDS.
    """
    limit = time.monotonic() + CONNECT_SECONDS
    while addresses and time.monotonic() < limit:
        refused = 0
        for address in addresses:
            try:
                peer = channel.connect(address, port, Secret(os.fsencode(secret)), role)
                peer.keep_alive(LOST_SECONDS)
                return peer, address
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                pass
        # launch.py listened before this process was started. One of its addresses, such as that of
        # docker0, may belong to this host too, and refuse while the right one is slow to respond.
        if refused == len(addresses):
            limit = min(limit, time.monotonic() + REFUSED_SECONDS)
        time.sleep(0.2)
    return None


class ConnectionServer(PeerServer):
    """The clients of a launch: agents, or ranks that join it. Subclasses handle their messages.

    clients: the connection of each client that was identified, by its index.
    """

    def __init__(self, listener: socket.socket, loop: Loop, secret: Secret, size: int) -> None:
        self.clients: dict[int, Channel] = {}
        self._indices: dict[Channel, int] = {}
        super().__init__(listener, loop, secret, size)

    def identify(self, peer: Channel, message: Message) -> int | None:
        """Return the index of the client with this first message; None to refuse it."""
        raise NotImplementedError

    def identified(self, index: int) -> None:
        """Handle that a client was added to `clients`."""

    def handle(self, index: int, message: Message) -> None:
        """Handle a later message of a client."""

    def client_lost(self, index: int) -> None:
        """Handle the end of a client's connection, which stays in `clients`, closed."""

    def send_to_all(self, message: Message) -> None:
        for peer in self.clients.values():
            send(peer, message)

    def renumber(self, clients: dict[int, Channel]) -> None:
        """Replace the indices of the clients."""
        self.clients = clients
        self._indices = {peer: index for index, peer in clients.items()}

    def receive(self, peer: Channel, message: connection.Message) -> None:
        content = cast(Message, message["content"])
        if peer in self._indices:
            self.handle(self._indices[peer], content)
            return

        peer.keep_alive(LOST_SECONDS)
        index = self.identify(peer, content)
        if index is None:
            peer.close()
            return
        self.clients[index] = peer
        self._indices[peer] = index
        self.identified(index)

    def lost(self, peer: Channel) -> None:
        if peer in self._indices:
            self.client_lost(self._indices[peer])

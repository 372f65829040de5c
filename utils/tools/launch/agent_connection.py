"""Send and receive the messages between the processes of a launch."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypedDict, cast

from ...connection import Connection
from .event_loop import EventLoop
from .rank_cores import RankMask

LOST_SECONDS = 30  # without any TCP response from the other host
CONNECT_SECONDS = 60.0
REFUSED_SECONDS = 5.0
_POLL_SECONDS = 60.0


class JoinReport(TypedDict, total=False):
    """What a rank of a native launcher reports when it joins the launch."""

    token: str  # the secret of the launch
    reached: str  # the address by which it has reached launch.py
    host: list[str]  # the host's name, and what distinguishes it from another of that name
    rank: int
    world_size: int
    local_rank: int | None  # None where the launcher does not set it
    process: tuple[int, int | None, str]  # process id, start time, namespace of process ids
    port: int  # of rank 0: reserved on its host
    cores: RankMask
    problem: str  # why the rank cannot start; empty where it can


class Hello(TypedDict):
    """The first message of an agent."""

    index: int  # of its host in the plan
    token: str  # the secret of the launch
    reached: str  # the address by which it has reached launch.py
    host: str


class Check(TypedDict):
    """What an agent checks on its host; see files.problem_with()."""

    folder: str
    script: str
    checksum: int | None


class Ready(TypedDict):
    """The result of a check."""

    problem: str
    port: int  # reserved on this host


class StartOrder(TypedDict):
    """What an agent starts on its host."""

    launch_id: str
    host: str  # of launch.py
    environ: dict[str, str]
    output_dir: str
    watched_ranks: int  # for nested.GroupWatch
    input: bool  # the first process reads the standard input of launch.py
    processes: list[tuple[list[str], dict[str, str]]]  # words and variables of each


class Message(TypedDict, total=False):
    """One message. Each has one of these keys; more may be added."""

    # agent -> coordinator
    hello: Hello
    ready: Ready
    output: tuple[int, str, int]  # stream (1 or 2), text, index of the process
    exit: tuple[int, int]  # index of the process, exit status
    groups: list[tuple[int, int]]  # see nested.GroupWatch; also from a host with native ranks
    copies: bool  # no rank of the host has formed a group: they run (true), or have ended
    done: bool  # all processes have ended and all output was sent
    wants_input: bool  # more of the standard input of launch.py
    # coordinator -> agent
    check: Check
    start: StartOrder
    signal: tuple[int, bool]  # number; whether it is for torchrun's workers only
    end: bool  # end all processes
    input: str  # a part of the standard input of launch.py; empty at its end
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


class LaunchConnection:
    """One end of a connection of a launch, kept alive, and served by an EventLoop if attached.

    closed: the peer closed the connection or sent invalid data.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected socket."""
        self._connection = Connection(connected)
        self._loop: EventLoop | None = None
        self._connection.keep_alive(LOST_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def host_lost(self) -> bool:
        """Whether it was closed because the other host does not respond."""
        return self._connection.host_lost

    @property
    def peer_address(self) -> str:
        """The address of the other end, as this host sees it."""
        return str(self._connection.socket.getpeername()[0])

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes

    def attach(
        self,
        loop: EventLoop,
        on_message: Callable[[LaunchConnection, Message], None],
        on_lost: Callable[[LaunchConnection], None],
    ) -> None:
        """Let the loop receive messages and send what is unsent, until the connection closes.

        on_lost: called once if the other end is gone, after its last message.
        """
        self._loop, self._on_message, self._on_lost = loop, on_message, on_lost
        loop.add(self, self._handle)
        self._update()

    def send(self, message: Message, timeout: float = 0.0) -> None:
        """Send a message, or keep what the kernel does not take within `timeout` seconds."""
        self._connection.send(dict(message), timeout)
        self._update()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        return cast("list[Message]", self._connection.receive())

    def receive_one(self) -> Message | None:
        """Wait for the next message, however long; None when the other end is gone."""
        while True:
            with suppress(TimeoutError):
                return cast("Message | None", self._connection.receive_one(_POLL_SECONDS))

    def close(self) -> None:
        """Close this end; nothing more is delivered from it."""
        if self._loop is not None:
            self._loop.remove(self)
            self._loop = None
        self._connection.close()

    def _handle(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._connection.flush()
        for message in self.receive():
            if self._loop is None:  # closed because of the message before
                return
            self._on_message(self, message)
        self._update()

    def _update(self) -> None:
        """Set the events to wait for, or report that the connection was lost."""
        if self._loop is None:
            return
        if self.closed:
            self.close()
            self._on_lost(self)
        else:
            self._loop.set_events(self, self._connection.events)


def connect(addresses: Sequence[str], port: int) -> tuple[LaunchConnection, str] | None:
    """Connect to launch.py; return the connection and the address that worked.

    None where launch.py is gone, or cannot be reached within CONNECT_SECONDS.
    """
    limit = time.monotonic() + CONNECT_SECONDS
    while addresses and time.monotonic() < limit:
        refused = 0
        for address in addresses:
            try:
                connected = socket.create_connection((address, port), timeout=3)
                return LaunchConnection(connected), address
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

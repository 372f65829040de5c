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
from .host_ranks import HostProcess, RankMask

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
    # Of the first message: index of its host in the plan, the secret of the launch, the address by
    # which it has reached launch.py, name of its host
    hello: tuple[int, str, str, str]
    ready: tuple[str, int]  # why the ranks cannot start, or ""; a port that is reserved there
    output: tuple[int, str, int]  # stream (1 or 2), text, index of the process
    exit: tuple[int, int]  # index of the process, exit status
    groups: list[tuple[int, int]]  # see nested.GroupWatch; also from a host with native ranks
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


class LaunchConnection(Connection):
    """One end of a connection of a launch, kept alive, and served by an EventLoop if attached."""

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected socket."""
        super().__init__(connected)
        self._loop: EventLoop | None = None
        self.keep_alive(LOST_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def peer_address(self) -> str:
        """The address of the other end, as this host sees it."""
        return str(self.socket.getpeername()[0])

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

    def send(self, message: Message, timeout: float = 0.0) -> None:  # type: ignore[override]
        """Send a message, or keep what the kernel does not take within `timeout` seconds."""
        super().send(dict(message), timeout)
        self._update()

    def wait_for_message(self) -> Message | None:
        """Wait for the next message, however long; None when the other end is gone."""
        while True:
            with suppress(TimeoutError):
                return cast("Message | None", self.receive_one(_POLL_SECONDS))

    def close(self) -> None:
        """Close this end; nothing more is delivered from it."""
        if self._loop is not None:
            self._loop.remove(self)
            self._loop = None
        super().close()

    def _handle(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.flush()
        for message in cast("list[Message]", self.receive()):
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
            self._loop.set_events(self, self.events)


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


class ConnectionServer:
    """The clients of a launch: agents, or ranks that join it. Subclasses handle their messages.

    clients: the connection of each client that was identified, by its index. unknown: those whose
    first message has not arrived.
    """

    def __init__(self, listener: socket.socket, loop: EventLoop) -> None:
        self.clients: dict[int, LaunchConnection] = {}
        self._indices: dict[LaunchConnection, int] = {}
        self.unknown: set[LaunchConnection] = set()
        self._listener, self._loop = listener, loop
        loop.add(listener, self._accept)

    def identify(self, connection: LaunchConnection, message: Message) -> int | None:
        """Return the index of the client with this first message; None to refuse it."""
        raise NotImplementedError

    def identified(self, index: int) -> None:
        """Handle that a client was added to `clients`."""

    def handle(self, index: int, message: Message) -> None:
        """Handle a later message of a client."""

    def client_lost(self, index: int) -> None:
        """Handle the end of a client's connection, which stays in `clients`, closed."""

    def accept_failed(self, error: OSError) -> None:
        """Handle that a client could not be accepted; mostly it has gone already."""

    def send_to_all(self, message: Message) -> None:
        for connection in self.clients.values():
            connection.send(message)

    def renumber(self, clients: dict[int, LaunchConnection]) -> None:
        """Replace the indices of the clients."""
        self.clients = clients
        self._indices = {connection: index for index, connection in clients.items()}

    def close(self) -> None:
        for connection in [*self.unknown, *self.clients.values()]:
            connection.close()

    def _accept(self, events: int) -> None:
        try:
            connection = LaunchConnection(self._listener.accept()[0])
        except OSError as error:
            self.accept_failed(error)
            return
        self.unknown.add(connection)
        connection.attach(self._loop, self._receive, self._lost)

    def _receive(self, connection: LaunchConnection, message: Message) -> None:
        if connection in self._indices:
            self.handle(self._indices[connection], message)
            return

        self.unknown.discard(connection)
        index = self.identify(connection, message)
        if index is None:
            connection.close()
            return
        self.clients[index] = connection
        self._indices[connection] = index
        self.identified(index)

    def _lost(self, connection: LaunchConnection) -> None:
        self.unknown.discard(connection)
        if connection in self._indices:
            self.client_lost(self._indices[connection])

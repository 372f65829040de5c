"""Accept the connections of a launch; identify each by its first message."""

from __future__ import annotations

import socket

from .agent_connection import LaunchConnection, Message
from .event_loop import EventLoop


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

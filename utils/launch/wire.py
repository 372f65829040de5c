"""Messages between the head of a launch and its agents: JSON lines over TCP, never blocking.

Not here: what the messages mean (control.py, agent.py).
"""
from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
LOST_AFTER = 30  # seconds without a sign of life from the other host's kernel
CONNECT_SECONDS = 60.0
REFUSED_SECONDS = 5.0


class Wire:
    """One end of a connection. `closed` once the other end is gone, or was never right."""

    LONGEST = 1 << 26  # bytes of one message; more is no message of ours

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.closed = False
        self._out = bytearray()
        self._in = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that was switched off sends nothing: its peer's kernel has to find out.
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4),
                              ("TCP_USER_TIMEOUT", LOST_AFTER * 1000)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._out)

    @property
    def events(self) -> int:
        """What a selector has to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def send(self, message: Message) -> None:
        if not self.closed:
            self._out += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what can be sent at once."""
        try:
            while self._out:
                sent = self.socket.send(bytes(self._out[:1 << 20]))
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    def receive(self) -> list[Message]:
        """The messages that have come in."""
        try:
            while len(self._in) < self.LONGEST and (chunk := self.socket.recv(1 << 18)):
                self._in += chunk
            self._lose()
        except BlockingIOError:
            pass
        except OSError:
            self._lose()
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):  # a stranger's
                self._lose()
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        self._lose()
        self.socket.close()

    def _lose(self) -> None:
        self.closed = True
        self._out.clear()


def connect(addresses: Sequence[str], port: int) -> tuple[Wire, str] | None:
    """A connection to the launch and the address that worked; None after CONNECT_SECONDS, or when it is gone."""
    limit = time.monotonic() + CONNECT_SECONDS
    while addresses and time.monotonic() < limit:
        refused = 0
        for address in addresses:
            try:
                return Wire(socket.create_connection((address, port), timeout=3)), address
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                pass
        # It listened before it started this process. One of several addresses, such as that of docker0, may be this
        # host's own and refuse while the right one does not respond yet.
        if refused == len(addresses):
            limit = min(limit, time.monotonic() + REFUSED_SECONDS)
        time.sleep(0.2)
    return None

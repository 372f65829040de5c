"""Exchange messages over a connected socket. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import select
import selectors
import socket
import time
from collections import deque
from typing import Any, Protocol

Message = dict[str, Any]  # what json can write


class ProtocolError(Exception):
    """The peer sent what is no message; the text says what was wrong."""


class Framing(Protocol):
    """How messages become bytes. output: what it has to send itself."""

    output: bytearray

    def encode(self, message: Message) -> bytes: ...
    def feed(self, data: bytes) -> list[Message]: ...


_CHUNK_BYTES = 1 << 14  # each recv() allocates so much
_RETRANSMITS = 3  # in a row, which takes a second or more
_HOST_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Connection:
    """One end of a connection. It blocks only where a timeout is given.

    closed: the peer closed the connection or sent invalid data; `problem` has the reason.
    host_lost: it was closed because the other host does not respond; see keep_alive().
    """

    def __init__(self, connected: socket.socket, framing: Framing) -> None:
        """Take over a connected socket."""
        self.socket = connected
        self.closed = self.host_lost = False
        self.problem = ""
        self.framing = framing
        self._can_send = True
        self._unsent = bytearray()
        self._messages: deque[Message] = deque()
        connected.setblocking(False)

    def keep_alive(self, lost_seconds: int) -> None:
        """Let the kernel close the connection when the other host does not respond for so long.

        A host that was switched off or cut off sends nothing. The kernel there responds for a
        process that is stopped or busy.
        """
        options = (
            ("TCP_KEEPIDLE", lost_seconds // 3),
            ("TCP_KEEPINTVL", max(1, lost_seconds // 6)),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", lost_seconds * 1000),
        )
        with contextlib.suppress(OSError):  # another kind of socket
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options:
                if hasattr(socket, option):
                    self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._unsent)

    @property
    def events(self) -> int:
        """The events that a selector has to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: Message, timeout: float = 0.0) -> None:
        """Send a message, or keep what the kernel does not take within `timeout` seconds."""
        if self.closed or not self._can_send:
            return
        self._unsent += self.framing.encode(message)
        self.flush()
        deadline = time.monotonic() + timeout
        while self._unsent and self._wait(select.POLLOUT, deadline):
            self.flush()

    def flush(self) -> None:
        """Send what the kernel takes at once."""
        self._unsent += self.framing.output
        self.framing.output.clear()
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[: 1 << 20])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:  # what the other end sent before can still be received
            self._can_send = False
            self._note_lost_host(error)
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def receive_one(self, timeout: float) -> Message | None:
        """Wait for the next message and leave later ones; None when the connection has ended.

        Raises TimeoutError when no message arrives within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._messages and not self.closed:
            if not self._wait(select.POLLIN, deadline):
                raise TimeoutError("no message arrived")
            self._read()
        return self._messages.popleft() if self._messages else None

    def wait_for_input(self, deadline: float) -> bool:
        """Take what arrives next; False at the deadline, or when the connection has ended."""
        if not self._wait(select.POLLIN, deadline):
            return False
        self._read()
        return not self.closed

    def is_unacknowledged(self) -> bool:
        """Whether the other host acknowledges nothing: it is down or cut off. Linux only.

        A process that is stopped does not matter: its host acknowledges what arrives.
        """
        if self.closed or not hasattr(socket, "TCP_INFO"):
            return self.host_lost
        # struct tcp_info of tcp(7): state, ca_state, retransmits of the same data, ...
        try:
            return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2] >= _RETRANSMITS
        except OSError:  # another kind of socket
            return False

    def close(self) -> None:
        """Close the socket. Unsent messages are dropped."""
        self._lose("closed by this process")
        self.socket.close()

    def _read(self) -> None:
        if self.closed:
            return
        try:
            chunk = self.socket.recv(_CHUNK_BYTES)
            while chunk:
                self._messages.extend(self.framing.feed(chunk))
                if len(chunk) < _CHUNK_BYTES:  # a selector reports the rest, and the end
                    break
                chunk = self.socket.recv(_CHUNK_BYTES)
            if not chunk:
                self._lose("it closed the connection")
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._lose(str(error))
        except OSError as error:
            self._note_lost_host(error)
            self._lose(error.strerror or str(error))
        if self.framing.output:
            self.flush()

    def _wait(self, event: int, deadline: float) -> bool:
        """Wait for an event of poll(2); False at the deadline or when the connection is closed."""
        seconds = deadline - time.monotonic()
        if self.closed or seconds <= 0:
            return False
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self.socket, event)
        return bool(poll.poll(seconds * 1000))

    def _note_lost_host(self, error: OSError) -> None:
        self.host_lost = self.host_lost or error.errno in _HOST_LOST

    def _lose(self, problem: str) -> None:
        self.closed = True
        self.problem = self.problem or problem
        self._unsent.clear()

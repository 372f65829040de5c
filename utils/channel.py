"""One channel between the processes of a launch: JSON messages, after one proof of the secret.

On connecting, a server and its peer prove to each other that they know the secret, without sending
it (like multiprocessing's authkey). Later messages are not encrypted. They are signed if the peer
demands it: agents do, because they receive commands. Messages of ranks are not signed, like the
traffic of torch's store, gloo and NCCL. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import hmac
import itertools
import json
import os
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

_VERSION = 4
_HEADER = struct.Struct(">4sI")  # _MAGIC, number of bytes in the JSON that follows
_MAGIC = b"ddp\n"
_LONGEST, _LONGEST_OF_PROOF = 1 << 26, 1 << 12  # bytes: any message; a message of the proof
_ACCEPTS = 64  # connections accepted between other events
_PROOF_SECONDS = 20.0  # seconds for the proof; a busy host may be slow
_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.05  # seconds until a listener tries again after "too many open files"
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
_CHUNK_BYTES = 1 << 14  # bytes that each recv() allocates
_RETRANSMITS = 3  # retransmits in a row, which take a second or more
_HOST_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_COUNTER = struct.Struct(">Q")  # number of frames that one side has signed
_SIGNATURE_BYTES = 32  # HMAC-SHA256, before the JSON
_ENCODE = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode  # equal on both sides

Message = dict[str, Any]  # a JSON object; its kind is in "kind"


class ProtocolError(Exception):
    """The peer sent something that is not a message; the text says what was wrong."""


class Secret(NamedTuple):
    """The shared secret. label: identifies this launch, even if another one has the same key."""

    key: bytes
    label: str = ""


class Peer(NamedTuple):
    """The rank at the other end of a connection."""

    rank: int
    host: str  # "node17 (pid 4711)"


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Session:
    """The messages of one connection as bytes, starting with the proof. No input or output."""

    def __init__(self, secret: Secret, hello: Message | None = None) -> None:
        """hello: the first message of a connecting peer; None on the server."""
        self.is_open = False
        self.output = bytearray()  # bytes to send at once
        self._secret, self._is_peer = secret, hello is not None
        self._nonce, self._key = os.urandom(16).hex(), b""
        self._num_signed, self._num_checked = 0, 0  # numbers of frames
        self._waiting: list[Message] = []  # messages that wait for the server's proof
        self._input = bytearray()
        self.hello: Message = {}
        if hello is not None:
            self.hello = {**hello, "kind": "hello", "version": _VERSION, "nonce": self._nonce}
            self.output += _frame(self.hello)

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message; b"" until the server has proved itself."""
        if self.is_open:
            return self._signed_frame(message)
        self._waiting.append(message)
        return b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that have arrived. Raises ProtocolError for any other bytes."""
        self._input += data
        messages = []
        while self._input and (message := self._next()) is not None:
            if self.is_open:
                messages.append(message)
            else:
                self._prove(message)
        return messages

    def _next(self) -> Message | None:
        """Take one complete message from the input; None if there is none."""
        if self._input[: len(_MAGIC)] != _MAGIC[: len(self._input)]:
            raise ProtocolError("it sent no message; another program runs there")
        if len(self._input) < _HEADER.size:
            return None
        _, length = _HEADER.unpack_from(self._input)
        if length > (_LONGEST if self.is_open else _LONGEST_OF_PROOF):
            raise ProtocolError(f"it sent a message of {length} bytes; expected a shorter one")
        end = _HEADER.size + length
        if len(self._input) < end:
            return None
        body = bytes(self._input[_HEADER.size : end])
        del self._input[:end]
        if self.is_open and self.hello.get("signs"):
            body = self._checked(body)
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(body)
            if isinstance(message, dict) and isinstance(message.get("kind"), str):
                return message
        raise ProtocolError("it sent no valid message")

    def _prove(self, message: Message) -> None:
        """Answer hello, challenge or proof. Any message out of turn is an error."""
        kind, nonce = message["kind"], message.get("nonce")
        if kind == "challenge" and self._is_peer:
            self._derive_key(nonce)
            self._check_proof(message, "server")
            self.output += _frame({"kind": "proof", "proof": self._proof("peer")})
            self.is_open = True
            self.output += b"".join(map(self._signed_frame, self._waiting))
            self._waiting.clear()
        elif kind == "hello" and not self._is_peer and not self.hello:
            whole = (isinstance(message.get(key), int) for key in ("version", "index", "size"))
            if not all(whole) or message["version"] != _VERSION:
                raise ProtocolError("it runs another version of this kit")
            self.hello = message
            self._derive_key(self._nonce)
            proof = self._proof("server")
            self.output += _frame({"kind": "challenge", "nonce": self._nonce, "proof": proof})
        elif kind == "proof" and not self._is_peer and self._key:
            self._check_proof(message, "peer")
            self.is_open = True
        else:
            raise ProtocolError(f"it sent a message of the kind {kind}, which is not due")

    def _signed_frame(self, message: Message) -> bytes:
        """Return a frame after the proof; it is signed if the peer has demanded that."""
        if not self.hello.get("signs"):
            return _frame(message)
        body = _ENCODE(message).encode()
        signature = self._sign(body, self._num_signed, by_peer=self._is_peer)
        self._num_signed += 1
        return _HEADER.pack(_MAGIC, len(signature) + len(body)) + signature + body

    def _checked(self, signed: bytes) -> bytes:
        """Return the JSON of a signed frame; ProtocolError unless it is the next one."""
        signature, body = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        expected = self._sign(body, self._num_checked, by_peer=not self._is_peer)
        if not hmac.compare_digest(signature, expected):
            raise ProtocolError("a message was changed, repeated or left out on the way")
        self._num_checked += 1
        return body

    def _sign(self, body: bytes, number: int, *, by_peer: bool) -> bytes:
        label = b"frame of peer" if by_peer else b"frame of server"
        return hmac.digest(self._key, label + _COUNTER.pack(number) + body, "sha256")

    def _derive_key(self, nonce_of_server: object) -> None:
        text = _ENCODE([self.hello, self._secret.label, nonce_of_server])
        self._key = hmac.digest(self._secret.key, text.encode(), "sha256")

    def _proof(self, whose: str) -> str:
        return hmac.digest(self._key, whose.encode(), "sha256").hex()

    def _check_proof(self, message: Message, whose: str) -> None:
        given = str(message.get("proof")).encode()
        if not hmac.compare_digest(given, self._proof(whose).encode()):
            raise ProtocolError("it does not know the secret of this launch")


def _frame(message: Message) -> bytes:
    body = _ENCODE(message).encode()
    return _HEADER.pack(_MAGIC, len(body)) + body


class Loop:
    """Calls a handler for each ready source, and timed calls when they are due. One thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # heap: time, number, call
        self._numbers = itertools.count()

    def close(self) -> None:
        self._selector.close()

    def add(self, source: HasFileno | int, handler: Callable[[int], None]) -> None:
        """Call handler(events) whenever the source is readable, until remove()."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def set_events(self, source: HasFileno | int, events: int) -> None:
        """Wait for these events of a source, such as selectors.EVENT_WRITE."""
        key = self._selector.get_key(source)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def remove(self, source: HasFileno | int) -> None:
        self._selector.unregister(source)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def run_once(self, *timeouts: float | None) -> None:
        """Wait for an event, at most for the shortest timeout in seconds, and call its handler."""
        limits = [seconds for seconds in timeouts if seconds is not None]
        limits += [max(0.0, when - time.monotonic()) for when, *_ in self._timers[:1]]
        for key, events in self._selector.select(min(limits, default=None)):
            if self._selector.get_map().get(key.fd) is key:  # an earlier handler may remove it
                key.data(events)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()


class Channel:
    """One side of a connection whose two sides prove themselves. Blocks only with a timeout.

    closed: the peer closed the connection or sent invalid data; `problem` has the reason.
    host_lost: it was closed because the other host does not respond; see keep_alive().
    """

    def __init__(self, connected: socket.socket, secret: Secret, hello: Message | None = None):
        """Take over a connected socket. hello: see Session."""
        self.socket = connected
        self.session = Session(secret, hello)
        self.closed = self.host_lost = False
        self.problem = ""
        self._can_send = True
        self._unsent = bytearray()
        self._messages: deque[Message] = deque()
        self._loop: Loop | None = None
        self._awaited = 0  # events that the loop waits for
        connected.setblocking(False)
        self.flush()

    def attach(
        self,
        loop: Loop,
        on_message: Callable[[Channel, Message], None],
        on_lost: Callable[[Channel], None],
    ) -> None:
        """Let the loop receive messages and send unsent ones, until the connection closes.

        on_lost: called once when the other side is gone, after its last message.
        """
        self._loop, self._on_message, self._on_lost = loop, on_message, on_lost
        loop.add(self, self._handle)
        self._awaited = selectors.EVENT_READ
        self._update()

    def detach(self) -> None:
        """Take the connection back from the loop."""
        if self._loop is not None:
            self._loop.remove(self)
            self._loop = None

    def keep_alive(self, lost_seconds: int) -> None:
        """Let the kernel close the connection if the other host does not respond for so long.

        A host that is switched off or cut off sends nothing. For a process that is only stopped or
        busy, its kernel responds.
        """
        options = (
            ("TCP_KEEPIDLE", lost_seconds // 3),
            ("TCP_KEEPINTVL", max(1, lost_seconds // 6)),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", lost_seconds * 1000),
        )
        with contextlib.suppress(OSError):  # not a TCP socket
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

    def send(self, message: Message, timeout: float = 0.0) -> None:
        """Send a message; keep the part that the kernel does not take within `timeout` seconds."""
        if self.closed or not self._can_send:
            return
        self._unsent += self.session.encode(message)
        self.flush()
        deadline = time.monotonic() + timeout
        while self._unsent and self._wait(select.POLLOUT, deadline):
            self.flush()
        self._update()

    def flush(self) -> None:
        """Send as much as the kernel takes at once."""
        self._unsent += self.session.output
        self.session.output.clear()
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[: 1 << 20])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:  # messages that the other side sent before can still be received
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
        """Wait for the next message, and leave later ones; None if the connection has ended.

        Raises TimeoutError if no message arrives within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._messages and not self.closed:
            if not self._wait(select.POLLIN, deadline):
                raise TimeoutError("no message arrived")
            self._read()
        return self._messages.popleft() if self._messages else None

    def wait_for_input(self, deadline: float) -> bool:
        """Read input when it arrives; False at the deadline, or when the connection has ended."""
        if not self._wait(select.POLLIN, deadline):
            return False
        self._read()
        return not self.closed

    def is_unacknowledged(self) -> bool:
        """Whether the other host acknowledges nothing: it is down or cut off. Linux only.

        A stopped process does not matter, because its host still acknowledges input.
        """
        if self.closed or not hasattr(socket, "TCP_INFO"):
            return self.host_lost
        # struct tcp_info of tcp(7): state, ca_state, retransmits of the same data, ...
        try:
            return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2] >= _RETRANSMITS
        except OSError:  # not a TCP socket
            return False

    def close(self) -> None:
        """Close this side. Unsent messages are dropped, and no more messages are delivered."""
        self.detach()
        self._lose("closed by this process")
        self.socket.close()

    def _read(self) -> None:
        if self.closed:
            return
        try:
            chunk = self.socket.recv(_CHUNK_BYTES)
            while chunk:
                self._messages.extend(self.session.feed(chunk))
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
        if self.session.output:
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

    def _handle(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.flush()
        for message in self.receive():
            if self._loop is None:  # the previous message closed it
                return
            self._on_message(self, message)
        self._update()

    def _update(self) -> None:
        """Set the events to wait for, or report that the connection was lost."""
        if self._loop is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self.closed:
            self.close()
            self._on_lost(self)
        elif self._awaited != events:
            self._awaited = events
            self._loop.set_events(self, events)


class PeerServer:
    """The server side of a channel, run by a Loop. Subclasses handle messages.

    A peer that has not proved itself is closed after twenty seconds. If there are more than
    `size` + 64 such peers, the oldest is closed.
    """

    def __init__(self, listener: socket.socket, loop: Loop, secret: Secret, size: int) -> None:
        """size: number of expected peers. The listener stays open after close()."""
        self._listener, self._loop, self._secret, self._size = listener, loop, secret, size
        self._unproved: dict[Channel, None] = {}  # peers without proof, oldest first
        self._peers: set[Channel] = set()
        self._closed = False
        listener.setblocking(False)
        self._listen()

    def receive(self, peer: Channel, message: Message) -> None:
        """Handle a message from a peer that has proved itself."""
        raise NotImplementedError

    def lost(self, peer: Channel) -> None:
        """Handle the end of a connection to a peer that has proved itself."""

    def out_of_files(self, error: OSError) -> None:
        """Handle that no peer can be accepted, because this process may open no more files."""

    def release(self, peer: Channel) -> None:
        """Give up a peer that has proved itself: it is served no more, and close() skips it."""
        peer.detach()
        self._peers.discard(peer)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(KeyError):  # the listener is paused
            self._loop.remove(self._listener)
        for peer in [*self._peers, *self._unproved]:
            peer.close()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add(self._listener, self._accept)

    def _accept(self, _: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    continue  # the client gave up between its connect() and this accept()
                if not self._unproved:
                    self.out_of_files(error)
                for peer in [*self._unproved][:1]:
                    self._close_unproved(peer)
                self._loop.remove(self._listener)
                self._loop.after(_PAUSE_SECONDS, self._listen)
                return
            if len(self._unproved) >= self._size + 64:
                self._close_unproved(next(iter(self._unproved)))
            peer = Channel(client, self._secret)
            self._unproved[peer] = None
            peer.attach(self._loop, self._receive, self._lost)
            self._loop.after(_PROOF_SECONDS, partial(self._close_unproved, peer))

    def _close_unproved(self, peer: Channel) -> None:
        if peer in self._unproved and not peer.session.is_open:
            del self._unproved[peer]
            peer.close()

    def _receive(self, peer: Channel, message: Message) -> None:
        if peer in self._unproved:
            del self._unproved[peer]
            self._peers.add(peer)
        self.receive(peer, message)

    def _lost(self, peer: Channel) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self.lost(peer)
        self._unproved.pop(peer, None)


class Unresponsive(ConnectionError):
    """A program accepts connections there, but sends nothing."""


def connect(
    address: str,
    port: int,
    secret: Secret,
    role: str,
    *,
    index: int = 0,
    size: int = 0,
    seconds: float = _CONNECT_SECONDS,
    signs: bool = False,
) -> Channel:
    """Connect to a server, and wait until both have proved themselves.

    role: kind of this peer. index, size: its number, and the number of all such peers. seconds:
    time limit for the server's response. signs: whether both sides sign each message.
    Raises OSError if no server of this launch responds.
    """
    connected = socket.create_connection((address, port), min(seconds, _CONNECT_SECONDS))
    return prove(connected, secret, role, index=index, size=size, seconds=seconds, signs=signs)


def prove(
    connected: socket.socket,
    secret: Secret,
    role: str,
    *,
    index: int,
    size: int,
    seconds: float,
    signs: bool = False,
) -> Channel:
    """Wait until both sides of a connection to a server have proved themselves; see connect()."""
    if connected.getsockname() == connected.getpeername():  # to itself: nobody listens there
        connected.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    # Otherwise the first message after the proof would wait until the proof is acknowledged.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = {"role": role, "index": index, "size": size, "instance": os.urandom(8).hex()}
    hello |= {"signs": True} if signs else {}
    peer = Channel(connected, secret, hello)
    deadline = time.monotonic() + seconds
    while not peer.session.is_open and peer.wait_for_input(deadline):
        pass
    if not peer.session.is_open:
        problem = peer.problem
        peer.close()
        if not problem:
            raise Unresponsive(
                "it accepts connections but sends nothing; another program runs there"
            )
        raise ConnectionError(problem)
    return peer

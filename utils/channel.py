"""One channel between the processes of a launch: typed messages, proved by the launch's secret.

A server and its peers first prove to each other that they know the secret, without sending it;
every later message carries a MAC (HMAC, RFC 2104, over a counter, so that none can be replayed).
Before the proof a peer may send a few hundred bytes and has twenty seconds, and so many such peers
are kept. Messages can be read on the network, but not changed. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import hmac
import itertools
import json
import os
import re
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from .connection import Connection, Message, ProtocolError

_VERSION = 2
_HEADER_BYTES = 80  # "kind length mac\n", at most
_ACCEPTS = 64  # at once, between other events
_PROOF_SECONDS = 20.0  # a busy host may be slow; sooner where there are too many
_CONNECT_SECONDS = 3.0
_EVICTION_SECONDS = 1.0  # a peer proves itself sooner
_PAUSE_SECONDS = 0.05  # of a listener, when this process may open no more files
_OF_PROOF = ("hello", "challenge", "proof")
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
_ENCODE = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode  # one order at both ends
_DECODE = json.JSONDecoder().decode

# Of a field: its exact type, or a function. Integers are not negative.
Check = type | Callable[[object], bool]


def _accepts(check: Check, value: object) -> bool:
    if isinstance(check, type):
        return type(value) is check and not (check is int and value < 0)  # type: ignore[operator]
    return check(value)


def _text(longest: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= longest


def _hex(digits: int) -> Check:
    matches = re.compile(f"[0-9a-f]{{{digits}}}").fullmatch
    return lambda value: isinstance(value, str) and matches(value) is not None


def _one_of(*values: object) -> Check:
    return lambda value: value in values


def or_none(check: Check) -> Check:
    return lambda value: value is None or _accepts(check, value)


def _row(*checks: Check) -> Check:
    def is_row(value: object) -> bool:
        is_list = isinstance(value, list) and len(value) == len(checks)
        return is_list and all(map(_accepts, checks, value))  # type: ignore[call-overload]

    return is_row


def _anything(value: object) -> bool:
    return True


class Kind(NamedTuple):
    """What a kind of message holds. limit: bytes of its JSON. fields: the check of each value."""

    limit: int
    fields: Mapping[str, Check]


_CAUSE_LIMIT = 1 << 18
_CAUSE = _row(str, _text(16), or_none(int), or_none(_text(256)), bool)  # launch_report.Failure
KINDS: dict[str, Kind] = {
    "hello": Kind(
        512,
        {
            "version": int,
            "role": _text(32),
            "index": int,
            "size": int,
            "instance": _hex(16),
            "nonce": _hex(32),
        },
    ),
    "challenge": Kind(2048, {"nonce": _hex(32), "proof": _hex(64), "credential": str}),
    "proof": Kind(256, {"proof": _hex(64)}),
    "ack": Kind(64, {}),
    "ask_missing": Kind(64, {}),
    # To launch.py.
    "notice": Kind(
        1 << 14,
        {
            "what": _one_of("failed", "saved"),
            "text": _text(2000),
            "about": _text(16),
            "rank": or_none(int),
            "host": or_none(_text(256)),
            "is_over": bool,
        },
    ),
    # Between the ranks: at the start, then while they run.
    "report": Kind(1 << 18, {"value": dict}),
    "answer": Kind(
        _CAUSE_LIMIT,
        {"assignment": or_none(dict), "error": str, "master_addr": str, "host": str},
    ),
    "connected": Kind(64, {}),
    "start_failed": Kind(_CAUSE_LIMIT, {"cause": _CAUSE}),
    "beat": Kind(1 << 14, {"progress": int, "entered": int, "location": str}),
    "ask_position": Kind(64, {"ends": bool}),
    "position": Kind(1 << 20, {"position": or_none(list)}),
    "ask_states": Kind(1 << 14, {"pids": list}),
    "states": Kind(1 << 16, {"states": list}),
    "failed": Kind(_CAUSE_LIMIT, {"cause": _CAUSE}),
    "query": Kind(64, {"about": _one_of("lost", "timeout")}),
    "cause": Kind(_CAUSE_LIMIT, {"cause": or_none(_CAUSE)}),
    "left": Kind(
        2 * _CAUSE_LIMIT,
        {"cause": or_none(_CAUSE), "first": or_none(_CAUSE), "entered": or_none(int)},
    ),
    "hang": Kind(_CAUSE_LIMIT, {"cause": _CAUSE, "folder": str}),
    "end": Kind(_CAUSE_LIMIT, {"cause": _CAUSE}),
    # Of doctor.
    "request": Kind(1 << 24, {"number": int, "what": str, "values": or_none(list)}),
    "reply": Kind(1 << 24, {"number": int, "value": _anything}),
}
LONGEST_CAUSE = _CAUSE_LIMIT // 16  # characters


class Secret(NamedTuple):
    """What both ends know. label: of this launch, so that another one with the same key differs.

    credential: of a server, contains the key for those who can read it. read: of a peer, returns
    the key in the server's credential, or raises OSError.
    """

    key: bytes
    label: str = ""
    credential: str = ""
    read: Callable[[str], bytes] | None = None
    kinds: Mapping[str, Kind] = KINDS  # that both ends send


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Session:
    """The messages of one connection as bytes, from its proof on. Does no input or output.

    Use: Connection(socket, Session(...)).
    """

    def __init__(self, secret: Secret, hello: Message | None = None) -> None:
        """hello: of a peer that connects; None for the end of a server."""
        self.is_open = False
        self.output = bytearray()  # to be sent at once
        self.hello = hello or {}
        self.secret = secret
        self._is_peer = hello is not None
        self.name, self._other = ("peer", "server") if self._is_peer else ("server", "peer")
        self._nonce = os.urandom(16).hex()
        self.key = b""  # of both ends, from the proof on
        self._waiting: list[Message] = []  # for the proof of the server
        self._input = bytearray()
        self._counters: dict[str, int] = {}  # messages of each sender
        if hello is not None:
            self.hello = {**hello, "version": _VERSION, "nonce": self._nonce}
            self._put("hello", self.hello)

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message, its name as "kind"; b"" while the server is unproved."""
        if not self.is_open:
            self._waiting.append(message)
            return b""
        fields = {name: value for name, value in message.items() if name != "kind"}
        return self._frame(message["kind"], fields)

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that have arrived. Raises ProtocolError for any other bytes."""
        self._input += data
        messages = []
        while self._input and (found := self._next()) is not None:
            kind, fields = found
            if kind not in _OF_PROOF:
                messages.append({"kind": kind, **fields})
            else:
                self._prove(kind, fields)
        return messages

    def _next(self) -> tuple[str, Message] | None:
        """Take a whole message from the input."""
        end = self._input.find(b"\n", 0, _HEADER_BYTES)
        if end < 0:
            if len(self._input) >= _HEADER_BYTES:
                raise ProtocolError("it sent no message; another program runs there")
            return None
        kind, length, mac = self._header(bytes(self._input[:end]))
        if len(self._input) < end + 1 + length:
            return None
        body = bytes(self._input[end + 1 : end + 1 + length])
        del self._input[: end + 1 + length]
        if self.is_open and not hmac.compare_digest(mac, self._mac(self._other, kind, body)):
            raise ProtocolError("its message was changed on the way")
        try:
            fields = _DECODE(body.decode())
        except (ValueError, RecursionError):
            fields = None
        expected = self.secret.kinds[kind].fields
        if isinstance(fields, dict) and fields.keys() == expected.keys():
            for name, check in expected.items():
                if not _accepts(check, fields[name]):
                    break
            else:
                return kind, fields
        raise ProtocolError(f"it sent no valid message of the kind {kind}")

    def _header(self, line: bytes) -> tuple[str, int, str]:
        """Return kind, length and MAC, checked before the body is read."""
        kind, _, rest = line.decode("ascii", "replace").partition(" ")
        length, _, mac = rest.partition(" ")
        kinds = self.secret.kinds
        if kind not in (kinds if self.is_open else _OF_PROOF) or not length.isdecimal():
            raise ProtocolError("it sent no message; another program runs there")
        if int(length) > kinds[kind].limit:
            raise ProtocolError(f"it sent a message of {length} bytes; expected a shorter one")
        return kind, int(length), mac

    def _prove(self, kind: str, fields: Message) -> None:
        """Answer hello, challenge or proof. Only the one that is due is right."""
        if kind == "challenge" and self._is_peer and not self.key:
            if self.secret.read is not None:
                try:
                    self.secret = self.secret._replace(key=self.secret.read(fields["credential"]))
                except OSError as error:
                    raise ProtocolError(f"it has no credential of this user: {error}") from None
            self.key = self._session_key(fields["nonce"])
            self._check_proof(fields["proof"], "server")
            self._put("proof", {"proof": self._proof("peer")})
            self.is_open = True
            for message in self._waiting:
                self.output += self.encode(message)
            self._waiting.clear()
        elif kind == "hello" and not self._is_peer and not self.hello:
            if fields["version"] != _VERSION:
                raise ProtocolError("it runs another version of this kit")
            self.hello = fields
            self.key = self._session_key(self._nonce)
            proof, credential = self._proof("server"), self.secret.credential
            self._put("challenge", {"nonce": self._nonce, "proof": proof, "credential": credential})
        elif kind == "proof" and not self._is_peer and self.key and not self.is_open:
            self._check_proof(fields["proof"], "peer")
            self.is_open = True
        else:
            raise ProtocolError(f"it sent a message of the kind {kind}, which is not due")

    def _session_key(self, nonce_of_server: str) -> bytes:
        text = _ENCODE(["session", self.hello, self.secret.label, nonce_of_server])
        return hmac.digest(self.secret.key, text.encode(), "sha256")

    def _proof(self, whose: str) -> str:
        return hmac.digest(self.key, whose.encode(), "sha256").hex()

    def _check_proof(self, proof: str, whose: str) -> None:
        if not hmac.compare_digest(proof, self._proof(whose)):
            raise ProtocolError("it does not know the secret of this launch")

    def _put(self, kind: str, fields: Message) -> None:
        self.output += self._frame(kind, fields)

    def _frame(self, kind: str, fields: Message) -> bytes:
        body = _ENCODE(fields).encode()
        mac = self._mac(self.name, kind, body) if self.is_open else "-"
        return f"{kind} {len(body)} {mac}\n".encode() + body

    def _mac(self, sender: str, kind: str, body: bytes) -> str:
        """Return the MAC of the next message of a sender."""
        number = self._counters.get(sender, 0) + 1
        self._counters[sender] = number
        head = f"{sender} {number} {kind} ".encode()
        return hmac.digest(self.key, head + body, "sha256")[:16].hex()


class Loop:
    """Calls a handler for each source that is ready, and what is due at a time. One thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = itertools.count()

    def close(self) -> None:
        self._selector.close()

    def add(self, source: HasFileno | int, handler: Callable[[int], None]) -> None:
        """Call handler(events) whenever the source can be read, until remove()."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def set_events(self, source: HasFileno | int, events: int) -> None:
        """Wait for these events of a source, such as selectors.EVENT_WRITE."""
        key = self._selector.get_key(source)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def remove(self, source: HasFileno | int) -> None:
        self._selector.unregister(source)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once, so many seconds from now."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def run_once(self, *timeouts: float | None) -> None:
        """Wait for an event, at most for the shortest timeout (seconds), and call its handler."""
        limits = [seconds for seconds in timeouts if seconds is not None]
        limits += [max(0.0, when - time.monotonic()) for when, *_ in self._timers[:1]]
        for key, events in self._selector.select(min(limits, default=None)):
            if self._selector.get_map().get(key.fd) is key:  # an earlier handler may remove it
                key.data(events)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()


class Channel(Connection):
    """A connection whose ends prove themselves; served by a Loop if attached."""

    def __init__(self, connected: socket.socket, secret: Secret, hello: Message | None = None):
        """hello: see Session."""
        self.session = Session(secret, hello)
        super().__init__(connected, self.session)
        self._loop: Loop | None = None
        self._awaited = 0  # the events that the loop waits for
        self.flush()

    def attach(
        self,
        loop: Loop,
        on_message: Callable[[Channel, Message], None],
        on_lost: Callable[[Channel], None],
    ) -> None:
        """Let the loop receive messages and send what is unsent, until the connection closes.

        on_lost: called once if the other end is gone, after its last message.
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

    def send(self, message: Message, timeout: float = 0.0) -> None:
        """Send a message, or keep what the kernel does not take within `timeout` seconds."""
        super().send(message, timeout)
        self._update()

    def close(self) -> None:
        """Close this end; nothing more is delivered from it."""
        self.detach()
        super().close()

    def _handle(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.flush()
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
        elif self._awaited != self.events:
            self._awaited = self.events
            self._loop.set_events(self, self._awaited)


class PeerServer:
    """The end of a channel to which peers connect, served by a Loop. Subclasses handle messages.

    Peers that have not proved themselves are closed after twenty seconds, and where there are more
    than `size` + 64 of them: then the oldest of the address that has most.
    """

    def __init__(self, listener: socket.socket, loop: Loop, secret: Secret, size: int) -> None:
        """size: the number of peers that are expected. The listener stays open in the end."""
        self._listener, self._loop, self._secret, self._size = listener, loop, secret, size
        self._unproved: dict[Channel, tuple[str, float]] = {}  # address, time; oldest first
        self._peers: set[Channel] = set()
        self._closed = False
        listener.setblocking(False)
        self._listen()

    def receive(self, peer: Channel, message: Message) -> None:
        """Handle a message of a peer that has proved itself."""
        raise NotImplementedError

    def lost(self, peer: Channel) -> None:
        """Handle the end of such a peer's connection."""

    def out_of_files(self, error: OSError) -> None:
        """Handle that a peer cannot be accepted, because this process may open no more files."""

    def release(self, peer: Channel) -> None:
        """Give up a peer that has proved itself: it is no longer served, nor closed by close()."""
        peer.detach()
        self._peers.discard(peer)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(KeyError):  # it is paused
            self._loop.remove(self._listener)
        for peer in [*self._peers, *self._unproved]:
            peer.close()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add(self._listener, self._accept)

    def _accept(self, _: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                client, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    continue  # the client gave up between its connect() and this accept()
                if not self._unproved:
                    self.out_of_files(error)
                if not self._evict(older_than=_EVICTION_SECONDS):
                    self._loop.remove(self._listener)
                    self._loop.after(_PAUSE_SECONDS, self._listen)
                    return
                continue
            if len(self._unproved) >= self._size + 64:
                self._evict()
            peer = Channel(client, self._secret)
            self._unproved[peer] = str(address[0]), time.monotonic()
            peer.attach(self._loop, self._receive, self._lost)
            self._loop.after(_PROOF_SECONDS, partial(self._close_unproved, peer))

    def _close_unproved(self, peer: Channel) -> None:
        if peer in self._unproved and not peer.session.is_open:
            del self._unproved[peer]
            peer.close()

    def _evict(self, older_than: float = 0.0) -> bool:
        """Close the oldest unproved peer of the address that has most; False if there is none."""
        before = time.monotonic() - older_than
        unproved = {
            one: address
            for one, (address, accepted_at) in self._unproved.items()
            if accepted_at <= before and not one.session.is_open
        }
        if not unproved:
            return False
        [(most, _)] = Counter(unproved.values()).most_common(1)
        self._close_unproved(next(one for one in unproved if unproved[one] == most))
        return True

    def _receive(self, peer: Channel, message: Message) -> None:
        if self._unproved.pop(peer, None):
            self._peers.add(peer)
        self.receive(peer, message)

    def _lost(self, peer: Channel) -> None:
        if self._unproved.pop(peer, None) is None:
            self._peers.discard(peer)
            self.lost(peer)


class Unresponsive(ConnectionError):
    """A program accepts connections there, and sends nothing."""


def connect(
    address: str,
    port: int,
    secret: Secret,
    role: str,
    *,
    index: int = 0,
    size: int = 0,
    seconds: float = _CONNECT_SECONDS,
) -> Channel:
    """Connect to a server, and wait until both have proved themselves.

    role: what this peer is. index, size: its number among so many. seconds: until the server has
    responded. Raises OSError where no server of this launch does.
    """
    connected = socket.create_connection((address, port), min(seconds, _CONNECT_SECONDS))
    return prove(connected, secret, role, index=index, size=size, seconds=seconds)


def prove(
    connected: socket.socket, secret: Secret, role: str, *, index: int, size: int, seconds: float
) -> Channel:
    """Wait until both ends of a connection to a server have proved themselves, as connect()."""
    if connected.getsockname() == connected.getpeername():  # by the kernel: nobody listens there
        connected.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    # A first message follows the proof: it would wait for the acknowledgement of that.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = {"role": role, "index": index, "size": size, "instance": os.urandom(8).hex()}
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

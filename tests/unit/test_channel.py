"""The channel between the processes of a launch: who is let in, and what a peer without the secret can do: nothing."""
from __future__ import annotations

import errno
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.channels import HELLO, KEY, opened_pair
from utils import channel
from utils.channel import Channel, Loop, Message, PeerServer, ProtocolError, Secret, Session

NOTICE = {"kind": "notice", "what": "failed", "text": "out of memory", "about": "exception", "rank": 1, "host": "h1",
          "is_over": False}


def exchange(peer: Session, server: Session) -> list[Message]:
    """Pass on what both ends have to send; return the messages that the server gets."""
    received: list[Message] = []
    while peer.output or server.output:
        sent, answered = bytes(peer.output), bytes(server.output)
        peer.output.clear()
        server.output.clear()
        received += server.feed(sent)
        peer.feed(answered)
    return received


def opened() -> tuple[Session, Session]:
    peer, server = Session(KEY, HELLO), Session(KEY)
    exchange(peer, server)
    assert peer.is_open and server.is_open
    return peer, server


def test_nothing_but_hello_is_sent_before_the_server_has_proved_itself() -> None:
    peer, server = Session(KEY, HELLO), Session(KEY)
    assert peer.encode(NOTICE) == b"" and b'"kind":"hello"' in peer.output
    sent = bytes(peer.output)
    assert exchange(peer, server) == [NOTICE]
    sent += server.encode({"kind": "ack"})
    assert KEY.key not in sent and KEY.label.encode() not in sent
    assert peer.feed(server.encode({"kind": "ack"})[:10]) == []  # the rest follows


def test_signed_messages_go_both_ways_and_no_other_is_taken() -> None:
    """Whoever can change packets on the way can hold back, repeat, exchange and write messages."""
    first, second = {"kind": "start", "n": 1}, {"kind": "end", "n": 2}

    def ends() -> tuple[Session, Session]:
        peer, server = Session(KEY, {**HELLO, "signs": True}), Session(KEY)
        peer.encode(NOTICE)
        assert exchange(peer, server) == [NOTICE] and peer.is_open and server.is_open
        return peer, server

    peer, server = ends()
    assert peer.feed(server.encode(first) + server.encode(second)) == [first, second]
    assert server.feed(peer.encode(first)) == [first]
    unsigned = opened()[1].encode(first)
    attacks: list[Callable[[Session, bytes, bytes], bytes]] = [
        lambda server, one, two: one.replace(b'"n":1', b'"n":7'), lambda server, one, two: two,
        lambda server, one, two: one + one, lambda server, one, two: unsigned,
        lambda server, one, two: ends()[1].encode(first), lambda server, one, two: one[:8] + b"0" * 32 + one[40:]]
    for attack in attacks:
        peer, server = ends()
        with pytest.raises(ProtocolError, match="a message was changed, repeated or left out on the way"):
            peer.feed(attack(server, server.encode(first), server.encode(second)))
    peer, server = ends()
    with pytest.raises(ProtocolError, match="changed, repeated"):
        server.feed(server.encode(first))  # its own, sent back


# Each is what a peer without the secret says to a server.
def wrong_secret(secret: Secret) -> Callable[[Session], object]:
    return lambda server: exchange(Session(secret, HELLO), server)


def first_bytes(data: bytes) -> Callable[[Session], object]:
    return lambda server: server.feed(data)


def with_proof(proof: str) -> Callable[[Session], object]:
    def talk(server: Session) -> None:
        server.feed(bytes(Session(KEY, HELLO).output))
        server.feed(channel._frame({"kind": "proof", "proof": proof}))
    return talk


def own_proof_sent_back(server: Session) -> None:
    server.feed(bytes(Session(KEY, HELLO).output))
    challenge = json.loads(bytes(server.output)[8:])
    with_proof(challenge["proof"])(server)


def replayed_session(server: Session) -> None:
    """What another peer has sent, recorded from hello on."""
    recorder, peer = Session(KEY), Session(KEY, HELLO)
    hello = bytes(peer.output)
    recorder.feed(hello)
    peer.output.clear()
    peer.feed(bytes(recorder.output))
    server.feed(hello + bytes(peer.output) + peer.encode(NOTICE))


def hello(**changed: object) -> bytes:
    fields: dict[str, Any] = {"kind": "hello", "version": 3, **HELLO, "nonce": "0" * 32, **changed}
    return channel._frame({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize("talk", [
    wrong_secret(Secret(b"another", KEY.label)), wrong_secret(Secret(KEY.key, "launch 2")), wrong_secret(Secret(b"")),
    with_proof("0" * 64), with_proof(hmac.new(b"", b"peer", hashlib.sha256).hexdigest()), own_proof_sent_back,
    replayed_session, first_bytes(hello(version=2)), first_bytes(hello(index="1")), first_bytes(hello(size=None)),
    first_bytes(hello() * 2), first_bytes(b"ddp\n\0\0\x20\0"), first_bytes(b"ddp\n\xff\xff\xff\xff"),
    first_bytes(b"ddp\n\0\0\0\2{}"), first_bytes(b"ddp\n\0\0\0\5[[[[["), first_bytes(channel._frame(NOTICE)),
    first_bytes(b"SSH-2.0-OpenSSH_9.2\r\n"), first_bytes(b"GET / HTTP/1.1\r\n\r\n"), first_bytes(b"\0" * 4097),
    first_bytes(b'{"kit": "ddpkit-1", "token": "secret"}\n')])
def test_a_peer_without_the_proof_is_refused(talk: Callable[[Session], object]) -> None:
    server = Session(KEY)
    with pytest.raises(ProtocolError):
        talk(server)
    assert not server.is_open


def test_messages_arrive_whole_in_order_and_before_the_end() -> None:
    server, peer = opened_pair()
    with pytest.raises(TimeoutError):
        server.receive_one(0.01)
    notices = [{**NOTICE, "rank": rank} for rank in range(4)]
    data = b"".join(map(peer.session.encode, notices))
    peer.socket.sendall(data[:len(data) // 2])
    assert server.receive() == notices[:2]
    peer.socket.sendall(data[len(data) // 2:])
    assert server.receive_one(5) == notices[2]
    peer.close()
    server.send({"kind": "ack"})  # to nobody
    assert server.receive_one(5) == notices[3]
    assert server.receive_one(5) is None and server.problem == "it closed the connection"


def test_large_message_waits_for_the_receiver() -> None:
    server, peer = opened_pair()
    message = {"kind": "gathered", "topic": "large", "values": ["x" * (1 << 22)], "ended": []}
    server.send(message)
    assert server.unsent_bytes
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(peer.receive_one, 20)
        server.send({"kind": "ack"}, timeout=20)
        assert received.result() == message and server.unsent_bytes == 0


def test_a_false_server_learns_nothing() -> None:
    victim, false_server = Session(KEY, HELLO), Session(Secret(b"guessed", KEY.label))
    victim.encode(NOTICE)
    with pytest.raises(ProtocolError, match="does not know the secret"):
        exchange(victim, false_server)
    assert not victim.is_open and not victim.output


class Counting(PeerServer):
    def __init__(self, listener: socket.socket, loop: Loop, size: int) -> None:
        super().__init__(listener, loop, KEY, size)
        self.received = 0
        self.full: list[OSError] = []

    def receive(self, peer: Channel, message: Message) -> None:
        self.received += 1
        peer.send({"kind": "ack"})

    def out_of_files(self, error: OSError) -> None:
        self.full.append(error)


@contextmanager
def serving(size: int = 4) -> Iterator[tuple[Counting, int]]:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, closing(Loop()) as loop:
        with closing(Counting(listener, loop, size)) as server:
            def serve() -> None:
                while not ended.is_set():
                    loop.run_once(0.01)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield server, listener.getsockname()[1]
            finally:
                ended.set()
                thread.join()


def notify(port: int) -> float:
    """Send a notice; return the seconds until it was acknowledged."""
    begin = time.monotonic()
    with closing(channel.connect("127.0.0.1", port, KEY, "rank")) as peer:
        peer.send(NOTICE)
        assert peer.receive_one(5) == {"kind": "ack"}
    return time.monotonic() - begin


def delay_in_a_flood(data: bytes) -> float:
    with serving() as (server, port), ExitStack() as peers:
        for _ in range(300):
            peer = peers.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.sendall(data)
        delay = max(notify(port) for _ in range(4))
        assert server.received == 4 and not server.full
    return delay


@pytest.mark.parametrize("data", [b"", b"ddp\n", b"ddp\n\0\0\1\0{", b"garbage\n"])
def test_a_flood_delays_nobody_by_a_second(data: bytes) -> None:
    assert any(delay_in_a_flood(data) < 1 for _ in range(3))  # other tests delay it, too


def test_a_process_without_a_free_descriptor_waits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (server, port):
        refused = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", refused)
            with socket.create_connection(("127.0.0.1", port)):
                time.sleep(0.5)
        assert server.full and refused.call_count < 50
        assert notify(port) < 1


def test_a_source_that_another_handler_has_removed_is_not_called() -> None:
    called: list[int] = []
    with closing(Loop()) as loop, ExitStack() as sockets:
        pairs = [socket.socketpair() for _ in range(2)]
        for end in (end for pair in pairs for end in pair):
            sockets.enter_context(end)
        for number, (read, write) in enumerate(pairs):
            write.send(b"x")
            loop.add(read, lambda events, number=number: (called.append(number), loop.remove(pairs[1 - number][0])))
        loop.run_once(1.0)
    assert len(called) == 1

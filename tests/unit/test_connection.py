"""JSON messages over a pair of sockets."""
from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from utils.connection import Connection


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the plain socket at its other end."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, longest_bytes=1 << 16)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[Connection, socket.socket]) -> None:
    connection, other = pair
    other.sendall(b'{"a":1}\n{"b":')
    assert connection.receive() == [{"a": 1}]
    other.sendall(b'2}\n{"c":3}\n')
    assert connection.receive_one(5) == {"b": 2}
    assert connection.receive() == [{"c": 3}]


@pytest.mark.parametrize("text", [b"SSH-2.0-OpenSSH\r\n", b"[1]\n", b"\x00\xff\n",
                                  b"[" * 60_000 + b"\n", b"x" * (1 << 17)])
def test_other_programs_close_the_connection(pair: tuple[Connection, socket.socket],
                                             text: bytes) -> None:
    connection, other = pair
    sender = threading.Thread(target=other.sendall, args=(text,), daemon=True)
    sender.start()
    assert connection.receive_one(10) is None
    assert connection.closed and "another program" in connection.problem


def test_messages_before_the_end_are_received(pair: tuple[Connection, socket.socket]) -> None:
    connection, other = pair
    other.sendall(b'{"a":1}\n')
    other.close()
    connection.send({"lost": True})
    assert connection.receive_one(5) == {"a": 1}
    assert connection.receive_one(5) is None and connection.problem == "it closed the connection"


def test_waiting_for_a_message_ends_in_time(pair: tuple[Connection, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        pair[0].receive_one(0.01)


def test_large_message_waits_for_the_receiver(pair: tuple[Connection, socket.socket]) -> None:
    connection, other = pair
    connection.send({"text": "x" * (1 << 22)})
    assert connection.unsent_bytes
    receiver = Connection(other)
    reading = threading.Thread(target=lambda: received.append(receiver.receive_one(20)))
    received: list[object] = []
    reading.start()
    connection.send({}, timeout=20)
    reading.join(20)
    assert connection.unsent_bytes == 0 and received == [{"text": "x" * (1 << 22)}]

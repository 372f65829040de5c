"""JSON messages over a pair of sockets."""
from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from utils.connection import Connection

Pair = tuple[Connection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection, and the plain socket at its other end."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, longest_bytes=1 << 16)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_messages_arrive_whole_in_order_and_before_the_end(pair: Pair) -> None:
    connection, other = pair
    with pytest.raises(TimeoutError):
        connection.receive_one(0.01)

    other.sendall(b'{"a":1}\n{"b":')
    assert connection.receive() == [{"a": 1}]
    other.sendall(b'2}\n{"c":3}\n{"d":4}\n')
    assert connection.receive_one(5) == {"b": 2}
    assert connection.receive() == [{"c": 3}, {"d": 4}]

    other.sendall(b'{"e":5}\n')
    other.close()
    connection.send({"lost": True})
    assert connection.receive_one(5) == {"e": 5}
    assert connection.receive_one(5) is None and connection.problem == "it closed the connection"


@pytest.mark.parametrize("text", [
    b"SSH-2.0-OpenSSH\r\n", b"[1]\n", b"\x00\xff\n", b"[" * 60_000 + b"\n", b"x" * (1 << 17)], ids=len)
def test_other_programs_close_the_connection(pair: Pair, text: bytes) -> None:
    connection, other = pair
    threading.Thread(target=other.sendall, args=(text,), daemon=True).start()
    assert connection.receive_one(10) is None
    assert connection.closed and "another program" in connection.problem


def test_large_message_waits_for_the_receiver(pair: Pair) -> None:
    connection, other = pair
    message = {"text": "x" * (1 << 22)}
    connection.send(message)
    assert connection.unsent_bytes
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(Connection(other).receive_one, 20)
        connection.send({}, timeout=20)
        assert received.result() == message and connection.unsent_bytes == 0

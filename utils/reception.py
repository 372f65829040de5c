"""The roll call: every rank hands rank 0 its card, rank 0 judges them all and answers each. No torch.

One connection per rank, lines of JSON, held until torch has connected all ranks, so that a rank that dies is noticed
and named. Not here: how rank 0 is found (rendezvous.py), what is on the cards (rollcall.py).
"""
from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import network
from .launchers import LaunchError, Placement
from .monitor import PROTOCOL, Monitor, decode, encode
from .rollcall import Card, ranges

Reply = dict[str, Any]
Judge = Callable[[list[Card]], tuple[str | None, list[Reply]]]  # cards by rank -> what is wrong, and a reply for each

SILENT = "it accepted the connection and said nothing; another program listens there"
_LONGEST_LINE = 1 << 20
_LINGER = 15.0  # seconds that rank 0 stays to tell late ranks why the start failed


class Reception:
    """Rank 0's side of the roll call: one connection per rank, held until the verdict."""

    def __init__(self, listener: socket.socket, placement: Placement, token: str, doubts: Sequence[str] = ()) -> None:
        self._listener, self._placement, self._token = listener, placement, token
        self._doubts = doubts  # what to tell with the news that ranks are missing
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, bytes] = {}
        self._rank_of: dict[socket.socket, int] = {}
        self._cards: dict[int, Card] = {}
        self._failure = ""
        self.address = "127.0.0.1"  # of this host, as the first rank on another host reached it

    def gather(self, card: Card, judge: Judge, deadline: float) -> Reply:
        """Collect the cards of all ranks, judge them, answer every rank; returns the reply for rank 0."""
        self._cards[0] = card
        if card.get("error"):
            self._failure = _says(0, card)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._failure and len(self._cards) < self._placement.world_size:
                if time.monotonic() >= deadline:
                    self._failure = self._missing()
                self._serve(deadline)
            replies: list[Reply] = []
            if not self._failure:
                wrong, replies = judge([self._cards[rank] for rank in range(self._placement.world_size)])
                self._failure = wrong or ""
            self._answer(replies)
            # Late ranks get the cause of a failed start. Where torchrun restarts, a late rank is of the next attempt.
            restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            deadline = min(deadline, time.monotonic() + (0 if restarts else _LINGER))
            while self._failure and len(self._cards) < self._placement.world_size and time.monotonic() < deadline:
                self._serve(deadline)
        finally:
            self._selector.close()
            self._listener.setblocking(True)
            for line in list(self._unread):
                if self._failure or line not in self._rank_of:
                    self._unread.pop(line)
                    line.close()
        if self._failure:
            raise LaunchError(self._failure)
        return replies[0]

    def monitor(self) -> Monitor:
        """Watch over the ranks that joined, until they leave."""
        return Monitor({line: (rank, _where(self._cards[rank])) for line, rank in self._rank_of.items()}, rank=0,
                       host=_where(self._cards[0]))

    def _serve(self, deadline: float) -> None:
        """Deal with what comes next, or return at the deadline."""
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._failure = f"rank 0 on {socket.gethostname()} ran out of file descriptors: {error}"
                    return
                continue  # the peer gave up between its connect and our accept
            line.setblocking(False)
            self._unread[line] = b""
            self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: socket.socket) -> None:
        try:
            received = line.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        rank = self._rank_of.get(line)
        if not received:
            if rank is not None and not self._failure:
                self._failure = (f"rank {rank} on {_where(self._cards[rank])} ended while the ranks were starting. "
                                 "Its own message tells why")
            return self._drop(line)
        self._unread[line] += received
        while b"\n" in self._unread[line]:
            text, _, self._unread[line] = self._unread[line].partition(b"\n")
            if not self._hear(line, text):
                return self._drop(line)
        if len(self._unread[line]) > _LONGEST_LINE:
            self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        self._unread.pop(line, None)
        line.close()

    def _hear(self, line: socket.socket, text: bytes) -> bool:
        """Deal with one line of a rank; False for a stranger."""
        try:
            said = json.loads(text)
            if said["kit"] != PROTOCOL or said["token"] != self._token:
                line.sendall(encode(token=self._token))  # so that the stranger knows whom it met
                return False
            rank, size, card = int(said["rank"]), int(said["world_size"]), said.get("card", {})
        except (ValueError, KeyError, TypeError, OSError, RecursionError):
            return False
        if said.get("giving_up"):
            self._failure = self._failure or self._missing()
            return True
        size_here, answered = self._placement.world_size, bool(self._failure)
        if answered:
            pass  # the first cause stands
        elif size != size_here:
            self._failure = (f"the ranks disagree on the world size: rank 0 on {_where(self._cards[0])} was told "
                             f"{size_here}, rank {rank} on {_where(card)} was told {size}. All ranks have to be "
                             "started by one launch with one size")
        elif rank in self._cards:
            self._failure = (f"two processes say that they are rank {rank}: on {_where(self._cards[rank])} and on "
                             f"{_where(card)}. Are two launches using the same MASTER_ADDR and MASTER_PORT?")
        elif card.get("error"):
            self._failure = _says(rank, card)
        self._rank_of[line], self._cards[rank] = rank, card
        peer, own = plain_address(line.getpeername()[0]), plain_address(line.getsockname()[0])
        if answered:
            self._answer_one(line, {"error": self._failure})
            return True
        if self.address == "127.0.0.1" and not network.is_loopback(own) and (peer != own or len(self._cards) == 2):
            self.address = own
        with contextlib.suppress(OSError):
            line.sendall(encode(token=self._token, welcome=True))
        return True

    def _missing(self) -> str:
        missing = [rank for rank in range(self._placement.world_size) if rank not in self._cards]
        known: dict[str, int] = {}
        for card in self._cards.values():
            known[str(card.get("host"))] = known.get(str(card.get("host")), 0) + 1
        hosts = ", ".join(f"{host} ({count})" for host, count in list(known.items())[:16])
        return (f"{len(missing)} of {self._placement.world_size} ranks did not join: rank {ranges(missing)}. "
                f"Those that came run on {hosts}{' ...' if len(known) > 16 else ''}. Look for messages of the missing "
                f"ranks; if there are none, they hang before setup_distributed() or cannot reach rank 0, which listens "
                f"on {socket.gethostname()} port {self._listener.getsockname()[1]}"
                + "".join(f". {doubt}" for doubt in self._doubts))

    def _answer(self, replies: list[Reply]) -> None:
        for line, rank in self._rank_of.items():
            self._answer_one(line, {"error": self._failure} if self._failure else {"reply": replies[rank]})

    def _answer_one(self, line: socket.socket, verdict: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a rank that is gone needs no answer
            line.settimeout(10)
            line.sendall(encode(token=self._token, master_addr=self.address,
                                host=_where(self._cards[0]), **verdict))
            line.setblocking(False)


def call(address: str, port: int, hello: dict[str, Any], deadline: float,
         patience: float = 10.0) -> tuple[Reply, socket.socket] | str:
    """Hand in the card and wait for the verdict: (verdict, open connection), or why this place is not rank 0's.

    patience: seconds that the first word may take; rank 0 says it at once, the verdict when all ranks have come.
    """
    left = deadline - time.monotonic()
    try:
        line = socket.create_connection((address, port), timeout=max(0.1, min(3.0, left)))
    except OSError as error:
        return error.strerror or "no answer"
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(line.close)
        try:
            if line.getsockname() == line.getpeername():
                return "Connection refused"  # the kernel joined a connection to itself: nobody listens
            line.sendall(encode(**hello))
            line.settimeout(max(0.1, min(patience, left)))
            verdict = decode(_read_line(line))
            if verdict.get("token") != hello["token"]:
                return "another launch of this kit listens there" if verdict.get("kit") else "not this kit answered"
            if not _is_verdict(verdict):
                line.settimeout(max(0.1, deadline - time.monotonic()))
                verdict = _wait(line, hello)
        except TimeoutError:
            return SILENT
        except OSError as error:
            return f"the connection broke ({error.strerror})"
        if not _is_verdict(verdict):
            raise LaunchError(f"rank 0 at {address} port {port} ended while the ranks were starting (seen by rank "
                              f"{hello['rank']} on {socket.gethostname()}). Its own message tells why")
        if verdict.get("error"):
            failure = LaunchError(verdict["error"])
            failure.reported_by_rank_0 = True
            raise failure
        on_failure.pop_all()
    return verdict, line


def _wait(line: socket.socket, hello: dict[str, Any]) -> dict[str, Any]:
    """The verdict; when it does not come in time, ask rank 0 to name who is missing."""
    try:
        return decode(_read_line(line))
    except TimeoutError:
        line.settimeout(5)
        with contextlib.suppress(OSError):
            line.sendall(encode(**{k: v for k, v in hello.items() if k != "card"}, giving_up=True))
            return decode(_read_line(line))
    return {}


def _read_line(line: socket.socket) -> bytes:
    """The next line and nothing behind it, which the watch will read; what there is where the other side ends."""
    read = b""
    while len(read) < _LONGEST_LINE:
        seen = line.recv(1 << 16, socket.MSG_PEEK)
        end = seen.find(b"\n") + 1
        read += line.recv(end or len(seen))
        if end or not seen:
            break
    return read


def _is_verdict(said: dict[str, Any]) -> bool:
    return "error" in said or "reply" in said


def plain_address(address: str) -> str:
    """::ffff:10.0.0.1 -> 10.0.0.1"""
    return address.removeprefix("::ffff:")


def _where(card: Card) -> str:
    return f"{card.get('host', '?')} (pid {card.get('pid', '?')})"


def _says(rank: int, card: Card) -> str:
    return f"rank {rank} on {_where(card)} cannot start: {card['error']}"

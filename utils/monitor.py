"""Find out which rank ended, failed or hangs first, so that every rank can report the same cause. No torch.

Every rank keeps its connection of the start-up exchange to rank 0 until it leaves, and a thread of its own listens to
it. A rank that leaves or fails reports so on its connection first; a connection that ends without a report is a rank
that was killed. A rank whose collective fails or times out queries rank 0 for the cause. Messages are lines of JSON.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import socket
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

PROTOCOL = "ddpkit-1"
_ACKNOWLEDGE_SECONDS = 2.0  # that a leaving rank waits for its report to arrive
_DECIDE_SECONDS = 3.0  # that rank 0 waits for reports and positions before it answers a query
_END_SECONDS = 10.0  # that a rank for which the others have waited in vain has to notice that they have stopped
Position = tuple[int, str]  # number of collectives that a rank has entered, and where its main thread is


def encode(**words: Any) -> bytes:
    """One message as a line."""
    return json.dumps({"kit": PROTOCOL, **words}, separators=(",", ":")).encode() + b"\n"


def decode(text: bytes) -> dict[str, Any]:
    """The words of a line; empty where it is not a message of this kit."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) and words.get("kit") == PROTOCOL else {}


class Monitor:
    """One rank's end of the connections between rank 0 and the others. connections: to which rank, on which host.

    Until started() a rank that ends makes the start fail: the thread ends this process unless cause() was called.
    position: called by the thread for the number of collectives that this rank has entered.
    """

    def __init__(self, connections: dict[socket.socket, tuple[int, str]], *, rank: int, host: str = "") -> None:
        self._rank, self.connections = rank, dict(connections)
        self._where = {0: host or socket.gethostname(), **dict(connections.values())}
        self.position: Callable[[], int | None] = lambda: None
        self._others = [other for other, _ in connections.values()]
        self._lock = threading.RLock()
        self._started = dict.fromkeys([rank, *self._where], False)
        self._start_failure = ""
        self._handled = threading.Event()  # the main thread deals with a failed start itself
        self._found = threading.Event()
        self._departed: dict[int, str] = {}  # rank -> cause for those that still need it; "" where it is a victim
        self._first = ""  # the cause that every rank reports
        self._queries: dict[socket.socket | None, tuple[str, float]] = {}  # who waits for the cause: kind, since when
        self._positions: dict[int, Position] = {}
        self._asked_positions = False
        self._behind_ranks: set[int] = set()  # that hang, as far as rank 0 knows
        self._answer = threading.Event()
        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self._unread: dict[socket.socket, bytes] = dict.fromkeys(connections, b"")
        self._closing = self._over = False
        self._wake, self._woken = socket.socketpair()
        # A forked child, a DataLoader's worker for example, must not keep the connections of a dead rank open.
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))
        threading.Thread(target=self._run, daemon=True, name="rank monitor").start()

    # Called by the main thread ---------------------------------------------------------------------------------------

    def cause(self, seconds: float) -> str:
        """Which rank ended during the start, if it becomes known within `seconds`; the caller reports it."""
        self._handled.set()
        self._found.wait(seconds)
        return self._start_failure

    def started(self) -> None:
        """Report that torch has connected this rank."""
        with self._lock:
            self._handled.set()
            self._started[self._rank] = True
            self._send_all(started=True)

    def leave(self, cause: str) -> None:
        """Report that this rank leaves, and close the connections.

        cause: what the ranks that still need this one should report; "" where this rank is itself stopped by another.
        Waits two seconds at most for the report to arrive.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._end_ranks_behind(set())
            # Nobody can query rank 0 after it has left: it leaves with the cause that it knows.
            self._send_all(left=cause, first=self._first or self._known() if self._rank == 0 else "")
        self._notify()
        self._all_acknowledged.wait(_ACKNOWLEDGE_SECONDS)
        self._over = True
        self._notify()

    def query(self, kind: str) -> str:
        """The first cause, by rank 0; "" where it is not known. kind: "lost" or "timeout", what this rank has seen."""
        with self._lock:
            if self._first or self._closing or self._rank and 0 in self._departed:
                return self._first or self._known()
            self._answer.clear()
            if self._rank == 0:
                self._queries[None] = kind, time.monotonic()
            else:
                self._send_all(query=kind)
        self._notify()
        self._answer.wait(2 * _DECIDE_SECONDS + 1)
        return self._first or self._known()

    def report(self, cause: str) -> str:
        """Report a failure of this rank, which goes on for a moment; returns the cause that came first."""
        with self._lock:
            if self._rank == 0:
                self._first = self._first or cause
                return self._first
            if self._first or self._closing or 0 in self._departed:
                return self._first or cause
            self._answer.clear()
            self._send_all(failed=cause)
        self._answer.wait(_ACKNOWLEDGE_SECONDS)
        return self._first or cause

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for connection in list(self.connections):
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
            while not self._start_failure and not self._over:
                for key, _ in selector.select(0.05 if self._queries else None):
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif not self._read(key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                with self._lock:
                    self._decide()
                    self._end_ranks_behind(set(self._where) - set(self._departed))
                    if self._closing and self._acknowledged.issuperset(self._others):
                        self._all_acknowledged.set()
        self._found.set()
        self._all_acknowledged.set()
        self._answer.set()
        self._close_sockets()
        if self._start_failure and not self._handled.wait(2):
            sys.stderr.write(f"{self._start_failure}\n")
            sys.stderr.flush()
            os._exit(1)

    def _read(self, connection: socket.socket) -> bool:
        """Handle what has arrived; False when the connection has ended."""
        try:
            received = connection.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            received = b""
        with self._lock:
            other, where = self.connections[connection]
            self._unread[connection] += received
            *lines, self._unread[connection] = self._unread[connection].split(b"\n")
            for line in lines:
                self._handle(connection, other, decode(line))
            if not received:
                self._ended(connection, other, where)
        return bool(received)

    def _handle(self, connection: socket.socket, other: int, message: dict[str, Any]) -> None:
        if message.get("error"):
            self._fail_start(str(message["error"]))
        if message.get("started"):
            self._started[other] = True
        if "left" in message:
            self._departed[other] = str(message["left"])
            self._acknowledged.add(other)  # it needs no report any more
            self._send(connection, acknowledged=True)
            self._first = self._first or str(message.get("first") or "")
            if self._rank:  # nobody answers any more
                self._answer.set()
        if message.get("acknowledged"):
            self._acknowledged.add(other)
        if message.get("failed"):
            self._first = self._first or str(message["failed"])
            self._send(connection, cause=self._first)
        if message.get("query"):
            self._queries[connection] = str(message["query"]), time.monotonic()
        if "cause" in message:
            self._first = self._first or str(message["cause"])
            self._answer.set()
        if message.get("end"):
            self._end_later(str(message["end"]))
        if message.get("where"):
            self._send(connection, entered=self.position(), at=_main_thread())
        if "entered" in message and message["entered"] is not None:
            self._positions[other] = int(message["entered"]), str(message.get("at", ""))

    def _ended(self, connection: socket.socket, other: int, where: str) -> None:
        self._acknowledged.add(other)
        self._queries.pop(connection, None)
        if self._closing or other in self._departed:
            pass
        elif not self._started[other] and not (self._rank and self._started[self._rank]):
            self._fail_start(f"rank {other} on {where} died while torch was connecting the ranks. "
                             "Its own message tells why")
        else:
            self._departed[other] = (f"rank {other} on {where} died without a message: was it killed by the system? "
                                     "Look for out of memory or for a signal in the launcher's output")
            if self._rank:
                self._answer.set()

    def _fail_start(self, cause: str) -> None:
        """A rank ended during the start: those that still start cannot go on."""
        if self._rank == 0:
            self._send_all(error=cause)
        if self._started[self._rank]:
            self._first = self._first or cause
        else:
            self._start_failure = cause

    def _known(self) -> str:
        """What the first rank that departed gave as the cause."""
        return next((cause for cause in self._departed.values() if cause), "")

    def _decide(self) -> None:
        """On rank 0: answer the queries as soon as the cause is known, or after a while with what is known."""
        if not self._queries or self._rank:
            return
        waited = time.monotonic() - min(since for _, since in self._queries.values())
        self._first = self._first or self._known()
        if not self._first and any(kind == "timeout" for kind, _ in self._queries.values()):
            self._first = self._behind(waited > _DECIDE_SECONDS)
        if self._first or waited > _DECIDE_SECONDS:
            for connection in self._queries:
                if connection is None:
                    self._answer.set()
                else:
                    self._send(connection, cause=self._first)
            self._queries.clear()

    def _behind(self, last_chance: bool) -> str:
        """Which ranks have entered fewer collectives than the others, or do not answer; "" while that is not known."""
        running = sorted(set(self._where) - set(self._departed))
        if not self._asked_positions:
            self._asked_positions = True
            self._send_all(where=True)
        entered = self.position()
        if entered is not None:
            self._positions[0] = entered, _main_thread()
        silent = [rank for rank in running if rank not in self._positions]
        if silent and not last_chance:
            return ""
        last = max((entered for entered, _ in self._positions.values()), default=0)
        missing = [rank for rank in running if rank in self._positions and self._positions[rank][0] < last]
        self._behind_ranks = {*missing, *silent}
        named = [f"rank {rank} on {self._where[rank]} did not enter collective {last}, in which the other ranks wait. "
                 f"It is at {self._positions[rank][1]}" for rank in missing]
        named += [f"rank {rank} on {self._where[rank]} does not answer: it is stopped, or busy in native code"
                  for rank in silent]
        if len(named) > 8:
            named[8:] = [f"... and {len(named) - 8} more ranks"]
        return "; ".join(named) or (f"a collective timed out although all ranks have entered collective {last} by now: "
                                    "one was late, or a connection between the hosts is interrupted")

    def _end_ranks_behind(self, running: set[int]) -> None:
        """On rank 0: when no others are running, end the ranks that they have waited for, which may never notice."""
        if self._behind_ranks.issuperset(running):
            for connection, (rank, _) in self.connections.items():
                if rank in self._behind_ranks:
                    self._send(connection, end=self._first)
            if 0 in self._behind_ranks:
                self._end_later(self._first)
            self._behind_ranks = set()

    def _end_later(self, cause: str) -> None:
        def end() -> None:
            if not self._closing:
                sys.stderr.write(f"rank {self._rank} on {socket.gethostname()} is ended, because all other ranks have "
                                 f"stopped: {cause}\n")
                sys.stderr.flush()
                os._exit(1)

        timer = threading.Timer(_END_SECONDS, end)
        timer.daemon = True
        timer.start()

    def _send(self, connection: socket.socket, **words: Any) -> None:
        with contextlib.suppress(OSError, ValueError):  # the other side has gone
            connection.sendall(encode(**words))

    def _send_all(self, **words: Any) -> None:
        with self._lock:
            for connection in self.connections:
                self._send(connection, **words)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _close_sockets(self) -> None:
        for one in [*self.connections, self._wake, self._woken]:
            with contextlib.suppress(OSError):
                one.close()


def _close_in_child(reference: weakref.ref[Monitor]) -> None:
    monitor = reference()
    if monitor is not None:
        monitor._close_sockets()


def _main_thread() -> str:
    """Where the main thread is, in the innermost frame that is not of Python's library or an installed package."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # what faulthandler shows, as an object
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((*libraries, "<")):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"

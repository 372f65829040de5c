"""The start-up exchange: every rank reports to rank 0, which sends each rank its assignment.

Each rank has one connection to rank 0, identified by the token of the launch. The connections
stay open: monitor.py notices a rank that dies while torch connects the ranks. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, cast

from ..connection import Connection, Message
from ..host import network
from ..launch_error import LaunchError
from ..launchers.launcher import Placement
from ..monitor.monitor import Monitor, Peer
from .reports import Assignment, RankReport, ranges

PROTOCOL = "ddpkit-1"
_LONGEST_BYTES = 1 << 20  # of one message
_SEND_SECONDS = 10.0
_LATE_RANKS_SECONDS = 15.0  # that rank 0 stays to send late ranks the cause of a failed start
_SHOWN_HOSTS = 16


class RendezvousServer:
    """Rank 0's end of the start-up exchange. A context manager.

    address: of this host, as the first rank on another host has reached it.
    """

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        token: str,
        hints: Callable[[], Iterable[str]],
    ) -> None:
        """Prepare to accept connections.

        token: identifies the launch; other clients are turned away. hints: returns what may keep
        ranks from joining, for the message that names the missing ones.
        """
        self.address = "127.0.0.1"
        self._listener, self._world_size, self._token = listener, world_size, token
        self._hints = hints
        self._selector = selectors.DefaultSelector()
        self._connections: dict[Connection, str] = {}  # to the address of the client
        self._rank_of: dict[Connection, int] = {}
        self._reports: dict[int, RankReport] = {}
        self._refusal = ""  # the cause, once the start has failed

    def __enter__(self) -> RendezvousServer:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._selector.close()
        self._listener.setblocking(True)
        for connection in self._connections:
            if error is not None or connection not in self._rank_of:
                connection.close()

    def collect(self, report: RankReport, deadline: float) -> list[RankReport]:
        """Wait for the reports of all ranks; return them in rank order.

        report: rank 0's. deadline: monotonic seconds. Raises LaunchError when a rank does not
        join in time, ends, cannot start, or does not belong to this launch.
        """
        self._reports[0] = report
        if report["error"]:
            raise LaunchError(_cannot_start(0, report))
        while len(self._reports) < self._world_size:
            if time.monotonic() >= deadline:
                raise LaunchError(self._missing_ranks())
            self._serve(deadline)
        return [self._reports[rank] for rank in range(self._world_size)]

    def send(self, assignments: Sequence[Assignment]) -> Monitor:
        """Send every rank its assignment; return the monitor of the connections."""
        for connection, rank in self._rank_of.items():
            self._send_result(connection, {"assignment": assignments[rank]})
        peers = {
            connection: Peer(rank, _host(self._reports[rank]))
            for connection, rank in self._rank_of.items()
        }
        return Monitor(peers, rank=0, host=_host(self._reports[0]))

    def refuse(self, cause: str, deadline: float) -> None:
        """Send the cause of a failed start to every rank, for some seconds also to late ranks."""
        self._refusal = cause
        for connection in self._rank_of:
            self._send_result(connection, {"error": cause})
        # Where torchrun restarts the ranks, a late rank belongs to the next attempt.
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        late_ranks_seconds = 0.0 if restarts else _LATE_RANKS_SECONDS
        deadline = min(deadline, time.monotonic() + late_ranks_seconds)
        while len(self._reports) < self._world_size and time.monotonic() < deadline:
            self._serve(deadline)

    def _serve(self, deadline: float) -> None:
        """Handle the next events, or return at the deadline."""
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            if isinstance(key.fileobj, Connection):
                self._read(key.fileobj)
            else:
                self._accept()

    def _accept(self) -> None:
        while True:
            try:
                client, client_address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # the client gave up between its connect() and this accept()
                if self._refusal:
                    return
                raise LaunchError(
                    f"rank 0 on {socket.gethostname()} ran out of file descriptors: {error}. "
                    f"Expected one for each of {self._world_size} ranks. Raise `ulimit -n` there"
                ) from None
            connection = Connection(client, longest_bytes=_LONGEST_BYTES)
            self._connections[connection] = plain_address(client_address[0])
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: Connection) -> None:
        for message in connection.receive():
            if not self._handle(connection, message):
                self._drop(connection)
                return
        if connection.closed:
            self._drop(connection)
            rank = self._rank_of.get(connection)
            if rank is not None and not self._refusal:
                raise LaunchError(
                    f"rank {rank} on {_host(self._reports[rank])} ended while the ranks were "
                    "starting. Look for its own message"
                )

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        self._connections.pop(connection)
        connection.close()

    def _handle(self, connection: Connection, message: Message) -> bool:
        """Handle a message; False for an unknown client.

        Raises LaunchError when the start fails by this message.
        """
        if message.get("kit") != PROTOCOL or message.get("token") != self._token:
            connection.send(self._message({}))  # the client learns which launch this is
            return False
        rank, world_size = int(message["rank"]), int(message["world_size"])
        if message.get("timed_out"):
            if not self._refusal:
                raise LaunchError(self._missing_ranks())
            return True

        report = cast(RankReport, message.get("report", {}))
        earlier = self._reports.get(rank)
        self._rank_of[connection], self._reports[rank] = rank, report
        if self._refusal:
            self._send_result(connection, {"error": self._refusal})
            return True
        self._check(rank, world_size, report, earlier)
        self._note_address(connection)
        connection.send(self._message({"joined": True}))
        return True

    def _check(
        self, rank: int, world_size: int, report: RankReport, earlier: RankReport | None
    ) -> None:
        """Raise LaunchError unless this rank can join. earlier: a report of the same rank."""
        if world_size != self._world_size:
            raise LaunchError(
                f"the ranks disagree on the world size: rank 0 of {self._world_size} on "
                f"{_host(self._reports[0])}, rank {rank} of {world_size} on {_host(report)}. Start "
                "all ranks by one launch with one size"
            )
        if earlier is not None:
            raise LaunchError(
                f"two processes report as rank {rank}: on {_host(earlier)} and on {_host(report)}. "
                "Check whether two launches use the same MASTER_ADDR and MASTER_PORT"
            )
        if report.get("error"):
            raise LaunchError(_cannot_start(rank, report))

    def _note_address(self, connection: Connection) -> None:
        if self.address != "127.0.0.1":
            return
        local_address = plain_address(connection.socket.getsockname()[0])
        from_another_host = self._connections[connection] != local_address
        is_first = len(self._reports) == 2
        if not network.is_loopback(local_address) and (from_another_host or is_first):
            self.address = local_address

    def _missing_ranks(self) -> str:
        missing = [rank for rank in range(self._world_size) if rank not in self._reports]
        ranks_of = Counter(str(report.get("host")) for report in self._reports.values())
        hosts = [f"{host} ({count})" for host, count in list(ranks_of.items())[:_SHOWN_HOSTS]]
        more = " ..." if len(ranks_of) > _SHOWN_HOSTS else ""
        plural = "s" * (len(missing) > 1)
        return (
            f"{len(missing)} of {self._world_size} ranks did not join: rank{plural} "
            f"{ranges(missing)}. "
            f"Those that joined run on {', '.join(hosts)}{more}. Look for messages of the missing "
            "ranks. If there are none, they hang before setup_distributed() or cannot reach "
            f"rank 0, which listens on {socket.gethostname()} port "
            f"{self._listener.getsockname()[1]}" + "".join(f". {hint}" for hint in self._hints())
        )

    def _send_result(self, connection: Connection, result: Message) -> None:
        host = _host(self._reports[0])
        message = self._message({"master_addr": self.address, "host": host, **result})
        connection.send(message, _SEND_SECONDS)

    def _message(self, content: Message) -> Message:
        return {"kit": PROTOCOL, "token": self._token, **content}


class NotRank0(Exception):
    """Rank 0 of this launch does not listen at an address; the text names what was found there."""

    unresponsive = False  # a program accepts connections there and sends nothing


class Joined(NamedTuple):
    """What a rank has after the start-up exchange."""

    assignment: Assignment
    master_addr: str
    local_addr: str  # of this host, on the way to rank 0
    monitor: Monitor


def join(
    address: str,
    port: int,
    token: str,
    placement: Placement,
    report: RankReport,
    *,
    deadline: float,
    first_response_timeout: float = 10.0,
) -> Joined:
    """Report to rank 0 at an address and wait for the assignment.

    deadline: monotonic seconds. first_response_timeout: seconds until the first response; rank 0
    sends it at once, and the assignment when all ranks have joined.

    Raises NotRank0 when rank 0 of this launch is not found there, and LaunchError when it is, but
    the start has failed.
    """
    this_rank = {
        "kit": PROTOCOL,
        "token": token,
        "rank": placement.rank,
        "world_size": placement.world_size,
    }
    left = deadline - time.monotonic()
    try:
        connected = socket.create_connection((address, port), timeout=max(0.1, min(3.0, left)))
    except OSError as error:
        raise NotRank0(error.strerror or "no response") from None
    connection = Connection(connected, longest_bytes=_LONGEST_BYTES)

    with contextlib.ExitStack() as on_failure:
        on_failure.callback(connection.close)
        try:
            is_connected_to_itself = connected.getsockname() == connected.getpeername()
        except OSError as error:  # the program there has closed the connection already
            raise NotRank0(error.strerror or "no response") from None
        if is_connected_to_itself:  # by the kernel: nobody listens there
            raise NotRank0("Connection refused")
        timeout = max(0.1, min(first_response_timeout, left))
        connection.send({**this_rank, "report": report}, timeout)
        response: Message | None = _first_response(connection, token, timeout)
        if response and "joined" in response:
            response = _wait_for_result(connection, this_rank, deadline)

        if response is None:
            raise LaunchError(
                f"rank 0 at {address} port {port} ended while the ranks were starting (seen by "
                f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}). Look "
                "for its own message"
            )
        if "error" in response:
            failure = LaunchError(response["error"])
            failure.reported_by_rank_0 = True
            raise failure
        on_failure.pop_all()

    # The monitor may close the connection at any time.
    local_addr = plain_address(connected.getsockname()[0])
    rank_0 = Peer(0, response["host"])
    monitor = Monitor({connection: rank_0}, rank=placement.rank, host=_host(report))
    return Joined(response["assignment"], response["master_addr"], local_addr, monitor)


def _first_response(connection: Connection, token: str, timeout: float) -> Message:
    """Return rank 0's first message: that this rank has joined, or the cause of a failed start."""
    try:
        response = connection.receive_one(timeout)
    except TimeoutError:
        failure = NotRank0("it accepts connections but sends nothing; another program runs there")
        failure.unresponsive = True
        raise failure from None
    if response is None:
        raise NotRank0(connection.problem)
    if response.get("kit") != PROTOCOL:
        raise NotRank0("its response is not from this kit; another program runs there")
    if response.get("token") != token or not response.keys() & {"joined", "error"}:
        raise NotRank0("another launch of this kit listens there")
    return response


def _wait_for_result(connection: Connection, this_rank: Message, deadline: float) -> Message | None:
    """Return the assignment or error; None when rank 0 has ended.

    At the deadline, request the error from rank 0, which names the missing ranks.
    """
    with contextlib.suppress(TimeoutError):
        return connection.receive_one(max(0.1, deadline - time.monotonic()))
    connection.send({**this_rank, "timed_out": True})
    with contextlib.suppress(TimeoutError):
        return connection.receive_one(5.0)
    return None


def plain_address(address: str) -> str:
    """::ffff:10.0.0.1 -> 10.0.0.1"""
    return address.removeprefix("::ffff:")


def _host(report: RankReport) -> str:
    return f"{report.get('host', '?')} (pid {report.get('pid', '?')})"


def _cannot_start(rank: int, report: RankReport) -> str:
    return f"rank {rank} on {_host(report)} cannot start: {report['error']}"

"""The start-up exchange: every rank reports to rank 0, which sends each rank its assignment.

Each rank has one connection to rank 0. Both sides have proved that they know the secret of the
launch. The connections stay open; the monitor of the ranks uses them next. No torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, cast

from .. import channel
from ..channel import Channel, Loop, Message, Peer, PeerServer, Secret
from ..errors import LaunchError
from ..host import network
from ..launchers.launcher import Placement
from ..phrases import CANNOT_START
from .reports import Assignment, RankReport, did_not_join

_ROLE = "rank"
_SEND_SECONDS = 10.0
_LATE_RANKS_SECONDS = 15.0  # rank 0 sends late ranks the cause of a failed start for so long
_SHOWN_HOSTS = 16


class RendezvousServer(PeerServer):
    """Rank 0's side of the start-up exchange. A context manager.

    address: this host's address, as the first rank on another host has reached it.
    """

    def __init__(
        self,
        listener: socket.socket,
        world_size: int,
        secret: Secret,
        hints: Callable[[], Iterable[str]],
    ) -> None:
        """Accept connections.

        hints: returns possible reasons why ranks do not join, for the message that names them.
        """
        self.address = "127.0.0.1"
        self._world_size, self._hints = world_size, hints
        self._rank_of: dict[Channel, int] = {}
        self._reports: dict[int, RankReport] = {}
        self._refusal = ""  # why the start has failed
        super().__init__(listener, Loop(), secret, world_size)

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self._loop.close()
        self._listener.setblocking(True)

    def collect(self, report: RankReport, deadline: float) -> list[RankReport]:
        """Wait for the reports of all ranks; return them in rank order.

        report: rank 0's own. deadline: monotonic seconds. Raises LaunchError when a rank does not
        join in time, ends, cannot start, or does not belong to this launch.
        """
        self._reports[0] = report
        if report["error"]:
            raise LaunchError(_cannot_start(0, report), rank=0, host=report["host"])
        while len(self._reports) < self._world_size:
            if time.monotonic() >= deadline:
                raise LaunchError(self._missing_ranks())
            self._loop.run_once(max(0.0, deadline - time.monotonic()))
        return [self._reports[rank] for rank in range(self._world_size)]

    def addresses(self) -> set[str]:
        """Return the addresses that the ranks joined from, and other addresses of their hosts."""
        found = set[str]().union(*(report["addresses"] for report in self._reports.values()))
        for peer in self._rank_of:
            with contextlib.suppress(OSError):  # the rank may just have ended
                found.add(network.plain_address(peer.socket.getpeername()[0]))
        return found

    def send(self, assignments: Sequence[Assignment]) -> dict[Channel, Peer]:
        """Send every rank its assignment; return the connections, which stay open."""
        peers = {
            peer: Peer(rank, host_and_pid(self._reports[rank]))
            for peer, rank in self._rank_of.items()
        }
        for peer, rank in self._rank_of.items():
            self.release(peer)
            self._answer(peer, assignment=assignments[rank])
        return peers

    def refuse(self, cause: str, deadline: float) -> None:
        """Send every rank the cause of a failed start, for some seconds also late ranks."""
        self._refusal = cause
        for peer in self._rank_of:
            self._answer(peer, error=cause)
        # If torchrun restarts the ranks, a late rank belongs to the next attempt.
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        late_ranks_seconds = 0.0 if restarts else _LATE_RANKS_SECONDS
        deadline = min(deadline, time.monotonic() + late_ranks_seconds)
        while len(self._reports) < self._world_size and time.monotonic() < deadline:
            self._loop.run_once(max(0.0, deadline - time.monotonic()))

    def out_of_files(self, error: OSError) -> None:
        if not self._refusal:
            raise LaunchError(
                f"rank 0 on {socket.gethostname()} ran out of file descriptors: {error}. "
                f"Expected one for each of {self._world_size} ranks. Raise `ulimit -n` there",
                rank=0,
                host=socket.gethostname(),
            )

    def lost(self, peer: Channel) -> None:
        rank = self._rank_of.get(peer)
        if rank is not None and not self._refusal:
            raise LaunchError(
                f"rank {rank} on {host_and_pid(self._reports[rank])} ended while the ranks were "
                "starting. Look for its own message",
                rank=rank,
                host=self._reports[rank]["host"],
            )

    def receive(self, peer: Channel, message: Message) -> None:
        """Handle a message. Raises LaunchError if it makes the start fail."""
        if message["kind"] == "ask_missing" and not self._refusal:
            raise LaunchError(self._missing_ranks())
        if message["kind"] != "report":
            return
        rank, world_size = peer.session.hello["index"], peer.session.hello["size"]
        if world_size == self._world_size <= rank:
            peer.close()
            return
        report = cast(RankReport, message["value"])
        earlier = self._reports.get(rank)
        self._rank_of[peer], self._reports[rank] = rank, report
        if self._refusal:
            self._answer(peer, error=self._refusal)
            return
        self._check(rank, world_size, report, earlier)
        self._note_address(peer)

    def _check(
        self, rank: int, world_size: int, report: RankReport, earlier: RankReport | None
    ) -> None:
        """Raise LaunchError unless this rank can join. earlier: a report of the same rank."""
        if world_size != self._world_size:
            raise LaunchError(
                f"the ranks disagree on the world size: rank 0 of {self._world_size} on "
                f"{host_and_pid(self._reports[0])}, rank {rank} of {world_size} on "
                f"{host_and_pid(report)}. Start all ranks by one launch with one size"
            )
        if earlier is not None:
            raise LaunchError(
                f"two processes report as rank {rank}: on {host_and_pid(earlier)} and on "
                f"{host_and_pid(report)}. Check whether two launches use the same MASTER_ADDR and "
                "MASTER_PORT"
            )
        if report.get("error"):
            raise LaunchError(_cannot_start(rank, report), rank=rank, host=report["host"])

    def _note_address(self, peer: Channel) -> None:
        if self.address != "127.0.0.1":
            return
        local_address, address = (
            network.plain_address(end[0])
            for end in (peer.socket.getsockname(), peer.socket.getpeername())
        )
        is_first = len(self._reports) == 2
        if not network.is_loopback(local_address) and (address != local_address or is_first):
            self.address = local_address

    def _missing_ranks(self) -> str:
        missing = [rank for rank in range(self._world_size) if rank not in self._reports]
        ranks_of = Counter(str(report.get("host")) for report in self._reports.values())
        hosts = [f"{host} ({count})" for host, count in list(ranks_of.items())[:_SHOWN_HOSTS]]
        more = " ..." if len(ranks_of) > _SHOWN_HOSTS else ""
        return (
            f"{did_not_join(missing, self._world_size)}. Those that joined run on "
            f"{', '.join(hosts)}{more}. Look for messages of the missing ranks. If there are none, "
            "they hang before setup_distributed() or cannot reach rank 0, which "
            f"listens on {socket.gethostname()} port "
            f"{self._listener.getsockname()[1]}" + "".join(f". {hint}" for hint in self._hints())
        )

    def _answer(
        self, peer: Channel, *, assignment: Assignment | None = None, error: str = ""
    ) -> None:
        answer = {"assignment": assignment, "error": error, "master_addr": self.address}
        host = host_and_pid(self._reports[0])
        peer.send({"kind": "answer", **answer, "host": host}, _SEND_SECONDS)


class NotRank0(Exception):
    """Rank 0 of this launch does not listen at an address; the text says what was found there."""

    unresponsive = False  # whether a program accepts connections there but sends nothing


class Joined(NamedTuple):
    """The result of a rank's start-up exchange."""

    assignment: Assignment
    master_addr: str
    local_addr: str  # this host's address on the way to rank 0
    connections: dict[Channel, Peer]  # the connection to rank 0


def join(
    address: str,
    port: int,
    secret: Secret,
    placement: Placement,
    report: RankReport,
    *,
    deadline: float,
    first_response_timeout: float = 10.0,
) -> Joined:
    """Report to rank 0 at an address and wait for the assignment.

    deadline: monotonic seconds. first_response_timeout: seconds until rank 0 has proved itself. It
    sends the assignment later, when all ranks have joined.

    Raises NotRank0 if rank 0 of this launch is not found there, and LaunchError if it is, but the
    start has failed.
    """
    seconds = max(0.1, min(first_response_timeout, deadline - time.monotonic()))
    rank, size = placement.rank, placement.world_size
    try:
        peer = channel.connect(address, port, secret, _ROLE, index=rank, size=size, seconds=seconds)
    except OSError as error:
        failure = NotRank0(error.strerror or str(error) or "no response")
        failure.unresponsive = isinstance(error, channel.Unresponsive)
        raise failure from None

    with contextlib.ExitStack() as on_failure:
        on_failure.callback(peer.close)
        peer.send({"kind": "report", "value": report}, seconds)
        answer = _wait_for_answer(peer, deadline)
        if answer is None:
            raise LaunchError(
                f"rank 0 at {address} port {port} ended while the ranks were starting (seen by "
                f"rank {rank} of {size} on {socket.gethostname()}). Look for its own message"
            )
        if answer["error"]:
            refused = LaunchError(answer["error"])
            refused.reported_by_rank_0 = True
            raise refused
        on_failure.pop_all()

    local_addr = network.plain_address(peer.socket.getsockname()[0])
    rank_0 = Peer(0, answer["host"])
    return Joined(answer["assignment"], answer["master_addr"], local_addr, {peer: rank_0})


def _wait_for_answer(peer: Channel, deadline: float) -> Message | None:
    """Return rank 0's answer; None when rank 0 has ended.

    At the deadline, asks rank 0 for the error, which names the missing ranks.
    """
    with contextlib.suppress(TimeoutError):
        return peer.receive_one(max(0.1, deadline - time.monotonic()))
    peer.send({"kind": "ask_missing"})
    with contextlib.suppress(TimeoutError):
        return peer.receive_one(5.0)
    return None


def host_and_pid(report: RankReport) -> str:
    """Return "node17 (pid 4711)"."""
    return f"{report.get('host', '?')} (pid {report.get('pid', '?')})"


def _cannot_start(rank: int, report: RankReport) -> str:
    return f"rank {rank} on {host_and_pid(report)} {CANNOT_START} {report['error']}"

"""The messages between the processes of a launch, and the server that receives them."""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ... import channel
from ...channel import Channel, Loop, Message, PeerServer, Secret
from ...errors import LaunchError
from ...host import network
from ...launch_protocol import EARLY, PROBLEM, REPORT, TRACEBACK, Failure, Unimported
from ...ranges import name_ranks
from .child_processes import Processes
from .event_loop import EventLoop
from .ignored_stops import describe
from .launch_plan import Plan
from .launch_result import LaunchResult, print_status
from .tracebacks import Tracebacks

LOST_SECONDS = 30  # seconds without a TCP response: the other host counts as lost
CONNECT_SECONDS = 60.0  # time limit for reaching ddpkit launch
REFUSED_SECONDS = 5.0  # shorter limit once every address refuses
_IGNORED_SECONDS = 0.5  # waits for other ranks that ignore a stop: one line names all


def secret_of_ranks(launch_secret: str) -> str:
    """Return the secret that ranks use, which an agent derives from its own."""
    return hmac.digest(os.fsencode(launch_secret), b"ranks", "sha256")[:16].hex()


def secret_of(text: str) -> Secret:
    """Return the secret that the processes of a launch prove to each other. text: known to all."""
    return Secret(os.fsencode(text))


def peer_address(peer: Channel) -> str:
    """Return the address of the other end, as this host sees it."""
    return network.plain_address(str(peer.socket.getpeername()[0]))


def address_of_rank_0(address: str, reached: Sequence[str], own: Collection[str]) -> str:
    """Return the address by which other hosts reach rank 0.

    address: address of rank 0's host, as seen from here. reached: addresses of this host to which
    peers on other hosts have connected. own: all addresses of this host.
    """
    if reached and (network.is_loopback(address) or address in own):
        return Counter(reached).most_common(1)[0][0]  # rank 0 is on this host
    return address


def connect(
    addresses: Sequence[str], port: int, secret: str, role: str
) -> tuple[Channel, str] | None:
    """Connect to ddpkit launch; return the connection and the address that worked.

    None where ddpkit launch is gone, or cannot be reached within CONNECT_SECONDS.
    """
    limit = time.monotonic() + CONNECT_SECONDS
    while addresses and time.monotonic() < limit:
        refused = 0
        for address in addresses:
            try:
                peer = channel.connect(address, port, secret_of(secret), role, signs=True)
                peer.keep_alive(LOST_SECONDS)
                return peer, address
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                pass
        # The launch listened before this process was started. One of its addresses, such as
        # docker0's, may belong to this host too, and refuse while the right one is slow to respond.
        if refused == len(addresses):
            limit = min(limit, time.monotonic() + REFUSED_SECONDS)
        time.sleep(0.2)
    return None


class RankNotices:
    """What the ranks have reported, and the socket where a launch listens. A context manager.

    launch_secret: known to agents, which derive the ranks' secret from it. addresses, port: where
    this process listens. variables: environment variables that the ranks need. saved_at:
    time.monotonic() when all ranks had saved. checkpoint: newest safe step; None if no Checkpointer
    has reported one. failed_at: time.monotonic() of the first failure report. first_cause: the last
    reported cause, because torchrun may have restarted the ranks after an earlier one. is_early:
    the rank of first_cause had no process group yet. unimported: what the first rank that failed
    cannot import from a copy of --stage. problems: ERRORs of a training that goes on.
    """

    def __init__(self, peers: int, ports: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        """peers: how many may connect at once. ports: ports that the ranks can reach; () for any.

        hosts: other hosts with ranks.
        """
        self.peers = peers
        self._address = network.address_towards(hosts)
        self.launch_secret = os.urandom(16).hex()
        self.saved_at: float | None = None
        self.checkpoint: int | None = None
        self.failed_at: float | None = None
        self.first_cause: Failure | None = None
        self.is_early = False
        self.unimported: Unimported | None = None
        self.problems: list[str] = []
        self.tracebacks = Tracebacks()
        self.listener = self.listen(ports)
        secret = secret_of_ranks(self.launch_secret)
        self.secret = secret_of(secret)
        addresses = [self._address] if self._address else network.local_addresses()
        self.addresses = ",".join(addresses or ["127.0.0.1"])
        self.port = int(self.listener.getsockname()[1])
        self.variables = {REPORT: f"{self.addresses}/{self.port}/{secret}"}

    def __enter__(self) -> RankNotices:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def listen(self, ports: Sequence[int]) -> socket.socket:
        address, problem = self._address, OSError()
        for port in [*ports, *network.free_ports()]:
            try:
                return network.listen(port, self.peers, address)
            except OSError as error:  # another program uses this port
                problem = error
        raise LaunchError(
            f"ddpkit launch cannot listen on {address or 'this host'}: {problem.strerror}. "
            f"Expected a free port, of {network.PORT_RANGE} if that is set. Choose another range"
        )

    def note(self, peer: Channel, message: Message) -> None:
        """Note a rank's report, and acknowledge it: the rank may end then."""
        if message["what"] == TRACEBACK:
            self.tracebacks.ask(peer, str(message["digest"]), int(message["rank"]))
            return
        if digest := message.get("digest"):
            has_printed = bool(message["has_printed"])
            self.tracebacks.ended(str(digest), int(message["rank"]), has_printed=has_printed)
        if message["what"] == "saved":
            self.saved_at = self.saved_at or time.monotonic()
        elif message["what"] == "checkpoint":
            self.checkpoint = max(int(message["text"]), self.checkpoint or 0)
        elif message["what"] == PROBLEM:
            self.problems.append(str(message["text"]))
        elif message["what"] != EARLY or self.first_cause is None:
            self.failed_at = self.failed_at or time.monotonic()
            self.is_early = message["what"] == EARLY
            if (unimported := message.get("unimported")) and self.first_cause is None:
                self.unimported = Unimported(*unimported)
            known, fields = self.first_cause, {**message, "kind": message["about"]}
            # A rank may have another version of the kit, whose failures have fewer fields.
            names = [name for name in Failure._fields if name in fields]
            first = Failure(**{name: fields[name] for name in names})
            if first.rank is None and known is not None and known.text == first.text:
                # A rank that was told the cause repeats it when rank 0 has left.
                first = known._replace(is_over=first.is_over)
            self.first_cause = first
        peer.send({"kind": "ack"})


class Launch(NamedTuple):
    """A launch that runs."""

    plan: Plan
    id: str
    processes: Processes
    files: ExitStack  # removes files at the end
    loop: EventLoop
    notices: RankNotices
    result: LaunchResult


class LaunchServer(PeerServer):
    """Serve notices of ranks, and the clients of a launch: agents, or ranks that join it.

    Subclasses handle the messages of clients; this class accepts no clients. clients: index ->
    connection of each identified client.
    """

    def __init__(self, notices: RankNotices, loop: Loop) -> None:
        self.clients: dict[int, Channel] = {}
        self._indices: dict[Channel, int] = {}
        self._notices = notices
        self._ignoring: set[int] = set()  # ranks that ignore a stop
        super().__init__(notices.listener, loop, notices.secret, notices.peers)

    def note_ignored(self, ranks: Collection[int]) -> None:
        """Print which ranks ignore a stop, in one line for all that report it soon."""
        if not self._ignoring:
            self._loop.after(_IGNORED_SECONDS, self._print_ignored)
        self._ignoring |= set(ranks)

    def _print_ignored(self) -> None:
        print_status(describe(name_ranks(self._ignoring)))

    def identify(self, peer: Channel, message: Message) -> int | None:
        """Return the index of the client with this first message; None to refuse it."""
        return None

    def identified(self, index: int) -> None:
        """Handle that a client was added to `clients`."""

    def handle(self, index: int, message: Message) -> None:
        """Handle a later message of a client."""

    def client_lost(self, index: int) -> None:
        """Handle the end of a client's connection, which stays in `clients`, closed."""

    def send_to_all(self, message: Message) -> None:
        for peer in self.clients.values():
            peer.send(message)

    def renumber(self, clients: dict[int, Channel]) -> None:
        """Replace the indices of the clients."""
        self.clients = clients
        self._indices = {peer: index for index, peer in clients.items()}

    def receive(self, peer: Channel, message: Message) -> None:
        if message["kind"] == "notice":
            self._notices.note(peer, message)
            return
        if peer in self._indices:
            self.handle(self._indices[peer], message)
            return

        peer.keep_alive(LOST_SECONDS)
        index = self.identify(peer, message)
        if index is None:
            peer.close()
            return
        self.clients[index] = peer
        self._indices[peer] = index
        self.identified(index)

    def lost(self, peer: Channel) -> None:
        if peer in self._indices:
            self.client_lost(self._indices[peer])

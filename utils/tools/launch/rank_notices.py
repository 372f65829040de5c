"""The listener of a launch for its ranks, and their notices: all have saved; what failed first."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from ...channel import Channel, Loop, PeerServer, Secret
from ...connection import Message
from ...host import network
from ...monitor.launch_report import VARIABLE
from .launch_result import FirstCause


def secret_of_ranks(launch_secret: str) -> str:
    """Return the secret that ranks use, which an agent derives from its own."""
    return hmac.digest(os.fsencode(launch_secret), b"ranks", "sha256")[:16].hex()


class RankNotices:
    """What the ranks have reported, and the listening socket for that. A context manager.

    The ranks that a native launcher starts join their launch through the same socket and secret.

    launch_secret: of the agents. secret: of the ranks. address: where this process listens.
    variables: the environment variables that the ranks need. saved: all ranks have saved.
    first_cause: the last one that was reported, as torchrun may have restarted the ranks after an
    earlier one.
    """

    def __init__(
        self, ranks: int, ports: Sequence[int] = (), launch_secret: str | None = None
    ) -> None:
        """ranks: that may connect at once. ports: those the ranks can reach; () for any.

        launch_secret: what the agents know; by default a random one.
        """
        self.ranks, self._ports = ranks, ports
        self.launch_secret = launch_secret or os.urandom(16).hex()
        self.saved = False
        self.first_cause: FirstCause | None = None

    def __enter__(self) -> RankNotices:
        self.listener = self._listen()
        secret = secret_of_ranks(self.launch_secret)
        self.secret = Secret(secret.encode())
        addresses = ",".join(network.local_addresses() or ["127.0.0.1"])
        port = self.listener.getsockname()[1]
        self.address = f"{addresses}/{port}/"
        self.variables = {VARIABLE: self.address + secret}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.listener.close()

    def _listen(self) -> socket.socket:
        for port in self._ports:
            with suppress(OSError):  # another program uses this port
                return socket.create_server(("", port), backlog=self.ranks)

        return socket.create_server(("", 0), backlog=self.ranks)

    def note(self, peer: Channel, message: Message) -> None:
        """Note what a rank reports, and let it know: it may end then."""
        if message["kind"] != "notice":
            return
        if message["what"] == "saved":
            self.saved = True
        else:
            text, rank = message["text"], message["rank"]
            known = self.first_cause
            if rank is None and known is not None and known.text == text:
                rank = known.rank  # a rank that was told the cause repeats it when rank 0 has left
            self.first_cause = FirstCause(text, rank, message["is_over"])
        peer.send({"kind": "ack"})


class NoticeServer(PeerServer):
    """Serves the notices of a launch whose ranks do not join it."""

    def __init__(self, notices: RankNotices, loop: Loop) -> None:
        super().__init__(notices.listener, loop, notices.secret, notices.ranks)
        self._notices = notices

    def receive(self, peer: Channel, message: Message) -> None:
        self._notices.note(peer, message)

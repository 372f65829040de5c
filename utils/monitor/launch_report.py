"""Notices of the ranks to launch.py, and their listener: all have saved; what failed first.

Exit statuses cannot report this. torchrun turns every failure into status 1. Launchers end the
other ranks, which may still be saving, as soon as one leaves with a status other than 0. And the
rank that fails first need not be the first that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from ..connection import Connection

VARIABLE = "DDPKIT_REPORT"  # "10.0.0.1,10.1.0.1/41667/<secret>": where launch.py listens
_SEND_TIMEOUT = 5  # seconds
_RECEIVE_TIMEOUT = 1.0  # seconds
_MAXIMUM_MESSAGE_BYTES = 1 << 14
_LONGEST_CAUSE = 2000


class FirstCause(NamedTuple):
    """What failed first, as the ranks report it."""

    text: str
    rank: int | None  # None where it is not one rank
    is_over: bool = False  # all ranks end: a host is lost, or they hang


class ReportListener:
    """Listen for the notices of the ranks; poll with receive(). A context manager.

    The ranks that a native launcher starts join their launch through the same socket and secret.

    variables: the environment variables that the ranks need. listener: the listening socket.
    saved: all ranks have saved. first_cause: the last one that was reported, as torchrun may have
    restarted the ranks after an earlier one.
    """

    def __init__(self, backlog: int = 16, ports: Sequence[int] = ()) -> None:
        """backlog: ranks that may connect at once. ports: those the ranks can reach; () for any."""
        self._backlog = backlog
        self._ports = ports
        self.saved = False
        self.first_cause: FirstCause | None = None

    def __enter__(self) -> ReportListener:
        from ..host import network  # ranks need only the rest of this file, and load it quickly

        self.listener = self._listen()
        self._secret = os.urandom(16).hex()
        addresses = ",".join(network.local_addresses() or ["127.0.0.1"])
        port = self.listener.getsockname()[1]
        self.variables = {VARIABLE: f"{addresses}/{port}/{self._secret}"}
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
            with contextlib.suppress(OSError):  # another program uses this port
                return socket.create_server(("", port), backlog=self._backlog)

        return socket.create_server(("", 0), backlog=self._backlog)

    def note(self, message: object) -> bool:
        """Note what a message reports; return False for one without the secret of this launch."""
        import hmac  # takes longer to load than the rest of this file

        if not isinstance(message, dict):
            return False
        # As bytes: compare_digest() takes no strings with other characters than ASCII.
        token = str(message.get("token")).encode(errors="replace")
        if not hmac.compare_digest(token, self._secret.encode()):
            return False

        self.saved = self.saved or message.get("saved") is True
        if cause := message.get("first_cause"):
            rank = message.get("rank")
            rank = rank if isinstance(rank, int) else None
            known = self.first_cause
            if rank is None and known is not None and known.text == str(cause):
                rank = known.rank  # a rank that was told the cause repeats it when rank 0 has left
            self.first_cause = FirstCause(str(cause), rank, message.get("is_over") is True)
        return True

    def receive(self) -> None:
        """Note what has arrived. A rank ends only after its notice has."""
        while select.select([self.listener], [], [], 0)[0]:
            with contextlib.suppress(OSError), self.listener.accept()[0] as client:
                connection = Connection(client, longest_bytes=_MAXIMUM_MESSAGE_BYTES)
                self.note(connection.receive_one(_RECEIVE_TIMEOUT))


def parse_address(value: str) -> tuple[list[str], int, str]:
    """Split the value of VARIABLE into addresses, port and secret; [], 0, "" if it is malformed."""
    addresses, _, rest = value.partition("/")
    port, _, secret = rest.partition("/")
    if not port.isdecimal():
        return [], 0, ""
    return addresses.split(","), int(port), secret


def report_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Report to launch.py that all ranks have saved; return whether launch.py received it."""
    return _send({"saved": True}, environ)


def report_first_cause(
    text: str,
    rank: int | None = None,
    is_over: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Report to launch.py what failed first. rank, is_over: see FirstCause."""
    line = " ".join(text.split())[:_LONGEST_CAUSE]
    return _send({"first_cause": line, "rank": rank, "is_over": is_over}, environ)


def _send(values: Mapping[str, object], environ: Mapping[str, str]) -> bool:
    addresses, port, secret = parse_address(environ.get(VARIABLE, ""))
    notice = json.dumps({"token": secret, **values}).encode() + b"\n"
    linger = struct.pack("ii", 1, _SEND_TIMEOUT)

    for address in addresses:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), _SEND_TIMEOUT) as server,
        ):
            # This process may end in a moment: close() waits until the notice has arrived.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            server.settimeout(None)
            server.sendall(notice)
            return True
    return False

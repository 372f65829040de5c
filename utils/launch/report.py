"""Where the ranks of a launch report to it: that they have started, and that all have saved after a stop.

The exit status cannot report the latter: torchrun makes 1 of any, and whatever ends the other ranks when one leaves
with another status than 0 does so while they may still be saving.
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

from ..schedulers.exit_status import EXIT_REQUEUE as EXIT_REQUEUE

VARIABLE = "DDPKIT_REPORT"  # "10.0.0.1,10.1.0.1/41667/<secret>", where the launch listens
_SECONDS = 5


class Report:
    """Where ranks report to their launch. A context manager. It listens all the time, and reads when it is asked.

    backlog: how many ranks may connect at once. ports: those that ranks can reach; any where there are none.
    """

    def __init__(self, backlog: int = 16, ports: Sequence[int] = ()) -> None:
        self._backlog, self._ports = backlog, ports
        self._saved = False

    def __enter__(self) -> Report:
        from .. import network  # ranks and submit.py need the rest of this file only, and quickly
        self.listener = self._listen()
        self._secret = os.urandom(16).hex()
        addresses = ",".join(network.own_addresses() or ["127.0.0.1"])
        self.variables = {VARIABLE: f"{addresses}/{self.listener.getsockname()[1]}/{self._secret}"}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.listener.close()

    def _listen(self) -> socket.socket:
        for port in self._ports:
            with contextlib.suppress(OSError):  # another program's
                return socket.create_server(("", port), backlog=self._backlog)
        return socket.create_server(("", 0), backlog=self._backlog)

    def is_known(self, message: object) -> bool:
        """Whether a message carries the secret of this launch. One that says that all have saved is noted."""
        import hmac  # takes longer to load than the rest of this file
        if not isinstance(message, dict) or not hmac.compare_digest(str(message.get("token")), self._secret):
            return False
        self._saved = self._saved or message.get("saved") is True
        return True

    def saved(self) -> bool:
        """Whether rank 0 has reported so by now. It has made sure that its message is here before it ends."""
        while select.select([self.listener], [], [], 0)[0]:
            with contextlib.suppress(OSError, ValueError), self.listener.accept()[0] as connection:
                connection.settimeout(1)
                with connection.makefile("rb") as stream:
                    self.is_known(json.loads(stream.readline(1 << 10)))
        return self._saved


def parse(value: str) -> tuple[list[str], int, str]:
    """The value of VARIABLE -> addresses, port, secret; none, 0 and "" where it is no such value."""
    addresses, _, rest = value.partition("/")
    port, _, secret = rest.partition("/")
    return (addresses.split(","), int(port), secret) if port.isdecimal() else ([], 0, "")


def tell_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell the launch that has started this rank; whether it was told, and whether there is one."""
    addresses, port, secret = parse(environ.get(VARIABLE, ""))
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _SECONDS) as connection:
            # Closing waits until the other host has it: this process may be gone in a moment.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _SECONDS))
            connection.sendall(json.dumps({"token": secret, "saved": True}).encode() + b"\n")
            return True
    return False

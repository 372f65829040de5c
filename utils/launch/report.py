"""How rank 0 tells the launch that all ranks have saved and that the run is to go on in the next job.

An exit status does not get that far: torchrun makes 1 of any, and whatever ends the other ranks when one leaves with
another status than 0 does so while they may still be saving. Not here: when it is told (preemption.py).
"""
from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Mapping
from types import TracebackType

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again later
VARIABLE = "DDPKIT_REPORT"  # "10.0.0.1,10.1.0.1/41667/<secret>", where the launch listens
_SECONDS = 5


class Report:
    """The ear of a launch. A context manager. It listens all the time, and hears when it is asked."""

    def __enter__(self) -> Report:
        from .. import network  # ranks and submit.py need the rest of this file only, and quickly
        self._listener = socket.create_server(("", 0), backlog=16)
        self._secret = os.urandom(16).hex()
        addresses = ",".join(network.own_addresses() or ["127.0.0.1"])
        self.variables = {VARIABLE: f"{addresses}/{self._listener.getsockname()[1]}/{self._secret}"}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._listener.close()

    def saved(self) -> bool:
        """Whether rank 0 has told so by now. It has made sure that its word is here before it ends."""
        while select.select([self._listener], [], [], 0)[0]:
            import hmac  # takes longer to load than the rest of this file
            with contextlib.suppress(OSError), self._listener.accept()[0] as connection:
                connection.settimeout(1)
                if hmac.compare_digest(connection.recv(len(self._secret)), self._secret.encode()):
                    return True
        return False


def tell_saved(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell the launch that has started this rank; whether it was told, and whether there is one."""
    addresses, _, rest = environ.get(VARIABLE, "").partition("/")
    port, _, secret = rest.partition("/")
    for address in addresses.split(",") if port.isdecimal() else ():
        with contextlib.suppress(OSError), socket.create_connection((address, int(port)), _SECONDS) as connection:
            # Closing waits until the other host has it: this process may be gone in a moment.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _SECONDS))
            connection.sendall(secret.encode())
            return True
    return False

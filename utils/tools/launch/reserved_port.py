"""Reserve a TCP port, so that no other launch on this host can use it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from ...host.network import LISTEN_PORTS

_ATTEMPTS = 200


class ReservedPort:
    """A port that nothing listens on, reserved until all holders of its descriptor have closed it.

    The reservation is an abstract unix-domain socket named after the port. The kernel keeps such
    names apart for each network namespace, as it does ports, and releases them when the last
    process that holds them ends. Launches of other users see the reservation too. Without abstract
    sockets (macOS) the port is only a free one.
    """

    def __init__(self, ports: Sequence[int] = LISTEN_PORTS) -> None:
        """Reserve one of the ports. OSError where none of them is free."""
        for _ in range(_ATTEMPTS):
            port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
            lock = _lock(port)
            if lock is None:
                continue
            if _is_free(port):
                self.port, self._lock = port, lock
                return
            lock.close()
        raise OSError(f"no port of {ports[0]} to {ports[-1]} is free on {socket.gethostname()}")

    def keep_over_exec(self) -> None:
        """Hand the reservation on to the program that replaces this one."""
        self._lock.set_inheritable(True)
        self._lock.detach()

    def close(self) -> None:
        self._lock.close()


def _lock(port: int) -> socket.socket | None:
    """Bind a socket to the name of the port; None where another launch holds the name."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            lock.bind(f"\0ddpkit-port-{port}")
        except OSError:
            lock.close()
            return None
    return lock


def _is_free(port: int) -> bool:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind(("", port))
    except OSError:
        return False
    return True

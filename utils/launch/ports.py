"""A free TCP port of this host that no other launch is given while this one lives."""
from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

PORTS = range(20000, 32000)  # below the ports that Linux gives to outgoing connections
_ATTEMPTS = 200


class ReservedPort:
    """A port that nothing listens on, reserved for one launch until this object and all heirs of its descriptor close.

    The reservation is an abstract unix-domain socket named after the port. The kernel keeps such names apart for each
    network namespace, as it does ports, and releases them when the last process that holds them has ended, however it
    ends. Another user's launch sees the reservation too. Without abstract sockets (macOS) the port is only a free one.
    """

    def __init__(self, ports: Sequence[int] = PORTS) -> None:
        for _ in range(_ATTEMPTS):
            port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
            lock = _lock(port)
            if lock is not None and _is_free(port):
                self.port, self._lock = port, lock
                return
            if lock is not None:
                lock.close()
        raise OSError(f"no port of {ports[0]} to {ports[-1]} is free on {socket.gethostname()}")

    def keep_over_exec(self) -> None:
        """Hand the reservation on to the program that replaces this one."""
        self._lock.set_inheritable(True)
        self._lock.detach()

    def close(self) -> None:
        self._lock.close()


def _lock(port: int) -> socket.socket | None:
    """A socket bound to the name of the port; None where another launch has it."""
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
    with suppress(OSError), socket.socket(family) as probe:
        probe.bind(("", port))
        return True
    return False

"""What a host needs before its ranks start: the folder, the same script, a reserved port."""

from __future__ import annotations

import os
import socket
import sys
import zlib
from collections.abc import Sequence

from ...host import network
from ...launch_error import LaunchError

_ATTEMPTS = 200


class ReservedPort:
    """A port that nothing listens on, reserved until all holders of its descriptor have closed it.

    The reservation is an abstract unix-domain socket named after the port. The kernel keeps such
    names apart for each network namespace, as it does ports, and releases them when the last
    process that holds them ends. Launches of other users see the reservation too. Without abstract
    sockets (macOS) the port is only a free one.
    """

    def __init__(self, ports: Sequence[int] = ()) -> None:
        """Reserve one of the ports, by default of listen_ports(); LaunchError if none is free."""
        ports = ports or network.listen_ports()
        for _ in range(_ATTEMPTS):
            port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
            lock = _lock(port)
            if lock is None:
                continue
            if _is_free(port):
                self.port, self._lock = port, lock
                return
            lock.close()
        raise LaunchError(
            f"no port of {ports[0]} to {ports[-1]} is free on {socket.gethostname()}. Expected one "
            f"for rank 0. Set {network.PORT_RANGE} to another range"
        )

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
            # As the listener: connections that have ended there are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError:
        return False
    return True


def problem_with(folder: str, script: str, checksum: int | None) -> str:
    """Enter the folder and check the script; return what is wrong with them, empty if nothing.

    script: its path, relative to the folder or absolute; empty where there is none.
    checksum: of the script on the host of ddpkit launch.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        return f"the working folder {folder} cannot be entered ({error.strerror})"
    if not script:
        return ""
    found = checksum_of(script)
    if found is None:
        return f"there is no readable script {script} in {folder}"
    if checksum is not None and found != checksum:
        return f"the script {script} in {folder} differs from the one on the host of ddpkit launch"
    return ""


def checksum_of(script: str) -> int | None:
    """Return the CRC-32 of a file; None where it cannot be read."""
    try:
        with open(script, "rb") as file:
            return zlib.crc32(file.read())
    except OSError:
        return None

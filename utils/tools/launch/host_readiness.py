"""What a host needs before its ranks start: the folder, the same script, a reserved port."""

from __future__ import annotations

import os
import socket
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress

from ...errors import LaunchError
from ...host import network
from ...host.socket_owner import socket_owners

_ATTEMPTS = 200
_COURTESY = 20  # after this many reserved ports, reservations of other users are ignored
_NAME = "ddpkit-port-{}"


class ReservedPort:
    """A port that nothing listens on, reserved until all holders of its descriptor have closed it.

    The reservation is an abstract unix-domain socket named after the port. The kernel keeps such
    names apart for each network namespace, as it does ports, and releases them when the last
    process that holds them ends. Launches of other users see the reservation too. It is a courtesy:
    one user may hold all names and no port, so after some refusals another user's reservation no
    longer counts. Without abstract sockets (macOS) the port is only a free one.
    """

    def __init__(self, ports: Sequence[int] = ()) -> None:
        """Reserve one of the ports, by default of listen_ports(); LaunchError if none is free."""
        ports = ports or network.listen_ports()
        refusals, owners = 0, dict[str, int]()
        for _ in range(_ATTEMPTS):
            port = ports[int.from_bytes(os.urandom(4), "big") % len(ports)]
            lock = _lock(port)
            if lock is None:
                refusals += 1
                if refusals == _COURTESY:
                    owners = socket_owners(_NAME.format(""))
                owner = owners.get(_NAME.format(port))
                if refusals < _COURTESY or owner == os.getuid() or not _is_free(port):
                    continue
                _note_reserved(port, owner)
            elif not _is_free(port):
                lock.close()
                continue
            self.port, self._lock = port, lock
            return
        raise LaunchError(
            f"no port of {ports[0]} to {ports[-1]} is free on {socket.gethostname()}. Expected one "
            f"for rank 0. Set {network.PORT_RANGE} to another range"
        )

    def keep_over_exec(self) -> None:
        """Hand the reservation on to the program that replaces this one."""
        if self._lock is not None:
            self._lock.set_inheritable(True)
            self._lock.detach()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _note_reserved(port: int, owner: int | None) -> None:
    """Print whose reservation is ignored."""
    import pwd  # few launches need it

    user = "an unknown user" if owner is None else f"user {owner}"
    if owner is not None:
        with suppress(KeyError):
            user = f"user {pwd.getpwuid(owner).pw_name}"
    host = socket.gethostname()
    sys.stderr.write(
        f"ddpkit launch: port {port} of {host} is free and used, though {user} reserves it: "
        f"{_COURTESY} others were reserved, too. Tell the administrators\n"
    )


def _lock(port: int) -> socket.socket | None:
    """Bind a socket to the name of the port; None where another launch holds the name."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            lock.bind("\0" + _NAME.format(port))
        except OSError:
            lock.close()
            return None
    return lock


def _is_free(port: int) -> bool:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            # The listener sets it, too: ended connections do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError:
        return False
    return True


def problem_with(folder: str, script: str, checksum: int | None) -> str:
    """Enter the folder and check the script; return what is wrong with them, empty if nothing.

    script: its path, relative to the folder or absolute; empty where there is none.
    checksum: CRC-32 of the script on the host of ddpkit launch; None: do not compare.
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

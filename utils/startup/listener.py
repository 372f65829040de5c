"""Open the socket that rank 0 listens on: for the start-up exchange, then for torch's store."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from ..errors import LaunchError
from ..host import network
from .endpoints import Endpoints

_DESCRIPTORS_PER_RANK = 2  # one to the start-up exchange, one to the store
_OTHER_DESCRIPTORS = 256


def open_listener(endpoints: Endpoints, world_size: int) -> socket.socket:
    """Return a socket bound to the first free candidate port.

    With a name service, any free port will do. Raises LaunchError if all ports are taken.
    """
    ports: Sequence[int] = endpoints.ports
    if endpoints.name_service is not None and len(ports) != 1:
        ports = network.free_ports()
    address = _address(endpoints)
    taken = OSError()
    for port in ports:
        try:
            return network.listen(port, world_size, address)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise LaunchError(
                    f"rank 0 on {socket.gethostname()} cannot listen on port {port}: {error}"
                ) from None
            taken = error

    if len(ports) == 1:
        found = f"MASTER_PORT={ports[0]}"
        remedy = "Choose another MASTER_PORT, or unset it: the kit picks a free port"
    else:
        found = f"ports {', '.join(map(str, ports[:8]))}{' ...' * (len(ports) > 8)}"
        remedy = "Set MASTER_PORT to a free port"
    raise LaunchError(
        f"rank 0 cannot listen on {found} of {socket.gethostname()}: "
        f"{os.strerror(taken.errno or 0)}, by another program or launch. {remedy}"
    )


def _address(endpoints: Endpoints) -> str:
    """Return the address to listen on; "" for all addresses.

    `ddpkit launch` passes one address of rank 0's host to all ranks, as MASTER_ADDR.
    """
    if endpoints.loopback:
        return "127.0.0.1"
    is_published = endpoints.name_service is not None and len(endpoints.ports) != 1
    if is_published and (address := network.published_address()):
        return address
    [host] = endpoints.hosts if len(endpoints.hosts) == 1 else [""]
    return host if host in network.interfaces().values() else ""


def allow_connections(world_size: int) -> None:
    """Raise the limit of open files, so that rank 0 can accept all ranks.

    Raises LaunchError if the hard limit is too low.
    """
    import resource  # Unix only, like every launcher

    needed = _DESCRIPTORS_PER_RANK * world_size + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"rank 0 on {socket.gethostname()} may open {hard} files, but {world_size} ranks need "
            f"{needed}. Raise the hard limit (ulimit -Hn) on the compute nodes"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

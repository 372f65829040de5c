"""This host's addresses and interfaces, and what its names resolve to. Standard library only.

Not here: where rank 0 listens (rendezvous.py).
"""
from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable

_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 0x1  # netdevice(7)
# Bridges of containers and virtual machines: every host has the same address there.
_PRIVATE_BRIDGES = ("docker", "virbr", "lxc", "lxd", "cni", "podman", "br-", "veth", "vmnet")


def interfaces() -> dict[str, str]:
    """IPv4 address of each interface that is up, by interface name, in the order of the kernel."""
    import fcntl  # not on Windows, where there is no launcher to be started by either

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                flags = struct.unpack("16xH", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[:18])[0]
                if flags & _IFF_UP:
                    found[name] = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return found


def resolve(host: str) -> list[str]:
    """The IP addresses of a host name or address, IPv4 first; empty where it does not resolve."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found = dict.fromkeys(str(answer[4][0]) for answer in answers)
    return sorted(found, key=lambda address: ":" in address)


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def own_addresses() -> list[str]:
    """Addresses by which other hosts may reach this one, the likeliest first; loopback is never among them."""
    by_name = interfaces()
    outward = [address for name, address in by_name.items()
               if not is_loopback(address) and not name.startswith(_PRIVATE_BRIDGES)]
    bridged = [address for address in by_name.values() if not is_loopback(address) and address not in outward]
    named = [address for address in resolve(socket.gethostname()) if address in outward]
    return list(dict.fromkeys([*named, *outward, *bridged]))


def interface_of(address: str) -> str | None:
    """The interface that has this address, or None."""
    return next((name for name, own in interfaces().items() if own == address), None)


def default_gloo_address() -> str | None:
    """The address that gloo takes when GLOO_SOCKET_IFNAME is not set: the first of the host name's that is our own."""
    own = set(interfaces().values())
    return next((a for a in resolve(socket.gethostname()) if a in own or is_loopback(a)), None)


def missing_interfaces(names: Iterable[str]) -> list[str]:
    """Those of the names that are no interface of this host."""
    present = {name for _, name in socket.if_nameindex()}
    return [name for name in names if name not in present]

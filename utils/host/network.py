"""Find this host's addresses and interfaces, and resolve host names."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

LISTEN_PORTS = range(20000, 32000)  # below the ports that Linux gives to outgoing connections

_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 0x1  # netdevice(7)
_SIOCGIFMTU = 0x8921
# Bridges of containers and virtual machines: every host has the same address there.
_PRIVATE_BRIDGES = ("docker", "virbr", "lxc", "lxd", "cni", "podman", "br-", "veth", "vmnet")


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that is up, by name, in the kernel's order."""
    import fcntl  # not on Windows, where no launcher runs either

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                flags = struct.unpack("16xH", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[:18])[0]
                if flags & _IFF_UP:
                    address = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
                    found[name] = socket.inet_ntoa(address)
    return found


def resolve(host: str) -> list[str]:
    """Return the IP addresses of a host name, IPv4 first; empty where it does not resolve."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return sorted(found, key=lambda address: ":" in address)


def resolve_on_fabric(host: str) -> list[str]:
    """Return the addresses of a host on the fabric, if hosts have a second name there.

    DDPKIT_HOST_SUFFIX is the suffix of these names. "i" gives node1i for node1, and node1i.site for
    node1.site; ".hsn.site" gives node1.hsn.site. The list is empty if the variable is unset, or if
    no such name exists.
    """
    suffix = os.environ.get("DDPKIT_HOST_SUFFIX", "")
    name, dot, domain = host.partition(".")
    if not suffix or ":" in host or name.isdigit() or host.endswith(suffix):
        return []
    return resolve(name + suffix + ("" if suffix.startswith(".") else dot + domain))


def is_loopback(address: str) -> bool:
    """Return whether an IP address, or "localhost", is reachable from this host alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def local_addresses() -> list[str]:
    """Return addresses by which other hosts may reach this one, the likeliest first. No loopback.

    The addresses of the host name come first, the one on the fabric at the top. Those of bridges
    for containers come last.
    """
    addresses = {name: one for name, one in interfaces().items() if not is_loopback(one)}
    bridged = [one for name, one in addresses.items() if name.startswith(_PRIVATE_BRIDGES)]
    outward = [one for one in addresses.values() if one not in bridged]
    host = socket.gethostname()
    named = [one for one in [*resolve_on_fabric(host), *resolve(host)] if one in outward]
    return list(dict.fromkeys([*named, *outward, *bridged]))


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None where there is none."""
    return next((name for name, one in interfaces().items() if one == address), None)


def mtu(interface: str) -> int | None:
    """Return the largest packet that an interface sends, in bytes; None where it is unknown."""
    import fcntl  # as above

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        response = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("256s", interface.encode()[:15]))
        return int(struct.unpack("16xi", response[:20])[0])
    return None


def default_gloo_address() -> str | None:
    """Return the address that gloo uses while GLOO_SOCKET_IFNAME is not set.

    It is the first address of the host name that belongs to this host.
    """
    local = set(interfaces().values())
    resolved = resolve(socket.gethostname())
    return next((one for one in resolved if one in local or is_loopback(one)), None)


def missing_interfaces(names: Iterable[str]) -> list[str]:
    """Return those of the names that are not interfaces of this host."""
    present = {name for _, name in socket.if_nameindex()}
    return [name for name in names if name not in present]

"""Find this host's addresses and interfaces, and resolve host names."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import random
import re
import socket
import struct
from collections.abc import Collection, Iterable, Sequence

from ..errors import LaunchError
from . import process

PORT_RANGE = "DDPKIT_PORT_RANGE"  # "20000-20999": listen only on these ports
INTERFACE = "DDPKIT_INTERFACE"  # "ib0": publish only this interface's address, and listen there
_LISTEN_PORTS = range(20000, 32000)  # below Linux's ports for outgoing connections
_OTHER_BACKLOG = 512  # connections besides the peers'

_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 0x1  # netdevice(7)
# Bridges of containers and virtual machines have the same address on every host.
_PRIVATE_BRIDGES = ("docker", "virbr", "lxc", "lxd", "cni", "podman", "br-", "veth", "vmnet")


def interfaces() -> dict[str, str]:
    """Return interface name -> address for each interface that is up, in the kernel's order.

    The address is IPv4. An interface with only a global IPv6 address comes last.
    """
    import fcntl  # Unix only, like every launcher

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                flags = struct.unpack("16xH", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[:18])[0]
                if flags & _IFF_UP:
                    address = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
                    found[name] = socket.inet_ntoa(address)
    for line in process.read("/proc/net/if_inet6").decode().splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope == "00":  # global scope
            found.setdefault(name, str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def listen_ports() -> range:
    """Return the ports to choose from. Raises LaunchError if PORT_RANGE is malformed."""
    text = os.environ.get(PORT_RANGE, "")
    if not text:
        return _LISTEN_PORTS
    numbers = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    ports = range(int(numbers[1]), int(numbers[2]) + 1) if numbers else range(0)
    if not ports or not 0 < ports[0] <= ports[-1] < 1 << 16:
        raise LaunchError(f"{PORT_RANGE} is {text!r}; expected two ports such as 20000-20999")
    return ports


def free_ports() -> Sequence[int]:
    """Return the ports to try if any will do: 0, or PORT_RANGE's ports in random order."""
    ports = listen_ports()
    return random.sample(ports, len(ports)) if os.environ.get(PORT_RANGE) else [0]


def listen(port: int, peers: int, address: str = "") -> socket.socket:
    """Return a listening socket, by default for IPv4 and IPv6. Raises OSError.

    Other programs may connect, too, and fill the accept queue. A peer then waits a second, until
    its kernel sends the SYN again.
    """
    is_dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in address else socket.AF_INET
    return socket.create_server(
        (address, port), family=family, dualstack_ipv6=is_dual, backlog=peers + _OTHER_BACKLOG
    )


def published_address() -> str:
    """Return the address of INTERFACE to listen on; "" for all. Raises LaunchError."""
    return local_addresses()[0] if os.environ.get(INTERFACE) else ""


def address_towards(hosts: Sequence[str]) -> str:
    """Return this host's address on the way to other hosts; "" if it is unknown.

    Only the first and the last host are resolved, because resolving all would take too long.
    If INTERFACE is set, its address is returned. Without other hosts it is a loopback address.
    """
    if address := published_address():
        return address
    if not hosts:
        return "127.0.0.1"
    own = set(interfaces().values())
    found = {
        _source_address([*resolve_on_fabric(host), *resolve(host)], own)
        for host in {hosts[0], hosts[-1]}
    }
    return found.pop() if len(found) == 1 else ""


def _source_address(targets: Sequence[str], own: Collection[str]) -> str:
    """Return this host's address on the way to the first target; "" if that is this host."""
    for target in targets[:1]:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            source = str(probe.getsockname()[0])
            return "" if target in own or is_loopback(source) else source
    return ""


def plain_address(address: str) -> str:
    """::ffff:10.0.0.1 -> 10.0.0.1"""
    return address.removeprefix("::ffff:")


def resolve(host: str) -> list[str]:
    """Return the IP addresses of a host name, IPv4 first; empty if it does not resolve."""
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


@functools.cache
def is_loopback(address: str) -> bool:
    """Whether an IP address, or "localhost", can be reached only from this host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def is_specific(address: str) -> bool:
    """Whether a listener at this IP address listens only there; false for "0.0.0.0" and "::"."""
    return not ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def local_addresses() -> list[str]:
    """Return addresses at which other hosts may reach this one, the likeliest first.

    The fabric's address comes first, then others of the host name; bridges of containers come
    last, loopback is left out. With INTERFACE, only that interface's address is returned; raises
    LaunchError if it has none.
    """
    if chosen := os.environ.get(INTERFACE):
        present = interfaces()
        if chosen not in present:
            raise LaunchError(
                f"{INTERFACE}={chosen}, but {socket.gethostname()} has no such interface that is "
                f"up and has an address; it has {', '.join(present)}. Name one of these"
            )
        return [present[chosen]]
    addresses = {
        name: address for name, address in interfaces().items() if not is_loopback(address)
    }
    bridged = [address for name, address in addresses.items() if name.startswith(_PRIVATE_BRIDGES)]
    outward = [address for address in addresses.values() if address not in bridged]
    host = socket.gethostname()
    named = [
        address for address in [*resolve_on_fabric(host), *resolve(host)] if address in outward
    ]
    outward.sort(key=lambda address: ":" in address)
    return list(dict.fromkeys([*named, *outward, *bridged]))


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address; None if there is none."""
    return next(
        (name for name, own_address in interfaces().items() if own_address == address), None
    )


def default_gloo_address() -> str | None:
    """Return the address that gloo uses if GLOO_SOCKET_IFNAME is not set.

    It is the host name's first address that belongs to this host.
    """
    local = set(interfaces().values())
    resolved = resolve(socket.gethostname())
    return next((address for address in resolved if address in local or is_loopback(address)), None)


def missing_interfaces(names: Iterable[str]) -> list[str]:
    """Return the names that are not interfaces of this host."""
    present = {name for _, name in socket.if_nameindex()}
    return [name for name in names if name not in present]

"""Check that each host resolves its own name and those of the others to addresses that they have.

The kit itself needs no names: it uses the address of the interface that leads to rank 0. An MPI
that starts ranks on other hosts, torchrun, and MASTER_ADDR with env:// need them. gloo and Open MPI
also use the address of the host's own name, which the Debian installer sets to 127.0.1.1.
https://www.debian.org/doc/manuals/debian-reference/ch05.en.html#_the_hostname_resolution
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ....host import network
from ..check import Check, Finding, Level, Ranks, Reported
from ..peers import in_threads, names_of

LOOK_UP_SECONDS = 8.0  # a name server that does not respond takes 5 s and more
_SENT = 64  # names that one host reports


@dataclass
class NameFacts:
    """What a host has found.

    addresses: its own, of all interfaces, IPv4 first. wrong: number of a host, and the addresses of
    its name, wrong ones first: none where it does not resolve, None where there was no response in
    time. Only names that do not resolve to an address of their host, or that also resolve to
    another one.
    """

    addresses: list[str]
    wrong: list[tuple[int, list[str] | None]]


class Names(Check[NameFacts]):
    """Host names and their addresses."""

    name = "names"
    quick = True
    seconds = 20.0
    facts = NameFacts

    def collect(self, ranks: Ranks) -> NameFacts:
        """Look up the names of all hosts."""
        addresses = [*network.interfaces().values(), *_ipv6_addresses()]
        addresses = [one for one in addresses if not network.is_loopback(one)]
        gathered = ranks.all_gather("addresses", addresses)
        places = {place.node: place for place in ranks.hosts}
        jobs = {node: partial(network.resolve, place.host) for node, place in places.items()}
        resolved = in_threads(jobs, LOOK_UP_SECONDS)
        wrong: list[tuple[int, list[str] | None]] = []
        for node, place in places.items():
            found, known = resolved.get(node), gathered[place.rank]
            if found is None or known is None or not _is_right(found, known):
                wrong.append((node, found and sorted(found, key=lambda one: one in (known or ()))))
        wrong.sort(key=lambda one: one[0] != ranks.me.node)
        return NameFacts(addresses, wrong[:_SENT])

    def conclude(self, reported: Sequence[Reported[NameFacts]]) -> Iterator[Finding]:
        """Report each host whose name is wrong, and where it is wrong."""
        if len(reported) < 2:
            return
        hosts = {one.place.node: one.place.host for one in reported}
        counts = Counter(hosts.values())  # one name on two hosts: the check of placement reports it
        addresses = {one.place.node: one.facts.addresses for one in reported}
        seen = [
            (one.place.node, node, found)
            for one in reported
            for node, found in one.facts.wrong
            if counts[hosts.get(node, "")] == 1
            and (found is None or not _is_right(found, addresses[node]))
        ]
        own = [one for one in seen if one[0] == one[1]]
        others = [one for one in seen if one[0] != one[1]]
        unknown = _known_nowhere(len(hosts), [(a, b) for a, b, found in others if not found])
        findings = [
            *_unknown_names(hosts, addresses, unknown),
            *_own_names(hosts, addresses, [one for one in own if one[2] or one[1] not in unknown]),
            *_other_names(hosts, addresses, [one for one in others if one[1] not in unknown]),
        ]
        yield from findings
        if not findings:
            yield Finding(Level.GOOD, f"{len(hosts)} hosts resolve their names to their addresses")


Seen = tuple[int, int, "list[str] | None"]  # the host that looked up, the name's host, addresses


def _is_right(found: Sequence[str], known: Sequence[str]) -> bool:
    """Return whether a name leads to its host, and nowhere else. known: the host's addresses.

    IPv6 addresses count where the name has no other, and loopback where it comes first.
    """
    if not found or network.is_loopback(found[0]):
        return False
    used = [one for one in found if ":" not in one] or found
    return all(one in known or network.is_loopback(one) for one in used)


def _ipv6_addresses() -> list[str]:
    lines: list[str] = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        lines = file.read().splitlines()
    # "fe800000000000000042acfffe110002 02 40 20 80     eth0"
    return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]


def _known_nowhere(count: int, unresolved: Sequence[tuple[int, int]]) -> list[int]:
    """Return the hosts whose names none of the others resolves. unresolved: observer, host."""
    observers = Counter(node for _, node in unresolved)
    return sorted(node for node, number in observers.items() if number == count - 1)


def _unknown_names(
    hosts: Mapping[int, str], addresses: Mapping[int, Sequence[str]], unknown: Sequence[int]
) -> Iterator[Finding]:
    if not unknown:
        return
    names = tuple(hosts[node] for node in unknown)
    first = unknown[0]
    yield Finding(
        Level.WARNING,
        f"no other host resolves {names_of(names)}; expected {_one_of(addresses[first])} for "
        f"{hosts[first]}",
        f"Add {names_of(names)} to DNS, or to /etc/hosts of all hosts. Until then, use addresses "
        "in MASTER_ADDR, --rdzv-endpoint and host files",
        hosts=names,
    )


def _own_names(
    hosts: Mapping[int, str], addresses: Mapping[int, Sequence[str]], seen: Sequence[Seen]
) -> Iterator[Finding]:
    loopback: dict[str, list[int]] = {}
    for node, _, found in seen:
        if found and network.is_loopback(found[0]):
            loopback.setdefault(found[0], []).append(node)
            continue
        host = hosts[node]
        yield Finding(
            Level.WARNING,
            f"{host} {_resolves(found)} its own name{_to(found)}; expected "
            f"{_one_of(addresses[node])}",
            f"Write the address of {host} into DNS, or into its /etc/hosts",
            hosts=(host,),
        )
    for address, nodes in loopback.items():
        first = hosts[nodes[0]]
        names = tuple(hosts[node] for node in nodes)
        resolve = "resolves its own name" if len(names) == 1 else "resolve their own names"
        yield Finding(
            Level.WARNING,
            f"{names_of(names)} {resolve} to {address}, which other hosts cannot reach; expected "
            f"{_one_of(addresses[nodes[0]])} on {first}",
            f"Remove the line '{address} {first}' from /etc/hosts there, or write the host's "
            "address into it. Without that, set GLOO_SOCKET_IFNAME for programs that do not use "
            "this kit, and give addresses instead of names to an MPI",
            hosts=names,
        )


def _other_names(
    hosts: Mapping[int, str], addresses: Mapping[int, Sequence[str]], seen: Sequence[Seen]
) -> Iterator[Finding]:
    """Group the hosts that resolve a name in the same way, and the names that they do not find."""
    observers: dict[tuple[int, tuple[str, ...] | None], list[str]] = {}
    for observer, node, found in seen:
        key = (node, None if found is None else tuple(found))
        observers.setdefault(key, []).append(hosts[observer])
    unresolved: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for (node, found_there), by in observers.items():
        if not found_there:
            unresolved.setdefault((tuple(by), found_there is None), []).append(hosts[node])
            continue
        owner = next((hosts[one] for one in hosts if found_there[0] in addresses[one]), None)
        of_whom = f"an address of {owner}" if owner else "no address of a host of this job"
        if network.is_loopback(found_there[0]):
            of_whom = "the host itself"
        yield Finding(
            Level.WARNING,
            f"{names_of(by)} resolve{'s' * (len(by) == 1)} {hosts[node]} to {found_there[0]}, "
            f"{of_whom}; expected {_one_of(addresses[node])}",
            f"Correct the entry of {hosts[node]} in DNS, or in /etc/hosts of {names_of(by)}",
            hosts=tuple(by),
        )
    for (by_hosts, is_late), names in unresolved.items():
        how = f"within {LOOK_UP_SECONDS:.0f} s" if is_late else "at all"
        yield Finding(
            Level.WARNING,
            f"{names_of(by_hosts)} {'do' if len(by_hosts) > 1 else 'does'} not resolve "
            f"{names_of(names)} {how}",
            f"Add {names_of(names)} to DNS or to /etc/hosts of {names_of(by_hosts)}. Until then, "
            "use addresses in MASTER_ADDR, --rdzv-endpoint and host files",
            hosts=by_hosts,
        )


def _resolves(found: Sequence[str] | None) -> str:
    return "resolves" if found else "does not resolve"


def _to(found: Sequence[str] | None) -> str:
    return f" to {found[0]}, which is no address of it" if found else ""


def _one_of(addresses: Sequence[str]) -> str:
    shown = [one for one in addresses if ":" not in one] or addresses
    return " or ".join(shown[:3]) or "an address of it"

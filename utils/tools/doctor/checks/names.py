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
from ..check import Check, Exchange, Finding, Level, Ranks, Reported
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

    def collect(self, ranks: Ranks) -> Exchange[NameFacts]:
        """Look up the names of all hosts."""
        addresses = [*network.interfaces().values(), *_ipv6_addresses()]
        addresses = [one for one in addresses if not network.is_loopback(one)]
        gathered = yield addresses
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
        """Report each name that leads elsewhere, and the hosts on which it does."""
        if len(reported) < 2:
            return
        hosts = {one.place.node: one.place.host for one in reported}
        counts = Counter(hosts.values())  # one name on two hosts: the check of placement reports it
        addresses = {one.place.node: one.facts.addresses for one in reported}
        seen: dict[tuple[int, str | None], list[int]] = {}  # name's host, address: observers
        for one in reported:
            for node, found in one.facts.wrong:
                if counts[hosts.get(node, "")] == 1 and not _is_right(found or (), addresses[node]):
                    first = None if found is None else "".join(found[:1])
                    seen.setdefault((node, first), []).append(one.place.node)
        # The same of several names is one finding: where they do not resolve, and 127.0.1.1.
        alike: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        for (node, first), by in seen.items():
            own = bool(first) and network.is_loopback(first or "") and by == [node]
            nowhere = not first and len(set(by) - {node}) == len(hosts) - 1
            alike.setdefault((first, () if own or nowhere else tuple(by)), []).append(node)
        for (first, observers), nodes in alike.items():
            yield _wrong(hosts, addresses, first, observers, nodes)
        if not alike:
            yield Finding(Level.GOOD, f"{len(hosts)} hosts resolve their names to their addresses")


def _wrong(
    hosts: Mapping[int, str],
    addresses: Mapping[int, Sequence[str]],
    first: str | None,
    observers: Sequence[int],
    nodes: Sequence[int],
) -> Finding:
    """Return the finding about names that lead to an address, "", or None: no response.

    observers: the hosts that see it; none: all others, or for loopback the host itself.
    """
    names = names_of([hosts[node] for node in nodes])
    by = names_of([hosts[node] for node in observers])
    right = f"expected {_one_of(addresses[nodes[0]])} for {hosts[nodes[0]]}"
    blamed = tuple(hosts[node] for node in observers or nodes)
    in_dns = f"Correct the entry of {names} in DNS, or in /etc/hosts of {by or 'all hosts'}"
    if first and not observers:
        return Finding(
            Level.WARNING,
            f"the own name of {names} leads to {first}, which other hosts cannot reach; {right}",
            f"Remove the line '{first} {hosts[nodes[0]]}' from /etc/hosts there, or write the "
            "host's address into it. Without that, set GLOO_SOCKET_IFNAME for programs that do not "
            "use this kit, and give addresses instead of names to an MPI",
            hosts=blamed,
        )
    if first:
        owner = next((hosts[one] for one in hosts if first in addresses[one]), None)
        of_whom = f"an address of {owner}" if owner else "no address of a host of this job"
        of_whom = "the host itself" if network.is_loopback(first) else of_whom
        message = f"{by}: {names} leads to {first}, {of_whom}; {right}"
        return Finding(Level.WARNING, message, in_dns, hosts=blamed)
    how = f"within {LOOK_UP_SECONDS:.0f} s" if first is None else "at all"
    return Finding(
        Level.WARNING,
        f"{by or 'all other hosts'}: {names} is not resolved {how}; {right}",
        f"{in_dns}. Until then, use addresses in MASTER_ADDR, --rdzv-endpoint and host files",
        hosts=blamed,
    )


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


def _one_of(addresses: Sequence[str]) -> str:
    shown = [one for one in addresses if ":" not in one] or addresses
    return " or ".join(shown[:3]) or "an address of it"

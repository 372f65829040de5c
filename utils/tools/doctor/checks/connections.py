"""Check that hosts can connect to each other in both directions, and packets of full size arrive.

Each host connects by TCP to the others, at the addresses that the collectives use, and exchanges
12 KB with each of them. A path that loses large packets lets the connection through, but no data.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....host import network
from ...bench.host_pairs import attribute
from ..check import Check, Exchange, Finding, Level, Ranks, Reported
from ..networking import NO_DATA, connect_hosts, data_address, interface_problem, names_of

_SHOWN = 6  # links named in a message
_SIOCGIFMTU = 0x8921  # netdevice(7)


@dataclass
class ConnectionFacts:
    """A host's result.

    interface_problem: why gloo or NCCL finds no interface, or "".
    others: host number -> problem, or "".
    """

    address: str
    interface: str
    mtu: int | None
    interface_problem: str = ""
    others: list[tuple[int, str]] = field(default_factory=list)


class Connections(Check[ConnectionFacts]):
    """Connections, interfaces and packet sizes between hosts."""

    name = "connections"
    quick = True
    seconds = 30.0
    facts = ConnectionFacts

    def collect(self, ranks: Ranks) -> Exchange[ConnectionFacts]:
        """Connect to the partners while they connect to this host."""
        address = data_address(ranks.address)
        interface = network.interface_of(address) or ""
        problem = interface_problem(hosts=len(ranks.hosts))
        facts = ConnectionFacts(address, interface, _mtu(interface), problem)
        if len(ranks.hosts) > 1:
            found = yield from connect_hosts(ranks, address)
            facts.others = list(found.items())
        return facts

    def conclude(self, reported: Sequence[Reported[ConnectionFacts]]) -> Iterator[Finding]:
        """Report broken connections, then packet sizes."""
        findings = list(_wrong_interfaces(reported))
        if len(reported) < 2:
            yield from findings
            return
        seen = _Seen(reported)
        findings += [*_same_address(seen), *_broken(seen), *_interface_mtus(seen)]
        yield from findings
        if not findings:
            interfaces = names_of(sorted({facts.interface for facts in seen.facts.values()}))
            mtus = names_of(sorted({str(facts.mtu) for facts in seen.facts.values() if facts.mtu}))
            yield Finding(
                Level.GOOD,
                f"{len(reported)} hosts connect in both directions over {interfaces} "
                f"(MTU {mtus or 'unknown'})",
            )


# Findings ----------------------------------------------------------------------------------------


class _Seen:
    """The facts of all hosts as tables, indexed by (from, to)."""

    def __init__(self, reported: Sequence[Reported[ConnectionFacts]]) -> None:
        self.hosts = {report.place.node: report.place.host for report in reported}
        self.facts = {report.place.node: report.facts for report in reported}
        self.problem: dict[tuple[int, int], str] = {}
        for report in reported:
            for other, problem in report.facts.others:
                if other in self.hosts:  # otherwise the runner reports the host
                    self.problem[report.place.node, other] = problem

    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs that at least one host has tried to connect."""
        return sorted({(min(pair), max(pair)) for pair in self.problem})

    def broken(self) -> list[tuple[int, int]]:
        """Return the pairs that at least one host could not connect."""
        return sorted({(min(pair), max(pair)) for pair, found in self.problem.items() if found})


def _wrong_interfaces(reported: Sequence[Reported[ConnectionFacts]]) -> Iterator[Finding]:
    for report in reported:
        if problem := report.facts.interface_problem:
            what, _, remedy = problem.rpartition(". ")
            yield Finding(Level.BAD, what, remedy, hosts=(report.place.host,))


def _same_address(seen: _Seen) -> Iterator[Finding]:
    owners: dict[str, list[int]] = {}
    for node, facts in seen.facts.items():
        owners.setdefault(facts.address, []).append(node)
    for address, nodes in owners.items():
        if len(nodes) > 1:
            names = tuple(seen.hosts[node] for node in nodes)
            yield Finding(
                Level.BAD,
                f"{names_of(names)} use the same address {address} "
                f"({seen.facts[nodes[0]].interface}); expected one that only one host has",
                "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects the "
                "hosts, not to a bridge of containers or to lo",
                hosts=names,
            )


def _broken(seen: _Seen) -> Iterator[Finding]:
    broken = [pair for pair in seen.broken() if _problem(seen, pair) != "same address"]
    hosts, links = attribute(seen.pairs(), broken)
    if len(hosts) == len(seen.hosts):
        causes = Counter(_cause(seen, a, b) for a, b in broken)
        yield Finding(
            Level.BAD,
            f"no host can connect to another one: {causes.most_common(1)[0][0]}",
            _CHECK_FIREWALL,
            hosts=tuple(seen.hosts.values()),
        )
        return
    for node in hosts:
        own = [pair for pair in broken if node in pair]
        other = next(node_number for node_number in own[0] if node_number != node)
        yield Finding(
            Level.BAD,
            f"{seen.hosts[node]} cannot exchange data with any of {len(own)} other hosts: "
            f"{_cause(seen, node, other)}",
            f"Exclude {seen.hosts[node]}, and check its cable, firewall and routes. "
            f"{_CHECK_FIREWALL}",
            hosts=(seen.hosts[node],),
            exclude=True,
        )
    for a, b in links[:_SHOWN]:
        yield Finding(
            Level.BAD,
            f"{seen.hosts[a]} and {seen.hosts[b]} cannot connect in both directions: "
            f"{_cause(seen, a, b)}",
            f"Check the firewall and routes of both hosts, and the switch ports between them. "
            f"{_CHECK_FIREWALL}",
            hosts=(seen.hosts[a], seen.hosts[b]),
        )
    if len(links) > _SHOWN:
        names = sorted({seen.hosts[node] for pair in links[_SHOWN:] for node in pair})
        yield Finding(
            Level.BAD,
            f"{len(links) - _SHOWN} more pairs of hosts cannot connect, among {names_of(names)}",
            _CHECK_FIREWALL,
            hosts=tuple(names),
        )


_CHECK_FIREWALL = (
    "Ranks need all TCP ports of the range net.ipv4.ip_local_port_range between the hosts of a job"
)


def _problem(seen: _Seen, pair: Sequence[int]) -> str:
    a, b = pair
    return seen.problem.get((a, b)) or seen.problem.get((b, a), "")


def _cause(seen: _Seen, a: int, b: int) -> str:
    """Return what is known about a pair that cannot connect."""
    host, other = seen.hosts[a], seen.hosts[b]
    if not seen.problem.get((a, b)):
        return _cause(seen, b, a)
    problem = seen.problem[a, b]
    to = f"{other} ({seen.facts[b].address})"
    if problem == "refused":
        return f"{host} is refused by {to}, which listens: a firewall rejects connections"
    if problem == "no route":
        return f"{host} has no route to {to}, or {other} does not respond to ARP"
    if problem in NO_DATA:
        source, target = (host, other) if problem == NO_DATA[0] else (other, host)
        mtu = seen.facts[a if source == host else b].mtu
        return (
            f"{host} connects to {to}, but packets of full size from {source} to {target} are "
            f"lost; expected 12,000 bytes to arrive in packets of {mtu} bytes, the MTU of "
            f"{source}. Set the same MTU on all hosts and switches"
        )
    if problem != "timed out":
        return f"{host} cannot connect to {to}: {problem}"
    if seen.problem.get((b, a)) == "":
        return (
            f"{host} gets no response from {to}, while {other} connects to {host}: a firewall "
            f"drops connections from {host}"
        )
    return f"no response from {host} to {to}, nor from {other} to {host}: packets are dropped"


def _interface_mtus(seen: _Seen) -> Iterator[Finding]:
    by_mtu: dict[int, list[int]] = {}
    for node, facts in seen.facts.items():
        if facts.mtu:
            by_mtu.setdefault(facts.mtu, []).append(node)
    if len(by_mtu) < 2:
        return
    usual = max(by_mtu, key=lambda mtu: (len(by_mtu[mtu]), mtu))
    for mtu, nodes in by_mtu.items():
        if mtu == usual:
            continue
        names = tuple(seen.hosts[node] for node in nodes)
        interface = seen.facts[nodes[0]].interface
        others = names_of([seen.hosts[node] for node in by_mtu[usual]])
        yield Finding(
            Level.WARNING,
            f"{interface} of {names_of(names)} has MTU {mtu}, while {others} have {usual}; "
            "expected the same on all hosts. Larger packets are lost or divided",
            f"`ip link set {interface} mtu {usual}` on {names_of(names)}, and in the configuration "
            "of the network",
            hosts=names,
        )


def _mtu(interface: str) -> int | None:
    """Return the bytes of the largest packet an interface sends; None if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        response = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("256s", interface.encode()[:15]))
        return int(struct.unpack("16xi", response[:20])[0])
    return None

"""Check that hosts can connect to each other in both directions, and packets of full size arrive.

Each host connects by TCP to several ports of the others, at the addresses that the collectives use.
A connection needs both directions, so it does not show which one is broken. UDP packets do: each
host counts those that arrive from each other host, and their sizes. These packets may not be
divided (IP_PMTUDISC_PROBE, ip(7)), which shows the largest size that passes.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....host import network
from ...host_pairs import attribute
from ..check import Check, Finding, Level, Ranks, Reported
from ..peers import data_address, interface_problem, listen_spread, names_of, partners, serve, stop
from ..probes import CONNECT_SECONDS, NO_DATA, PORTS, Probes, connect_all, respond, round_trips

LONG_ROUND_TRIP_SECONDS = 20e-3
_SHOWN = 6  # links


@dataclass
class ConnectionFacts:
    """What a host has found, by the number of the other host.

    interface_problem: why gloo or NCCL find no interface, or "".
    tcp: number, the problem or "", round trip in seconds or None, ports that did not respond.
    udp: number, packets that have arrived from there, the largest one in bytes.
    """

    address: str
    interface: str
    mtu: int | None
    interface_problem: str = ""
    tcp: list[tuple[int, str, float | None, list[int]]] = field(default_factory=list)
    udp: list[tuple[int, int, int]] = field(default_factory=list)


class Connections(Check[ConnectionFacts]):
    """Connections, directions, interfaces, packet sizes and round-trip times between hosts."""

    name = "connections"
    quick = True
    seconds = 30.0
    facts = ConnectionFacts

    def collect(self, ranks: Ranks) -> ConnectionFacts:
        """Connect to the partners while they connect to this host."""
        address = data_address(ranks.address)
        interface = network.interface_of(address) or ""
        problem = interface_problem(hosts=len(ranks.hosts))
        facts = ConnectionFacts(address, interface, network.mtu(interface), problem)
        if len(ranks.hosts) < 2:
            return facts
        listeners = listen_spread(address, PORTS)
        for listener in listeners:
            serve(listener, respond)
        probes = Probes(address, ranks.me.node)
        own = {
            "address": address,
            "ports": [listener.getsockname()[1] for listener in listeners],
            "udp": probes.port,
        }
        gathered = ranks.all_gather("listening", own)
        places = {place.node: gathered[place.rank] for place in ranks.hosts}
        near = partners(len(places), ranks.me.node)
        others = {
            node: places[node]
            for node in sorted({0, *near} - {ranks.me.node})
            if places.get(node) is not None
        }
        probed = {node: place for node, place in others.items() if node in near}
        sender = threading.Thread(target=probes.send, args=(probed, facts.mtu or 1500), daemon=True)
        sender.start()
        tcp = connect_all(others, address)
        sender.join(CONNECT_SECONDS)
        ranks.all_gather("connected", True)
        expected = [
            node
            for node, place in places.items()
            if place is not None and ranks.me.node in partners(len(places), node)
        ]
        facts.udp = probes.received(expected)
        reached = {node: others[node] for node, problem, _ in tcp if not problem}
        trips = round_trips(reached)  # when nothing else is on its way
        ranks.all_gather("measured", True)
        facts.tcp = [(node, problem, trips.get(node), ports) for node, problem, ports in tcp]
        for listener in listeners:
            stop(listener)
        return facts

    def conclude(self, reported: Sequence[Reported[ConnectionFacts]]) -> Iterator[Finding]:
        """Report broken connections, then packet sizes, then long round trips."""
        findings = list(_wrong_interfaces(reported))
        if len(reported) < 2:
            yield from findings
            return
        seen = _Seen(reported)
        findings += [
            *_same_address(seen),
            *_broken(seen),
            *_closed_ports(seen),
            *_interface_mtus(seen),
            *_path_mtus(seen),
            *_long_round_trips(seen),
        ]
        yield from findings
        if not findings:
            interfaces = names_of(sorted({one.interface for one in seen.facts.values()}))
            trips = list(seen.round_trips().values())
            usual = f", round trip {statistics.median(trips) * 1e6:.0f} us" if trips else ""
            yield Finding(
                Level.GOOD,
                f"{len(reported)} hosts connect in both directions over {interfaces} "
                f"(MTU {seen.usual_mtu()}){usual}",
            )


# Findings ----------------------------------------------------------------------------------------


class _Seen:
    """The facts of all hosts as tables by direction: (from, to)."""

    def __init__(self, reported: Sequence[Reported[ConnectionFacts]]) -> None:
        self.hosts = {one.place.node: one.place.host for one in reported}
        self.facts = {one.place.node: one.facts for one in reported}
        self.problem: dict[tuple[int, int], str] = {}
        self.trip: dict[tuple[int, int], float] = {}
        self.closed: dict[tuple[int, int], list[int]] = {}
        self.arrived: dict[tuple[int, int], int] = {}  # the largest packet; 0 for none
        for one in reported:
            node = one.place.node
            for other, problem, trip, ports in one.facts.tcp:
                if other not in self.hosts:  # the runner reports it
                    continue
                self.problem[node, other] = problem
                if trip is not None:
                    self.trip[node, other] = trip
                if ports and not problem:
                    self.closed[node, other] = ports
            for other, _, largest in one.facts.udp:
                if other in self.hosts:
                    self.arrived[other, node] = largest

    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of which at least one host has tried to connect."""
        return sorted({(min(pair), max(pair)) for pair in self.problem})

    def broken(self) -> list[tuple[int, int]]:
        """Return the pairs of which at least one host could not connect."""
        return sorted({(min(pair), max(pair)) for pair, found in self.problem.items() if found})

    def round_trips(self) -> dict[tuple[int, int], float]:
        """Return the shorter round trip of each pair."""
        found: dict[tuple[int, int], float] = {}
        for (a, b), trip in self.trip.items():
            pair = (min(a, b), max(a, b))
            found[pair] = min(trip, found.get(pair, trip))
        return found

    def usual_mtu(self) -> int | None:
        """Return the most frequent MTU of the interfaces."""
        known = Counter(one.mtu for one in self.facts.values() if one.mtu)
        return known.most_common(1)[0][0] if known else None


def _wrong_interfaces(reported: Sequence[Reported[ConnectionFacts]]) -> Iterator[Finding]:
    for one in reported:
        if problem := one.facts.interface_problem:
            what, _, remedy = problem.rpartition(". ")
            variable = what.partition("=")[0]
            yield Finding(Level.BAD, what, remedy, hosts=(one.place.host,), subject=variable)


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
        other = next(one for one in own[0] if one != node)
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
    """Return what is known of a pair that cannot connect."""
    one, other = seen.hosts[a], seen.hosts[b]
    if not seen.problem.get((a, b)):
        return _cause(seen, b, a)
    problem = seen.problem[a, b]
    to = f"{other} ({seen.facts[b].address})"
    if problem == "refused":
        return f"{one} is refused by {to}, which listens: a firewall rejects connections"
    if problem == "no route":
        return f"{one} has no route to {to}, or {other} does not respond to ARP"
    if problem in NO_DATA:
        source, target = (a, b) if problem == NO_DATA[0] else (b, a)
        largest = seen.arrived.get((source, target))
        what = f"packets above {largest} bytes" if largest else "packets of full size"
        mtu = seen.facts[source].mtu
        return (
            f"{one} connects to {to}, but {what} from {seen.hosts[source]} to {seen.hosts[target]} "
            f"are lost; expected up to {mtu} bytes, the MTU of {seen.hosts[source]}. Set the same "
            "MTU on all hosts and switches"
        )
    if problem != "timed out":
        return f"{one} cannot connect to {to}: {problem}"
    there, back = seen.arrived.get((a, b)), seen.arrived.get((b, a))
    if there is None and back is None:
        return f"{one} gets no response from {to}"
    if there and back:
        reverse = "also" if seen.problem.get((b, a)) else "not"
        return (
            f"{one} gets no response to a TCP connection to {to}, while UDP packets pass in both "
            f"directions: a firewall drops TCP connections; those from {other} to {one} are "
            f"{reverse} dropped"
        )
    if back:
        return f"packets from {one} to {to} are lost; those from {other} to {one} arrive"
    if there:
        return f"packets from {to} to {one} are lost; those from {one} to {other} arrive"
    return f"no packet passes between {one} and {to} in either direction"


def _closed_ports(seen: _Seen) -> Iterator[Finding]:
    if not seen.closed:
        return
    by_target: dict[int, list[int]] = {}
    for source, target in seen.closed:
        by_target.setdefault(target, []).append(source)
    for target, sources in list(by_target.items())[:_SHOWN]:
        ports = ", ".join(map(str, sorted(seen.closed[sources[0], target])))
        observers = names_of([seen.hosts[source] for source in sources])
        yield Finding(
            Level.BAD,
            f"{seen.hosts[target]} does not respond to {observers} at port {ports}, though it "
            "listens there; other ports respond: a firewall closes a part of the ports",
            f"Open all ports from and to the hosts of a job on {seen.hosts[target]}. "
            f"{_CHECK_FIREWALL}",
            hosts=(seen.hosts[target],),
        )


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


def _path_mtus(seen: _Seen) -> Iterator[Finding]:
    """Report paths that lose packets which both interfaces can carry."""
    short: dict[tuple[int, int], int] = {}
    for (a, b), largest in seen.arrived.items():
        mtus = [seen.facts[node].mtu or 0 for node in (a, b)]
        works = not seen.problem.get((a, b)) and not seen.problem.get((b, a))
        if works and 0 < largest < min(*mtus, 65_000):
            short[a, b] = largest
    hosts, links = attribute(
        sorted({(min(pair), max(pair)) for pair in seen.arrived}),
        {(min(pair), max(pair)) for pair in short},
    )
    named = [(seen.hosts[node], [pair for pair in short if node in pair]) for node in hosts]
    named += [(f"{seen.hosts[a]} - {seen.hosts[b]}", [(a, b), (b, a)]) for a, b in links]
    for name, directions in named[:_SHOWN]:
        a, b = next(pair for pair in directions if pair in short)
        yield Finding(
            Level.WARNING,
            f"{name}: packets above {short[a, b]} bytes from {seen.hosts[a]} to {seen.hosts[b]} "
            f"are lost, though the interfaces of both have MTU {seen.facts[a].mtu} and "
            f"{seen.facts[b].mtu}. TCP connections work, because it finds the smaller size",
            "Set the same MTU on the switches between these hosts, or a smaller one on all hosts",
            hosts=tuple(dict.fromkeys(name.split(" - "))),
        )


def _long_round_trips(seen: _Seen) -> Iterator[Finding]:
    trips = seen.round_trips()
    if not trips:
        return
    shortest = min(trips.values()) if len(trips) > 1 else 0.0
    limit = max(LONG_ROUND_TRIP_SECONDS, 4 * shortest)
    long = {pair for pair, trip in trips.items() if trip > limit}
    usual = [trip for pair, trip in trips.items() if pair not in long]
    hosts, links = attribute(trips, long)
    for node in hosts:
        own = [trip for pair, trip in trips.items() if node in pair]
        yield Finding(
            Level.WARNING,
            f"a round trip to {seen.hosts[node]} takes {_milliseconds(own)} from every other host, "
            f"among the others {_milliseconds(usual)}",
            f"Exclude {seen.hosts[node]}, or look for a wrong route (`ip route`, `traceroute`), a "
            "VPN, or an overloaded link there",
            hosts=(seen.hosts[node],),
            exclude=True,
        )
    for pair in links[:_SHOWN]:
        one, other = (seen.hosts[node] for node in pair)
        yield Finding(
            Level.WARNING,
            f"a round trip between {one} and {other} takes {_milliseconds([trips[pair]])}; "  # type: ignore[index]
            f"expected under {LONG_ROUND_TRIP_SECONDS * 1e3:.0f} ms, usual is "
            f"{_milliseconds(usual)}",
            "Look for a wrong route between them (`ip route`, `traceroute`), a VPN, or an "
            "overloaded link",
            hosts=(one, other),
        )


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3g} ms" if seconds else "unknown"

"""Measure the links between hosts in a tournament: bandwidth, round trips, lost packets.

One rank of each host takes part. In one round no host is in two pairs, so that a slow link is told
apart from a slow host. One plain TCP stream in each direction shows neither the speed of RDMA nor
the full bandwidth of a fast adapter, but an adapter that runs at a lower speed, a bad cable, and a
busy or lossy link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...host_pairs import Pair, attribute, rounds, usual_bandwidth
from ..check import CPUS, Check, Finding, Level, Ranks, Reported
from ..link import LinkEnd, Measured
from ..peers import ALL_PAIRS_HOSTS, data_address, names_of

SLOW = 0.4  # share of the usual bandwidth: one stream of TCP varies more than a collective
LOST_SHARE = 0.003  # of the packets; a healthy network loses none of so few
LOW_BYTES_PER_SECOND = 12.5e6  # 100 Mbit/s
_ROUNDS = 10  # with more than ALL_PAIRS_HOSTS hosts
_ATTEMPTS = 3
_TOURNAMENT_SECONDS = 28.0
_FIRST_SECONDS = 20.0  # the rest is for what seems bad
_SHOWN = 6


@dataclass
class LinkFacts:
    """The links that this host has measured, as Measured, and how many it was to measure."""

    links: list[dict[str, Any]]
    planned: int


class Links(Check[LinkFacts]):
    """Bandwidth, jitter and lost packets of each pair of hosts."""

    name = "links"
    seconds = 60.0
    facts = LinkFacts

    def collect(self, ranks: Ranks) -> LinkFacts:
        """Take part in the tournament, and measure again what seems bad."""
        hosts = len(ranks.hosts)
        if hosts < 2:
            return LinkFacts([], 0)
        schedule = rounds(hosts)[: None if hosts <= ALL_PAIRS_HOSTS else _ROUNDS]
        end = LinkEnd(data_address(ranks.address), ranks.me.node)
        gathered = ranks.all_gather("listening", end.place)
        places = {place.node: gathered[place.rank] for place in ranks.hosts}
        end.connect(places, [pair for one in schedule for pair in one])
        ranks.all_gather("connected", True)
        start = time.monotonic()
        best: dict[Pair, Measured] = {}
        again: set[Pair] | None = None
        for attempt in range(_ATTEMPTS):
            limit = start + (_TOURNAMENT_SECONDS if attempt else _FIRST_SECONDS)
            for pairs in schedule:
                pair = next((one for one in pairs if ranks.me.node in one), None)
                if pair and (again is None or pair in again) and time.monotonic() < limit:
                    found = end.measure(pair, limit)
                    if found:
                        best[pair] = _better(best.get(pair), found)
            own = [asdict(one) for one in best.values()]
            if attempt < _ATTEMPTS - 1:
                every = ranks.all_gather(f"measured {attempt}", own)
                measured = [_measured(row) for rows in every for row in rows or ()]
                again = _suspicious({one.pair: one for one in measured})
                if not again:
                    break
        end.close()
        planned = sum(one[0] == ranks.me.node for pairs in schedule for one in pairs)
        return LinkFacts([asdict(one) for one in best.values()], planned)

    def conclude(self, reported: Sequence[Reported[LinkFacts]]) -> Iterator[Finding]:
        """Report lossy and slow hosts and links."""
        hosts = {one.place.node: one.place.host for one in reported}
        rows = [_measured(row) for one in reported for row in one.facts.links]
        # The runner reports hosts without facts.
        links = {one.pair: one for one in rows if hosts.keys() >= set(one.pair)}
        planned = sum(one.facts.planned for one in reported)
        if not planned:
            return
        lossy = _lossy(links)
        findings = [*_report_lost(lossy, links, hosts), *_report_slow(lossy, links, hosts)]
        yield from (replace(one, follows=("connections", CPUS)) for one in findings)
        if findings:
            return
        bandwidths = [one.bandwidth for one in links.values() if one.bandwidth is not None]
        if not bandwidths:  # the check of connections has reported why
            return
        trips = statistics.median(one.round_trip for one in links.values())
        jitter = statistics.median(one.jitter for one in links.values())
        part = "" if len(links) == planned else f" of {planned}"
        lost = sum(sum(one.lost) for one in links.values())
        probes = sum(sum(one.probes) for one in links.values())
        yield Finding(
            Level.GOOD,
            f"{len(links)}{part} links between {len(hosts)} hosts: "
            f"{_rate(statistics.median(bandwidths))} per TCP stream, the slowest "
            f"{_rate(min(bandwidths))}; round trip {trips * 1e6:.0f} us, jitter "
            f"{jitter * 1e6:.0f} us; {lost} of {probes} packets lost",
        )


def _measured(row: Mapping[str, Any]) -> Measured:
    """Return the link of a row from JSON, where pairs are lists."""
    pairs = {name: tuple(row[name]) for name in ("busy", "probes", "lost")}
    return Measured(**{**row, **pairs})


def _better(before: Measured | None, found: Measured) -> Measured:
    """Combine two measurements: the higher bandwidth counts, and all lost packets."""
    if before is None:
        return found
    best = max(before, found, key=lambda one: one.bandwidth or 0.0)
    return replace(
        best,
        probes=(before.probes[0] + found.probes[0], before.probes[1] + found.probes[1]),
        lost=(before.lost[0] + found.lost[0], before.lost[1] + found.lost[1]),
        segments=before.segments + found.segments,
        sent_again=before.sent_again + found.sent_again,
        times=before.times + found.times,
    )


def _suspicious(links: Mapping[Pair, Measured]) -> set[Pair]:
    """Return the links that have to be measured again before they are blamed."""
    lossy = {pair for pair, one in links.items() if sum(one.lost)}
    again = {pair for pair, one in links.items() if one.sent_again > 0.001 * one.segments}
    return _slow(links) | lossy | (again if len(again) < len(links) else set())


def _slow(links: Mapping[Pair, Measured]) -> set[Pair]:
    known = {pair: one.bandwidth for pair, one in links.items() if one.bandwidth is not None}
    least = LOW_BYTES_PER_SECOND
    if len(known) > 2:
        least = max(least, SLOW * usual_bandwidth(known))
    # Busy cores slow a transfer, too, and say nothing about the link.
    return {pair for pair in known if links[pair].possible_bandwidth < least}


# Findings ----------------------------------------------------------------------------------------


def _lossy(links: Mapping[Pair, Measured]) -> dict[tuple[int, int], float]:
    """Return the share of lost packets by direction, for those that lose too many."""
    found = {}
    for one in links.values():
        for direction, sent, lost in zip(
            ((one.a, one.b), (one.b, one.a)), one.probes, one.lost, strict=True
        ):
            if lost > 2 and lost > LOST_SHARE * sent:
                found[direction] = lost / sent
    return found


def _report_lost(
    lossy: Mapping[tuple[int, int], float],
    links: Mapping[Pair, Measured],
    hosts: Mapping[int, str],
) -> Iterator[Finding]:
    directions = [one for pair in links for one in (pair, pair[::-1])]
    left = dict(lossy)
    for node, host in hosts.items():
        for index, what in ((0, "sends"), (1, "receives")):
            own = [one for one in directions if one[index] == node]
            bad = [one for one in own if one in lossy]
            if len(own) < 2 or len(bad) < len(own) or not any(one in left for one in bad):
                continue
            left = {one: share for one, share in left.items() if one not in bad}
            share = statistics.median(lossy[one] for one in bad)
            yield Finding(
                Level.WARNING,
                f"{share:.1%} of the packets that {host} {what} are lost, on all {len(own)} links; "
                "expected none",
                f"Check the cable, the adapter and the switch port of {host} (`ethtool -S`, `ip -s "
                "link`), and exclude it until then",
                hosts=(host,),
                exclude=True,
            )
    for (a, b), share in list(left.items())[:_SHOWN]:
        one = links[min(a, b), max(a, b)]
        yield Finding(
            Level.WARNING,
            f"{share:.1%} of the packets from {hosts[a]} to {hosts[b]} are lost, and TCP sent "
            f"{one.sent_again} of {one.segments} segments again; expected none",
            f"Check the cables and switch ports between {hosts[a]} and {hosts[b]} (`ethtool -S`)",
            hosts=(hosts[a], hosts[b]),
        )


def _report_slow(
    lossy: Mapping[tuple[int, int], float],
    links: Mapping[Pair, Measured],
    hosts: Mapping[int, str],
) -> Iterator[Finding]:
    # Other programs may have slowed a single measurement.
    slow = {pair for pair in _slow(links) if links[pair].times > 1}
    explained = {(min(one), max(one)) for one in lossy}
    slow_hosts, slow_links = attribute(links, slow)
    usual = [one.bandwidth for pair, one in links.items() if pair not in slow and one.bandwidth]
    expected = (
        f"the other links have {_rate(statistics.median(usual))}"
        if usual
        else (f"expected at least {_rate(LOW_BYTES_PER_SECOND)}")
    )
    if len(slow_hosts) == len(hosts) and len(slow) == len(links) and not usual:
        rates = [one.bandwidth or 0.0 for one in links.values()]
        yield Finding(
            Level.WARNING,
            f"all links are slow: the median is {_rate(statistics.median(rates))}; {expected}",
            "Check that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the fast interface, and its "
            "speed (`ethtool`)",
            hosts=tuple(hosts.values()),
        )
        return
    for node in slow_hosts:
        own = [one for pair, one in links.items() if node in pair]
        if explained.issuperset(one.pair for one in own):
            continue
        sent = statistics.median(_bandwidth(one, node) for one in own)
        received = statistics.median(_bandwidth(one, one.other(node)) for one in own)
        yield Finding(
            Level.WARNING,
            f"{hosts[node]} is slow in all its {len(own)} links: it sends {_rate(sent)} and "
            f"receives {_rate(received)}; {expected}",
            f"Check the speed of the interface of {hosts[node]} (`ethtool`), its cable and switch "
            "port, and other jobs there; exclude it until then",
            hosts=(hosts[node],),
            exclude=True,
        )
    for a, b in slow_links[:_SHOWN]:
        if (a, b) in explained:
            continue
        one = links[a, b]
        yield Finding(
            Level.WARNING,
            f"the link between {hosts[a]} and {hosts[b]} is slow: {_rate(one.a_to_b or 0)} to "
            f"{hosts[b]}, {_rate(one.b_to_a or 0)} to {hosts[a]}; {expected}, and both hosts are "
            "as fast as the others elsewhere",
            f"Check the switch ports and routes between {hosts[a]} and {hosts[b]} (`traceroute`)",
            hosts=(hosts[a], hosts[b]),
        )
    if len(slow_links) > _SHOWN:
        names = sorted({hosts[node] for pair in slow_links[_SHOWN:] for node in pair})
        yield Finding(
            Level.WARNING,
            f"{len(slow_links) - _SHOWN} more links are slow, between {names_of(names)}; "
            f"{expected}",
            "Check the switches between these hosts",
            hosts=tuple(names),
        )


def _bandwidth(one: Measured, sender: int) -> float:
    return (one.a_to_b if sender == one.a else one.b_to_a) or 0.0


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"

"""Pair the hosts for measurements; tell a slow or broken link from a slow or broken host. No torch.

The pairs are measured in rounds, as in a round-robin tournament. In a round each host has at most
one partner, so that no two pairs share a host's connection.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

SLOW = 0.6  # a link is slow below this share of the usual bandwidth
Pair = tuple[int, int]  # numbers of two hosts, the lower one first


def rounds(hosts: int) -> list[list[Pair]]:
    """Return the rounds of a round-robin tournament: each pair of hosts once (circle method)."""
    places = list(range(hosts + hosts % 2))  # with an odd number, one host waits in each round
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        both = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in both if max(a, b) < hosts])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def attribute(
    pairs: Iterable[Sequence[int]], affected: Collection[Sequence[int]]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the hosts whose links are all affected, and the affected links of the other hosts.

    A host with a single link is never blamed, because its partner may be at fault.
    """
    bad = {tuple(pair) for pair in affected}
    links: dict[int, list[tuple[int, ...]]] = {}
    for pair in pairs:
        for host in pair:
            links.setdefault(host, []).append(tuple(pair))
    hosts = [host for host, own in sorted(links.items()) if len(own) > 1 and bad.issuperset(own)]
    return hosts, sorted(pair for pair in bad if not set(pair) & set(hosts))


def usual_bandwidth(bandwidths: Mapping[Pair, float]) -> float:
    """Return the upper quartile, which a slow host or some slow links do not change."""
    if len(bandwidths) < 2:
        return max(bandwidths.values(), default=0.0)
    return statistics.quantiles(bandwidths.values(), n=4, method="inclusive")[2]


def slow_pairs(bandwidths: Mapping[Pair, float]) -> set[Pair]:
    """Return the pairs whose bandwidth is below SLOW times the usual one.

    With two hosts there is nothing to compare with.
    """
    if len(bandwidths) < 3:
        return set()
    usual = usual_bandwidth(bandwidths)
    return {pair for pair, bandwidth in bandwidths.items() if bandwidth < SLOW * usual}


def find_slow(bandwidths: Mapping[Pair, float]) -> tuple[list[int], list[Pair]]:
    """Return the slow hosts, and the slow links between hosts that are not slow.

    A host is slow if all its links are.
    """
    hosts, links = attribute(bandwidths, slow_pairs(bandwidths))
    return hosts, [(a, b) for a, b in links]


def describe(bandwidths: Mapping[Pair, float], names: Sequence[str]) -> str:
    """Return the summary: which hosts or links are slow, and by how much."""
    slow_hosts, slow_links = find_slow(bandwidths)
    usual = [
        bandwidth
        for pair, bandwidth in bandwidths.items()
        if pair not in slow_links and not set(pair) & set(slow_hosts)
    ] or list(bandwidths.values())
    median = statistics.median(usual)
    sentences = []
    for host in slow_hosts:
        own = [bandwidth for pair, bandwidth in bandwidths.items() if host in pair]
        times = median / statistics.median(own)
        sentences.append(
            f"{names[host]} is {times:.1f} times slower than the rest in all its links"
        )
    for a, b in slow_links:
        times = median / bandwidths[a, b]
        sentences.append(
            f"the link {names[a]} - {names[b]} is {times:.1f} times slower than the rest; "
            "both hosts are as fast as the others elsewhere"
        )
    if not sentences:
        alike = min(bandwidths.values()) / max(bandwidths.values())
        return (
            f"No slow link among {len(bandwidths)}: the median is {median / 1e9:.3g} GB/s, the "
            f"slowest has {alike:.0%} of the fastest."
        )
    return f"{'; '.join(sentences)}. The median of the others is {median / 1e9:.3g} GB/s."

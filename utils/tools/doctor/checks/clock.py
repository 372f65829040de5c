"""Compare the clocks of the hosts with that of rank 0's host, by the four time stamps of NTP.

RFC 5905, section 8: https://www.rfc-editor.org/rfc/rfc5905#section-8
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..check import Check, Finding, Level, Ranks, Reported
from ..peers import connect, data_address, listen, receive, serve, stop

SKEW_SECONDS = 1.0
_EXCHANGES = 8
_CONNECT_SECONDS = 4.0
_STAMPS = struct.Struct("!dd")


@dataclass
class ClockFacts:
    """How far this host's clock is ahead of rank 0's, in seconds, and how precisely that is known.

    None where rank 0's host could not be reached.
    """

    ahead_seconds: float | None
    round_trip_seconds: float | None


class Clock(Check[ClockFacts]):
    """Clock skew between hosts."""

    name = "clock"
    quick = True
    seconds = 15.0
    facts = ClockFacts

    def collect(self, ranks: Ranks) -> ClockFacts:
        """Exchange time stamps with rank 0's host."""
        listener = place = None
        if ranks.me.node == 0 and len(ranks.hosts) > 1:
            listener = listen(data_address(ranks.address))
            serve(listener, _send_time)
            place = listener.getsockname()[:2]
        first = ranks.hosts[0].rank
        place = ranks.all_gather("listening", place)[first]
        facts = ClockFacts(0.0, 0.0) if ranks.me.node == 0 else ClockFacts(None, None)
        if place and ranks.me.node != 0:
            try:
                with connect(place[0], place[1], _CONNECT_SECONDS) as connected:
                    facts = _measure(connected)
            except OSError:  # the check of connections reports it
                pass
        ranks.all_gather("measured", True)
        if listener:
            stop(listener)
        return facts

    def conclude(self, reported: Sequence[Reported[ClockFacts]]) -> Iterator[Finding]:
        """Report clocks that differ from the median of all by more than a second."""
        known = [
            (one.place.host, one.facts.ahead_seconds)
            for one in reported
            if one.facts.ahead_seconds is not None
        ]
        if len(known) < 2:
            return
        # With two hosts it is rank 0's clock: nothing shows which of them is right.
        usual = statistics.median_low([ahead for _, ahead in known])
        if len(known) == 2:
            usual = known[0][1]
        wrong = [
            (host, ahead - usual) for host, ahead in known if abs(ahead - usual) > SKEW_SECONDS
        ]
        reference = next(host for host, ahead in known if ahead == usual)
        for host, skew in wrong:
            yield Finding(
                Level.WARNING,
                f"the clock of {host} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} "
                f"that of {reference}; expected a difference of at most {SKEW_SECONDS:.0f} s",
                f"Start chronyd or ntpd on {host} (`timedatectl`, `chronyc tracking`). Until then, "
                "time stamps in logs and of files mislead, and credentials may be refused",
                hosts=(host,),
            )
        if not wrong:
            largest = max(abs(ahead - usual) for _, ahead in known)
            yield Finding(
                Level.GOOD,
                f"the clocks of {len(known)} hosts differ by {largest * 1e3:.1f} ms at most",
            )


def _send_time(connected: socket.socket) -> None:
    while connected.recv(1):
        received = time.time()
        connected.sendall(_STAMPS.pack(received, time.time()))


def _measure(connected: socket.socket) -> ClockFacts:
    """Return the offset of the exchange with the shortest round trip."""
    found = []
    for _ in range(_EXCHANGES):
        sent = time.time()
        connected.sendall(b"t")
        there, returned = _STAMPS.unpack(receive(connected, _STAMPS.size))
        received = time.time()
        found.append(
            (received - sent - (returned - there), (sent - there + received - returned) / 2)
        )
    round_trip, ahead = min(found)
    return ClockFacts(ahead, round_trip)

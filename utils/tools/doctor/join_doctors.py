"""Join the ranks of this run of `doctor`, without torch unless torchrun has started them.

The ranks report nothing here that could make them differ: the checks compare them later.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...host import process
from ...launch_error import LaunchError
from ...launchers.detect import Detection, find_launcher
from ...launchers.launcher import Placement
from ...launchers.rank_variables import without_inherited
from ...monitor.monitor import Monitor
from ...startup.address import Rendezvous, agree
from ...startup.reports import RankReport, make_report
from .check import RankPlace
from .doctor_exchange import Exchange, Gathered, Server

# A rank that does not find rank 0 explains why, before rank 0 ends the launch.
EARLIER_SECONDS = 4.0
_PLACES_SECONDS = 20.0


@dataclass
class Joined:
    """The ranks of this run, as seen from one of them.

    everyone: by rank. address: this host's address on the way to rank 0.
    notes: on rank 0, what the user should know about the launch.
    """

    placement: Placement
    everyone: tuple[RankPlace, ...]
    address: str = "127.0.0.1"
    notes: tuple[str, ...] = ()
    _exchange: Exchange | None = None
    _server: Server | None = None
    _monitor: Monitor | None = None

    @property
    def me(self) -> RankPlace:
        """This rank."""
        return self.everyone[self.placement.rank]

    def gather(
        self, topic: str, value: Any, seconds: float, ranks: Sequence[int] | None = None
    ) -> Gathered:
        """Return the values of all ranks, or of these, as Exchange.gather() does."""
        if self._exchange is None:
            return Gathered([value])
        return self._exchange.gather(topic, value, seconds, ranks)

    def close(self) -> None:
        """Leave: rank 0 as the last one, because its exit status may end the others."""
        if self._monitor is not None:
            self._monitor.leave("")
        if self._server is not None:
            self._server.wait_for_others(3.0)
            self._server.close()
        if self._exchange is not None:
            self._exchange.close()


def join(timeout: float) -> Joined:
    """Join the other ranks. timeout: seconds, after which rank 0 names the missing ranks.

    Raises LaunchError when a rank is missing, or the launch contradicts itself.
    """
    detection = find_launcher()
    placement = detection.placement
    if placement.world_size == 1:
        return Joined(placement, (RankPlace(0, socket.gethostname(), 0, 0),))

    seconds = timeout if placement.rank == 0 else max(timeout / 2, timeout - EARLIER_SECONDS)
    detection = Detection(detection.launcher, placement.replace(notes=()), detection.reason)
    # host_cores: placement.py reports on the cores, which is a note of the start otherwise.
    report: RankReport = {**make_report(detection.placement, bind=False), "host_cores": 1}
    found = _agree(detection, report, time.monotonic() + seconds)
    assert found.monitor is not None  # of every launch with several ranks
    found.monitor.started()

    server = None
    if found.listener is not None:
        server = Server(found.listener, placement.world_size, found.token)
    exchange = Exchange(
        placement.rank, placement.world_size, found.rank_0_addr, found.master_port, found.token
    )
    here = [socket.gethostname(), process.boot_id(), process.namespace("net")]
    hosts = exchange.gather("places", here, _PLACES_SECONDS).values
    return Joined(
        placement,
        _places(hosts),
        found.local_addr,
        found.notes if placement.rank == 0 else (),
        exchange,
        server,
        found.monitor,
    )


def _agree(detection: Detection, report: RankReport, deadline: float) -> Rendezvous:
    launcher, timeout = detection.launcher, deadline - time.monotonic()
    if launcher.has_store(os.environ):
        from ...startup.store import agree_by_agent_store  # imports torch

        return agree_by_agent_store(detection, report, deadline)[0]
    environ = without_inherited(os.environ)
    return agree(detection.placement, report, launcher=launcher, timeout=timeout, environ=environ)


def _places(hosts: Sequence[Sequence[str] | None]) -> tuple[RankPlace, ...]:
    """Return the place of each rank. hosts: what identifies the host of each rank, by rank.

    Raises LaunchError where a rank has not reported its host.
    """
    if None in hosts:
        missing = [rank for rank, host in enumerate(hosts) if host is None]
        raise LaunchError(
            f"{len(missing)} of {len(hosts)} ranks joined, but then did not report their host: "
            f"{', '.join(map(str, missing[:16]))}. Check for messages of these ranks"
        )
    nodes: dict[tuple[str, ...], int] = {}
    ranks_on: dict[int, int] = {}
    places = []
    for rank, host in enumerate(hosts):
        assert host is not None
        node = nodes.setdefault(tuple(host), len(nodes))
        places.append(RankPlace(rank, host[0], node, ranks_on.get(node, 0)))
        ranks_on[node] = ranks_on.get(node, 0) + 1
    return tuple(places)

"""Let the ranks that a native launcher has started join the launch: compare them with the plan, answer with variables.

The other end of each connection is rank_start.py.
"""
from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .. import network
from ..schedulers.pbs import short
from .plan import Plan
from .report import Report
from .wire import Message, Wire

START_SECONDS = 120.0  # from one rank to the next, until all have joined
_SHOWN = 8  # ranks or hosts in a message


@dataclass(frozen=True)
class Joined:
    """The report of a rank that has joined."""

    rank: int
    local_rank: int | None  # as its launcher says
    host: tuple[str, ...]  # its name, and what tells it from another host of that name
    address: str  # of that host, as this one sees it
    reached: str  # the address by which it reached this host
    port: int = 0  # rank 0's: reserved on its host


class JoinServer:
    """The ranks of one launch, until all of them have joined or one could not.

    complete: all ranks have their variables. problem: why the launch has failed; empty while it has not.
    """

    def __init__(self, plan: Plan, report: Report, selector: selectors.BaseSelector) -> None:
        self._plan, self._report, self._selector = plan, report, selector
        self._launcher = "srun" if plan.means == "srun" else "mpiexec"
        self._unknown: list[Wire] = []  # connections that have not reported
        self._wires: dict[int, Wire] = {}  # rank -> connection
        self._joined: dict[int, Joined] = {}
        self._limit = time.monotonic() + START_SECONDS
        self.complete = False
        self.problem = ""
        selector.register(report.listener, selectors.EVENT_READ)

    def seconds_left(self, now: float) -> float | None:
        """Seconds until missing ranks are an error; None where there is nothing to wait for."""
        return None if self.complete or self.problem else max(0.0, self._limit - now)

    def wait_longer(self, now: float) -> None:
        """Start the time limit anew: the launcher has said that it is waiting for resources."""
        self._limit = now + START_SECONDS

    def check_time(self, now: float) -> None:
        if not self.complete and not self.problem and now >= self._limit:
            self._fail(f"{self.missing()} within {START_SECONDS:.0f} s. Expected {self._plan.world_size} ranks on "
                       f"{', '.join(self._plan.hosts[:_SHOWN])}. Check these hosts, and that they can reach "
                       f"{socket.gethostname()} by TCP")

    def missing(self) -> str:
        """ "2 of 4 ranks did not join: 1, 3" """
        missing = [rank for rank in range(self._plan.world_size) if rank not in self._joined]
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        return f"{len(missing)} of {self._plan.world_size} ranks did not join: {shown}"

    def hosts_without_ranks(self) -> list[str]:
        """Hosts of the plan from which no rank has joined; none where hosts have other names than the scheduler's."""
        found = {short(one.host[0]) for one in self._joined.values()}
        if not found <= {short(host) for host in self._plan.hosts}:
            return []
        return [host for host in self._plan.hosts if short(host) not in found][:_SHOWN]

    def host_of(self, rank: int) -> str:
        """The name of the host of a rank that has joined; empty where it is not known."""
        return self._joined[rank].host[0] if rank in self._joined else ""

    def handle(self, source: object, events: int) -> bool:
        """Look at what the selector has found; False where it is none of the ranks'."""
        if source is self._report.listener:
            try:
                wire = Wire(self._report.listener.accept()[0])
            except OSError as error:  # mostly: the client has gone already
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._fail(f"{self.missing()}, because launch.py may open no more files ({error.strerror}). "
                               f"Expected one connection for each rank. Raise `ulimit -n` on {socket.gethostname()}")
                return True
            self._unknown.append(wire)
            self._selector.register(wire, wire.events)
            return True
        if not isinstance(source, Wire):
            return False
        if events & selectors.EVENT_WRITE:
            source.flush()
        for message in source.receive():
            if source in self._unknown:
                self._unknown.remove(source)
                self._join(source, message)
        self._update(source)
        return True

    def close(self) -> None:
        for wire in list(self._unknown):  # rank 0's report that all have saved may have come this moment
            for message in wire.receive():
                self._report.is_known(message)
        for wire in [*self._unknown, *self._wires.values()]:
            wire.close()

    def _update(self, wire: Wire) -> None:
        if not wire.closed:
            self._selector.modify(wire, wire.events)
        elif wire.socket.fileno() >= 0:
            self._selector.unregister(wire)
            wire.close()
            if wire in self._unknown:
                self._unknown.remove(wire)
            for rank, one in self._wires.items():
                if one is wire and not self.complete:
                    self._fail(f"rank {rank} on {self.host_of(rank)} ended before all ranks had joined")

    def _join(self, wire: Wire, message: Message) -> None:
        report = message.get("join", message)
        if not self._report.is_known(report) or "join" not in message:
            wire.closed = True  # an unknown client, or rank 0, which has nothing more to say
            return
        host = tuple(map(str, report["host"]))
        if self.problem or self.complete or report.get("problem"):
            who = f"rank {report['rank']}" if "rank" in report else "a rank"
            self._fail(f"{who} on {host[0]}: {report.get('problem')}. Expected the same files on every host, and one "
                       "launcher: correct that, and start again" if report.get("problem") else
                       f"{who} on {host[0]} has joined a launch that is complete")
            wire.closed = True
            return
        rank, size = int(report["rank"]), int(report["world_size"])
        if size != self._plan.world_size or rank in self._joined:
            found = f"{size} ranks" if size != self._plan.world_size else f"rank {rank} twice"
            self._fail(f"{self._launcher} has started {found}, one of them on {host[0]}. Expected {self._expected()}. "
                       f"Check what was asked of the scheduler, and the {self._launcher} line above")
            wire.closed = True
            return
        self._wires[rank] = wire
        self._joined[rank] = Joined(rank, report.get("local_rank"), host, str(wire.socket.getpeername()[0]),
                                    str(report["reached"]), int(report.get("port", 0)))
        self._limit = time.monotonic() + START_SECONDS
        if len(self._joined) == self._plan.world_size:
            self._start()

    def _start(self) -> None:
        """All have joined: compare hosts with the plan, and answer."""
        if why := mismatch(self._plan, list(self._joined.values())):
            self._fail(f"{self._launcher} has started {_shape(self._joined.values())}. Expected {self._expected()}. "
                       f"{why}")
            return
        self.complete = True
        own = set(network.own_addresses())
        for rank, variables in rank_variables(self._joined, own).items():
            self._wires[rank].send({"variables": variables})
            if rank in self._wires and not self._wires[rank].closed:
                self._selector.modify(self._wires[rank], self._wires[rank].events)

    def _expected(self) -> str:
        each = ", ".join(f"{count} on {host}" for host, count in zip(self._plan.hosts, self._plan.ranks, strict=True)
                         if host in self._plan.hosts[:_SHOWN])
        return f"{self._plan.world_size} ranks ({each}{', ...' * (len(self._plan.hosts) > _SHOWN)})"

    def _fail(self, why: str) -> None:
        self.problem = self.problem or why
        for wire in self._wires.values():
            if not wire.closed:
                wire.send({"failed": True})


def mismatch(plan: Plan, joined: list[Joined]) -> str:
    """Why the ranks that have joined are on other hosts than the plan says, as a hint; empty where they are not.

    Names of hosts count where they are the scheduler's. A job's own distribution of its tasks over its hosts is Slurm's
    affair: then only the number of hosts counts.
    """
    by_host = Counter(one.host for one in joined)
    if len(by_host) != len(plan.hosts):
        return "Check that the launcher sees all hosts of the job, and no others"
    planned = Counter({short(host): count for host, count in zip(plan.hosts, plan.ranks, strict=True)})
    found = Counter({short(host[0]): count for host, count in by_host.items()})
    if set(planned) & set(found) and set(planned) != set(found):
        return f"Not expected: {', '.join(sorted(set(found) - set(planned))[:_SHOWN])}. Check --hosts and the host file"
    counts_differ = sorted(by_host.values()) != sorted(plan.ranks) or set(planned) == set(found) and planned != found
    if counts_differ and not plan.as_asked:
        return "Check what else tells the launcher how many ranks a host gets"
    return ""


def rank_variables(joined: Mapping[int, Joined], own_addresses: set[str]) -> dict[int, dict[str, str]]:
    """The variables of each rank, as torchrun names them. own_addresses: of the host of launch.py.

    Hosts are numbered in the order of their lowest ranks. The local rank is the launcher's, which GPU masks and core
    bindings go by, where it is one of a host's ranks numbered from 0.
    """
    hosts: dict[tuple[str, ...], list[Joined]] = {}
    for rank in sorted(joined):
        hosts.setdefault(joined[rank].host, []).append(joined[rank])
    address = "127.0.0.1"
    if len(hosts) > 1:
        first = joined[0]
        address = first.address
        if network.is_loopback(address) or address in own_addresses:  # rank 0 is here: as other hosts reach this one
            others = Counter(one.reached for one in joined.values() if one.host != first.host)
            address = others.most_common(1)[0][0]
    variables = {}
    for node_rank, ranks in enumerate(hosts.values()):
        numbered = sorted(one.local_rank if one.local_rank is not None else -1 for one in ranks) == [*range(len(ranks))]
        for index, one in enumerate(ranks):
            local_rank = one.local_rank if numbered else index
            variables[one.rank] = {
                "RANK": str(one.rank), "WORLD_SIZE": str(len(joined)), "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(ranks)), "NODE_RANK": str(node_rank), "GROUP_RANK": str(node_rank),
                "MASTER_ADDR": address, "MASTER_PORT": str(joined[0].port)}
    return variables


def _shape(joined: Iterable[Joined]) -> str:
    counted = Counter(one.host[0] for one in joined)
    shown = [f"{count} on {host}" for host, count in counted.most_common(_SHOWN)]
    return f"{sum(counted.values())} ranks ({', '.join(shown)}{', ...' * (len(counted) > _SHOWN)})"

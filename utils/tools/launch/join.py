"""Check the ranks that a native launcher started against the plan, then send each its variables.

rank_start.py is the other end of each connection.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...channel import Channel, Loop, Message
from ...host import network
from ...job.notation import short_name
from ...startup.reports import did_not_join
from . import rank_environment as environment
from .child_processes import LAUNCH_VARIABLE, launch_path
from .host_ranks import RankMask
from .launch_connection import LaunchServer, RankNotices, address_of_rank_0, peer_address
from .launch_plan import Plan
from .launch_result import LaunchResult
from .nested import note_groups

START_SECONDS = 120.0  # time limit for each next rank to join
_SHOWN = 8  # ranks or hosts in a message


class JoinedRank(NamedTuple):
    """The report of a rank that has joined."""

    rank: int
    local_rank: int | None  # numbered by its launcher; None: unknown
    host: tuple[str, ...]  # name, boot id, network namespace: names may repeat
    address: str  # address of that host, as seen from here
    reached: str  # address of this host that the rank has connected to
    port: int = 0  # port that rank 0 has reserved on its host; 0 for other ranks
    cores: RankMask = RankMask(mask="", gpu_nodes=[])


class JoinServer(LaunchServer):
    """Let the ranks of one launch join, send each its variables, and receive their reports.

    complete: all ranks were sent their variables. problem: why the launch has failed; "" if it has
    not. running: ranks that have not ended and whose parent is still connected. ended_at:
    time.monotonic() when the last rank ended. orphaned: host -> message, if a process of the
    launcher has ended there before its ranks. command_pid: process id of the launcher's command,
    which never counts as orphaned.
    """

    def __init__(
        self,
        plan: Plan,
        launch_id: str,
        notices: RankNotices,
        loop: Loop,
        result: LaunchResult,
    ) -> None:
        super().__init__(notices, loop)
        self._plan, self._id, self._result = plan, launch_id, result
        self._launcher = plan.method.name
        self._joined: dict[int, JoinedRank] = {}
        self._limit = time.monotonic() + START_SECONDS
        self.running: set[int] = set()
        self._handled: dict[int, list[int]] = {}  # rank -> signals that it handles
        self.orphaned: dict[str, str] = {}
        self.command_pid = 0
        self.ended_at: float | None = None
        self.complete = False
        self.problem = ""

    def wait_longer(self, now: float) -> None:
        """Start the time limit anew: the launcher itself waits for resources."""
        self._limit = now + START_SECONDS

    def check_time(self, now: float) -> None:
        """Fail if the time limit is over."""
        if not self.complete and not self.problem and now >= self._limit:
            self._fail(
                f"{self.missing()} within {START_SECONDS:.0f} s. Expected "
                f"{self._plan.world_size} ranks on {', '.join(self._plan.hosts[:_SHOWN])}. Check "
                f"these hosts, and that they can reach {socket.gethostname()} by TCP"
            )

    def all_handle(self, number: int) -> bool:
        """Return whether all ranks run and handle a signal, as far as their parents report it."""
        return self.complete and all(number in self._handled.get(rank, ()) for rank in self.running)

    def missing(self) -> str:
        """Return "2 of 4 ranks did not join: ranks 1,3"."""
        size = self._plan.world_size
        return did_not_join([rank for rank in range(size) if rank not in self._joined], size)

    def hosts_without_ranks(self) -> list[str]:
        """Return hosts of the plan from which no rank has joined.

        The list is empty if the ranks report host names that are not the scheduler's.
        """
        found = {short_name(joined.host[0]) for joined in self._joined.values()}
        if not found <= {short_name(host) for host in self._plan.hosts}:
            return []
        return [host for host in self._plan.hosts if short_name(host) not in found][:_SHOWN]

    def identify(self, peer: Channel, message: Message) -> int | None:
        joined = self._checked(message, peer) if message["kind"] == "join" else None
        if joined is None:
            return None
        self._joined[joined.rank] = joined
        return joined.rank

    def identified(self, index: int) -> None:
        self._limit = time.monotonic() + START_SECONDS
        if len(self._joined) < self._plan.world_size:
            return
        ranks = list(self._joined.values())
        if hint := mismatch(self._plan, ranks):
            self._fail(
                f"{self._launcher} has started {_describe(ranks)}. Expected {self._expected()}. "
                f"{hint}"
            )
            return
        self.complete = True
        own_addresses = set(network.local_addresses())
        num_hosts = len({joined.host for joined in ranks})
        variables_of = rank_variables(self._joined, own_addresses)
        # An mpiexec may not have passed this variable to the other hosts.
        launches = launch_path(self._plan.environ, self._id)
        by_host: dict[str, list[JoinedRank]] = {}  # node rank -> its ranks
        for rank in sorted(variables_of, key=lambda rank: int(variables_of[rank]["LOCAL_RANK"])):
            by_host.setdefault(variables_of[rank]["NODE_RANK"], []).append(self._joined[rank])
        self.running = set(self._joined)
        for rank, variables in variables_of.items():
            on_host = by_host[variables["NODE_RANK"]]
            # One parent on each host watches which process groups the ranks there form.
            is_watched = self._plan.is_watched and rank == on_host[0].rank
            self.clients[rank].send(
                {
                    "kind": "variables",
                    "variables": {**variables, LAUNCH_VARIABLE: launches},
                    "num_hosts": num_hosts,
                    "cores": [joined.cores for joined in on_host],
                    "watched_ranks": len(on_host) if is_watched else 0,
                },
            )

    def handle(self, index: int, message: Message) -> None:
        of_rank_0 = self._joined[index].host == self._joined[0].host
        text = note_groups(message, self._plan, self._result, of_rank_0=of_rank_0)
        self.problem = self.problem or text
        if message["kind"] == "handled":
            self._handled[index] = message["signals"]
        if message["kind"] == "orphaned":
            host, (pid, parent) = self._joined[index].host[0], message["parent"]
            text = (
                f"{parent} on {host} has ended before the ranks that it had started there: it was "
                "killed, or has failed. Their output is lost. See dmesg there"
            )
            if (host, pid) != (socket.gethostname(), self.command_pid):
                self.orphaned[host] = text
        if message["kind"] == "ignored":
            self.note_ignored([index])
        if message["kind"] == "stopped":
            host = self._joined[index].host[0]
            self._result.rank_stopped(
                index, host, message["pid"], message["why"], message["seconds"], time.monotonic()
            )
        if message["kind"] == "exit":
            self._rank_ended(index, message["status"])

    def _rank_ended(self, rank: int, status: int) -> None:
        self.running.discard(rank)
        host = self._joined[rank].host[0]
        who, now, others = f"rank {rank} on {host}", time.monotonic(), bool(self.running)
        self._result.process_ended(who, status, now, others=others, rank=rank, host=host)
        self.ended_at = None if others else now

    def probe(self) -> None:
        """Send something that each host has to acknowledge; see note_unresponsive()."""
        self.send_to_all({"kind": "probe"})

    def note_unresponsive(self) -> None:
        """Note the hosts of running ranks that have not acknowledged what was sent."""
        for rank in self.running:
            if self.clients[rank].is_unacknowledged():
                self._host_lost(rank)

    def _host_lost(self, rank: int) -> None:
        host = self._joined[rank].host[0]
        text = f"the connection to {host} was lost: the host or its network has failed"
        self._result.host_lost(host, text, time.monotonic())

    def client_lost(self, index: int) -> None:
        host, now = self._joined[index].host[0], time.monotonic()
        if self.clients[index].host_lost:
            self._host_lost(index)
        elif index in self.running:  # its parent was killed, perhaps with the rank
            self._result.rank_lost(index, host, now)
        self.running.discard(index)
        if self.complete and not self.running:
            self.ended_at = self.ended_at or now
        if not self.complete:
            self._fail(f"rank {index} on {host} ended before all ranks had joined")

    def out_of_files(self, error: OSError) -> None:
        self._fail(
            f"{self.missing()}, because ddpkit launch may open no more files ({error.strerror}). "
            "Expected one connection for each rank. Raise `ulimit -n` on "
            f"{socket.gethostname()}"
        )

    def _checked(self, report: Message, peer: Channel) -> JoinedRank | None:
        """Return a rank's report if it matches the plan; else fail the launch."""
        host, rank, world_size = tuple(report["host"]), report["rank"], report["world_size"]
        who = "a rank" if rank is None else f"rank {rank}"
        if report["problem"]:
            self._fail(
                f"{who} on {host[0]}: {report['problem']}. Expected the same files on every host, "
                "and one launcher. Correct that, and start again"
            )
            return None
        if self.problem or self.complete:
            self._fail(f"{who} on {host[0]} has joined a launch that is complete")
            return None

        if world_size != self._plan.world_size or rank in self._joined:
            wrong_size = world_size != self._plan.world_size
            found = f"{world_size} ranks" if wrong_size else f"rank {rank} twice"
            self._fail(
                f"{self._launcher} has started {found}, one of them on {host[0]}. Expected "
                f"{self._expected()}. Check what was requested from the scheduler, and the "
                f"{self._launcher} line above"
            )
            return None
        known = {**report, "host": host, "address": peer_address(peer)}
        return JoinedRank(**{name: known[name] for name in JoinedRank._fields})

    def _expected(self) -> str:
        pairs = list(zip(self._plan.hosts, self._plan.ranks, strict=True))
        each = ", ".join(f"{count} on {host}" for host, count in pairs[:_SHOWN])
        more = ", ..." * (len(pairs) > _SHOWN)
        return f"{self._plan.world_size} ranks ({each}{more})"

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.send_to_all({"kind": "end"})


def mismatch(plan: Plan, joined: list[JoinedRank]) -> str:
    """Return a hint if the ranks are on other hosts than planned; "" if they match.

    Host names are compared if they are the scheduler's. The number of ranks on each host is not
    compared if Slurm distributes the job's own tasks.
    """
    by_host = Counter(rank.host for rank in joined)
    if len(by_host) != len(plan.hosts):
        return "Check that the launcher sees all hosts of the job, and no others"

    planned = {short_name(host): count for host, count in zip(plan.hosts, plan.ranks, strict=True)}
    found = Counter({short_name(host[0]): count for host, count in by_host.items()})
    same_hosts = set(planned) == set(found)
    same_names = bool(set(planned) & set(found))
    if same_names and not same_hosts:
        unexpected = ", ".join(sorted(set(found) - set(planned))[:_SHOWN])
        return f"Not expected: {unexpected}. Check --nodelist and the host file"

    same_counts = (
        planned == found if same_hosts else sorted(planned.values()) == sorted(by_host.values())
    )
    if not same_counts and not plan.method.keeps_job_layout:
        return "Check what else decides how many ranks the launcher starts on a host"
    return ""


def rank_variables(
    joined: Mapping[int, JoinedRank], own_addresses: set[str]
) -> dict[int, dict[str, str]]:
    """Return the variables of each rank. own_addresses: addresses of the host of ddpkit launch.

    Hosts are numbered in the order of their lowest ranks. Ranks keep the launcher's local ranks,
    which GPU masks and core bindings follow, if these count from 0 on a host.
    """
    hosts: dict[tuple[str, ...], list[JoinedRank]] = {}
    for rank in sorted(joined):
        hosts.setdefault(joined[rank].host, []).append(joined[rank])

    address, first = "127.0.0.1", joined[0]
    if len(hosts) > 1:
        reached = [rank.reached for rank in joined.values() if rank.host != first.host]
        address = address_of_rank_0(first.address, reached, own_addresses)
    variables = {}
    for node_rank, ranks in enumerate(hosts.values()):
        of_launcher = [rank.local_rank for rank in ranks if rank.local_rank is not None]
        numbered = sorted(of_launcher) == list(range(len(ranks)))
        local_ranks = of_launcher if numbered else range(len(ranks))
        for joined_rank, local_rank in zip(ranks, local_ranks, strict=True):
            variables[joined_rank.rank] = environment.rank_variables(
                rank=joined_rank.rank,
                world_size=len(joined),
                local_rank=local_rank,
                local_world_size=len(ranks),
                node_rank=node_rank,
                address=address,
                port=first.port,
            )
    return variables


def _describe(joined: Iterable[JoinedRank]) -> str:
    """Return "3 ranks (2 on n1, 1 on n2)"."""
    counted = Counter(rank.host[0] for rank in joined)
    shown = ", ".join(f"{count} on {host}" for host, count in counted.most_common(_SHOWN))
    return f"{sum(counted.values())} ranks ({shown}{', ...' * (len(counted) > _SHOWN)})"

"""Agree on the host and port where rank 0 listens, and exchange the ranks' reports there.

Rank 0 binds a port and keeps it: the listening socket serves the start-up exchange and then torch's
store. The other ranks try the places where endpoints.py expects rank 0. No torch.
"""

from __future__ import annotations

import functools
import hmac
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..channel import Channel, Peer, Secret
from ..errors import LaunchError
from ..host import network
from ..host.address_filter import accept_only
from ..launch_protocol import may_have
from ..launchers.launcher import Launcher, NameService, NameServiceUnavailable, Placement, poll
from ..launchers.rank_variables import REQUIRE_SECRET
from ..phrases import NO_RANK_0
from . import secret
from .endpoints import Endpoints, find_endpoints
from .exchange import NotRank0, RendezvousServer, join
from .listener import allow_connections, open_listener
from .reports import Assignment, RankReport, check_reports

_MAX_ADDRESSES = 8  # addresses of rank 0's host to publish; they fit into 200 bytes
_TRIED_ADDRESSES = 4  # addresses tried for one host name


@dataclass
class Rendezvous:
    """The result of the start-up exchange for one rank.

    master_addr, master_port: rank 0's, the same on every rank.
    rank_0_addr: the address at which this rank has reached rank 0.
    local_addr: this host's address on the way to rank 0.
    listener: on rank 0 the socket bound to master_port, for torch's store; else None.
    connections: to rank 0, or on rank 0 to every other rank; empty for a single rank.
    table: on rank 0 one row per host. slowest: on rank 0 the host that reported last.
    secret: shared by the ranks of this launch.
    is_authenticated: whether other users cannot guess the secret.
    """

    assignment: Assignment
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    rank_0_addr: str = "127.0.0.1"
    local_addr: str = "127.0.0.1"
    listener: socket.socket | None = None
    connections: dict[Channel, Peer] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    table: str = ""
    slowest: str = ""
    secret: Secret = Secret(b"")
    is_authenticated: bool = True

    @property
    def token(self) -> str:
        """A name of this launch, equal on every rank, which does not reveal the secret."""
        text = f"token {self.secret.label}".encode()
        return hmac.digest(self.secret.key, text, "sha256").hex()[:24]


def agree(
    placement: Placement,
    report: RankReport,
    *,
    launcher: Launcher,
    timeout: float,
    environ: Mapping[str, str] = os.environ,
    name_service: NameService | None = None,
    earlier_starts: int = 0,
) -> Rendezvous:
    """Find rank 0, report to it, and return what it has assigned to this rank.

    launcher: the launcher that `placement` is from. timeout: seconds until a missing rank is an
    error. environ: variables, without any that a rank has set for other programs.
    name_service: used instead of the launcher's.
    earlier_starts: how often the same processes have joined each other before.

    Raises LaunchError on every rank, with rank 0's message if rank 0 can be reached.
    """
    if placement.world_size == 1:
        if report["error"]:
            raise LaunchError(report["error"])
        result = check_reports([report])
        return Rendezvous(result.assignments[0], notes=tuple(result.notes), table=result.table)

    deadline = time.monotonic() + timeout
    endpoints = find_endpoints(
        launcher,
        placement,
        environ,
        name_service=name_service,
        timeout=timeout,
        earlier_starts=earlier_starts,
    )
    if environ.get(REQUIRE_SECRET) == "1" and not endpoints.is_authenticated:
        start = launcher.describe_start(environ)
        raise LaunchError(
            f"{REQUIRE_SECRET} is set, and ranks {start} share no secret. Start them by "
            f"ddpkit launch, or export {secret.FILE}=<a private file> to all ranks"
        )
    if placement.rank == 0:
        return _serve(placement, endpoints, report, deadline)
    return _join(placement, endpoints, report, deadline, timeout)


# Rank 0


def _serve(
    placement: Placement, endpoints: Endpoints, report: RankReport, deadline: float
) -> Rendezvous:
    """Let the other ranks join, check all reports, and send the results."""
    allow_connections(placement.world_size)
    listener = open_listener(endpoints, placement.world_size)
    bound_to, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    try:
        key = endpoints.secret(_publish(endpoints, bound_to, port, deadline))
        hints = functools.partial(_hints, placement, endpoints)
        with RendezvousServer(listener, placement.world_size, key, hints) as server:
            try:
                result = check_reports(server.collect(report, deadline))
            except LaunchError as error:
                server.refuse(str(error), deadline)
                raise
            # Torch's store uses this socket next, and demands no proof of the secret.
            if may_have("filter") and not network.is_loopback(bound_to):
                accept_only(listener, server.addresses())
            connections = server.send(result.assignments)
    except BaseException:
        listener.close()
        raise
    finally:
        secret.forget_secret(endpoints.identity)
    return Rendezvous(
        result.assignments[0],
        master_addr=server.address,
        master_port=port,
        rank_0_addr=bound_to if network.is_specific(bound_to) else "127.0.0.1",
        local_addr=server.address,
        listener=listener,
        connections=connections,
        notes=(*result.notes, *endpoints.notes),
        table=result.table,
        slowest=result.slowest,
        secret=key,
        is_authenticated=endpoints.is_authenticated,
    )


def _publish(endpoints: Endpoints, bound_to: str, port: int, deadline: float) -> str:
    """Publish a new secret, port and addresses through the name service; return the secret.

    Returns "" if there is no name service. bound_to: the address where rank 0 listens.
    """
    if endpoints.name_service is None:
        return ""
    if network.is_specific(bound_to):
        addresses = [bound_to]
    else:
        local = network.local_addresses()
        resolved = (address for host in endpoints.hosts for address in network.resolve(host))
        chosen_by_user = [address for address in resolved if address in local]
        addresses = list(dict.fromkeys([*chosen_by_user, *local]))[:_MAX_ADDRESSES]
    addresses = addresses or ["127.0.0.1"]

    published = os.urandom(12).hex()
    text = f"{published}|{port}|{','.join(addresses)}"
    try:
        endpoints.name_service.publish(text, deadline - time.monotonic())
    except NameServiceUnavailable as error:
        raise LaunchError(
            f"rank 0 on {socket.gethostname()} cannot publish its address: {error}. "
            "Export MASTER_ADDR and MASTER_PORT to all ranks"
        ) from None
    return published


def _hints(placement: Placement, endpoints: Endpoints) -> Iterator[str]:
    """Yield possible reasons why other ranks do not join, for the message that names them."""
    yield from placement.notes
    if hint := _hint_on_variables(placement, endpoints):
        yield hint
    by_master_addr = endpoints.source.startswith("MASTER_ADDR")
    if not by_master_addr or not endpoints.hosts or endpoints.name_service is not None:
        return
    address = endpoints.hosts[-1]
    resolved, local = network.resolve(address), network.local_addresses()
    if not resolved:
        yield f"MASTER_ADDR={address} does not resolve on rank 0's host"
    elif not any(
        address in local or ":" in address or network.is_loopback(address) for address in resolved
    ):
        yield (
            f"MASTER_ADDR={address} is no address of rank 0's host {socket.gethostname()}, which "
            f"has {', '.join(local[:4])}"
        )


# The other ranks


def _join(
    placement: Placement,
    endpoints: Endpoints,
    report: RankReport,
    deadline: float,
    timeout: float,
) -> Rendezvous:
    """Try the candidates until rank 0 responds or the time is over."""
    failures: dict[str, str] = {}  # host -> latest failure; the newest comes last
    attempts = 0
    # A busy rank 0 responds to 4,000 ranks within 4 s. Wait longer if rank 0 can be nowhere else.
    response_timeout = 10.0 if endpoints.is_certain else 2 + placement.world_size / 500

    def try_candidates() -> Rendezvous | None:
        nonlocal attempts
        # The first port on the first host is almost always right; try the others less often.
        num_places = 1 + 2**attempts // 8
        candidates = _candidates(placement, endpoints, num_places, deadline, failures)
        for name, address, port, published in candidates:
            key = endpoints.secret(published)
            try:
                joined = join(
                    address,
                    port,
                    key,
                    placement,
                    report,
                    deadline=deadline,
                    first_response_timeout=response_timeout,
                )
            except NotRank0 as found:
                shown = name if name == address else f"{name} ({address})"
                failures.pop(name, None)
                failures[name] = f"{shown} port {port}: {found}"
                if endpoints.loopback and "secret" in str(found):
                    failures[name] += (
                        f" (ranks that have a /dev/shm of their own, in containers, need "
                        f"{secret.FILE}=<a private file that they share>)"
                    )
                if found.unresponsive:
                    attempts += 3  # another program has the likeliest port: try others soon
                continue
            return Rendezvous(
                joined.assignment,
                joined.master_addr,
                master_port=port,
                rank_0_addr=address,
                local_addr=joined.local_addr,
                connections=joined.connections,
                notes=tuple(endpoints.notes),
                secret=key,
                is_authenticated=endpoints.is_authenticated,
            )
        attempts += 1
        return None

    found = poll(try_candidates, deadline - time.monotonic(), longest_pause=0.5)
    if found is not None:
        return found
    tried = "; ".join(list(failures.values())[-4:]) or "nothing: rank 0 has published no address"
    source = f" (from {endpoints.source})" if endpoints.name_service is None else ""
    raise LaunchError(
        f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()} "
        f"{NO_RANK_0} within {timeout:.0f} s{source}. Tried {tried}. Check that rank 0 runs there "
        "(look for its message), and that no firewall is between the hosts"
        + (f". {hint}" if (hint := _hint_on_variables(placement, endpoints)) else ""),
        rank=0,
    )


def _hint_on_variables(placement: Placement, endpoints: Endpoints) -> str:
    """Return a hint that no launcher has set the rank variables; "" if a launcher has.

    They may be left in a shell, so that a script waits for ranks that nobody starts.
    """
    if endpoints.launcher.starts_processes or endpoints.is_of_launch:
        return ""
    return (
        f"No launcher has set RANK={placement.rank} and WORLD_SIZE={placement.world_size}. If they "
        "are left in this shell, run: unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    )


def _candidates(
    placement: Placement,
    endpoints: Endpoints,
    num_places: int,
    deadline: float,
    failures: dict[str, str],
) -> Iterator[tuple[str, str, int, str]]:
    """Yield places to try: host name, address, port, and the secret that rank 0 has published.

    These come from the name service, or else from the first candidates.
    """
    if endpoints.name_service is not None:
        try:
            text = endpoints.name_service.look_up(max(0.0, deadline - time.monotonic()))
        except NameServiceUnavailable as error:
            raise LaunchError(
                f"rank {placement.rank} on {socket.gethostname()} cannot look up rank 0's address: "
                f"{error}. Export MASTER_ADDR and MASTER_PORT to all ranks"
            ) from None
        if text:
            published, port_of_rank_0, addresses = text.split("|")
            for address in addresses.split(","):
                yield address, address, int(port_of_rank_0), published
        return

    places = [(host, port) for port in endpoints.ports for host in endpoints.hosts]
    for host, port in places[:num_places]:
        resolved = endpoints.resolve(host)
        if not resolved:
            failures[host] = f"{host}: the name does not resolve on {socket.gethostname()}"
        for address in resolved[:_TRIED_ADDRESSES]:
            yield host, address, port, ""

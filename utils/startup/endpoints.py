"""Find out where rank 0 of a launch may listen, before the ranks are connected.

Under torchrun, or with variables set by hand, MASTER_ADDR and MASTER_PORT give the place. Otherwise
these are used, in this order:

1. a broadcast, if MPI is running already;
2. the launcher's name service, where rank 0 publishes its address;
3. the job's list of hosts and MASTER_ADDR, at MASTER_PORT and at ports derived from the identity of
   the launch;
4. MASTER_ADDR and MASTER_PORT alone;
5. a broadcast by mpi4py;
6. a list of hosts that only some ranks have.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..channel import Secret
from ..errors import LaunchError
from ..host import network
from ..launchers.launcher import Launcher, NameService, NameServiceUnavailable, Placement
from ..launchers.rank_variables import LAUNCH_RANK
from ..launchers.torchrun import is_stale
from .secret import find_secret

_NUM_CANDIDATES = 8
_NEVER_IN_NAMES = set("[],;()${}*?'\"/ \t\n")  # "gpu-a[01-02]" is a list


@dataclass
class Endpoints:
    """Where rank 0 may listen.

    identity: a text that only this launch has; "" if it is unknown.
    known_secret: a secret that the ranks share already; "" if rank 0 publishes one, or there is
    none.
    hosts, ports: candidates, the likeliest first. name_service: used instead of them, if any.
    source: origin of hosts and ports, for messages.
    loopback: whether all ranks run on this host and need no other interface.
    is_of_launch: whether ddpkit launch has started this process.
    """

    launcher: Launcher
    identity: str
    known_secret: str
    hosts: list[str]
    ports: list[int]
    name_service: NameService | None = None
    source: str = "MASTER_ADDR and MASTER_PORT"
    loopback: bool = False
    is_of_launch: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_authenticated(self) -> bool:
        """Whether the ranks share a secret that other users do not know."""
        service = self.name_service
        return bool(self.known_secret or (service is not None and service.is_private))

    def secret(self, published: str = "") -> Secret:
        """Return the secret; without one, text that can be guessed. published: text from rank 0."""
        label = hashlib.sha256(f"{self.identity}|{published}".encode()).hexdigest()
        text = self.known_secret or published or self.identity
        return Secret(text.encode(), label)

    @property
    def is_certain(self) -> bool:
        """Whether rank 0 can listen at one place only."""
        return self.name_service is not None or len(self.ports) == 1

    def resolve(self, host: str) -> list[str]:
        """Return the IP addresses of a host; empty if its name does not resolve."""
        resolved = [*network.resolve_on_fabric(host), *network.resolve(host)]
        return list(dict.fromkeys(resolved)) or self.launcher.resolve(host)


def find_endpoints(
    launcher: Launcher,
    placement: Placement,
    environ: Mapping[str, str],
    *,
    name_service: NameService | None = None,
    timeout: float,
    earlier_starts: int = 0,
) -> Endpoints:
    """Return where rank 0 of this launch may listen.

    name_service: used instead of the launcher's. timeout: seconds that MPI_Init may take.
    earlier_starts: number of earlier starts of the same processes, as in a search for parameters.
    A model of an earlier start may keep its store alive, and with it MASTER_PORT.
    Raises LaunchError when nothing leads to rank 0, or variables contradict the launch.
    """
    master_host, master_port, notes = _master_address(launcher, placement, environ)
    identity = launcher.identity(environ, placement)
    endpoints = Endpoints(
        launcher=launcher,
        identity=identity,
        known_secret=find_secret(environ, placement, identity),
        hosts=[master_host] if master_host else [],
        ports=[master_port] if master_port and name_service is None else [],
        name_service=name_service,
        loopback=placement.on_one_host and (not master_host or network.is_loopback(master_host)),
        is_of_launch=bool(environ.get(LAUNCH_RANK)),
        notes=notes,
    )
    if earlier_starts and endpoints.ports:
        others = candidate_ports(f"{identity or master_port} start {earlier_starts}")
        endpoints.ports = [*others, *endpoints.ports]
    # The given name service uses the store at MASTER_PORT, so rank 0 needs another port.
    if name_service is not None or launcher.requires_master_address:
        return endpoints

    is_local = endpoints.loopback and bool(identity)
    unavailable: list[NameServiceUnavailable] = []

    def connect(service: Callable[[], NameService | None]) -> bool:
        try:
            endpoints.name_service = service()
        except NameServiceUnavailable as error:
            unavailable.append(error)
        return endpoints.name_service is not None

    # After MPI_Init, the launcher's name service belongs to the MPI library.
    uses_mpi = bool(launcher.mpi_libraries)

    def connect_by_mpi(*, starts_mpi: bool) -> bool:
        from ..launchers import mpi  # few ranks need mpi4py

        if not starts_mpi and not mpi.is_running():
            return False
        limit = timeout if starts_mpi else None
        return connect(lambda: mpi.MpiBroadcast(launcher, placement, limit))

    if uses_mpi and "mpi4py.MPI" in sys.modules and connect_by_mpi(starts_mpi=False):
        return endpoints
    # Ranks on one host need no name service: they derive ports from the identity.
    if not is_local and connect(lambda: launcher.name_service(environ)):
        return endpoints

    if is_local:
        hosts, source = ["127.0.0.1"], "this host alone"
    else:
        hosts, source = launcher.candidate_hosts(environ)

    def use_hosts() -> Endpoints:
        # A stale MASTER_ADDR may match one rank by chance, so that rank tries the other hosts, too.
        endpoints.hosts = list(dict.fromkeys([*hosts, *endpoints.hosts]))
        endpoints.ports += candidate_ports(identity) if identity else []
        endpoints.source = f"MASTER_ADDR and {source}" if master_host else source
        return endpoints

    has_hosts = bool(hosts and (identity or master_port))
    if has_hosts and (is_local or launcher.all_have_hosts(environ)):
        return use_hosts()
    if endpoints.hosts and endpoints.ports:
        return endpoints
    may_use_mpi = uses_mpi and not any(error.affects_mpi for error in unavailable)
    if may_use_mpi and connect_by_mpi(starts_mpi=True):
        return endpoints
    if has_hosts:
        return use_hosts()
    reasons = "; ".join(str(error) for error in unavailable) or "no node list"
    raise LaunchError(
        f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}, "
        f"{launcher.describe_start(environ)}: rank 0's address is unknown ({reasons}). "
        "Export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to all ranks"
        f"{launcher.export_hint}"
    )


def candidate_ports(identity: str) -> list[int]:
    """Return ports to try; all ranks of a launch get the same, another launch other ones."""
    digest = hashlib.sha256(b"port" + identity.encode()).digest()
    numbers = (int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(_NUM_CANDIDATES))
    ports = network.listen_ports()
    return list(dict.fromkeys(ports[number % len(ports)] for number in numbers))


def _master_address(
    launcher: Launcher, placement: Placement, environ: Mapping[str, str]
) -> tuple[str, int, list[str]]:
    """Return MASTER_ADDR, MASTER_PORT and notes; "" and 0 if unset or from another launch.

    Raises LaunchError if they cannot be right.
    """
    host, port = (environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    is_required = launcher.requires_master_address
    if is_required and not (host and port):
        raise LaunchError(
            f"rank {placement.rank} of {placement.world_size} was set by hand (RANK, WORLD_SIZE), "
            f"but MASTER_ADDR={host!r} MASTER_PORT={port!r}; expected both. Export the host of "
            "rank 0 and a free port, or start the script by a launcher"
        )

    if not is_required and (host or port) and is_stale(environ, placement):
        note = (
            f"MASTER_ADDR={host} MASTER_PORT={port} was ignored: the RANK or WORLD_SIZE set with "
            "it belongs to another launch"
        )
        return "", 0, [note]

    if host and (problem := _problem_with_name(host, is_required)):
        raise LaunchError(f"MASTER_ADDR is {host[:80]!r}, {problem}")

    is_number = port.isascii() and port.isdecimal() and len(port) < 6
    if port and not (is_number and 0 < int(port) < 65536):
        raise LaunchError(
            f"MASTER_PORT is {port[:40]!r}; expected a port from 1 to 65535. Correct or unset it"
        )

    on_several_hosts = (
        not launcher.num_agents_variable
        and placement.local_world_size is not None
        and not placement.on_one_host
    )
    if on_several_hosts and host and network.is_loopback(host):
        if not is_required and environ.get("RANK", "").strip():
            return "", 0, []  # from another launch, which has this rank's RANK by chance
        raise LaunchError(
            f"MASTER_ADDR={host} is this host alone, but the {placement.world_size} ranks run on "
            "several hosts. Set it to a name of rank 0's host that all hosts know, or unset it"
        )
    return host, int(port or 0), []


def _problem_with_name(host: str, is_required: bool) -> str:
    """Return why this cannot be a host name or address, and what to do; "" if it can be."""
    unset = "" if is_required else ", or unset it"
    if host.count(":") == 1:
        return (
            f"with a port. Expected a host alone. Set MASTER_ADDR={host.partition(':')[0]}{unset}; "
            "the port belongs in MASTER_PORT"
        )
    if not set(host) & _NEVER_IN_NAMES:
        return ""
    if host.startswith("$"):
        return f"which no shell has expanded. Expected a host. Correct it{unset}"
    return (
        "a list of hosts. Expected one, that of rank 0. In a job of Slurm: MASTER_ADDR=$(scontrol "
        f'show hostnames "$SLURM_JOB_NODELIST" | head -n 1){unset}'
    )

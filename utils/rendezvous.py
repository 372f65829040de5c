"""Where rank 0 listens: an address and port that every rank agrees on, and the roll call there. No torch.

Rank 0 binds a port and keeps it; the others learn it by the launcher's name service (telephone.py), by MASTER_ADDR and
MASTER_PORT, or by trying the few ports that both sides derive from what identifies the launch. The listening socket
serves the roll call and then the TCPStore: one port does for everything. Not here: the roll call (reception.py).
"""
from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from . import network
from .launchers import LaunchError, Placement, hand_set_is_stale
from .monitor import Monitor
from .parents import parent_pids
from .reception import SILENT, Judge, Reception, Reply, call, plain_address
from .rollcall import Card
from .schedulers.slurm import expand_hostlist
from .telephone import Mpi4py, NoTelephone, Pmi1, Telephone, mpi_is_running, pmix

_CANDIDATE_PORTS = range(20000, 32000)  # below the ports that Linux gives to outgoing connections


@dataclass
class Rendezvous:
    """What every rank knows after the roll call."""

    master_addr: str  # the same on every rank
    master_port: int
    reply: Reply
    reach_addr: str  # the address of rank 0 that worked from here
    own_addr: str  # this host's address on the way to rank 0
    listener: socket.socket | None = None  # on rank 0: bound to master_port, for the store to listen on
    monitor: Monitor | None = None  # of the ranks' connections to rank 0; None for a single rank
    notes: tuple[str, ...] = ()
    token: str = ""  # the same on every rank; another one after a restart where rank 0 chose it (see _host)


@dataclass
class _Plan:
    """How the ranks of this launch find each other."""

    token: str
    hosts: list[str]
    ports: list[int]
    telephone: Telephone | None = None
    notes: list[str] = field(default_factory=list)
    source: str = ""  # for messages: where hosts and ports are from
    loopback: bool = False  # all ranks are on this host


def agree(placement: Placement, card: Card, judge: Judge, *, timeout: float,
          environ: Mapping[str, str] = os.environ, telephone: Telephone | None = None) -> Rendezvous:
    """Meet all ranks of the launch and hand every card to rank 0's judge.

    timeout: seconds until a missing rank is an error. telephone: one that the caller has (torchrun's store), else the
    launcher's is used. Raises LaunchError on every rank, with rank 0's words where it can be reached.
    """
    deadline = time.monotonic() + timeout
    plan = _plan(placement, environ, telephone, timeout)
    if placement.rank == 0:
        return _host(placement, plan, card, judge, deadline)
    return _join(placement, plan, card, deadline, timeout)


# How the launch is found ---------------------------------------------------------------------------------------------

def _plan(placement: Placement, environ: Mapping[str, str], telephone: Telephone | None,
          timeout: float | None = None) -> _Plan:
    one_host = placement.local_world_size == placement.world_size
    address, port, notes = _explicit(placement, environ, one_host)
    identity = _identity(placement, environ)
    plan = _Plan(hashlib.sha256(identity.encode()).hexdigest()[:24], [address] if address else [],
                 [port] if port and telephone is None else [], telephone, notes, "MASTER_ADDR and MASTER_PORT",
                 loopback=one_host and (not address or network.is_loopback(address)))
    if telephone is not None:  # MASTER_PORT is of the store that the telephone belongs to
        return plan
    if placement.launcher in ("torchrun", "env"):
        return plan
    why_not = []
    by_name_service = [] if plan.loopback and identity else [_telephone]
    for find in [_running_mpi, *by_name_service]:
        try:
            plan.telephone = plan.telephone or find(placement, environ)
        except NoTelephone as error:
            why_not.append(str(error))
    if plan.telephone is not None:
        return plan
    hosts, source = (["127.0.0.1"], "this host alone") if plan.loopback and identity else _listed_hosts(
        placement, environ)
    if hosts and (identity or port):
        # Where MASTER_ADDR is of a launch before, one rank's number may fit it: that one tries the usual places too.
        plan.hosts = list(dict.fromkeys([*hosts, *plan.hosts]))
        plan.ports += _ports(identity) if identity else []
        plan.source = f"MASTER_ADDR and {source}" if address else source
        return plan
    # Where PMI_FD is closed the MPI library would abort at it.
    if placement.launcher != "slurm" and not any("mpi4py" in why or why.startswith("PMI_FD=") for why in why_not):
        try:
            plan.telephone = Mpi4py(placement, timeout)
            return plan
        except NoTelephone as error:
            why_not.append(str(error))
    if plan.hosts and plan.ports:
        return plan
    raise LaunchError(f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}, started by "
                      f"{placement.launcher}: nothing tells where rank 0 is ({'; '.join(why_not) or 'no node list'}). "
                      "Export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to all ranks")


def _running_mpi(placement: Placement, environ: Mapping[str, str]) -> Telephone | None:
    """MPI itself, where it has been initialised: the launcher's name service is the library's from then on."""
    owned = placement.launcher in ("openmpi", "mpich", "intel-mpi", "mvapich", "flux")
    return Mpi4py(placement) if owned and mpi_is_running() else None


def _telephone(placement: Placement, environ: Mapping[str, str]) -> Telephone | None:
    """The launcher's name service; None where it has none."""
    if placement.launcher == "openmpi":
        return pmix(environ)
    if placement.launcher in ("mpich", "intel-mpi"):
        return Pmi1(environ, name_service=True)
    if placement.launcher in ("flux", "mvapich") and environ.get("PMI_FD"):
        return Pmi1(environ, name_service=False)
    return None


def _explicit(placement: Placement, environ: Mapping[str, str], one_host: bool) -> tuple[str, int, list[str]]:
    """MASTER_ADDR and MASTER_PORT where they belong to this launch, "" and 0 where not; and what was ignored."""
    address, text = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    by_hand = placement.launcher in ("torchrun", "env")
    if by_hand and not (address and text):
        raise LaunchError(f"rank {placement.rank} of {placement.world_size} was set by hand (RANK, WORLD_SIZE), but "
                          f"MASTER_ADDR={address!r} MASTER_PORT={text!r}; expected both. Export the host of rank 0 and "
                          "a free port, or start the script by a launcher")
    if not by_hand and (address or text) and hand_set_is_stale(environ, placement):
        return "", 0, [f"MASTER_ADDR={address} MASTER_PORT={text} was ignored: the RANK or WORLD_SIZE beside it is of "
                       "another launch"]
    if text and not (text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536):
        raise LaunchError(f"MASTER_PORT is {text[:40]!r}; expected a port from 1 to 65535. Correct or unset it")
    # Each agent of torchrun counts its own ranks: two agents may share a host, and localhost is right for them.
    several_hosts = placement.local_world_size and not one_host and placement.launcher != "torchrun"
    if address and several_hosts and network.is_loopback(address):
        if not by_hand and environ.get("RANK", "").strip():
            return "", 0, []  # one rank's number happens to fit what another launch left behind
        raise LaunchError(f"MASTER_ADDR={address} is this host alone, but the {placement.world_size} ranks run on "
                          "several hosts. Set it to a name of rank 0's host that all hosts know, or unset it")
    return address, int(text or 0), []


def _identity(placement: Placement, environ: Mapping[str, str]) -> str:
    """What all ranks of this launch have and no other launch has; empty where there is nothing of the kind."""
    names = {"slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
             "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports"), "pals": ("PALS_APID",),
             "intel-mpi": ("I_MPI_HYDRA_UUID",), "flux": ("FLUX_JOB_ID",), "jsrun": ("LSB_JOBID", "PMIX_NAMESPACE"),
             "env": ("MASTER_PORT",), "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_PORT")}
    values = [environ.get(name, "") for name in names.get(placement.launcher, ())]
    if not any(values) and placement.local_world_size == placement.world_size:
        values = [_proxy()]
    return ":".join([placement.launcher, *values]) if any(values) else ""


def _proxy() -> str:
    """The process on this host that all its ranks descend from: mpiexec's proxy, by process id and start time."""
    for pid in parent_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name in ("hydra_pmi_proxy", "pmi_proxy", "mpispawn"):  # not a wrapper of the user's, called mpiexec-...
                return f"{socket.gethostname()}:{pid}:{rest.split()[19]}"
    return ""


def _ports(identity: str) -> list[int]:
    """Ports to try, the same for all ranks of the launch, different between launches."""
    digest = hashlib.sha256(b"port" + identity.encode()).digest()
    steps = (int.from_bytes(digest[i:i + 4], "big") for i in range(0, 32, 4))
    return [_CANDIDATE_PORTS[step % len(_CANDIDATE_PORTS)] for step in steps]


def _listed_hosts(placement: Placement, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Hosts where rank 0 may be, the likeliest first, and the variable that lists them."""
    if placement.launcher == "slurm":
        return _step_hosts(environ), "SLURM_STEP_NODELIST"
    with contextlib.suppress(OSError), open(environ.get("PBS_NODEFILE", ""), encoding="utf-8") as nodes:
        return list(dict.fromkeys(nodes.read().split())), "PBS_NODEFILE"
    if environ.get("LSB_MCPU_HOSTS"):  # "batch1 1 h41n01 42 h41n02 42"
        return environ["LSB_MCPU_HOSTS"].split()[::2], "LSB_MCPU_HOSTS"
    return [], ""


def _step_hosts(environ: Mapping[str, str]) -> list[str]:
    """Nodes of the srun step where rank 0 may be: mostly the first of its list, which is sorted by name."""
    firsts: list[str] = []  # of each component of a heterogeneous job; some versions of srun still say PACK for HET
    try:
        nodes = expand_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
        while group := (environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{len(firsts)}")
                        or environ.get(f"SLURM_JOB_NODELIST_PACK_GROUP_{len(firsts)}")):
            firsts.append(expand_hostlist(group)[0])
    except ValueError as error:
        raise LaunchError(f"SLURM_STEP_NODELIST: {error}") from None
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":  # the ranks are on the hosts that a file lists
        with contextlib.suppress(OSError), open(environ.get("SLURM_HOSTFILE", ""), encoding="utf-8") as file:
            nodes = [first for first in [file.readline().split("*")[0].strip()] if first] + nodes
    elif firsts:  # rank 0 is in the first component that takes part in the step
        nodes = [first for first in firsts if first in nodes or not nodes] + nodes
    else:
        nodes = nodes[:1]
    return list(dict.fromkeys(nodes))


# Rank 0 --------------------------------------------------------------------------------------------------------------

def _host(placement: Placement, plan: _Plan, card: Card, judge: Judge, deadline: float) -> Rendezvous:
    notes = list(plan.notes) + list(_make_room(placement.world_size))
    listener = _listen(plan, placement)
    port = listener.getsockname()[1]
    try:
        if plan.telephone is not None:
            addresses = (None if plan.loopback else network.own_addresses()) or ["127.0.0.1"]
            named = [a for host in plan.hosts for a in network.resolve(host) if a in addresses]
            addresses = list(dict.fromkeys([*named, *addresses]))[:8]
            plan.token = os.urandom(12).hex()
            try:
                plan.telephone.publish(f"{plan.token}|{port}|{','.join(addresses)}", deadline - time.monotonic())
            except NoTelephone as error:
                raise LaunchError(f"rank 0 cannot tell the others where it listens: {error}. "
                                  "Export MASTER_ADDR and MASTER_PORT to all ranks") from None
        doubts = list(placement.notes)  # looking up a name may take long, and the others are calling already
        threading.Thread(target=lambda: doubts.extend(_doubts(plan)), daemon=True, name="doubts").start()
        reception = Reception(listener, placement, plan.token, doubts)
        reply = reception.gather(card, judge, deadline)
    except BaseException:
        listener.close()
        raise
    own = reception.address
    return Rendezvous(own, port, reply, "127.0.0.1", own, listener, reception.monitor(), tuple(notes), plan.token)


def _doubts(plan: _Plan) -> Iterator[str]:
    """What may keep the others from finding this host, for the message when they do not come."""
    if plan.source.startswith("MASTER_ADDR") and plan.hosts and plan.telephone is None:
        address = plan.hosts[-1]
        resolved = network.resolve(address)
        if not resolved:
            yield f"MASTER_ADDR={address} does not resolve on rank 0's host"
        elif not any(network.is_loopback(one) or one in network.own_addresses() or ":" in one for one in resolved):
            yield (f"MASTER_ADDR={address} is no address of rank 0's host {socket.gethostname()}, which has "
                   f"{', '.join(network.own_addresses()[:4])}")


def _make_room(world_size: int) -> Iterator[str]:
    """Raise the limit of open files to what two connections per rank need; a note where the kernel's queue is short."""
    import resource  # Unix only, like every launcher

    needed = 2 * world_size + 256  # the roll call's and the store's
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(f"rank 0 on {socket.gethostname()} may open {hard} files, but {world_size} ranks need "
                          f"{needed}. Raise the hard limit (ulimit -Hn) on the compute nodes")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/core/somaxconn", encoding="ascii") as file:
        queue = int(file.read())
        if queue < world_size:
            yield (f"net.core.somaxconn={queue} on {socket.gethostname()} is below the {world_size} ranks: connections "
                   "beyond it are retried by TCP, which takes seconds")


def _listen(plan: _Plan, placement: Placement) -> socket.socket:
    """A socket bound to the first port of the plan that is free; to any port where the others are told by telephone."""
    ports = plan.ports if plan.telephone is None or len(plan.ports) == 1 else [0]
    for port in ports:
        try:
            return _bind(port, plan.loopback, placement.world_size)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise LaunchError(f"rank 0 on {socket.gethostname()} cannot listen on port {port}: {error}") from None
            why = os.strerror(error.errno)
    by_hand = len(ports) == 1
    what = f"MASTER_PORT={ports[0]}" if by_hand else f"ports {', '.join(map(str, ports))}"
    cure = "Choose another MASTER_PORT, or unset it so that a free one is taken" if by_hand else "Set MASTER_PORT"
    raise LaunchError(f"rank 0 cannot listen on {what} of {socket.gethostname()}: {why}, by another program or launch. "
                      f"{cure}")


def _bind(port: int, loopback: bool, backlog: int) -> socket.socket:
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


# The other ranks -----------------------------------------------------------------------------------------------------

def _join(placement: Placement, plan: _Plan, card: Card, deadline: float, timeout: float) -> Rendezvous:
    hello = {"rank": placement.rank, "world_size": placement.world_size, "card": card}
    met: dict[str, str] = {}  # what happened at each place that was tried, the newest last
    attempt, pause = 0, 0.005
    # A busy rank 0 welcomes 4,000 ranks within 4 s. Where one place alone is possible, wait for it.
    patience = 10.0 if plan.telephone is not None or len(plan.ports) == 1 else 2 + placement.world_size / 500
    while True:
        for host, address, port in _places(placement, plan, attempt, deadline, met):
            outcome = call(address, port, {**hello, "token": plan.token}, deadline, patience)
            if not isinstance(outcome, str):
                verdict, line = outcome
                return Rendezvous(verdict["master_addr"], port, verdict["reply"], address,
                                  plain_address(line.getsockname()[0]), None,
                                  Monitor({line: (0, verdict["host"])}, rank=placement.rank), tuple(plan.notes),
                                  plan.token)
            met.pop(host, None)
            met[host] = f"{host}{'' if host == address else f' ({address})'} port {port}: {outcome}"
            if outcome == SILENT:
                attempt += 3  # a program that answers nobody has the likeliest port: go on to the others soon
        attempt += 1
        if time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    tried = "; ".join(list(met.values())[-4:]) or "rank 0 never told where it listens"
    source = f" (from {plan.source})" if plan.telephone is None else ""
    raise LaunchError(f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()} did not find rank 0 "
                      f"within {timeout:.0f} s{source}. Tried {tried}. Check that rank 0 runs there (look for its "
                      "message), and that no firewall is between the hosts")


def _places(placement: Placement, plan: _Plan, attempt: int, deadline: float,
            met: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    """Where to try, as (name, address, port): all that the telephone says, or a growing part of the candidates."""
    if plan.telephone is not None:
        try:
            told = plan.telephone.look_up(max(0.0, deadline - time.monotonic()))
        except NoTelephone as error:
            raise LaunchError(f"rank {placement.rank} on {socket.gethostname()} cannot ask where rank 0 listens: "
                              f"{error}. Export MASTER_ADDR and MASTER_PORT to all ranks") from None
        if told:
            plan.token, told_port, addresses = told.split("|")
            yield from ((address, address, int(told_port)) for address in addresses.split(","))
        return
    # The first port on the first host is right but for a collision, so that the others are tried less often.
    places = [(host, port) for port in plan.ports for host in plan.hosts]
    for host, port in places[:1 + (1 << min(attempt, 20)) // 8]:
        resolved = network.resolve(host) or (_slurm_address(host) if placement.launcher == "slurm" else [])
        if not resolved:
            met[host] = f"{host}: the name does not resolve on {socket.gethostname()}"
        yield from ((host, address, port) for address in resolved[:4])


@functools.cache
def _slurm_address(node: str) -> list[str]:
    """The address by which Slurm itself reaches a node (NodeAddr of scontrol(1)); empty where it does not say."""
    import subprocess  # needed only where node names do not resolve
    try:
        said = subprocess.run(["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True,
                              errors="replace", timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.search(r"\sNodeAddr=(\S+)", said)
    return network.resolve(found[1]) if found else []

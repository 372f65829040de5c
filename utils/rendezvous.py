"""Where rank 0 listens: an address and port that every rank agrees on, and the roll call there. No torch.

Rank 0 binds a port and keeps it; the others learn it by the launcher's name service (telephone.py), by MASTER_ADDR and
MASTER_PORT, or by trying the few ports that both sides derive from what identifies the launch. Each rank then hands in
a card; rank 0 judges them all and answers every rank. The listening socket is afterwards the TCPStore's, so that one
port serves for everything. Not here: what is on the cards and how they are judged (rollcall.py).
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import network
from .launchers import LaunchError, Placement, hand_set_is_stale, parent_pids
from .rollcall import Card, ranges
from .schedulers.slurm import expand_hostlist
from .telephone import Mpi4py, NoTelephone, Pmi1, Telephone, mpi_is_running, pmix

Reply = dict[str, Any]
Judge = Callable[[list[Card]], tuple[str | None, list[Reply]]]  # cards by rank -> what is wrong, and a reply for each

_PROTOCOL = "ddpkit-1"
_LONGEST_LINE = 1 << 20
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
    notes: tuple[str, ...] = ()


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
    plan = _plan(placement, environ, telephone)
    if placement.rank == 0:
        return _host(placement, plan, card, judge, deadline)
    return _join(placement, plan, card, deadline, timeout)


# How the launch is found ---------------------------------------------------------------------------------------------

def _plan(placement: Placement, environ: Mapping[str, str], telephone: Telephone | None) -> _Plan:
    address, port, notes = _explicit(placement, environ)
    identity = _identity(placement, environ)
    if telephone is not None:
        port = 0  # MASTER_PORT is of the store that the telephone belongs to
    plan = _Plan(hashlib.sha256(identity.encode()).hexdigest()[:24], [address] if address else [],
                 [port] if port else _ports(identity), telephone, notes, "MASTER_ADDR and MASTER_PORT",
                 loopback=placement.local_world_size == placement.world_size)
    if telephone is not None or placement.launcher in ("torchrun", "env"):
        return plan
    why_not = ""
    try:
        if mpi_is_running():
            plan.telephone = Mpi4py(placement)
        elif plan.loopback and identity:
            plan.hosts, plan.source = ["127.0.0.1"], "this host alone"
        else:
            plan.telephone = _telephone(placement, environ)
    except NoTelephone as error:
        why_not = str(error)
    if plan.telephone is not None or plan.hosts:
        return plan
    plan.hosts, plan.source = _listed_hosts(placement, environ)
    if plan.hosts and (identity or port):
        return plan
    if placement.launcher != "slurm":
        try:
            plan.telephone = Mpi4py(placement)
            return plan
        except NoTelephone as error:
            why_not = f"{why_not}; {error}" if why_not else str(error)
    raise LaunchError(f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}, started by "
                      f"{placement.launcher}: nothing tells where rank 0 is ({why_not or 'no node list'}). "
                      "Export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port> to all ranks")


def _telephone(placement: Placement, environ: Mapping[str, str]) -> Telephone | None:
    """The launcher's name service; None where it has none."""
    if placement.launcher == "openmpi":
        return pmix(environ)
    if placement.launcher in ("mpich", "intel-mpi"):
        return Pmi1(environ, name_service=True)
    if placement.launcher in ("flux", "mvapich") and environ.get("PMI_FD"):
        return Pmi1(environ, name_service=False)
    return None


def _explicit(placement: Placement, environ: Mapping[str, str]) -> tuple[str, int, list[str]]:
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
    if text and not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        raise LaunchError(f"MASTER_PORT is {text!r}; expected a port from 1 to 65535. Correct or unset it")
    one_host = placement.local_world_size == placement.world_size
    if address and placement.local_world_size and not one_host and network.is_loopback(address):
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
            if name.startswith(("hydra_pmi", "pmi_proxy", "mpispawn", "mpiexec", "mpirun")):
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
        groups = [environ.get(name, "") for name in ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_STEP_NODELIST")]
        if environ.get("SLURM_DISTRIBUTION") == "arbitrary":  # rank 0 may be on any node of the step
            with contextlib.suppress(OSError), open(environ.get("SLURM_HOSTFILE", ""), encoding="utf-8") as file:
                groups.insert(0, file.readline().split("*")[0].strip())
            hosts = [host for group in groups for host in expand_hostlist(group)]
        else:
            hosts = [host for group in groups for host in expand_hostlist(group)[:1]]
        return list(dict.fromkeys(hosts)), "SLURM_STEP_NODELIST"
    with contextlib.suppress(OSError), open(environ.get("PBS_NODEFILE", ""), encoding="utf-8") as nodes:
        return list(dict.fromkeys(nodes.read().split())), "PBS_NODEFILE"
    if environ.get("LSB_MCPU_HOSTS"):  # "batch1 1 h41n01 42 h41n02 42"
        return environ["LSB_MCPU_HOSTS"].split()[::2], "LSB_MCPU_HOSTS"
    return [], ""


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
                plan.telephone.publish(f"{plan.token}|{port}|{','.join(addresses)}")
            except NoTelephone as error:
                raise LaunchError(f"rank 0 cannot tell the others where it listens: {error}. "
                                  "Export MASTER_ADDR and MASTER_PORT to all ranks") from None
        reception = _Reception(listener, placement, plan.token)
        reply = reception.gather(card, judge, deadline)
    except BaseException:
        listener.close()
        raise
    own = reception.address
    return Rendezvous(own, port, reply, "127.0.0.1", own, listener, tuple(notes))


def _make_room(world_size: int) -> Iterator[str]:
    """Raise the limit of open files to what one connection per rank needs; a note where the kernel's queue is short."""
    import resource  # Unix only, like every launcher

    needed = world_size + 256
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


class _Reception:
    """Rank 0's side of the roll call: one connection per rank, held until the verdict."""

    def __init__(self, listener: socket.socket, placement: Placement, token: str) -> None:
        self._listener, self._placement, self._token = listener, placement, token
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, bytes] = {}
        self._rank_of: dict[socket.socket, int] = {}
        self._line_of: dict[int, socket.socket] = {}
        self._cards: dict[int, Card] = {}
        self._failure = ""
        self.address = "127.0.0.1"  # of this host, as the first rank on another host reached it

    def gather(self, card: Card, judge: Judge, deadline: float) -> Reply:
        """Collect the cards of all ranks, judge them, answer every rank; returns the reply for rank 0."""
        self._cards[0] = card
        if card.get("error"):
            self._failure = _says(0, card)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._failure and len(self._cards) < self._placement.world_size:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._failure = self._missing()
                    break
                for key, _ in self._selector.select(left):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.fileobj)  # type: ignore[arg-type]
            replies: list[Reply] = []
            if not self._failure:
                wrong, replies = judge([self._cards[rank] for rank in range(self._placement.world_size)])
                self._failure = wrong or ""
            self._answer(replies)
        finally:
            self._selector.close()
            for line in self._unread:
                line.close()
            self._listener.setblocking(True)
        if self._failure:
            raise LaunchError(self._failure)
        return replies[0]

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._failure = f"rank 0 on {socket.gethostname()} ran out of file descriptors: {error}"
                    return
                continue  # the peer gave up between its connect and our accept
            line.setblocking(False)
            self._unread[line] = b""
            self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: socket.socket) -> None:
        try:
            received = line.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        rank = self._rank_of.get(line)
        if not received:
            if rank is not None:
                self._failure = (f"rank {rank} on {_where(self._cards[rank])} ended while the ranks were starting. "
                                 "Its own message tells why")
            return self._drop(line)
        self._unread[line] += received
        while b"\n" in self._unread[line]:
            text, _, self._unread[line] = self._unread[line].partition(b"\n")
            if not self._hear(line, text):
                return self._drop(line)
        if len(self._unread[line]) > _LONGEST_LINE:
            self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        self._unread.pop(line, None)
        line.close()

    def _hear(self, line: socket.socket, text: bytes) -> bool:
        """Deal with one line of a rank; False for a stranger."""
        try:
            said = json.loads(text)
            if said["kit"] != _PROTOCOL or said["token"] != self._token:
                line.sendall(_line(kit=_PROTOCOL, token=self._token))  # so that the stranger knows whom it met
                return False
            rank, size = int(said["rank"]), int(said["world_size"])
        except (ValueError, KeyError, TypeError, OSError):
            return False
        if said.get("giving_up"):
            self._failure = self._missing()
            return True
        card: Card = said["card"]
        size_here = self._placement.world_size
        if size != size_here:
            self._failure = (f"the ranks disagree on the world size: rank 0 on {_where(self._cards[0])} was told "
                             f"{size_here}, rank {rank} on {_where(card)} was told {size}. All ranks have to be "
                             "started by one launch with one size")
        elif rank in self._cards:
            self._failure = (f"two processes say that they are rank {rank}: on {_where(self._cards[rank])} and on "
                             f"{_where(card)}. Are two launches using the same MASTER_ADDR and MASTER_PORT?")
        elif card.get("error"):
            self._failure = _says(rank, card)
        self._rank_of[line], self._line_of[rank], self._cards[rank] = rank, line, card
        peer, own = _plain(line.getpeername()[0]), _plain(line.getsockname()[0])
        if self.address == "127.0.0.1" and not network.is_loopback(own) and (peer != own or len(self._cards) == 2):
            self.address = own
        with contextlib.suppress(OSError):
            line.sendall(_line(kit=_PROTOCOL, token=self._token, welcome=True))
        return True

    def _missing(self) -> str:
        missing = [rank for rank in range(self._placement.world_size) if rank not in self._cards]
        known: dict[str, int] = {}
        for card in self._cards.values():
            known[str(card.get("host"))] = known.get(str(card.get("host")), 0) + 1
        hosts = ", ".join(f"{host} ({count})" for host, count in list(known.items())[:16])
        return (f"{len(missing)} of {self._placement.world_size} ranks did not come: rank {ranges(missing)}. "
                f"Those that came run on {hosts}{' ...' if len(known) > 16 else ''}. Look for messages of the missing "
                f"ranks; if there are none, they hang before setup_distributed() or cannot reach rank 0, which listens "
                f"on {socket.gethostname()} port {self._listener.getsockname()[1]}")

    def _answer(self, replies: list[Reply]) -> None:
        for rank, line in self._line_of.items():
            verdict = {"error": self._failure} if self._failure else {"reply": replies[rank]}
            with contextlib.suppress(OSError):
                line.setblocking(True)
                line.settimeout(10)
                line.sendall(_line(kit=_PROTOCOL, token=self._token, master_addr=self.address, **verdict))


# The other ranks -----------------------------------------------------------------------------------------------------

def _join(placement: Placement, plan: _Plan, card: Card, deadline: float, timeout: float) -> Rendezvous:
    hello = {"kit": _PROTOCOL, "rank": placement.rank, "world_size": placement.world_size, "card": card}
    met: dict[str, str] = {}  # what happened at each place that was tried, the newest last
    attempt, pause = 0, 0.005
    while True:
        for host, address, port in _places(placement, plan, attempt, deadline, met):
            outcome = _call(address, port, {**hello, "token": plan.token}, deadline)
            if not isinstance(outcome, str):
                said, own = outcome
                if said.get("error"):
                    raise LaunchError(said["error"])
                return Rendezvous(said["master_addr"], port, said["reply"], address, own, None, tuple(plan.notes))
            met.pop(host, None)
            met[host] = f"{host}{'' if host == address else f' ({address})'} port {port}: {outcome}"
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
            for address in addresses.split(","):
                yield address, address, int(told_port)
        return
    # The first port on the first host is right but for a collision, so that the others are tried less often.
    places = [(host, port) for port in plan.ports for host in plan.hosts]
    for host, port in places[:1 + (1 << min(attempt, 20)) // 8]:
        addresses = network.resolve(host)
        if not addresses:
            met[host] = f"{host}: the name does not resolve on {socket.gethostname()}"
        for address in addresses[:4]:
            yield host, address, port


def _call(address: str, port: int, hello: dict[str, Any], deadline: float) -> tuple[dict[str, Any], str] | str:
    """Hand in the card and wait for the verdict: (verdict, own address), or why this place is not rank 0's."""
    left = deadline - time.monotonic()
    try:
        line = socket.create_connection((address, port), timeout=max(0.1, min(3.0, left)))
    except OSError as error:
        return error.strerror or "no answer"
    with line, line.makefile("rb") as heard:
        try:
            own = _plain(line.getsockname()[0])
            if line.getsockname() == line.getpeername():
                return "Connection refused"  # the kernel joined a connection to itself: nobody listens
            line.sendall(_line(**hello))
            line.settimeout(max(0.1, min(5.0, left)))
            welcome = _said(heard.readline(_LONGEST_LINE))
            if welcome.get("token") != hello["token"]:
                return "another launch of this kit listens there" if welcome.get("kit") else "not this kit answered"
            verdict = welcome
            if not _is_verdict(welcome):
                line.settimeout(max(0.1, deadline - time.monotonic()))
                verdict = _wait(line, heard, hello)
        except TimeoutError:
            return "it accepted the connection and said nothing; another program listens there"
        except OSError as error:
            return f"the connection broke ({error.strerror})"
    if not _is_verdict(verdict):
        raise LaunchError(f"rank 0 at {address} port {port} ended while the ranks were starting (seen by rank "
                          f"{hello['rank']} on {socket.gethostname()}). Its own message tells why")
    return verdict, own


def _wait(line: socket.socket, heard: Any, hello: dict[str, Any]) -> dict[str, Any]:
    """The verdict; when it does not come in time, ask rank 0 to name who is missing."""
    try:
        return _said(heard.readline(_LONGEST_LINE))
    except TimeoutError:
        line.settimeout(5)
        # A new file object: a buffered reader that timed out once refuses to go on.
        with contextlib.suppress(OSError), line.makefile("rb") as again:
            line.sendall(_line(**{k: v for k, v in hello.items() if k != "card"}, giving_up=True))
            return _said(again.readline(_LONGEST_LINE))
    return {}


def _is_verdict(said: dict[str, Any]) -> bool:
    return "error" in said or "reply" in said


# Words ---------------------------------------------------------------------------------------------------------------

def _line(**words: Any) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode() + b"\n"


def _said(text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and said.get("kit") == _PROTOCOL else {}


def _plain(address: str) -> str:
    """::ffff:10.0.0.1 -> 10.0.0.1"""
    return address.removeprefix("::ffff:")


def _where(card: Card) -> str:
    return f"{card.get('host', '?')} (pid {card.get('pid', '?')})"


def _says(rank: int, card: Card) -> str:
    return f"rank {rank} on {_where(card)} cannot start: {card['error']}"

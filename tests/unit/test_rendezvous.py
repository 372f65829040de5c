"""All ranks find rank 0 and join, or all learn why not. The ranks are threads; no torch."""
from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from utils import network
from utils.launchers import LAUNCHERS, LaunchError, Placement
from utils.launchers.base import Launcher
from utils.launchers.detect import find_launcher
from utils.launchers.name_service import NameService, NameServiceUnavailable
from utils.rendezvous import Rendezvous, agree, endpoints
from utils.rendezvous.checks import RankReport, make_report
from utils.rendezvous.endpoints import candidate_ports, find_endpoints
from utils.rendezvous.exchange import PROTOCOL

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
LIMIT = 60.0  # seconds until a rank has to end
NEVER = 2 * LIMIT  # a rank that ends does not end by this time-out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_hand(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def slurm_job(number: int) -> dict[str, str]:
    """The variables of a job that no other process of this host uses, such as another test run."""
    return {"SLURM_CLUSTER_NAME": f"test{os.getpid()}", "SLURM_JOB_ID": str(number),
            "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}


def launcher_named(name: str) -> Launcher:
    return next(one for one in LAUNCHERS if one.name == name)


def placed(rank: int, size: int, launcher: str = "env", local_size: int | None = None) -> Placement:
    return Placement(launcher, rank, size, local_size and rank % local_size, local_size)


def report_of(placement: Placement, **changes: Any) -> RankReport:
    """The report of a rank on its own host, so that its node rank is its rank."""
    host = {"host": f"h{placement.rank}", "pid": placement.rank}
    return {**make_report(placement), **host, **changes}  # type: ignore[typeddict-item]


@dataclass
class Rank:
    """A rank in a thread, and what agree() returned or raised there."""

    placement: Placement
    environ: Mapping[str, str]
    timeout: float = NEVER
    changes: dict[str, Any] = field(default_factory=dict)  # of the report
    name_service: NameService | None = None
    keep: bool = False  # keep the listener open
    found: Rendezvous | None = None
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.found = agree(
                self.placement, report_of(self.placement, **self.changes),
                launcher=launcher_named(self.placement.launcher), timeout=self.timeout,
                environ=self.environ, name_service=self.name_service)
            if self.found.monitor is not None:
                self.found.monitor.started()
                self.found.monitor.leave("")
            if self.found.listener is not None and not self.keep:
                self.found.listener.close()
        except BaseException as error:  # noqa: B036 - the test looks at it
            self.failure = error

    def end(self) -> None:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), f"rank {self.placement.rank} did not end"

    @property
    def cause(self) -> str:
        """The message of its LaunchError."""
        self.end()
        assert isinstance(self.failure, LaunchError), repr(self.failure or self.found)
        return str(self.failure)

    @property
    def result(self) -> Rendezvous:
        self.end()
        assert self.found is not None, repr(self.failure)
        return self.found


def start(*ranks: int, size: int, port: int, **options: Any) -> list[Rank]:
    """Start some ranks of a launch by hand on this host."""
    return [Rank(placed(rank, size), by_hand(port), **options) for rank in ranks]


def start_slurm(environ: Mapping[str, str], size: int = 2, **options: Any) -> list[Rank]:
    return [Rank(placed(rank, size, "slurm", size), environ, **options) for rank in range(size)]


def assert_joined(ranks: list[Rank]) -> None:
    """All ranks of a launch have one address and port, and the node rank that rank 0 assigned."""
    results = [one.result for one in reversed(ranks)][::-1]  # rank 0 may wait for one that failed
    assert len({(one.master_addr, one.master_port) for one in results}) == 1
    for rank, result in zip(ranks, results, strict=True):
        assert result.assignment["node_rank"] == rank.placement.rank
        assert result.assignment["num_nodes"] == len(ranks)


def connect(port: int) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    limit = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        except OSError:
            assert time.monotonic() < limit, f"nobody listens on port {port}"
            time.sleep(0.002)


def first_message(rank: int, size: int, port: int) -> bytes:
    """What a rank sends first."""
    placement = placed(rank, size)
    found = find_endpoints(launcher_named("env"), placement, by_hand(port), timeout=1)
    message = {"kit": PROTOCOL, "token": found.token, "rank": rank, "world_size": size,
               "report": report_of(placement, host="there", pid=77)}
    return json.dumps(message).encode() + b"\n"


class Memory(NameService):
    """A name service within this process."""

    def __init__(self) -> None:
        self._text, self._is_published = "", threading.Event()

    def publish(self, text: str, timeout: float) -> None:
        self._text = text
        self._is_published.set()

    def look_up(self, timeout: float) -> str | None:
        return self._text if self._is_published.wait(timeout) else None


class Refusing(NameService):
    def publish(self, text: str, timeout: float) -> None:
        raise NameServiceUnavailable("mpiexec refused")

    def look_up(self, timeout: float) -> str | None:
        raise NameServiceUnavailable("mpiexec refused")


@pytest.fixture
def other_program() -> Iterator[Callable[[bytes], int]]:
    """other_program(banner) -> the port of a program that sends `banner` to every client, or b""."""
    listeners: list[socket.socket] = []

    def listen(banner: bytes) -> int:
        listeners.append(socket.create_server(("", 0)))
        if banner:
            threading.Thread(target=greet, args=(listeners[-1], banner), daemon=True).start()
        return int(listeners[-1].getsockname()[1])

    def greet(listener: socket.socket, banner: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with contextlib.suppress(OSError), client:
                    client.recv(1 << 20)
                    client.sendall(banner)

    yield listen
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


# All ranks join


@pytest.mark.parametrize("size", [2, 5, 40])
def test_all_ranks_agree_on_master_addr_and_port(size: int) -> None:
    port = free_port()
    launch = start(*reversed(range(size)), size=size, port=port)
    assert_joined(launch)
    assert launch[0].result.master_port == port


def test_a_name_service_leads_to_a_free_port() -> None:
    service, port = Memory(), free_port()
    for launcher, environ in (("mpich", {}), ("torchrun", by_hand(port))):
        launch = [Rank(placed(rank, 4, launcher), environ, name_service=service)
                  for rank in range(4)]
        assert_joined(launch)
        assert launch[0].result.master_port != port  # the store of torchrun's agent is there
        service = Memory()


def test_rank_0_keeps_listening() -> None:
    first, second = start(0, 1, size=2, port=free_port(), keep=True)
    listener = first.result.listener
    assert listener is not None and second.result.listener is None
    with listener, socket.create_connection(("127.0.0.1", second.result.master_port), timeout=5):
        assert listener.accept()


def test_ranks_wait_for_a_late_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as early:
        port = int(early.getsockname()[1])
        launch = start(1, 2, size=3, port=port)
        for _ in range(6):
            client = early.accept()[0]
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # with a reset: the rank may see it before it has sent anything
    assert_joined([*start(0, size=3, port=port), *launch])


def test_large_reports_arrive_whole() -> None:
    notes = {"notes": ["x" * 100_000]}
    assert_joined(start(0, 1, 2, size=3, port=free_port(), changes=notes))


# Some ranks do not join


def test_a_missing_rank_is_named_on_all_others() -> None:
    for one in start(0, 1, 2, 4, size=6, port=free_port(), timeout=0.7):
        assert "2 of 6 ranks did not join: rank 3,5" in one.cause


def test_the_shortest_time_out_ends_the_wait_of_all() -> None:
    port = free_port()
    launch = start(0, size=4, port=port, timeout=3) + start(1, size=4, port=port)
    for one in launch + start(2, size=4, port=port, timeout=0.5):
        assert "1 of 4 ranks did not join: rank 3" in one.cause


def test_without_rank_0_the_others_name_what_they_tried() -> None:
    port = free_port()
    (one,) = start(1, size=2, port=port, timeout=0.4)
    for part in ("rank 1 of 2", "did not find rank 0", "MASTER_ADDR",
                 f"127.0.0.1 port {port}: Connection refused"):
        assert part in one.cause


def test_a_rank_that_ends_is_named_at_once() -> None:
    port = free_port()
    launch = start(0, size=5, port=port, timeout=3) + start(1, 3, size=5, port=port)
    with connect(port) as connection:
        connection.sendall(first_message(2, 5, port))
        connection.recv(1 << 16)
    for one in launch:
        assert "rank 2 on there (pid 77) ended while the ranks were starting" in one.cause


def test_a_rank_0_that_ends_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        (one,) = start(1, size=2, port=port)
        connection, _ = listener.accept()
        with connection:
            token = json.loads(connection.recv(1 << 16))["token"]
            response = {"kit": PROTOCOL, "token": token, "joined": True}
            connection.sendall(json.dumps(response).encode() + b"\n")
        assert f"rank 0 at 127.0.0.1 port {port} ended while the ranks were starting" in one.cause


@pytest.mark.parametrize(("last", "size", "changes", "expected"), [
    (1, 3, {}, "two processes report as rank 1"),
    (2, 4, {}, "disagree on the world size.*has 3, rank 2 on h2 .pid 2. has 4"),
    (2, 3, {"torch_version": "1.0"}, "the ranks differ in torch version")])
def test_a_rank_that_does_not_match_fails_all(
        last: int, size: int, changes: dict[str, Any], expected: str) -> None:
    port = free_port()
    launch = start(0, size=3, port=port, timeout=3) + start(1, size=3, port=port)
    launch += start(last, size=size, port=port, changes=changes)
    for one in launch:
        assert re.search(expected, one.cause)


def test_a_rank_that_cannot_start_ends_the_wait_of_all() -> None:
    port = free_port()
    launch = start(0, size=3, port=port)
    with connect(port) as connection:  # rank 1, which waits
        connection.sendall(first_message(1, 3, port))
        assert b"joined" in connection.recv(1 << 16)
        launch += start(2, size=3, port=port, changes={"error": "it sees no GPU"})
        result = json.loads(connection.makefile("rb").readline())
    assert result["error"] == "rank 2 on h2 (pid 2) cannot start: it sees no GPU"
    assert [one.cause for one in launch] == [result["error"]] * 2


def test_a_late_rank_receives_the_cause_of_the_failure() -> None:
    port = free_port()
    launch = start(0, size=3, port=port)
    launch += start(1, size=3, port=port, changes={"error": "it sees no GPU"})
    assert "it sees no GPU" in launch[1].cause
    (late,) = start(2, size=3, port=port)
    assert "it sees no GPU" in late.cause


# Other clients and other programs

FOREIGN = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    "a port scanner": b"",
    "half a message": b'{"kit":"ddpkit-1","tok',
    "a message without end": b"x" * (3 << 20),
    "binary": bytes(range(256)) * 8 + b"\n",
    "brackets": b"[" * 200_000 + b"\n",
    "another kit": b'{"kit":"other-9","token":"x","rank":1,"world_size":2}\n',
    "another launch": b'{"kit":"ddpkit-1","token":"x","rank":1,"world_size":2,"report":{}}\n',
    "no object": b"[1]\nnull\n7\n\"text\"\n\n",
}


@pytest.mark.parametrize("stays", [True, False])
def test_other_clients_disturb_no_launch(stays: bool) -> None:
    port = free_port()
    launch = start(0, 1, size=3, port=port)
    with contextlib.ExitStack() as connections:
        for text in FOREIGN.values():
            connection = connections.enter_context(connect(port))
            with contextlib.suppress(OSError):  # rank 0 may close it within a long message
                connection.sendall(text)
            if not stays:
                connection.close()
        launch += start(2, size=3, port=port)
        assert_joined(launch)


def test_a_rank_of_another_launch_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(endpoints, "candidate_ports", lambda identity: [port])
    first = Rank(placed(0, 2, "slurm", 2), slurm_job(1))
    connect(port).close()
    other = Rank(placed(1, 2, "slurm", 2), slurm_job(2), timeout=0.5)
    assert "another launch of this kit listens there" in other.cause
    assert_joined([first, Rank(placed(1, 2, "slurm", 2), slurm_job(1))])


def test_a_silent_program_at_master_port_is_named(other_program: Callable[[bytes], int]) -> None:
    port = other_program(b"")
    first, second = start(0, 1, size=2, port=port, timeout=0.6)
    assert f"rank 0 cannot listen on MASTER_PORT={port}" in first.cause
    assert "Address already in use" in first.cause
    assert "accepts connections but sends nothing; another program runs there" in second.cause


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\xff\n", b"[" * 99_999 + b"\n",
                                    b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_sending_program_at_master_port_is_named(
        banner: bytes, other_program: Callable[[bytes], int]) -> None:
    (one,) = start(1, size=2, port=other_program(banner), timeout=0.4)
    assert "another program runs there" in one.cause


def test_a_silent_program_on_the_likeliest_port_is_passed_over() -> None:
    environ = slurm_job(77)
    placement = placed(0, 2, "slurm", 2)
    ports = candidate_ports(launcher_named("slurm").identity(environ, placement))
    with socket.create_server(("127.0.0.1", ports[0])):
        launch = start_slurm(environ)
        assert_joined(launch)
        assert launch[0].result.master_port == ports[1]


# MASTER_ADDR and MASTER_PORT


@pytest.mark.parametrize(("address", "expected"), [
    ("no-such-host.invalid", "no-such-host.invalid: the name does not resolve"),
    ("192.0.2.1", "Tried 192.0.2.1 port 29500: ")])
def test_a_wrong_master_addr_is_named(address: str, expected: str) -> None:
    assert expected in Rank(placed(1, 2), by_hand(29500, address), timeout=0.5).cause


def test_rank_0_reports_that_master_addr_is_not_its_own() -> None:
    cause = Rank(placed(0, 2), by_hand(free_port(), "192.0.2.1"), timeout=0.5).cause
    assert "1 of 2 ranks did not join" in cause
    assert "MASTER_ADDR=192.0.2.1 is no address of rank 0's host" in cause


SLURM_ON_TWO_HOSTS = placed(3, 4, "slurm", 2)
ENDPOINT_ERRORS = [
    *((placed(rank, 2), by_hand(29500) | changes, expected) for rank in (0, 1)
      for changes, expected in [
          *(({"MASTER_PORT": text}, "MASTER_PORT is ") for text in [
              "x", "0", "65536", "-1", "1.5", "29500x", "\u0663\u0663\u0663\u0663", "9" * 5000]),
          ({"MASTER_ADDR": " "}, "MASTER_ADDR=''.*expected both"),
          ({"MASTER_PORT": " "}, "MASTER_PORT=''.*expected both")]),
    (SLURM_ON_TWO_HOSTS, slurm_job(5) | by_hand(29500),
     "MASTER_ADDR=127.0.0.1 is this host alone.*4 ranks run on several hosts"),
    (SLURM_ON_TWO_HOSTS, slurm_job(6) | {"SLURM_STEP_NODELIST": "n[1"}, r"NODELIST.*n\[1"),
    (placed(1, 4, "mvapich", 2), {}, "rank 0's address is unknown.*mpi4py.*Export MASTER_ADDR")]


@pytest.mark.parametrize(("placement", "environ", "expected"), ENDPOINT_ERRORS)
def test_what_cannot_lead_to_rank_0_is_an_error(
        placement: Placement, environ: dict[str, str], expected: str,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=expected):
        find_endpoints(launcher_named(placement.launcher), placement, environ, timeout=1)


def test_a_master_addr_set_with_a_stale_rank_is_ignored_with_a_note() -> None:
    environ = {**slurm_job(3), "RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere",
               "MASTER_PORT": "bad"}
    for one in start_slurm(environ):
        (note,) = one.result.notes
        assert "MASTER_ADDR=nowhere MASTER_PORT=bad was ignored" in note


def test_a_stale_rank_that_matches_one_rank_keeps_nobody_apart() -> None:
    environ = {**slurm_job(3), "SLURM_STEP_NODELIST": "127.0.0.1", "RANK": "7", "WORLD_SIZE": "8",
               "MASTER_ADDR": "no-such-host.invalid"}
    assert_joined([Rank(placed(rank, 8, "slurm", 4), environ) for rank in range(8)])


def test_on_one_host_rank_0_listens_at_master_addr() -> None:
    address, *_ = network.local_addresses()
    environ = by_hand(free_port(), address)
    launch = [Rank(placed(rank, 2, "env", 2), environ) for rank in range(2)]
    assert_joined(launch)
    assert launch[1].result.rank_0_addr == address


def test_a_master_port_under_a_launcher_is_used() -> None:
    port = free_port()
    launch = start_slurm({**slurm_job(4), "MASTER_PORT": str(port)})
    assert_joined(launch)
    assert launch[0].result.master_port == port


# Where rank 0 may be


def recorded_processes(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(RECORDINGS.glob(pattern)):
        for process in json.loads(path.read_text())["processes"]:
            yield path.name, process


def test_every_recorded_task_of_srun_tries_the_host_of_rank_0() -> None:
    tasks = [(name, process) for name, process in recorded_processes("*/*.json")
             if process["expect"]["launcher"] == "slurm"]
    assert len(tasks) > 50
    for name, process in tasks:
        hosts, _ = launcher_named("slurm").candidate_hosts(process["environ"])
        assert process["expect"]["rank0_host"] in hosts, (name, process["expect"])


def test_all_ranks_of_a_recorded_launch_have_one_identity() -> None:
    identities: dict[str, set[str]] = {}
    for name, process in recorded_processes("mpi/*.json"):
        found = find_launcher(process["environ"])
        identity = found.launcher.identity(process["environ"], found.placement)
        identities.setdefault(name, set()).add(identity)
    assert len(identities) > 15
    assert {name: len(found) for name, found in identities.items() if len(found) > 1} == {}


def test_candidate_ports_depend_on_the_identity_alone() -> None:
    assert candidate_ports("slurm:1") == candidate_ports("slurm:1") != candidate_ports("slurm:2")
    for number in range(500):
        assert all(20000 <= port < 32000 for port in candidate_ports(f"slurm:{number}"))


@pytest.mark.parametrize(("rank", "expected"), [
    (0, "rank 0 on .* cannot publish its address: mpiexec refused"),
    (1, "rank 1 on .* cannot look up rank 0's address: mpiexec refused")])
def test_a_failing_name_service_is_an_error(rank: int, expected: str) -> None:
    placement = placed(rank, 2, "mpich")
    with pytest.raises(LaunchError, match=expected):
        agree(placement, make_report(placement), launcher=launcher_named("mpich"), timeout=1,
              environ={}, name_service=Refusing())


def test_an_unpublished_address_is_an_error_in_time() -> None:
    one = Rank(placed(1, 2, "mpich"), {}, name_service=Memory(), timeout=0.3)
    assert "rank 0 has published no address" in one.cause


# Many launches on one host


def assert_pairs_join(count: int) -> None:
    """Each of many launches that start at once finds its own rank 0."""
    launches = [start_slurm(slurm_job(1000 + number), changes={"kit_version": str(number)})
                for number in range(count)]
    for pair in launches:
        assert_joined(pair)  # ranks of two launches would differ in kit version


def test_200_launches_do_not_mix() -> None:
    assert_pairs_join(200)


def test_60_launches_with_one_likeliest_port_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(endpoints, "candidate_ports",
                        lambda identity: [port, *candidate_ports(identity)[1:]])
    assert_pairs_join(60)


def test_a_launch_without_a_free_port_is_an_error(
        monkeypatch: pytest.MonkeyPatch, other_program: Callable[[bytes], int]) -> None:
    ports = [other_program(b""), other_program(b"")]
    monkeypatch.setattr(endpoints, "candidate_ports", lambda identity: ports)
    cause = Rank(placed(0, 2, "slurm", 2), slurm_job(7), timeout=1).cause
    assert f"cannot listen on ports {ports[0]}, {ports[1]} of" in cause


# Limits

OPEN_FILES = """
import resource, sys
from utils.launchers import LaunchError, Placement
from utils.launchers.by_hand import ByHand
from utils.rendezvous import agree
from utils.rendezvous.checks import make_report

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
placement = Placement("env", 0, 100, None, None)
environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
try:
    agree(placement, make_report(placement), launcher=ByHand(), timeout=0.2, environ=environ)
except LaunchError as error:
    print(error, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("hard_limit", "expected"), [
    (64, ["may open 64 files, but 100 ranks need 456", "(64, 64)"]),
    (1000, ["99 of 100 ranks did not join", "(456, 1000)"])])
def test_the_limit_of_open_files_is_raised_or_reported(
        hard_limit: int, expected: list[str]) -> None:
    command = [sys.executable, "-c", OPEN_FILES, str(hard_limit), str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    for part in expected:
        assert part in done.stdout, done.stderr


def test_a_launch_leaves_no_connection_open() -> None:
    def sockets() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return {target for target in found if target.startswith("socket:")}

    before = sockets()
    for _ in range(3):
        assert_joined(start(0, 1, 2, size=3, port=free_port()))
        for one in start(0, 1, size=3, port=free_port(), timeout=0.2):
            assert one.cause
    limit = time.monotonic() + LIMIT
    while not sockets() <= before:
        assert time.monotonic() < limit, sockets() - before
        time.sleep(0.01)

"""All ranks find rank 0 and join, or all learn why not. The ranks are threads; no torch."""
from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.channels import HELLO
from utils import channel
from utils.channel import Channel, Secret, Session
from utils.host import network
from utils.launchers import LAUNCHERS, LaunchError, Placement
from utils.launchers.launcher import Launcher, NameService, NameServiceUnavailable
from utils.startup import Rendezvous, agree, endpoints
from utils.startup.endpoints import candidate_ports, find_endpoints
from utils.startup.listener import allow_connections
from utils.startup.reports import make_report

LIMIT = 60.0  # seconds until a rank has to end
NEVER = 2 * LIMIT  # a rank that ends does not end by this time-out
Launch = dict[int, Future[Rendezvous]]  # by rank
THREADS = ThreadPoolExecutor(200)


@pytest.fixture
def port() -> int:
    """A free port."""
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


def start_rank(placement: Placement, environ: Mapping[str, str], timeout: float = NEVER,
               name_service: NameService | None = None, **changes: Any) -> Future[Rendezvous]:
    """Start a rank in a thread, on its own host; what agree() returns or raises. changes: of its report."""
    report = {**make_report(placement), "host": f"h{placement.rank}", "pid": placement.rank, **changes}

    def run() -> Rendezvous:
        found = agree(placement, report, launcher=launcher_named(placement.launcher), timeout=timeout,
                      environ=environ, name_service=name_service)
        for connection in found.connections:
            connection.close()
        if placement.rank == 0:
            found.listener.close()
        return found
    return THREADS.submit(run)


def start(*ranks: int, size: int, port: int, **options: Any) -> Launch:
    """Start some ranks of a launch by hand on this host."""
    return {rank: start_rank(placed(rank, size), by_hand(port), **options) for rank in ranks}


def start_slurm(environ: Mapping[str, str], *ranks: int, size: int = 2, **options: Any) -> Launch:
    return {rank: start_rank(placed(rank, size, "slurm", size), environ, **options) for rank in ranks or range(size)}


def cause(rank: Future[Rendezvous]) -> str:
    with pytest.raises(LaunchError) as caught:
        rank.result(LIMIT)
    return str(caught.value)


def connected(port: int) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    client = socket.socket()
    wait_until(lambda: client.connect_ex(("127.0.0.1", port)) == 0, "rank 0")
    return client


def assert_joined(launch: Launch) -> Rendezvous:
    """All ranks have one address and port, and the node rank that rank 0 assigned. Return rank 0's."""
    results = {rank: launch[rank].result(LIMIT) for rank in sorted(launch, reverse=True)}
    assert len({(one.master_addr, one.master_port) for one in results.values()}) == 1
    assert {rank: one.assignment["node_rank"] for rank, one in results.items()} == {rank: rank for rank in launch}
    assert {one.assignment["num_nodes"] for one in results.values()} == {len(launch)}
    return results[0]


def test_ranks_wait_for_a_late_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as early:
        port = int(early.getsockname()[1])
        launch = start(1, 2, size=3, port=port)
        for _ in range(6):
            client = early.accept()[0]
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # with a reset: the rank may see it before it has sent anything
    assert_joined(start(0, size=3, port=port) | launch)


def test_missing_ranks_are_named_on_all_others_at_the_shortest_time_out(port: int) -> None:
    launch = start(0, size=6, port=port, timeout=3) | start(1, 2, size=6, port=port)
    for one in (launch | start(4, size=6, port=port, timeout=0.5)).values():
        assert "2 of 6 ranks did not join: ranks 3,5" in cause(one)


def secret(port: int, size: int) -> Secret:
    """What the ranks of a launch by hand have."""
    return find_endpoints(launcher_named("env"), placed(1, size), by_hand(port), timeout=1).secret()


def test_a_rank_that_ends_is_named_at_once(port: int) -> None:
    launch = start(0, size=5, port=port, timeout=3) | start(1, 3, size=5, port=port)
    peer = channel.prove(connected(port), secret(port, 5), "rank", index=2, size=5, seconds=LIMIT)
    with contextlib.closing(peer):
        peer.send({"kind": "report", "value": {"host": "there", "pid": 77}})
    for one in launch.values():
        assert "rank 2 on there (pid 77) ended while the ranks were starting" in cause(one)


def test_a_rank_0_that_ends_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        launch = start(1, size=2, port=port)
        with contextlib.closing(Channel(listener.accept()[0], secret(port, 2))) as server:
            while not server.session.is_open:
                assert server.wait_for_input(time.monotonic() + LIMIT)
        assert f"rank 0 at 127.0.0.1 port {port} ended while the ranks were starting" in cause(launch[1])


@pytest.mark.parametrize(("last", "size", "version", "expected"), [
    (1, 3, "", "two processes report as rank 1"),
    (2, 4, "", "disagree on the world size: rank 0 of 3 .*, rank 2 of 4 on h2 .pid 2."),
    (2, 3, "1.0", "the ranks differ in torch version")])
def test_a_rank_that_does_not_match_fails_all(last: int, size: int, version: str, expected: str, port: int) -> None:
    launch = [*start(0, size=3, port=port, timeout=3).values(), *start(1, size=3, port=port).values()]
    launch += start(last, size=size, port=port, torch_version=version).values()
    for one in launch:
        assert re.search(expected, cause(one))


def test_a_late_rank_receives_the_cause_of_the_failure(port: int) -> None:
    launch = start(0, size=3, port=port) | start(1, size=3, port=port, error="it sees no GPU")
    assert cause(launch[1]) == "rank 1 on h1 (pid 1) cannot start: it sees no GPU"
    assert cause(start(2, size=3, port=port)[2]) == cause(launch[0]) == cause(launch[1])


def test_ranks_join_at_master_port_whatever_else_connects(port: int) -> None:
    launch = start(1, 0, size=3, port=port, notes=["x" * 100_000])
    with contextlib.ExitStack() as connections:
        for text in (b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n", b"", b'{"kit":"ddpkit-1","tok',
                     bytes(Session(Secret(b"another"), HELLO).output)):
            with connected(port) as leaves:
                leaves.sendall(text)
            connections.enter_context(connected(port)).sendall(text)
        assert assert_joined(launch | start(2, size=3, port=port)).master_port == port


def another_launch() -> Session:
    """The end of a server with another secret, as it answers a rank."""
    session = Session(Secret(b"another"))
    session.feed(bytes(Session(Secret(b"another"), HELLO).output))
    return session


@pytest.mark.parametrize(("banner", "expected"), [
    (b"", "it accepts connections but sends nothing; another program runs there"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "it sent no message; another program runs there"),
    (bytes(another_launch().output), "it does not know the secret of this launch. Check")])
def test_another_program_at_master_port_is_named(banner: bytes, expected: str) -> None:
    with contextlib.ExitStack() as clients, socket.create_server(("", 0)) as other:
        other.settimeout(0.1)
        port = int(other.getsockname()[1])
        launch = start(0, 1, size=2, port=port, timeout=0.6)
        while not launch[1].done():
            with contextlib.suppress(OSError):
                clients.enter_context(other.accept()[0]).sendall(banner)
    assert re.search(f"rank 0 cannot listen on MASTER_PORT={port}.*Address already in use", cause(launch[0]))
    assert expected in cause(launch[1])


def test_a_silent_program_on_the_likeliest_port_is_passed_over() -> None:
    environ = slurm_job(77)
    ports = candidate_ports(launcher_named("slurm").identity(environ, placed(0, 2, "slurm", 2)))
    with socket.create_server(("127.0.0.1", ports[0])):
        assert assert_joined(start_slurm(environ)).master_port == ports[1]


def test_launches_with_one_likeliest_port_do_not_mix(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(endpoints, "candidate_ports", lambda identity: [port, *candidate_ports(identity)[1:]])
    launches = [start_slurm(slurm_job(1000 + number), kit_version=str(number)) for number in range(60)]
    for pair in launches:
        assert_joined(pair)  # ranks of two launches would differ in kit version


@pytest.mark.parametrize(("rank", "address", "expected"), [
    (1, "127.0.0.1", "rank 1 of 2.*did not find rank 0.*MASTER_ADDR.*127.0.0.1 port {port}: Connection refused"),
    (1, "no-such-host.invalid", "no-such-host.invalid: the name does not resolve"),
    *((rank, "127.0.0.1", "No launcher has set RANK=. and WORLD_SIZE=2. .* unset RANK WORLD_SIZE") for rank in (0, 1)),
    (0, "192.0.2.1", "1 of 2 ranks did not join.*MASTER_ADDR=192.0.2.1 is no address of rank 0's host")])
def test_a_wrong_master_addr_is_named(rank: int, address: str, expected: str, port: int) -> None:
    text = cause(start_rank(placed(rank, 2), by_hand(port, address), timeout=0.5))
    assert re.search(expected.format(port=port), text)


def test_rank_of_ddpkit_launch_was_numbered_by_a_launcher(port: int) -> None:
    environ = by_hand(port) | {"DDPKIT_LAUNCH_RANK": "0/2"}
    assert "No launcher" not in cause(start_rank(placed(0, 2), environ, timeout=0.5))


@pytest.mark.parametrize(("placement", "environ", "expected"), [
    *((placed(1, 2), by_hand(29500, host), f"MASTER_ADDR is .*{wanted}") for host, wanted in (
        ("gpu-a[01-02]", "a list of hosts. Expected one, that of rank 0. .*scontrol show hostnames"),
        ("n1,n2", "a list of hosts"), ("n1 n2", "a list of hosts"),
        ("$(hostname)", "which no shell has expanded"),
        ("n1:29500", "with a port. Expected a host alone. Set MASTER_ADDR=n1; the port belongs in MASTER_PORT"))),
    *((placed(1, 2), by_hand(29500) | {"MASTER_PORT": text}, "MASTER_PORT is ") for text in (
        "29500x", "0", "65536", "\u0663\u0663\u0663\u0663", "9" * 5000)),
    (placed(0, 2), by_hand(29500) | {"MASTER_ADDR": " "}, "MASTER_ADDR=''.*expected both"),
    (placed(1, 2), by_hand(29500) | {"MASTER_PORT": " "}, "MASTER_PORT=''.*expected both"),
    (placed(3, 4, "slurm", 2), slurm_job(5) | by_hand(29500),
     "MASTER_ADDR=127.0.0.1 is this host alone.*4 ranks run on several hosts"),
    (placed(3, 4, "slurm", 2), slurm_job(6) | {"SLURM_STEP_NODELIST": "n[1"}, r"NODELIST.*n\[1"),
    (placed(1, 4, "flux", 2), {}, "rank 0's address is unknown.*mpi4py.*Export MASTER_ADDR")])
def test_what_cannot_lead_to_rank_0_is_an_error(
        placement: Placement, environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=expected):
        find_endpoints(launcher_named(placement.launcher), placement, environ, timeout=1)


def test_open_mpi_uses_the_nodes_of_a_slurm_job_and_the_file_of_pbs_last(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file exists on the first host only, so that mpi4py, which all ranks have, comes before it."""
    placement, environ = placed(1, 4, "openmpi", 2), {"PMIX_NAMESPACE": "prterun-n1-42@1"}

    def found(**more: str) -> tuple[list[str], str, bool]:
        ends = find_endpoints(launcher_named("openmpi"), placement, environ | more, timeout=1)
        return ends.hosts, ends.source, ends.name_service is not None

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    (tmp_path / "nodes").write_text("n3\nn4\n")
    in_pbs = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert found(SLURM_JOB_NODELIST="n[1-2]") == (["n1", "n2"], "SLURM_JOB_NODELIST", False)
    assert found(**in_pbs) == (["n3", "n4"], "PBS_NODEFILE", False)
    assert found(**by_hand(29500, "n5"), **in_pbs) == (["n5"], "MASTER_ADDR and MASTER_PORT", False)
    monkeypatch.setattr("utils.launchers.mpi.import_mpi", lambda *_: None)
    assert found(**in_pbs) == ([], "MASTER_ADDR and MASTER_PORT", True)


def test_a_stale_rank_that_matches_one_rank_keeps_nobody_apart() -> None:
    environ = {**slurm_job(3), "SLURM_STEP_NODELIST": "127.0.0.1", "RANK": "7", "WORLD_SIZE": "8",
               "MASTER_ADDR": "no-such-host.invalid"}
    assert_joined({rank: start_rank(placed(rank, 8, "slurm", 4), environ) for rank in range(8)})


def test_on_one_host_rank_0_listens_at_master_addr_and_port(port: int) -> None:
    address, *_ = network.local_addresses()
    environ = by_hand(port, address)
    launch = {rank: start_rank(placed(rank, 2, "env", 2), environ) for rank in range(2)}
    assert_joined(launch)
    assert launch[1].result().rank_0_addr == address
    assert assert_joined(start_slurm({**slurm_job(4), "MASTER_PORT": str(port)})).master_port == port


@pytest.mark.parametrize(("rank", "found", "expected"), [
    (0, NameServiceUnavailable("mpiexec refused"), "rank 0 on .* cannot publish its address: mpiexec refused"),
    (1, NameServiceUnavailable("mpiexec refused"), "rank 1 on .* cannot look up rank 0's address: mpiexec refused"),
    (1, None, "rank 0 has published no address")])
def test_a_name_service_without_an_address_is_an_error(rank: int, found: Exception | None, expected: str) -> None:
    service = create_autospec(NameService, instance=True)
    service.publish.side_effect = service.look_up.side_effect = [found] * 1000
    assert re.search(expected, cause(start_rank(placed(rank, 2, "mpich"), {}, 0.3, service)))


def test_a_limit_of_open_files_that_cannot_be_raised_is_reported(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    text = cause(start(0, size=100, port=port, timeout=0.2)[0])
    assert "may open 64 files, but 100 ranks need 456" in text


def test_a_low_soft_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (300, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: raised.append(arguments))
    allow_connections(1)
    allow_connections(100)
    assert raised == [(resource.RLIMIT_NOFILE, (456, 4096))]


def test_loopback_address_of_another_launch_is_passed_over() -> None:
    """Its RANK is this rank's by chance."""
    environ = slurm_job(5) | by_hand(29500) | {"RANK": "3", "WORLD_SIZE": "4", "SLURM_STEP_NODELIST": "n[1-2]"}
    found = find_endpoints(launcher_named("slurm"), placed(3, 4, "slurm", 2), environ, timeout=1)
    assert found.hosts == ["n1"]


def test_rank_that_the_launch_does_not_have_is_refused_alone(port: int) -> None:
    launch = start(0, size=2, port=port)
    peer = channel.prove(connected(port), secret(port, 2), "rank", index=2, size=2, seconds=LIMIT)
    peer.send({"kind": "report", "value": make_report(placed(1, 2))})
    assert_joined(launch | start(1, size=2, port=port))


def test_a_launch_leaves_no_connection_open(port: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert_joined(start(0, 1, 2, size=3, port=port))
        for one in start(0, 1, size=3, port=port, timeout=0.2).values():
            assert cause(one)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of all connections", seconds=LIMIT)

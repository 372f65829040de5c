"""The clients of the launchers' name services, against a few lines of each server."""
from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from utils import process
from utils.launchers import LaunchError, Placement, pmi, pmix
from utils.launchers.hydra import MPICH
from utils.launchers.mpi import MpiBroadcast
from utils.launchers.name_service import NameServiceUnavailable, poll
from utils.launchers.pmi import KeyValueSpace, PublishedNames

# PMI-1

INIT = "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
PUBLISHED, FOUND = "cmd=publish_result rc=0 info=ok", "cmd=lookup_result rc=0 port=token|1234|10.0.0.1 info=ok"
KVS, BARRIER = "cmd=my_kvsname kvsname=kvs_7", "cmd=barrier_out"
Start = Callable[..., tuple[dict[str, str], socket.socket]]


@pytest.fixture
def mpiexec(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """mpiexec("response", ...) -> the environment of a rank, and the process manager's end of PMI_FD."""
    monkeypatch.setattr(pmi.atexit, "register", lambda *_: None)  # the ranks do not finalize
    ends: list[socket.socket] = []

    def start(*responses: str, end: str = "\n") -> tuple[dict[str, str], socket.socket]:
        ours, theirs = socket.socketpair()
        ends.extend((ours, theirs))
        theirs.sendall(("\n".join(responses) + end).encode())
        return {"PMI_FD": str(ours.fileno())}, theirs

    yield start
    for one in ends:
        one.close()


def commands(manager: socket.socket) -> list[str]:
    return manager.recv(1 << 16).decode().splitlines()[1:]  # after init


def test_rank_0_publishes_a_name_that_others_look_up(mpiexec: Start) -> None:
    environ, manager = mpiexec(INIT, PUBLISHED, FOUND)
    service = PublishedNames(environ)
    service.publish("token|1234|10.0.0.1", 9)
    assert service.look_up(1) == "token|1234|10.0.0.1"
    assert commands(manager) == [
        "cmd=publish_name service=ddpkit port=token|1234|10.0.0.1", "cmd=lookup_name service=ddpkit"]
    del service
    gc.collect()
    os.fstat(int(environ["PMI_FD"]))  # which belongs to the MPI library


def test_an_unpublished_name_is_none_in_time(mpiexec: Start) -> None:
    environ, _ = mpiexec(INIT, *["cmd=lookup_result rc=1 msg=not_found"] * 100)
    assert PublishedNames(environ).look_up(0.05) is None


def test_without_names_rank_0_puts_and_all_meet_at_one_barrier(mpiexec: Start) -> None:
    environ, manager = mpiexec(INIT, KVS, "cmd=put_result rc=0 msg=success", BARRIER)
    KeyValueSpace(environ).publish("text", 9)
    assert commands(manager)[1:] == ["cmd=put kvsname=kvs_7 key=ddpkit value=text", "cmd=barrier_in"]
    environ, manager = mpiexec(INIT, KVS, BARRIER, "cmd=get_result rc=0 value=text")
    other = KeyValueSpace(environ)
    assert [other.look_up(1), other.look_up(1)] == ["text", "text"]
    assert commands(manager).count("cmd=barrier_in") == 1


def test_a_refused_name_makes_the_service_unavailable(mpiexec: Start) -> None:
    environ, _ = mpiexec(INIT, "cmd=publish_result rc=1 msg=key_already_published")
    with pytest.raises(NameServiceUnavailable, match="key_already_published"):
        PublishedNames(environ).publish("x", 9)


@pytest.mark.parametrize("value", ["", "x", "-1", "98765"])
def test_a_closed_pmi_fd_makes_the_service_and_mpi_unavailable(value: str) -> None:
    with pytest.raises(NameServiceUnavailable, match=f"PMI_FD='{value}' is not usable") as caught:
        PublishedNames({"PMI_FD": value})
    assert caught.value.affects_mpi


def test_a_pmi_fd_that_is_a_file_is_not_written_to() -> None:
    with open(os.devnull, "rb") as file, pytest.raises(NameServiceUnavailable, match="not a socket"):
        PublishedNames({"PMI_FD": str(file.fileno())})


def test_an_mpiexec_that_closes_the_connection_is_unavailable(mpiexec: Start) -> None:
    environ, manager = mpiexec(end="")
    manager.shutdown(socket.SHUT_WR)
    with pytest.raises(NameServiceUnavailable, match="mpiexec closed the PMI connection"):
        PublishedNames(environ)


def test_a_response_cut_short_is_a_launch_error_with_the_command(mpiexec: Start) -> None:
    environ, _ = mpiexec(INIT, KVS, "cmd=barr", end="")
    service = KeyValueSpace(environ)
    with pytest.raises(LaunchError, match="no response to 'barrier_in'"):
        service.look_up(0.05)


# PMIx


@pytest.mark.parametrize(("library", "in_child", "expected"), [
    ("/lib/libc.so.6", False, "no parent process has libpmix loaded"),
    ("/nowhere/libpmix.so.2", False, "libpmix.so.2"), ("/nowhere/libpmix.so.2", True, "libpmix.so.2")])
def test_a_missing_or_broken_pmix_library_is_unavailable(
        library: str, in_child: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "mapped_files", lambda pid: [library])
    with pytest.raises(NameServiceUnavailable, match=expected):
        pmix.connect(in_child=in_child).publish("x", 9)


def test_the_connection_to_the_daemon_outlives_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"PMIX_SERVER_URI41": f"job@0.1;tcp4://127.0.0.1:{server.getsockname()[1]}", "PMIX_RANK": "1"}
        relay = pmix.Relay(environ)
        job, _, address = environ["PMIX_SERVER_URI41"].partition(";tcp4://")
        assert (job, environ["PMIX_RANK"]) == ("job@0.1", "1")
        host, port = address.split(":")

        with socket.create_connection((host, int(port))) as client, server.accept()[0] as daemon:
            client.sendall(b"init")
            assert daemon.recv(9) == b"init"
            daemon.sendall(b"done")
            assert client.recv(9) == b"done"
            client.shutdown(socket.SHUT_RDWR)  # as PMIx_Finalize does
            assert client.recv(9) == b""  # the relay has seen it
            daemon.settimeout(0.05)
            with pytest.raises(TimeoutError):
                daemon.recv(9)
            relay.daemons[0].close()
            assert daemon.recv(9) == b""

        with socket.create_connection((host, int(port))) as client:
            server.accept()[0].close()
            assert client.recv(9) == b""  # the client sees the end of the daemon


# MPI


def install_mpi4py(monkeypatch: pytest.MonkeyPatch, version: str, rank: int, size: int) -> list[str]:
    """Install a stand-in for mpi4py with this library version; return the calls that it gets."""
    calls: list[str] = []
    world = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size, bcast=lambda text, root: text or "text")
    mpi: Any = SimpleNamespace(
        Get_library_version=lambda: version + "\0", Init=lambda: calls.append("Init"),
        Is_initialized=lambda: "Init" in calls, Is_finalized=lambda: False, COMM_WORLD=world)
    package: Any = ModuleType("mpi4py")
    package.rc, package.MPI = SimpleNamespace(initialize=True), mpi
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return calls


def broadcast() -> MpiBroadcast:
    return MpiBroadcast(MPICH(), Placement("mpich", 1, 4, 1, 4))


def test_mpi_of_the_launchers_family_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install_mpi4py(monkeypatch, "MPICH Version: 5.0.2\nmore", 1, 4)
    service = broadcast()
    assert calls == ["Init"] and service.look_up(1) == service.look_up(1) == "text"


def test_mpi_that_does_not_belong_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install_mpi4py(monkeypatch, "Open MPI v5.0.11", 0, 1)
    with pytest.raises(NameServiceUnavailable, match="'Open MPI v5.0.11', which does not belong"):
        broadcast()
    assert calls == []
    install_mpi4py(monkeypatch, "MPICH Version: 4.0", 0, 1)
    with pytest.raises(LaunchError, match="rank 0 of 1, but mpich started this .* rank 1 of 4"):
        broadcast()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(NameServiceUnavailable, match="mpi4py cannot be imported"):
        broadcast()


def test_polling_goes_on_until_there_is_a_text() -> None:
    results = iter([None, "", "text", None, "too late"])
    assert poll(lambda: next(results), 5) == "text"
    assert poll(lambda: next(results), 0) is None  # one query at least

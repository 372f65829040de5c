"""The clients of the launchers' name services, against a few lines of each server."""
from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
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


class Mpiexec:
    """The process manager's end of PMI_FD: `responses` by command; None closes the connection."""

    def __init__(self, responses: dict[str, str | None]) -> None:
        self.commands: list[str] = []
        self._responses = responses
        self._socket, self.rank_end = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        return {"PMI_FD": str(self.rank_end.fileno())}

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._socket, self._socket.makefile() as lines:
            for line in lines:
                self.commands.append(line.strip())
                response = self._responses.get(line.split()[0].removeprefix("cmd="), "")
                if response is None:
                    return
                for piece in (response[:7], response[7:] + "\n" * bool(response)):
                    self._socket.sendall(piece.encode())


Start = Callable[..., Mpiexec]


@pytest.fixture
def mpiexec(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """mpiexec(command="response", ...) -> Mpiexec. Its ranks do not finalize when the tests end."""
    monkeypatch.setattr(pmi.atexit, "register", lambda *_: None)
    started: list[Mpiexec] = []

    def start(**responses: str | None) -> Mpiexec:
        init = "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
        started.append(Mpiexec({"init": init, **responses}))
        return started[-1]

    yield start
    for one in started:
        one.rank_end.close()


def test_rank_0_publishes_a_name(mpiexec: Start) -> None:
    server = mpiexec(publish_name="cmd=publish_result rc=0 info=ok")
    PublishedNames(server.environ).publish("token|1234|10.0.0.1", 9)
    assert server.commands[-1] == "cmd=publish_name service=ddpkit port=token|1234|10.0.0.1"


def test_other_ranks_look_it_up(mpiexec: Start) -> None:
    server = mpiexec(lookup_name="cmd=lookup_result rc=0 port=token|1234|10.0.0.1 info=ok")
    assert PublishedNames(server.environ).look_up(1) == "token|1234|10.0.0.1"


def test_an_unpublished_name_is_none_in_time(mpiexec: Start) -> None:
    server = mpiexec(lookup_name="cmd=lookup_result rc=1 msg=not_found")
    assert PublishedNames(server.environ).look_up(0.05) is None


def test_a_refused_name_makes_the_service_unavailable(mpiexec: Start) -> None:
    server = mpiexec(publish_name="cmd=publish_result rc=1 msg=key_already_published")
    with pytest.raises(NameServiceUnavailable, match="key_already_published"):
        PublishedNames(server.environ).publish("x", 9)


def test_without_names_rank_0_puts_and_all_meet_at_one_barrier(mpiexec: Start) -> None:
    responses = {"get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7",
                 "put": "cmd=put_result rc=0 msg=success", "barrier_in": "cmd=barrier_out",
                 "get": "cmd=get_result rc=0 value=text"}
    first, second = mpiexec(**responses), mpiexec(**responses)
    KeyValueSpace(first.environ).publish("text", 9)
    assert first.commands[-2:] == ["cmd=put kvsname=kvs_7 key=ddpkit value=text", "cmd=barrier_in"]
    other = KeyValueSpace(second.environ)
    assert [other.look_up(1), other.look_up(1)] == ["text", "text"]
    assert second.commands.count("cmd=barrier_in") == 1


def test_the_launchers_descriptor_stays_open(mpiexec: Start) -> None:
    server = mpiexec()
    PublishedNames(server.environ)
    gc.collect()
    os.fstat(server.rank_end.fileno())


@pytest.mark.parametrize("value", ["", "x", "-1", "98765"])
def test_a_closed_pmi_fd_makes_the_service_and_mpi_unavailable(value: str) -> None:
    with pytest.raises(NameServiceUnavailable, match=f"PMI_FD='{value}' is not usable") as caught:
        PublishedNames({"PMI_FD": value})
    assert caught.value.affects_mpi


def test_a_pmi_fd_that_is_a_file_is_not_written_to() -> None:
    with (open(os.devnull, "rb") as file,
          pytest.raises(NameServiceUnavailable, match="not a socket")):
        PublishedNames({"PMI_FD": str(file.fileno())})


def test_an_mpiexec_that_closes_the_connection_is_unavailable(mpiexec: Start) -> None:
    with pytest.raises(NameServiceUnavailable, match="mpiexec closed the PMI connection"):
        PublishedNames(mpiexec(init=None).environ)


def test_a_missing_response_is_a_launch_error_with_the_command(mpiexec: Start) -> None:
    service = KeyValueSpace(mpiexec(get_my_kvsname="cmd=my_kvsname kvsname=kvs_7").environ)
    with pytest.raises(LaunchError, match="no response to 'barrier_in'"):
        service.look_up(0.05)


def test_two_responses_in_one_piece_are_read_one_by_one(mpiexec: Start) -> None:
    server = mpiexec(init="cmd=response_to_init rc=0\ncmd=lookup_result port=first",
                     lookup_name="cmd=lookup_result port=second")
    service = PublishedNames(server.environ)
    assert [service.look_up(1), service.look_up(1)] == ["first", "second"]


# PMIx


def test_open_mpi_needs_the_library_of_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "mapped_files", lambda pid: ["/lib/libc.so.6"])
    with pytest.raises(NameServiceUnavailable, match="no parent process has libpmix loaded"):
        pmix.connect(in_child=False)


@pytest.mark.parametrize("in_child", [False, True])
def test_a_broken_pmix_library_is_unavailable(in_child: bool,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "mapped_files", lambda pid: ["/nowhere/libpmix.so.2"])
    with pytest.raises(NameServiceUnavailable, match="libpmix.so.2"):
        pmix.connect(in_child=in_child).publish("x", 9)


@pytest.fixture
def relayed() -> Iterator[tuple[pmix.Relay, socket.socket, socket.socket]]:
    """A relay, a client that is connected through it, and the daemon's end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"job@0.1;tcp4://127.0.0.1:{server.getsockname()[1]}"
        environ = {"PMIX_SERVER_URI41": uri, "PMIX_RANK": "1"}
        relay = pmix.Relay(environ)
        job, _, address = environ["PMIX_SERVER_URI41"].partition(";tcp4://")
        assert (job, environ["PMIX_RANK"]) == ("job@0.1", "1")
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as client, server.accept()[0] as daemon:
            yield relay, client, daemon


def test_the_connection_to_the_daemon_outlives_the_client(
        relayed: tuple[pmix.Relay, socket.socket, socket.socket]) -> None:
    relay, client, daemon = relayed
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


def test_the_client_sees_the_end_of_the_daemon(
        relayed: tuple[pmix.Relay, socket.socket, socket.socket]) -> None:
    _, client, daemon = relayed
    daemon.close()
    assert client.recv(9) == b""


# MPI


def install_mpi4py(monkeypatch: pytest.MonkeyPatch, version: str, rank: int,
                   size: int) -> list[str]:
    """Install a stand-in for mpi4py with this library version; return the calls that it gets."""
    calls: list[str] = []
    world = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size,
                            bcast=lambda text, root: text or "text")
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


def test_mpi_of_another_family_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install_mpi4py(monkeypatch, "Open MPI v5.0.11", 0, 1)
    with pytest.raises(NameServiceUnavailable, match="'Open MPI v5.0.11', which does not belong"):
        broadcast()
    assert calls == []


def test_mpi_with_another_rank_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mpi4py(monkeypatch, "MPICH Version: 4.0", 0, 1)
    with pytest.raises(LaunchError, match="rank 0 of 1, but mpich started this .* rank 1 of 4"):
        broadcast()


def test_a_missing_mpi4py_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(NameServiceUnavailable, match="mpi4py cannot be imported"):
        broadcast()


# Polling


def test_polling_goes_on_until_there_is_a_text() -> None:
    results = iter([None, "", "text"])
    assert poll(lambda: next(results), 5) == "text"


def test_polling_queries_once_at_least() -> None:
    calls: list[int] = []
    assert poll(lambda: calls.append(1), 0) is None  # type: ignore[func-returns-value]
    assert len(calls) == 1

"""The clients of the launchers' name services, against a few lines of each server."""
from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from utils.launchers import LaunchError, Placement, pmi
from utils.launchers.launcher import NameServiceUnavailable, poll
from utils.launchers.mpi import MpiBroadcast
from utils.launchers.mpi_launchers import MPICH
from utils.launchers.pmi import KeyValueSpace, PublishedNames

INIT = "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
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


def test_without_names_rank_0_puts_and_all_meet_at_one_barrier(mpiexec: Start) -> None:
    environ, manager = mpiexec(INIT, KVS, "cmd=put_result rc=0 msg=success", BARRIER)
    KeyValueSpace(environ).publish("text", 9)
    assert manager.recv(1 << 16).endswith(b"\ncmd=put kvsname=kvs_7 key=ddpkit value=text\ncmd=barrier_in\n")
    environ, manager = mpiexec(INIT, KVS, BARRIER, "cmd=get_result rc=0 value=text")
    other = KeyValueSpace(environ)
    assert [other.look_up(1), other.look_up(1)] == ["text", "text"]
    assert manager.recv(1 << 16).count(b"cmd=barrier_in") == 1


def test_a_refused_name_or_a_closed_connection_makes_the_service_unavailable(mpiexec: Start) -> None:
    environ, manager = mpiexec(end="")
    manager.shutdown(socket.SHUT_WR)
    with pytest.raises(NameServiceUnavailable, match="mpiexec closed the PMI connection"):
        PublishedNames(environ)
    environ, _ = mpiexec(INIT, "cmd=publish_result rc=1 msg=key_already_published")
    with pytest.raises(NameServiceUnavailable, match="key_already_published"):
        PublishedNames(environ).publish("x", 9)


def test_an_unusable_pmi_fd_makes_the_service_and_mpi_unavailable() -> None:
    with open(os.devnull, "rb") as file:
        for value in ("", "x", "98765", str(file.fileno())):
            with pytest.raises(NameServiceUnavailable, match=f"PMI_FD='{value}' is not usable") as caught:
                PublishedNames({"PMI_FD": value})
            assert caught.value.affects_mpi


def test_a_response_cut_short_is_a_launch_error_with_the_command(mpiexec: Start) -> None:
    environ, _ = mpiexec(INIT, KVS, "cmd=barr", end="")
    service = KeyValueSpace(environ)
    with pytest.raises(LaunchError, match="no response to 'barrier_in'"):
        service.look_up(0.05)


def test_mpi_that_does_not_belong_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = Mock()
    mpi.COMM_WORLD.Get_rank.return_value, mpi.COMM_WORLD.Get_size.return_value = 0, 1
    mpi.Get_library_version.return_value = "Open MPI v5.0.11\0"
    monkeypatch.setitem(sys.modules, "mpi4py", Mock(MPI=mpi))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    placement = Placement("mpich", 1, 4, 1, 4)
    with pytest.raises(NameServiceUnavailable, match="'Open MPI v5.0.11', which does not belong"):
        MpiBroadcast(MPICH(), placement)
    mpi.Init.assert_not_called()

    mpi.Get_library_version.return_value = "MPICH Version: 4.0"
    with pytest.raises(LaunchError, match="rank 0 of 1, but mpich started this .* rank 1 of 4"):
        MpiBroadcast(MPICH(), placement)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(NameServiceUnavailable, match="mpi4py cannot be imported"):
        MpiBroadcast(MPICH(), placement)


def test_polling_goes_on_until_there_is_a_text() -> None:
    results = iter([None, "", "text", None, "too late"])
    assert poll(lambda: next(results), 5) == "text"
    assert poll(lambda: next(results), 0) is None  # one query at least

"""The launcher's name service, against a mpiexec of a few lines."""
from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from utils import telephone
from utils.launchers import LaunchError, Placement
from utils.telephone import Mpi4py, NoTelephone, Pmi1, PmixInChild, _Relay, poll


class Mpiexec:
    """The process manager's end of PMI_FD for one rank: answers by command, from `answers`."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.heard: list[str] = []
        self._answers = answers
        self._mine, self.rank_end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def environ(self) -> dict[str, str]:
        return {"PMI_FD": str(self.rank_end.fileno())}

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._mine, self._mine.makefile("rw") as line:
            for text in line:
                self.heard.append(text.strip())
                answer = self._answers.get(text.split()[0].removeprefix("cmd="))
                if answer == "hang up":
                    return
                if answer is not None:
                    line.write(answer + "\n")
                    line.flush()

    def close(self) -> None:
        self.rank_end.close()


INIT = {"init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """started(answers) -> Mpiexec. The ranks do not say goodbye when the tests end."""
    monkeypatch.setattr(telephone.atexit, "register", lambda *_: None)
    running: list[Mpiexec] = []

    def start(answers: dict[str, str]) -> Mpiexec:
        running.append(Mpiexec({**INIT, **answers}))
        return running[-1]

    yield start
    for one in running:
        one.close()


def test_rank_0_publishes_by_the_name_service(started: Any) -> None:
    mpiexec = started({"publish_name": "cmd=publish_result rc=0 info=ok"})
    Pmi1(mpiexec.environ, name_service=True).publish("token|1234|10.0.0.1", 9)
    assert mpiexec.heard[-1] == "cmd=publish_name service=ddpkit port=token|1234|10.0.0.1"


def test_the_others_look_up_what_was_published(started: Any) -> None:
    mpiexec = started({"lookup_name": "cmd=lookup_result rc=0 port=token|1234|10.0.0.1 info=ok"})
    assert Pmi1(mpiexec.environ, name_service=True).look_up(1) == "token|1234|10.0.0.1"


def test_a_look_up_before_the_publishing_ends_in_time_with_nothing(started: Any) -> None:
    mpiexec = started({"lookup_name": "cmd=lookup_result rc=1 msg=not_found"})
    assert Pmi1(mpiexec.environ, name_service=True).look_up(0.05) is None


def test_a_refused_publishing_is_no_telephone_and_tells_the_answer(started: Any) -> None:
    mpiexec = started({"publish_name": "cmd=publish_result rc=1 msg=key_already_published"})
    with pytest.raises(NoTelephone, match="key_already_published"):
        Pmi1(mpiexec.environ, name_service=True).publish("x", 9)


def test_without_a_name_service_rank_0_puts_and_all_meet_at_the_barrier_once(started: Any) -> None:
    answers = {"get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7", "put": "cmd=put_result rc=0 msg=success",
               "barrier_in": "cmd=barrier_out", "get": "cmd=get_result rc=0 value=told"}
    first, second = started(answers), started(answers)
    Pmi1(first.environ, name_service=False).publish("told", 9)
    assert first.heard[-2:] == ["cmd=put kvsname=kvs_7 key=ddpkit value=told", "cmd=barrier_in"]
    other = Pmi1(second.environ, name_service=False)
    assert [other.look_up(1), other.look_up(1)] == ["told", "told"]
    assert second.heard.count("cmd=barrier_in") == 1


def test_the_file_descriptor_of_the_launcher_stays_open(started: Any) -> None:
    mpiexec = started({})
    one = Pmi1(mpiexec.environ, name_service=True)
    one._socket.close()
    os.fstat(mpiexec.rank_end.fileno())


@pytest.mark.parametrize("environ", [{}, {"PMI_FD": ""}, {"PMI_FD": "x"}, {"PMI_FD": "-1"}, {"PMI_FD": "98765"}])
def test_a_missing_or_closed_pmi_fd_is_no_telephone_and_tells_the_value(environ: dict[str, str]) -> None:
    with pytest.raises(NoTelephone, match=f"PMI_FD={environ.get('PMI_FD', '')!r} is not usable"):
        Pmi1(environ, name_service=True)


def test_a_pmi_fd_that_now_is_a_file_is_not_written_to() -> None:
    with open(os.devnull, "rb") as file, pytest.raises(NoTelephone, match="not a socket"):
        Pmi1({"PMI_FD": str(file.fileno())}, name_service=True)


def test_a_mpiexec_that_hangs_up_is_no_telephone(started: Any) -> None:
    with pytest.raises(NoTelephone, match="mpiexec closed the PMI connection"):
        Pmi1(started({"init": "hang up"}).environ, name_service=True)


def test_a_mpiexec_that_says_nothing_is_a_launch_error_that_names_the_command(started: Any) -> None:
    one = Pmi1(started({}).environ, name_service=True)
    with pytest.raises(LaunchError, match="the launcher did not answer 'lookup_name'"):
        one._say("lookup_name service=ddpkit", 0.05)


def test_answers_that_come_in_pieces_or_together_are_read_line_by_line(started: Any) -> None:
    mpiexec = started({"one": "cmd=a rc=0\ncmd=b rc=1", "two": "cmd=never_read rc=2"})
    one = Pmi1(mpiexec.environ, name_service=True)
    assert one._say("one", 1)["cmd"] == "a"
    assert one._say("two", 1)["cmd"] == "b"


# PMIx ----------------------------------------------------------------------------------------------------------------

def test_open_mpi_without_its_library_in_any_parent_is_no_telephone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telephone, "_libpmix_of_parents", lambda: None)
    with pytest.raises(NoTelephone, match="no parent process has libpmix loaded"):
        telephone.pmix({})


def test_open_mpi_5_is_asked_by_a_child_and_a_broken_library_is_no_telephone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telephone, "_libpmix_of_parents", lambda: "/nowhere/libpmix.so.2")
    one = telephone.pmix({"PRTE_LAUNCHED": "1"})
    assert isinstance(one, PmixInChild)
    with pytest.raises(NoTelephone, match="libpmix.so.2"):
        one.publish("x", 9)


def test_the_relay_keeps_the_connection_to_the_daemon_when_the_client_leaves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"PMIX_SERVER_URI41": f"job@0.1;tcp4://127.0.0.1:{server.getsockname()[1]}", "PMIX_RANK": "1"}
        relay = _Relay(environ)
        kind, address = environ["PMIX_SERVER_URI41"].split(";")
        assert (kind, environ["PMIX_RANK"]) == ("job@0.1", "1")
        host, port = address.removeprefix("tcp4://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"init")
            daemon = server.accept()[0]
            with daemon:
                assert daemon.recv(9) == b"init"
                daemon.sendall(b"done")
                assert client.recv(9) == b"done"
                client.shutdown(socket.SHUT_RDWR)  # as PMIx_Finalize does
                assert client.recv(9) == b""  # the relay has seen it
                daemon.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    daemon.recv(9)
                relay.upstream[0].close()
                assert daemon.recv(9) == b""


def test_the_relay_tells_the_client_that_the_daemon_has_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"PMIX_SERVER_URI2": f"job@0.1;tcp4://127.0.0.1:{server.getsockname()[1]}"}
        _Relay(environ)
        with socket.create_connection(("127.0.0.1", int(environ["PMIX_SERVER_URI2"].split(":")[-1]))) as client:
            server.accept()[0].close()
            assert client.recv(9) == b""


def test_open_mpi_4_is_asked_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telephone, "_libpmix_of_parents", lambda: "/nowhere/libpmix.so.2")
    with pytest.raises(NoTelephone, match="libpmix.so.2"):
        telephone.pmix({})


# mpi4py --------------------------------------------------------------------------------------------------------------

class Comm:
    def __init__(self, rank: int, size: int) -> None:
        self.Get_rank, self.Get_size = lambda: rank, lambda: size

    def bcast(self, text: str | None, root: int) -> str:
        return text or "told"


def fake_mpi4py(monkeypatch: pytest.MonkeyPatch, version: str, rank: int, size: int) -> list[str]:
    """Put an mpi4py in place whose library is `version`; returns the calls that it gets."""
    calls: list[str] = []
    package = ModuleType("mpi4py")
    mpi = SimpleNamespace(Get_library_version=lambda: version + "\0", Init=lambda: calls.append("Init"),
                          Is_initialized=lambda: "Init" in calls, Is_finalized=lambda: False,
                          COMM_WORLD=Comm(rank, size))
    package.rc = SimpleNamespace(initialize=True)  # type: ignore[attr-defined]
    package.MPI = mpi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return calls


PLACED = Placement("mpich", 1, 4, 1, 4)


def test_mpi4py_of_the_launchers_family_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_mpi4py(monkeypatch, "MPICH Version: 5.0.2\nmore", 1, 4)
    one = Mpi4py(PLACED)
    assert calls == ["Init"] and one.look_up(1) == one.look_up(1) == "told"


def test_mpi4py_of_another_family_is_never_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_mpi4py(monkeypatch, "Open MPI v5.0.11", 0, 1)
    with pytest.raises(NoTelephone, match="'Open MPI v5.0.11', which is not of mpich"):
        Mpi4py(PLACED)
    assert calls == []


def test_an_mpi_that_counts_other_ranks_is_a_launch_error_with_both_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi4py(monkeypatch, "MPICH Version: 4.0", 0, 1)
    with pytest.raises(LaunchError, match="MPI says rank 0 of 1, but mpich started this process as rank 1 of 4"):
        Mpi4py(PLACED)


def test_a_missing_mpi4py_is_no_telephone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(NoTelephone, match="mpi4py cannot be imported"):
        Mpi4py(PLACED)


# Asking again --------------------------------------------------------------------------------------------------------

def test_asking_goes_on_until_there_is_an_answer() -> None:
    answers = iter([None, "", "told"])
    assert poll(lambda: next(answers), 5) == "told"


def test_asking_happens_at_least_once_and_ends_in_time() -> None:
    asked: list[int] = []
    assert poll(lambda: asked.append(1), 0) is None  # type: ignore[func-returns-value]
    assert len(asked) == 1

"""Implement the client of PMI-1, the protocol between MPICH's process manager and a rank.

Messages go over the socket PMI_FD, each a line of key=value words: "cmd=put kvsname=kvs_7 key=a
value=b". Source: the description of PMI-1 in MPICH's documentation.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Mapping

from ..errors import LaunchError
from . import mpi
from .launcher import SERVICE, NameService, NameServiceUnavailable, poll

_TIMEOUT = 10.0  # seconds to wait for a response that depends on no other rank


class _Connection:
    """This rank's connection to its process manager."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            descriptor = int(environ.get("PMI_FD", ""))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                raise OSError("not a socket")
            self._socket = socket.socket(fileno=os.dup(descriptor))
        except (ValueError, OSError) as error:
            raise NameServiceUnavailable(
                f"PMI_FD={environ.get('PMI_FD', '')!r} is not usable ({error}): a program between "
                "mpiexec and this process closed it",
                affects_mpi=True,  # the MPI library would abort the process
            ) from None
        self._unread = b""
        self.query("init pmi_version=1 pmi_subversion=1")
        atexit.register(self._finalize, os.getpid())

    def query(self, command: str, timeout: float = _TIMEOUT) -> dict[str, str]:
        """Send one command and return the words of the response.

        Raises LaunchError if there is no response within `timeout` seconds.
        """
        # settimeout() would make the descriptor non-blocking, also for the MPI library, which
        # shares it.
        readable, deadline = select.poll(), time.monotonic() + timeout
        readable.register(self._socket, select.POLLIN)
        try:
            self._socket.sendall(f"cmd={command}\n".encode())
            while b"\n" not in self._unread:
                if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError
                received = self._socket.recv(4096)
                if not received:
                    raise NameServiceUnavailable("mpiexec closed the PMI connection")
                self._unread += received
        except TimeoutError:
            raise LaunchError(
                f"no response to '{command.split()[0]}' on PMI_FD for {timeout:.0f} s; expected "
                "one from mpiexec. At least one rank never called setup_distributed(), or the "
                "launcher hangs: look for messages of other ranks"
            ) from None
        except OSError as error:
            raise NameServiceUnavailable(f"the PMI connection broke: {error}") from None
        response, _, self._unread = self._unread.partition(b"\n")
        words = response.decode(errors="replace").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _finalize(self, pid: int) -> None:
        """Report at exit that this rank ends normally; otherwise Intel MPI kills the job.

        After MPI_Init, the MPI library reports it.
        """
        if pid == os.getpid() and not mpi.is_running():
            with contextlib.suppress(NameServiceUnavailable, LaunchError, OSError):
                self.query("finalize", 5)


class PublishedNames(NameService):
    """publish_name and lookup_name of MPICH and Intel MPI. No rank waits for another."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._connection = _Connection(environ)

    def publish(self, text: str, timeout: float) -> None:
        _check(self._connection.query(f"publish_name service={SERVICE} port={text}"))

    def look_up(self, timeout: float) -> str | None:
        command = f"lookup_name service={SERVICE}"
        return poll(lambda: self._connection.query(command).get("port"), timeout)


class KeyValueSpace(NameService):
    """put, barrier and get, in every PMI-1. All ranks wait for each other once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._connection = _Connection(environ)
        self._name = self._connection.query("get_my_kvsname").get("kvsname", "")
        self._found = ""

    def publish(self, text: str, timeout: float) -> None:
        _check(self._connection.query(f"put kvsname={self._name} key={SERVICE} value={text}"))
        self._connection.query("barrier_in", timeout)

    def look_up(self, timeout: float) -> str | None:
        if not self._found:  # the barrier counts each rank once
            self._connection.query("barrier_in", timeout)
            response = self._connection.query(f"get kvsname={self._name} key={SERVICE}")
            self._found = response.get("value", "")
        return self._found or None


def _check(response: dict[str, str]) -> None:
    if response.get("rc") != "0":
        raise NameServiceUnavailable(f"mpiexec refused to publish: {response}")

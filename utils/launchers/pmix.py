"""Use PMIx, Open MPI's process management interface, as a name service.

PMIx is called through the same libpmix that a parent process, Open MPI's daemon, has loaded:
another version may not understand the daemon. Source: the PMIx standard, "Publish/Lookup".
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from ..host import process
from .launcher import SERVICE, NameService, NameServiceUnavailable, poll

_PMIX_SUCCESS, _PMIX_STRING = 0, 3  # pmix_common.h; the same in PMIx 3, 4 and 5


# The structures of pmix_common.h


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", ctypes.c_uint64 * 3))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _Pdata(ctypes.Structure):
    _fields_ = (("proc", _Proc), ("key", ctypes.c_char * 512), ("value", _Value))


def connect(*, in_child: bool) -> NameService:
    """Return the name service of Open MPI.

    in_child: use a child process, as Open MPI 5 needs it; see ChildClient and Client.
    Raises NameServiceUnavailable when libpmix is not found or cannot be used.
    """
    for pid in process.parent_pids():
        for path in process.mapped_files(pid):
            if os.path.basename(path).startswith("libpmix.so"):  # "libpmix.so.2.2.35"
                return ChildClient(path) if in_child else Client(path)
    raise NameServiceUnavailable(
        "no parent process has libpmix loaded, which Open MPI's name service needs"
    )


class Client(NameService):
    """A PMIx client in this process. Open MPI 4 requires one until the process ends."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
            this_process = _Proc()
            status = self._library.PMIx_Init(ctypes.byref(this_process), None, ctypes.c_size_t(0))
        except (OSError, AttributeError) as error:
            raise NameServiceUnavailable(f"{library}: {error}") from None
        if status != _PMIX_SUCCESS:
            raise NameServiceUnavailable(f"PMIx_Init of {library} returned {status}")
        self._key = f"{SERVICE}.".encode() + this_process.nspace
        atexit.register(self._finalize, os.getpid())

    def publish(self, text: str, timeout: float) -> None:
        buffer = ctypes.create_string_buffer(text.encode())
        info = _Info(self._key, 0, _Value(_PMIX_STRING))
        info.value.data[0] = ctypes.addressof(buffer)
        status = self._library.PMIx_Publish(ctypes.byref(info), ctypes.c_size_t(1))
        if status != _PMIX_SUCCESS:
            raise NameServiceUnavailable(f"PMIx_Publish returned {status}")

    def look_up(self, timeout: float) -> str | None:
        return poll(self._look_up_once, timeout)

    def _look_up_once(self) -> str | None:
        found = _Pdata()
        found.key = self._key
        status = self._library.PMIx_Lookup(
            ctypes.byref(found), ctypes.c_size_t(1), None, ctypes.c_size_t(0)
        )
        if status != _PMIX_SUCCESS:
            return None
        return ctypes.string_at(found.value.data[0]).decode()

    def _finalize(self, pid: int) -> None:
        if pid == os.getpid():  # not in a forked process
            self._library.PMIx_Finalize(None, ctypes.c_size_t(0))


class ChildClient(NameService):
    """A PMIx client in a child process, one for each call.

    Open MPI 5 crashes in a later MPI_Init if this process was a PMIx client itself. The child's
    connection to the daemon must outlive the child: when a client disconnects, the daemon (PMIx
    5.0) counts one rank less in the fences of MPI_Init, and one rank waits there for ever. So the
    child passes the connection to this process; see _relay().
    """

    def __init__(self, library: str) -> None:
        self._library_path = library

    def publish(self, text: str, timeout: float) -> None:
        self._run(text, 0)

    def look_up(self, timeout: float) -> str | None:
        return self._run("", timeout) or None

    def _run(self, text: str, timeout: float) -> str:
        limit = timeout + 20
        parent_end, child_end = socket.socketpair()
        with parent_end:
            try:
                with child_end:
                    done = subprocess.run(
                        [*_child_command(), self._library_path, text, str(timeout)],
                        stdin=child_end.fileno(),
                        capture_output=True,
                        text=True,
                        timeout=limit,
                    )
            except subprocess.TimeoutExpired:
                raise NameServiceUnavailable(f"no response from PMIx for {limit:.0f} s") from None
            found, connections, *_ = socket.recv_fds(parent_end, 4096, _MAX_CONNECTIONS)
        _kept_connections.extend(connections)
        if done.returncode:
            raise NameServiceUnavailable(
                f"the PMIx client ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        return found.decode().strip()


_MAX_CONNECTIONS = 16
# Descriptors of the children's connections to the daemon. The kernel closes them when this
# process ends.
_kept_connections: list[int] = []


def _child_command() -> list[str]:
    """Return the command that runs _child_main(), wherever and under whatever name this package is.

    -I and -S: the child needs no site-packages, and starts in a third of the time without them.
    """
    root, name = process.import_path(__name__, __file__)
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from {name} import _child_main; "
        "_child_main(*sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code]


def _child_main(library: str, text: str, timeout: str) -> None:
    """Publish a text, or look it up if it is "". Send the result and the daemon's connections."""
    daemons = _relay()
    client = Client(library)
    found: str | None = text
    if text:
        client.publish(text, 0)
    else:
        found = client.look_up(float(timeout))
    with socket.socket(fileno=sys.stdin.fileno()) as parent:
        descriptors = [daemon.fileno() for daemon in daemons[:_MAX_CONNECTIONS]]
        socket.send_fds(parent, [(found or " ").encode()], descriptors)


def _relay() -> list[socket.socket]:
    """Relay bytes between the PMIx client of this process and the daemon.

    Returns the connections to the daemon, a list that grows. They stay open when the client
    disconnects. The relay takes the daemon's place in the variables PMIX_SERVER_URI*, of the form
    NAMESPACE.RANK;tcp4://HOST:PORT.
    """
    daemons: list[socket.socket] = []
    daemon_address = ("", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for name, value in os.environ.items():
        found = re.fullmatch(r"(.*;)tcp4://([0-9.]+):(\d+)(.*)", value)
        if name.startswith("PMIX_SERVER_URI") and found:
            daemon_address = (found[2], int(found[3]))
            os.environ[name] = f"{found[1]}tcp4://127.0.0.1:{port}{found[4]}"

    def accept() -> None:
        while True:
            client = listener.accept()[0]
            daemon = socket.create_connection(daemon_address)
            daemons.append(daemon)
            _in_thread(_copy, client, daemon)
            _in_thread(_copy, daemon, client)

    _in_thread(accept)
    return daemons


def _in_thread(function: Callable[..., None], *arguments: socket.socket) -> None:
    threading.Thread(target=function, args=arguments, daemon=True, name="PMIx relay").start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy what arrives until one of the two disconnects."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)

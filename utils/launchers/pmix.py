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
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import MutableMapping

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
    library = _libpmix_of_parents()
    if library is None:
        raise NameServiceUnavailable(
            "no parent process has libpmix loaded, which Open MPI's name service needs"
        )
    return ChildClient(library) if in_child else Client(library)


def _libpmix_of_parents() -> str | None:
    for pid in process.parent_pids():
        for path in process.mapped_files(pid):
            if os.path.basename(path).startswith("libpmix.so"):  # "libpmix.so.2.2.35"
                return path
    return None


class Client(NameService):
    """A PMIx client in this process. Open MPI 4 requires one until the process ends.

    finalize_at_exit: whether PMIx_Finalize is called when the interpreter ends.
    """

    def __init__(self, library: str, *, finalize_at_exit: bool = True) -> None:
        try:
            self._library = ctypes.CDLL(library)
            this_process = _Proc()
            status = self._library.PMIx_Init(ctypes.byref(this_process), None, ctypes.c_size_t(0))
        except (OSError, AttributeError) as error:
            raise NameServiceUnavailable(f"{library}: {error}") from None
        if status != _PMIX_SUCCESS:
            raise NameServiceUnavailable(f"PMIx_Init of {library} returned {status}")
        self._key = f"{SERVICE}.".encode() + this_process.nspace
        self._pid = os.getpid()
        if finalize_at_exit:
            atexit.register(self.finalize)

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

    def finalize(self) -> None:
        """Call PMIx_Finalize, except in a process forked from the client's."""
        if os.getpid() == self._pid:
            self._library.PMIx_Finalize(None, ctypes.c_size_t(0))


class ChildClient(NameService):
    """A PMIx client in a child process, one for each call.

    Open MPI 5 crashes in a later MPI_Init if this process was a PMIx client itself. The child's
    connection to the daemon must outlive the child: when a client disconnects, the daemon (PMIx
    5.0) counts one rank less in the fences of MPI_Init, and one rank waits there for ever. So the
    child passes the connection to this process; see Relay.
    """

    def __init__(self, library: str) -> None:
        self._library_path = library

    def publish(self, text: str, timeout: float) -> None:
        self._run("publish", text, timeout=0)

    def look_up(self, timeout: float) -> str | None:
        return self._run("look_up", str(timeout), timeout=timeout) or None

    def _run(self, action: str, argument: str, timeout: float) -> str:
        limit = timeout + 20
        parent_end, child_end = socket.socketpair()
        with parent_end, child_end:
            arguments = [str(child_end.fileno()), self._library_path, action, argument]
            try:
                done = subprocess.run(
                    [*_child_command(), *arguments],
                    capture_output=True,
                    text=True,
                    timeout=limit,
                    pass_fds=[child_end.fileno()],
                )
            except subprocess.TimeoutExpired:
                raise NameServiceUnavailable(f"no response from PMIx for {limit:.0f} s") from None
            parent_end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                _kept_connections.extend(socket.recv_fds(parent_end, 1, 16)[1])
        if done.returncode:
            raise NameServiceUnavailable(
                f"the PMIx client ended with {_status(done.returncode)}: "
                f"{done.stderr.strip()[-300:]}"
            )
        return done.stdout.strip()


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


def _child_main(descriptor: str, library: str, action: str, argument: str) -> None:
    """Publish or look up, print what was found, and pass on the connections to the daemon."""
    relay = Relay(os.environ)
    client = Client(library, finalize_at_exit=False)
    if action == "publish":
        client.publish(argument, 0)
    else:
        print(client.look_up(float(argument)) or "")
    client.finalize()
    with socket.socket(fileno=int(descriptor)) as parent:
        socket.send_fds(parent, [b"x"], [daemon.fileno() for daemon in relay.daemons][:16])


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


class Relay:
    """Relays bytes between the PMIx client of this process and the daemon.

    When the client disconnects, the connection to the daemon stays open. The relay takes the
    daemon's place in the variables PMIX_SERVER_URI*, of the form NAMESPACE.RANK;tcp4://HOST:PORT.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.daemons: list[socket.socket] = []
        self._daemon_address = ("", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        for name, value in list(environ.items()):
            found = re.fullmatch(r"(.*;)tcp4://([0-9.]+):(\d+)(.*)", value)
            if name.startswith("PMIX_SERVER_URI") and found:
                self._daemon_address = (found[2], int(found[3]))
                environ[name] = f"{found[1]}tcp4://127.0.0.1:{port}{found[4]}"
        threading.Thread(target=self._run, daemon=True, name="PMIx relay").start()

    def _run(self) -> None:
        peer: dict[socket.socket, socket.socket] = {}
        while True:
            for ready in select.select([self._listener, *peer], [], [])[0]:
                if ready is self._listener:
                    client = self._listener.accept()[0]
                    daemon = socket.create_connection(self._daemon_address)
                    peer.update({client: daemon, daemon: client})
                    self.daemons.append(daemon)
                elif ready in peer and not _forward(ready, peer[ready]):
                    client = peer[ready] if ready in self.daemons else ready
                    del peer[peer.pop(client)]  # the daemon does not learn of it
                    client.close()


def _forward(source: socket.socket, target: socket.socket) -> bool:
    """Copy what has arrived; return False when one of the two has disconnected."""
    try:
        data = source.recv(1 << 16)
        target.sendall(data)
    except OSError:
        return False
    return bool(data)

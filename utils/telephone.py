"""How rank 0 tells the others where it listens, before any of them can reach it: the launcher's own name service.

Hydra speaks PMI-1 over PMI_FD (wire protocol: MPICH's pmi wire documentation); Open MPI speaks PMIx through libpmix.
Both have publish and look-up, which need no barrier, so that a rank that never starts blocks nobody.
Flux and MVAPICH2 have only PMI-1's put, barrier and get. mpi4py is the last resort. No torch here.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Protocol

from .parents import parent_pids
from .placement import LaunchError, Placement


class Telephone(Protocol):
    def publish(self, text: str, seconds: float) -> None:
        """Rank 0: tell `text` (no white space, below 200 bytes) to every rank of this launch, within `seconds`."""

    def look_up(self, seconds: float) -> str | None:
        """Any other rank: what rank 0 told, or None when it has told nothing for about `seconds`."""


_SERVICE = "ddpkit"


class NoTelephone(RuntimeError):
    """The launcher's name service cannot be used from this process; the message says why."""


class Pmi1:
    """PMI-1 of the Hydra family over the socket PMI_FD."""

    def __init__(self, environ: Mapping[str, str], *, name_service: bool) -> None:
        try:
            inherited = int(environ.get("PMI_FD", ""))
            if not stat.S_ISSOCK(os.fstat(inherited).st_mode):
                raise OSError("not a socket")
            self._socket = socket.socket(fileno=os.dup(inherited))
        except (ValueError, OSError) as error:
            raise NoTelephone(f"PMI_FD={environ.get('PMI_FD', '')!r} is not usable ({error}): a program between "
                              "mpiexec and this process closed it") from None
        self._unread = b""
        self._names = name_service
        self._key_space = self._told = ""
        self._say("init pmi_version=1 pmi_subversion=1", 10)
        if not name_service:
            self._key_space = self._say("get_my_kvsname", 10).get("kvsname", "")
        atexit.register(self._finalize, os.getpid())

    def _say(self, message: str, seconds: float) -> dict[str, str]:
        """Send one command and return the words of the answer."""
        # Never settimeout(): it would make the descriptor non-blocking for the MPI library, which shares it.
        ready, limit = select.poll(), time.monotonic() + seconds
        ready.register(self._socket, select.POLLIN)
        try:
            self._socket.sendall(f"cmd={message}\n".encode())
            while b"\n" not in self._unread:
                if not ready.poll(max(0.0, limit - time.monotonic()) * 1000):
                    raise TimeoutError
                received = self._socket.recv(4096)
                if not received:
                    raise NoTelephone("mpiexec closed the PMI connection")
                self._unread += received
        except TimeoutError:
            raise LaunchError(f"the launcher did not answer '{message.split()[0]}' on PMI_FD for {seconds:.0f} s. "
                              "At least one rank never called setup_distributed(), or the launcher hangs") from None
        except OSError as error:
            raise NoTelephone(f"the PMI connection broke: {error}") from None
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(word.split("=", 1) for word in line.decode(errors="replace").split() if "=" in word)

    def publish(self, text: str, seconds: float) -> None:
        if self._names:
            answer = self._say(f"publish_name service={_SERVICE} port={text}", 10)
        else:
            answer = self._say(f"put kvsname={self._key_space} key={_SERVICE} value={text}", 10)
        if answer.get("rc") != "0":
            raise NoTelephone(f"mpiexec refused to publish: {answer}")
        if not self._names:
            self._say("barrier_in", seconds)

    def look_up(self, seconds: float) -> str | None:
        if not self._names:
            if not self._told:  # the barrier counts each rank once
                self._say("barrier_in", seconds)
                self._told = self._say(f"get kvsname={self._key_space} key={_SERVICE}", 10).get("value", "")
            return self._told or None
        return poll(lambda: self._say(f"lookup_name service={_SERVICE}", 10).get("port"), seconds)

    def _finalize(self, pid: int) -> None:
        """Without it Intel MPI kills the job at exit; after MPI_Init it is the library's own to say."""
        if pid == os.getpid() and not mpi_is_running():
            with contextlib.suppress(NoTelephone, LaunchError, OSError):
                self._say("finalize", 5)


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", ctypes.c_uint64 * 3))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _Pdata(ctypes.Structure):
    _fields_ = (("proc", _Proc), ("key", ctypes.c_char * 512), ("value", _Value))


_PMIX_STRING, _PMIX_SUCCESS = 3, 0  # pmix_common.h, the same in PMIx 3, 4 and 5


class Pmix:
    """PMIx of Open MPI, through the very libpmix that the daemon above this process has loaded."""

    def __init__(self, library: str) -> None:
        try:
            self._lib = ctypes.CDLL(library)
            me = _Proc()
            status = self._lib.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0))
        except (OSError, AttributeError) as error:
            raise NoTelephone(f"{library}: {error}") from None
        if status != _PMIX_SUCCESS:
            raise NoTelephone(f"PMIx_Init of {library} returned {status}")
        self._key = f"{_SERVICE}.".encode() + me.nspace

    def publish(self, text: str, seconds: float) -> None:
        held = ctypes.create_string_buffer(text.encode())
        info = _Info(self._key, 0, _Value(_PMIX_STRING))
        info.value.data[0] = ctypes.addressof(held)
        status = self._lib.PMIx_Publish(ctypes.byref(info), ctypes.c_size_t(1))
        if status != _PMIX_SUCCESS:
            raise NoTelephone(f"PMIx_Publish returned {status}")

    def look_up(self, seconds: float) -> str | None:
        def once() -> str | None:
            answer = _Pdata()
            answer.key = self._key
            if self._lib.PMIx_Lookup(ctypes.byref(answer), ctypes.c_size_t(1), None, ctypes.c_size_t(0)):
                return None
            return ctypes.string_at(answer.value.data[0]).decode()

        return poll(once, seconds)

    def finalize(self) -> None:
        self._lib.PMIx_Finalize(None, ctypes.c_size_t(0))


class PmixInProcess(Pmix):
    """Open MPI 4 wants one PMIx client for the life of the process, finalised at its end."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        pid = os.getpid()
        atexit.register(lambda: self.finalize() if os.getpid() == pid else None)


class PmixInChild:
    """Open MPI 5 crashes in a later MPI_Init when this process was a PMIx client; a child that was one does no harm.

    The child's connection to the daemon must outlive it, though: where a daemon (PMIx 5.0) sees a client of this host
    go, it counts one rank less in the fences of MPI_Init, and one rank waits there for ever. See _Relay.
    """

    def __init__(self, library: str) -> None:
        self._library = library

    def _run(self, *words: str, seconds: float) -> str:
        folder, package = os.path.split(os.path.dirname(os.path.abspath(__file__)))
        script = (f"import sys; sys.path.insert(0, {folder!r}); from {package} import telephone; "
                  "telephone._pmix_child(*sys.argv[1:])")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # -I and -S: the child needs no user's paths and no site-packages, and starts in a third of the time.
            command = [sys.executable, "-I", "-S", "-c", script, str(theirs.fileno()), self._library, *words]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 20,
                                      pass_fds=[theirs.fileno()])
            except subprocess.TimeoutExpired:
                raise NoTelephone(f"PMIx did not answer for {seconds + 20:.0f} s") from None
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                _connections.extend(socket.recv_fds(ours, 1, 16)[1])
        if done.returncode:
            how = (signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}")
            raise NoTelephone(f"the PMIx client ended with {how}: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()

    def publish(self, text: str, seconds: float) -> None:
        self._run("publish", text, seconds=0)

    def look_up(self, seconds: float) -> str | None:
        return self._run("look_up", str(seconds), seconds=seconds) or None


_connections: list[int] = []  # what children had to their daemon; the kernel closes them when this process ends


def _pmix_child(line: str, library: str, action: str, argument: str) -> None:
    relay = _Relay(os.environ)
    client = Pmix(library)
    if action == "publish":
        client.publish(argument, 0)
    else:
        print(client.look_up(float(argument)) or "")
    client.finalize()
    with socket.socket(fileno=int(line)) as parent:
        socket.send_fds(parent, [b"x"], [upstream.fileno() for upstream in relay.upstream][:16])


class _Relay:
    """Stands between the PMIx client of this process and the daemon, whose end stays open when the client leaves.

    It takes the daemon's place in the PMIX_SERVER_URI* of `environ` (NAMESPACE.RANK;tcp4://ADDRESS:PORT).
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.upstream: list[socket.socket] = []
        self._daemon = ("", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        here = f"tcp4://127.0.0.1:{self._listener.getsockname()[1]}"
        for name, value in list(environ.items()):
            found = re.fullmatch(r"(.*;)tcp4://([0-9.]+):(\d+)(.*)", value)
            if name.startswith("PMIX_SERVER_URI") and found:
                self._daemon = (found[2], int(found[3]))
                environ[name] = found[1] + here + found[4]
        threading.Thread(target=self._run, daemon=True, name="PMIx relay").start()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        while True:
            for ready in select.select([self._listener, *other], [], [])[0]:
                if ready is self._listener:
                    client, daemon = self._listener.accept()[0], socket.create_connection(self._daemon)
                    other.update({client: daemon, daemon: client})
                    self.upstream.append(daemon)
                elif ready in other and not _passed_on(ready, other[ready]):
                    client = other[ready] if ready in self.upstream else ready
                    del other[other.pop(client)]  # the daemon is not told
                    client.close()


def _passed_on(source: socket.socket, target: socket.socket) -> bool:
    """Copy what has come; False when one of the two has gone."""
    try:
        data = source.recv(1 << 16)
        target.sendall(data)
    except OSError:
        return False
    return bool(data)


def pmix(environ: Mapping[str, str]) -> Telephone:
    """The PMIx telephone that is safe under this Open MPI. NoTelephone where libpmix is not found."""
    library = _libpmix_of_parents()
    if library is None:
        raise NoTelephone("no parent process has libpmix loaded, so Open MPI cannot be asked for rank 0's host")
    return PmixInChild(library) if environ.get("PRTE_LAUNCHED") else PmixInProcess(library)


def _libpmix_of_parents() -> str | None:
    for pid in parent_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            found = re.search(r"(/\S.*/libpmix\.so[.0-9]*)$", maps.read(), re.MULTILINE)
            if found:
                return found[1]
    return None


class Mpi4py:
    """One broadcast from rank 0. Every rank has to take part."""

    def __init__(self, placement: Placement, seconds: float | None = None) -> None:
        self._mpi = import_mpi(placement, seconds)
        self._told: str | None = None

    def publish(self, text: str, seconds: float) -> None:
        self._mpi.COMM_WORLD.bcast(text, root=0)

    def look_up(self, seconds: float) -> str | None:
        self._told = self._told or str(self._mpi.COMM_WORLD.bcast(None, root=0))
        return self._told


# What MPI.Get_library_version() starts with, by launcher. A library of another family makes N runs of size 1.
_LIBRARIES = {"openmpi": r"Open MPI", "jsrun": r"Open MPI|IBM Spectrum MPI", "mpich": r"MPICH|CRAY MPICH|MVAPICH",
              "intel-mpi": r"Intel|MPICH", "pals": r"MPICH|CRAY MPICH", "mvapich": r"MVAPICH|MPICH"}


def import_mpi(placement: Placement, seconds: float | None = None) -> ModuleType:
    """mpi4py's MPI, initialised, after its library was found to be of the launcher's family and of this world size.

    seconds: the process ends with a traceback when MPI_Init takes longer, which waits for all ranks.
    NoTelephone where mpi4py is missing or its library is of another family; LaunchError where MPI disagrees.
    """
    try:
        import mpi4py  # type: ignore[import-not-found,unused-ignore]

        running = mpi_is_running()
        if not running:
            mpi4py.rc.initialize = False  # look at the library before it may abort the process inside MPI_Init
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, RuntimeError) as error:
        raise NoTelephone(f"mpi4py cannot be imported: {error}") from None
    version = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    expected = _LIBRARIES.get(placement.launcher)
    if expected is not None and not re.match(expected, version):
        raise NoTelephone(f"mpi4py uses the library {version!r}, which is not of {placement.launcher}, "
                          "the launcher of this process. Install mpi4py with that MPI, or start with the other mpiexec")
    if not running:
        if seconds is not None:  # it keeps Python's lock, so that no thread of Python could end it
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            MPI.Init()
        finally:
            if seconds is not None:
                faulthandler.cancel_dump_traceback_later()
    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if (rank, size) != (placement.rank, placement.world_size):
        if running:  # whoever started it: the launcher's own means may do without
            raise NoTelephone(f"mpi4py says rank {rank} of {size}, which is not this launch's")
        raise LaunchError(f"MPI says rank {rank} of {size}, but {placement.launcher} started this process as rank "
                          f"{placement.rank} of {placement.world_size}: mpi4py's library ({version}) does not belong "
                          "to this mpiexec. Install mpi4py with the MPI that starts the job")
    return MPI  # type: ignore[no-any-return]


def mpi_is_running() -> bool:
    """Whether somebody has already called MPI_Init through mpi4py (never imports it)."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not bool(mpi.Is_finalized())


def poll(ask: Callable[[], str | None], seconds: float) -> str | None:
    """Ask again with growing pauses until there is an answer or `seconds` are over."""
    limit, pause = time.monotonic() + seconds, 0.005
    while True:
        answer = ask()
        if answer or time.monotonic() + pause > limit:
            return answer or None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)

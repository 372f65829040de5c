"""Use PMIx, Open MPI's process management interface, as a name service.

PMIx is called through the same libpmix that a parent process, Open MPI's daemon, has loaded:
another version may not understand the daemon. Source: the PMIx standard, "Publish/Lookup".
"""

from __future__ import annotations

import atexit
import ctypes
import os

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


def connect() -> NameService:
    """Return the name service of Open MPI.

    Raises NameServiceUnavailable when libpmix is not found or cannot be used.
    """
    for pid in process.parent_pids():
        for path in process.mapped_files(pid):
            if os.path.basename(path).startswith("libpmix.so"):  # "libpmix.so.2.2.35"
                return Client(path)
    raise NameServiceUnavailable(
        "no parent process has libpmix loaded, which Open MPI's name service needs"
    )


class Client(NameService):
    """A PMIx client in this process, until it ends: Open MPI 4 requires that."""

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

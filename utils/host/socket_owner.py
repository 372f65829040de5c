"""Find out which users have bound abstract Unix-domain sockets, through sock_diag(7) of Linux."""

from __future__ import annotations

import socket
import struct
import sys

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_SHOW_NAME, _SHOW_UID = 0x01, 0x40  # UDIAG_SHOW_...; the second flag exists since Linux 5.3
_NAME, _UID = 0, 7  # UNIX_DIAG_...: types of attributes
_HEADER, _SOCKET, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBIII"), "=HH"
_SECONDS = 2.0
_MOST_BYTES = 64 << 20  # bytes; enough for a million sockets


def socket_owners(prefix: str) -> dict[str, int]:
    """Return socket name -> user id for abstract sockets with this prefix; empty if unknown."""
    owners: dict[str, int] = {}
    if sys.platform != "linux":
        return owners
    request = struct.pack(
        "=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_UID, 0, 0
    )
    size = _HEADER.size + len(request)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_SECONDS)
            header = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
            netlink.send(header + request)
            received = 0
            while received < _MOST_BYTES:
                data = netlink.recv(1 << 16)
                received += len(data)
                while len(data) >= _HEADER.size:
                    length, kind, *_ = _HEADER.unpack_from(data)
                    if kind != _SOCK_DIAG_BY_FAMILY:  # the end of the list, or an error
                        return owners
                    found = _attributes(data[_HEADER.size + _SOCKET.size : length])
                    name = found.get(_NAME, b"")
                    if name.startswith(b"\0" + prefix.encode()) and _UID in found:
                        owners[name[1:].decode()] = int.from_bytes(found[_UID], sys.byteorder)
                    data = data[-(-length // 4) * 4 :]
    except (OSError, ValueError, struct.error):
        pass  # the kernel has no sock_diag
    return owners


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from(_ATTRIBUTE, data)
        found[kind] = data[4:length]
        data = data[max(4, -(-length // 4) * 4) :]
    return found

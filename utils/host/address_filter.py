"""Let a listening socket accept known addresses only, through a socket filter of Linux.

The filter is a program of classic BPF. The kernel runs it for each packet that arrives at the
socket, and drops rejected packets. Sockets of accepted connections inherit it. It needs no
privilege. Sources: Documentation/networking/filter.rst and tcp_filter() of the kernel, socket(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the same on x86, Arm and Power
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, if false, operand
_LOAD_WORD, _LOAD_BYTE, _AND, _SHIFT_RIGHT = 0x20, 0x30, 0x54, 0x74
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here address the IP header
_SOURCE_IPV4, _SOURCE_IPV6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_MOST_IPV4, _MOST_IPV6 = 64, 16  # compared networks: at most 50 ns per packet
_MOST_WAITING = 4096  # waiting connections to close

_Instruction = tuple[int, int, int, int]


def accept_only(listener: socket.socket, addresses: Iterable[str]) -> bool:
    """Let the kernel drop connections from all other addresses; return whether it does so.

    If there are too many addresses to compare, the smallest networks that contain them are used.
    Connections that already wait to be accepted are closed, because their origin is unknown.
    listener: non-blocking.
    """
    if not sys.platform.startswith("linux"):
        return False
    code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in _program(addresses))
    buffer = ctypes.create_string_buffer(code, len(code))
    length = len(code) // _INSTRUCTION.size
    program = struct.pack("@HP", length, ctypes.addressof(buffer))  # struct sock_fprog
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:  # gVisor runs Linux programs, but has no such filter
        return False
    with contextlib.suppress(OSError):  # BlockingIOError: none is left
        for _ in range(_MOST_WAITING):
            with contextlib.suppress(ConnectionError):
                listener.accept()[0].close()
    return True


def _program(addresses: Iterable[str]) -> list[_Instruction]:
    """Return a filter that accepts packets from these addresses and drops all others."""
    parsed = {ipaddress.ip_address(address.partition("%")[0]) for address in addresses}
    ipv4 = [int(address) for address in parsed if address.version == 4]
    ipv6 = [int(address) for address in parsed if address.version == 6]
    accept, drop = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)

    bits, networks = _networks(ipv4, 32, _MOST_IPV4)
    for_ipv4 = [(_LOAD_WORD, 0, 0, _SOURCE_IPV4), (_AND, 0, 0, _mask(bits, 32))]
    for network in networks:
        for_ipv4 += [(_JUMP_IF_EQUAL, 0, 1, network), accept]

    bits, networks = _networks(ipv6, 128, _MOST_IPV6)
    for_ipv6: list[_Instruction] = []
    for network in networks:
        for word in range(4):
            shift = 96 - 32 * word
            mask, value = (_mask(bits, 128) >> shift, network >> shift)
            to_next = 3 * (3 - word) + 1
            for_ipv6 += [
                (_LOAD_WORD, 0, 0, _SOURCE_IPV6 + 4 * word),
                (_AND, 0, 0, mask & 0xFFFFFFFF),
                (_JUMP_IF_EQUAL, 0, to_next, value & 0xFFFFFFFF),
            ]
        for_ipv6.append(accept)

    version = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    is_ipv4 = (_JUMP_IF_EQUAL, 0, len(for_ipv4) + 1, 4)
    return [*version, is_ipv4, *for_ipv4, drop, *for_ipv6, drop]


def _networks(addresses: Iterable[int], width: int, most: int) -> tuple[int, list[int]]:
    """Return the longest prefix that leaves few enough networks, and these networks."""
    for bits in range(width, -1, -1):
        networks = {address & _mask(bits, width) for address in addresses}
        if len(networks) <= most:
            return bits, sorted(networks)
    raise AssertionError("all addresses are in one network of prefix 0")


def _mask(bits: int, width: int) -> int:
    return (1 << width) - (1 << (width - bits))

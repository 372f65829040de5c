"""Let a listening socket take connections from known addresses only, by a socket filter of Linux.

The kernel runs the filter, a program of classic BPF, for each packet that arrives for the socket,
and drops what it refuses. Sockets of accepted connections inherit it. Needs no privilege.
Sources: Documentation/networking/filter.rst and tcp_filter() of the kernel, socket(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h, the same on x86, Arm and Power
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, if false, operand
_LOAD_WORD, _LOAD_BYTE, _AND, _SHIFT_RIGHT = 0x20, 0x30, 0x54, 0x74
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here are of the IP header
_SOURCE_IPV4, _SOURCE_IPV6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_MOST_IPV4, _MOST_IPV6 = 64, 16  # networks to compare with: a packet takes 50 ns at most
_MOST_WAITING = 4096  # connections

_Instruction = tuple[int, int, int, int]


def accept_only(listener: socket.socket, addresses: Iterable[str]) -> bool:
    """Let the kernel drop connections from all but these addresses; return whether it does.

    Where they are too many to compare with, their networks count instead, as small as possible.
    Connections that wait to be accepted are closed: nobody knows where they are from.
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
    except OSError:  # another kernel than Linux runs the programs of Linux, as gVisor
        return False
    with contextlib.suppress(OSError):  # BlockingIOError: none is left
        for _ in range(_MOST_WAITING):
            with contextlib.suppress(ConnectionError):
                listener.accept()[0].close()
    return True


def _program(addresses: Iterable[str]) -> list[_Instruction]:
    """Return a filter that lets through what comes from these addresses, and drops the rest."""
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
    """Return the longest prefix of which the addresses have few enough, and these networks."""
    for bits in range(width, -1, -1):
        networks = {address & _mask(bits, width) for address in addresses}
        if len(networks) <= most:
            return bits, sorted(networks)
    raise AssertionError("all addresses are in one network of prefix 0")


def _mask(bits: int, width: int) -> int:
    return (1 << width) - (1 << (width - bits))

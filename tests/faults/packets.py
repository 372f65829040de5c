"""Lose, delay, slow down and refuse what hosts of the tests send to each other.

Linux does it at the host's end of the switch, so that neither host notices: tc with packet filters, and a token bucket
for rates. What no kernel module is needed for elsewhere either is done by a process: a delay, and a firewall that
refuses connections.

python tests/faults/packets.py delay INTERFACE INTERFACE SECONDS    forwards frames between the two
python tests/faults/packets.py refuse INTERFACE                     answers requests for connections by RST
"""
from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.cluster.hosts import Hosts
from tests.launch.launchers import ROOT

DROP, PASS = 2, 0xFFFFFFFF  # TC_ACT_SHOT, and TC_ACT_UNSPEC: ask the next filter
SSH = 22
# Offsets in a frame: Ethernet, IPv4 without options, TCP.
_PROTOCOL, _SOURCE, _DESTINATION, _FROM_PORT, _TO_PORT, _FLAGS = 23, 26, 30, 34, 36, 47
_LOAD = {1: 0x30, 2: 0x28, 4: 0x20}  # by size: BPF_LD | BPF_ABS; see bpf(4)
_LENGTH = 0x80  # BPF_LD | BPF_LEN
_JUMPS = {"==": (0x15, True), "!=": (0x15, False), ">": (0x25, True)}


class Condition(NamedTuple):
    """A comparison of `size` bytes at `offset` of a frame with a value; size 0 is the frame's length."""

    size: int
    offset: int
    comparison: str
    value: int


TCP = Condition(1, _PROTOCOL, "==", 6)
NOT_SSH = (Condition(2, _FROM_PORT, "!=", SSH), Condition(2, _TO_PORT, "!=", SSH))
NEW = Condition(1, _FLAGS, "==", 2)  # SYN alone: a request for a connection


def source(hosts: Hosts, host: str) -> Condition:
    return Condition(4, _SOURCE, "==", struct.unpack("!I", socket.inet_aton(hosts.address[host]))[0])


def longer_than(size: int) -> Condition:
    """Frames of more bytes."""
    return Condition(0, 0, ">", size)


def program(conditions: Sequence[Condition]) -> str:
    """Return the classic BPF program, as tc takes it, that drops the frames for which all conditions hold."""
    steps: list[tuple[int, int, int, int]] = []
    for index, (size, offset, comparison, value) in enumerate(conditions):
        jump, if_true = _JUMPS[comparison]
        no = 2 * (len(conditions) - index) - 1  # instructions to skip, to the last one
        steps.append((_LOAD.get(size, _LENGTH), 0, 0, offset))
        steps.append((jump, 0, no, value) if if_true else (jump, no, 0, value))
    steps += [(6, 0, 0, DROP), (6, 0, 0, PASS)]
    return ",".join([str(len(steps)), *(" ".join(map(str, step)) for step in steps)])


def run(hosts: Hosts, host: str, command: str) -> None:
    """Run a command on a host, or on "switch"."""
    done = subprocess.run([*hosts.enter(host), *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command!r} on {host}: {done.stderr.strip()}")


def port(hosts: Hosts, host: str) -> str:
    """Return the interface of the switch that leads to a host."""
    return f"v{hosts.hosts.index(host) + 1}"


def drop(hosts: Hosts, host: str, direction: str, *conditions: Condition) -> None:
    """Lose frames "from" or "to" a host without notice."""
    _add_filter(hosts, "switch", port(hosts, host), "ingress" if direction == "from" else "egress", conditions)


def _add_filter(hosts: Hosts, host: str, interface: str, direction: str, conditions: Sequence[Condition]) -> None:
    with contextlib.suppress(RuntimeError):  # there is one already
        run(hosts, host, f"tc qdisc add dev {interface} clsact")
    subprocess.run([*hosts.enter(host), "tc", "filter", "add", "dev", interface, direction, "bpf", "da", "bytecode",
                    program(conditions)], check=True)


def one_packet_per_frame(hosts: Hosts, names: Iterable[str]) -> None:
    """Let hosts send frames as an Ethernet carries them, instead of up to 64 kB at once."""
    for host in names:
        run(hosts, host, "ip link set eth0 gso_max_segs 1")


def delay(hosts: Hosts, host: str, seconds: float) -> None:
    """Delay what a host sends and receives by so many seconds each way."""
    old = port(hosts, host)
    new, far = f"{old}d", f"{old}e"
    for command in (f"ip link set {old} nomaster", f"ip link add {new} type veth peer name {far}",
                    f"ip link set {far} master br0 up", f"ip link set {new} up"):
        run(hosts, "switch", command)
    _start(hosts, "switch", "delay", old, new, str(seconds))


def refuse(hosts: Hosts, host: str) -> None:
    """Let a host refuse connections from other hosts, but for ssh, as a firewall does."""
    _start(hosts, host, "refuse", "eth0")
    _add_filter(hosts, host, "eth0", "ingress", [TCP, *NOT_SSH, NEW])


def _start(hosts: Hosts, host: str, *words: str) -> None:
    """Start this file on a host, until the hosts end."""
    process = hosts.popen(host, [sys.executable, __file__, *words], env={"PYTHONPATH": str(ROOT)},
                          stdout=subprocess.PIPE)
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"packets.py {words[0]} has not started on {host}")


# Processes -----------------------------------------------------------------------------------------------------------

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL = 263, 15, 23, 0x0003  # packet(7), linux/if_packet.h
_VNET_BYTES = 10


def _open(interface: str) -> socket.socket:
    """Open an interface for frames, each with a header about what is left to a network adapter: segments, checksums."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    opened.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    opened.bind((interface, 0))
    return opened


def forward_later(first: str, second: str, seconds: float) -> None:
    """Send each frame that arrives on one interface on the other one, so many seconds later."""
    sockets = [_open(first), _open(second)]
    selector = selectors.DefaultSelector()
    for index, one in enumerate(sockets):
        selector.register(one, selectors.EVENT_READ, sockets[1 - index])
    print("ready", flush=True)
    waiting: list[tuple[float, int, bytes, socket.socket]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, frame, target = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the queue is full: the frame is lost
                target.send(frame)
        for key, _ in selector.select(waiting[0][0] - now if waiting else None):
            assert isinstance(key.fileobj, socket.socket)
            frame = key.fileobj.recv(1 << 17)
            count += 1
            heapq.heappush(waiting, (time.monotonic() + seconds, count, frame, key.data))


def answer_by_rst(interface: str) -> None:
    """Answer each request for a TCP connection by RST, but for ssh."""
    tap = _open(interface)
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
    print("ready", flush=True)
    while True:
        frame = tap.recv(1 << 17)[_VNET_BYTES:]
        if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[_PROTOCOL] != 6 or frame[_FLAGS] & 0x12 != 2:
            continue
        from_port, to_port, number = struct.unpack("!HHI", frame[34:42])
        if to_port == SSH:
            continue
        segment = struct.pack("!HHIIBBHHH", to_port, from_port, 0, number + 1 & 0xFFFFFFFF, 5 << 4, 0x14, 0, 0, 0)
        pseudo = frame[30:34] + frame[26:30] + struct.pack("!HH", 6, len(segment))
        total = sum(struct.unpack(f"!{(len(pseudo) + len(segment)) // 2}H", pseudo + segment))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        segment = segment[:16] + struct.pack("!H", ~total & 0xFFFF) + segment[18:]
        raw.sendto(segment, (socket.inet_ntoa(frame[26:30]), 0))


if __name__ == "__main__":
    if sys.argv[1] == "delay":
        forward_later(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        answer_by_rst(sys.argv[2])

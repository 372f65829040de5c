"""Lose, delay and slow down what hosts of the tests send to each other.

Linux does it at the host's end of the switch, so that neither host notices: tc with packet filters, and a token bucket
for rates. What no kernel module is needed for elsewhere either is done by a process: a delay.

python tests/faults/packets.py delay INTERFACE INTERFACE SECONDS    forwards frames between the two
"""
from __future__ import annotations

import contextlib
import heapq
import selectors
import shlex
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
_PROTOCOL, _SOURCE, _FROM_PORT, _TO_PORT = 23, 26, 34, 36
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
    done = subprocess.run([*hosts.enter(host), *shlex.split(command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command!r} on {host}: {done.stderr.strip()}")


def port(hosts: Hosts, host: str) -> str:
    """Return the interface of the switch that leads to a host."""
    return f"v{hosts.hosts.index(host) + 1}"


def drop(hosts: Hosts, host: str, direction: str, *conditions: Condition) -> None:
    """Lose frames "from" or "to" a host without notice."""
    interface = port(hosts, host)
    with contextlib.suppress(RuntimeError):  # there is one already
        run(hosts, "switch", f"tc qdisc add dev {interface} clsact")
    subprocess.run([*hosts.enter("switch"), "tc", "filter", "add", "dev", interface,
                    "ingress" if direction == "from" else "egress", "bpf", "da", "bytecode", program(conditions)],
                   check=True)


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
    process = hosts.popen("switch", [sys.executable, __file__, "delay", old, new, str(seconds)],
                          env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "ready\n", f"packets.py has not started for {host}"


# Processes -----------------------------------------------------------------------------------------------------------

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL = 263, 15, 23, 0x0003  # packet(7), linux/if_packet.h


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


if __name__ == "__main__":
    forward_later(sys.argv[2], sys.argv[3], float(sys.argv[4]))

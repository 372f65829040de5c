"""Read the cores and NUMA nodes of this host from sysfs. No torch.

Source: Documentation/admin-guide/cputopology.rst and Documentation/ABI of the Linux kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Core(NamedTuple):
    """A physical core."""

    cpus: tuple[int, ...]  # its hardware threads, by the kernel's numbers
    node: int  # its NUMA node


class Topology(NamedTuple):
    """The cores of a host, sorted by NUMA node and CPU."""

    cores: tuple[Core, ...]

    def to_text(self) -> str:
        """Return one line: "0:0+4,1+5;1:2+6,3+7" for two nodes of two cores of two threads."""
        groups: dict[int, list[str]] = {}
        for core in self.cores:
            groups.setdefault(core.node, []).append("+".join(map(str, core.cpus)))
        return ";".join(f"{node}:{','.join(cores)}" for node, cores in groups.items())

    @classmethod
    def from_text(cls, text: str) -> Topology:
        """Parse the result of to_text()."""
        cores = []
        for group in text.split(";"):
            node, _, members = group.partition(":")
            for core in members.split(","):
                cores.append(Core(tuple(map(int, core.split("+"))), int(node)))
        return cls(tuple(cores))


def read_topology(root: Path = Path("/")) -> Topology | None:
    """Return the topology of this host, or None if sysfs does not describe it.

    root: the folder that contains sys.
    """
    system = f"{root}/sys/devices/system"
    online = parse_ranges(_read(f"{system}/cpu/online"))
    if not online:
        return None
    node_of = dict(_nodes(system))
    one_thread_each = _read(f"{system}/cpu/smt/active").strip() == "0"

    cores: list[Core] = []
    seen: set[int] = set()
    for cpu in sorted(online):
        if cpu in seen:
            continue
        folder = f"{system}/cpu/cpu{cpu}"
        siblings = {cpu}
        if not one_thread_each:
            siblings |= parse_ranges(_read(f"{folder}/topology/thread_siblings_list")) & online
        seen |= siblings
        cores.append(Core(tuple(sorted(siblings)), node_of.get(cpu, 0)))
    cores.sort(key=lambda core: (core.node, core.cpus))
    return Topology(tuple(cores))


def pci_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device, such as "0000:c1:00.0"; None where it is unknown."""
    text = _read(f"{root}/sys/bus/pci/devices/{address}/numa_node").strip()
    return int(text) if text.isdecimal() else None  # the kernel writes -1 for unknown


def parse_ranges(text: str) -> set[int]:
    """Return the numbers of a list in the kernel's format: "0-2,8" -> {0, 1, 2, 8}.

    Raises ValueError for other text.
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the list of numbers in the kernel's format: {0, 1, 2, 8} -> "0-2,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _nodes(system: str) -> Iterator[tuple[int, int]]:
    """Yield each CPU with its NUMA node. A node may have no CPUs, such as HBM or a GPU's memory."""
    try:
        names = os.listdir(f"{system}/node")
    except OSError:
        return
    for name in names:
        if re.fullmatch(r"node\d+", name):
            for cpu in parse_ranges(_read(f"{system}/node/{name}/cpulist")):
                yield cpu, int(name[4:])


def _read(path: str) -> str:
    """Return a file's content; "" where it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY)  # hundreds of files: open() takes three times as long
    except OSError:
        return ""
    try:
        return os.read(file, 1 << 16).decode()
    except OSError:
        return ""
    finally:
        os.close(file)

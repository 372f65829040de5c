"""The nodes of tests/topologies, also as the sysfs trees that their kernels would show."""
from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from utils.host.cores import Cpus, Topology, pci_node, read_topology
from utils.ranges import format_ranges, parse_ranges

FOLDER = Path(__file__).resolve().parents[1] / "topologies"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # hundreds of small files
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


class Site(NamedTuple):
    """A node of a cluster."""

    topology: Topology
    mask: Cpus  # of the ranks of a job that has the whole node
    gpus: list[int | None]  # the NUMA node of each
    cores: str  # what the ranks have to get, in the syntax of DDPKIT_CPU_BIND
    by: str  # "divide" or "DDPKIT_CPU_BIND"


def gpu_address(index: int) -> str:
    return f"0000:{16 * index + 1:02x}:00.0"


def write_tree(root: Path, name: str) -> None:
    """Write what sysfs shows on a node of this cluster, as far as the kit reads it."""
    described = json.loads((FOLDER / f"{name}.json").read_text())
    nodes = {number: sorted(parse_ranges(text)) for number, text in described["nodes"].items()}
    sibling = described["sibling"]
    system = root / "sys/devices/system"

    def write(path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    write(system / "cpu/online", format_ranges(cpu for cpus in nodes.values() for cpu in cpus))
    write(system / "cpu/smt/active", int(sibling > 0))
    for number, cpus in nodes.items():
        write(system / f"node/node{number}/cpulist", format_ranges(cpus))
        first_threads = [cpu for cpu in cpus if cpu - sibling not in cpus] if sibling else cpus
        for cpu in first_threads:
            for thread in {cpu, cpu + sibling}:
                write(system / f"cpu/cpu{thread}/topology/thread_siblings_list", format_ranges({cpu, cpu + sibling}))
    for index, node in enumerate(described["gpus"]):
        write(root / f"sys/bus/pci/devices/{gpu_address(index)}/numa_node", -1 if node is None else node)


@functools.cache
def load_site(name: str) -> Site:
    """Return a node of a cluster, as read from its sysfs tree."""
    described = json.loads((FOLDER / f"{name}.json").read_text())
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        write_tree(Path(folder), name)
        topology = read_topology(Path(folder))
        gpus = [pci_node(gpu_address(index), Path(folder)) for index in range(len(described["gpus"]))]
    assert topology is not None and gpus == described["gpus"]
    cpus = {cpu for core in topology.cores for cpu in core.cpus}
    mask = frozenset(cpus - parse_ranges(described["reserved"]))
    return Site(topology, mask, gpus, described["cores"], described["by"])

"""The cores and NUMA nodes of this host, and which of them each local rank gets. No torch.

Sources: Documentation/admin-guide/cputopology.rst and Documentation/ABI of the Linux kernel.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from ..ranges import format_ranges, parse_ranges
from . import process


class Core(NamedTuple):
    """A physical core."""

    cpus: tuple[int, ...]  # its hardware threads, numbered as in the kernel
    node: int  # its NUMA node


class Topology(NamedTuple):
    """The cores of a host, sorted by NUMA node and CPU."""

    cores: tuple[Core, ...]

    def to_text(self) -> str:
        """Return one line; "0:0+4,1+5;1:2+6,3+7" is two nodes of two cores of two threads."""
        groups: dict[int, list[str]] = {}
        for core in self.cores:
            groups.setdefault(core.node, []).append("+".join(map(str, core.cpus)))
        return ";".join(f"{node}:{','.join(cores)}" for node, cores in groups.items())

    @classmethod
    @functools.lru_cache(maxsize=256)  # most hosts of a job have the same topology
    def from_text(cls, text: str) -> Topology:
        """Parse the result of to_text(). An empty text gives no cores."""
        cores = []
        for group in text.split(";") if text else ():
            node, _, members = group.partition(":")
            for core in members.split(","):
                cores.append(Core(tuple(map(int, core.split("+"))), int(node)))
        return cls(tuple(cores))


def read_topology(root: Path = Path("/")) -> Topology | None:
    """Return the topology of this host, or None if sysfs does not describe it.

    root: the folder that contains sys.
    """
    system = root / "sys/devices/system"
    online = parse_ranges(_read(f"{system}/cpu/online"))
    node_of: dict[int, int] = {}
    for folder in system.glob("node/node[0-9]*"):  # a node of HBM or GPU memory has no CPUs
        for cpu in parse_ranges(_read(f"{folder}/cpulist")):
            node_of[cpu] = int(folder.name.removeprefix("node"))

    cores: set[Core] = set()
    for cpu in online:
        siblings = parse_ranges(_read(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cpus = tuple(sorted(siblings & online)) or (cpu,)
        cores.add(Core(cpus, node_of.get(cpu, 0)))
    return (
        Topology(tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))) if cores else None
    )


def pci_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:c1:00.0"; None if it is unknown."""
    text = _read(f"{root}/sys/bus/pci/devices/{address}/numa_node").strip()
    return int(text) if text.isdecimal() else None  # the kernel writes -1 for unknown


def _read(path: str) -> str:
    return process.read(path).decode()


# The cores of each rank --------------------------------------------------------------------------

CPU_BIND = "DDPKIT_CPU_BIND"  # binding set by the site or the user: "list:4-7:8-11"
NO_BINDING = "none"  # value of CPU_BIND: leave all ranks on the launcher's cores
# A rank needs a core besides its main thread's: gloo and NCCL communicate in threads of their
# own. With one core for each of two ranks, a step over gloo took 1.01 to 1.02 times as long as with
# both cores for both (medians of 2000 and of 400 pairs; DDPKIT_CPU_BIND=list:0:1 bench_binding.py).
_LEAST_CORES = 2
_CPUS = r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*"  # "0-3,8"
Cpus = frozenset[int]


def divide(
    topology: Topology, masks: Sequence[Cpus], gpu_nodes: Sequence[int | None]
) -> list[Cpus]:
    """Return the CPUs of each local rank of a host: a subset of its mask, and never empty.

    Ranks with the same mask divide its cores among themselves. Each rank gets whole cores, which
    no other rank has, on the NUMA node of its GPU. If a rank would get one core, the ranks near a
    node share its cores.

    A mask is kept if the launcher has given each rank its own, if it overlaps with another mask,
    or if it has fewer cores than ranks.

    masks: CPUs that each rank may run on now. gpu_nodes: NUMA node of each rank's GPU; None if the
    rank has no GPU or the node is unknown.
    """
    result = list(masks)
    for mask in set(masks):
        ranks = [rank for rank, other in enumerate(masks) if other == mask]
        cores = cores_in(topology, mask)
        overlaps = any(mask & other for other in masks if other != mask)
        own_mask = len(ranks) == 1 and len(masks) > 1
        if overlaps or own_mask or len(cores) < len(ranks) or not mask <= _cpus(cores):
            continue
        parts = _divide_cores(cores, {rank: gpu_nodes[rank] for rank in ranks})
        for rank, part in parts.items():
            result[rank] = _cpus(part) & mask
    return result


def cores_in(topology: Topology, cpus: Cpus) -> list[Core]:
    """Return the cores to which these CPUs belong."""
    return [core for core in topology.cores if not cpus.isdisjoint(core.cpus)]


def _cpus(cores: Sequence[Core]) -> Cpus:
    return frozenset(cpu for core in cores for cpu in core.cpus)


def _divide_cores(
    cores: Sequence[Core], node_of: Mapping[int, int | None]
) -> dict[int, list[Core]]:
    """Divide cores among ranks whose GPUs are on these nodes. There is a core for each rank.

    The ranks with a GPU on a node get equal shares of its cores. But if a rank would get less than
    half of an equal share of all cores, or a node has a single core or is unknown, all ranks get
    equal shares of all cores.
    """
    ranks_near: dict[int | None, list[int]] = {}
    for rank, node in node_of.items():
        ranks_near.setdefault(node, []).append(rank)
    near = {node: [core for core in cores if core.node == node] for node in ranks_near}
    if any(
        len(near[node]) < _LEAST_CORES
        or 2 * (len(near[node]) // len(ranks)) * len(node_of) < len(cores)
        for node, ranks in ranks_near.items()
    ):
        ranks_near = {None: sorted(node_of, key=lambda rank: node_of[rank] or 0)}
        near = {None: list(cores)}

    return {
        rank: part
        for node, ranks in ranks_near.items()
        for rank, part in zip(ranks, _split(near[node], len(ranks)), strict=True)
    }


def _split(cores: list[Core], count: int) -> list[list[Core]]:
    """Split cores into contiguous equal parts; if a part has one core, each gets all of them."""
    if len(cores) < _LEAST_CORES * count:
        return [cores] * count
    ends = [(2 * part * len(cores) + count) // (2 * count) for part in range(count + 1)]
    return [cores[first:last] for first, last in itertools.pairwise(ends)]


# A binding given by the site or the user ---------------------------------------------------------


def parse_binding(text: str, local_ranks: int = 1) -> list[Cpus]:
    """Return the CPUs of each local rank from the value of DDPKIT_CPU_BIND.

    "list:0-3,8-11:4-7" follows the syntax of PALS. Raises ValueError for any other form, and for
    fewer entries than local_ranks.
    """
    form = re.fullmatch(f"(?:verbose,)?list:({_CPUS}(?::{_CPUS})*)", text.strip())
    found = [frozenset(parse_ranges(part)) for part in form[1].split(":")] if form else []
    if not found or not all(found):
        raise ValueError(
            f'{CPU_BIND} is {text!r}. Expected "list:" and the CPUs of each local rank, as in '
            "list:0-3:4-7. Correct the variable, or unset it"
        )
    if len(found) < local_ranks:
        raise ValueError(
            f"{CPU_BIND}={text} has CPUs for {len(found)} local ranks, but there is a local rank "
            f"{local_ranks - 1}. Expected an entry for each rank of a host. Start fewer ranks on "
            "each host, or correct or unset the variable"
        )
    return found


def cpus_of_mask(mask: str) -> list[int]:
    """Return the CPUs of a hexadecimal mask: "0xf0" -> [4, 5, 6, 7]."""
    bits = int(mask, 16)
    return [cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1]


def mask_of_cpus(cpus: Cpus) -> str:
    """Return the hexadecimal mask of CPUs, without 0x."""
    return f"{sum(1 << cpu for cpu in cpus):x}"


# This process ------------------------------------------------------------------------------------


def available_cpus() -> Cpus:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def openmp_binding(environ: Mapping[str, str]) -> str:
    """Return the variable that makes OpenMP bind threads, such as "OMP_PROC_BIND=close", or "".

    If it is set, GNU's OpenMP binds the main thread to the first place when torch loads it.
    Source: libgomp/config/linux/affinity.c.
    """
    if environ.get("OMP_PROC_BIND", "true").strip().lower() == "false":
        return ""
    names = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES")
    return next((f"{name}={environ[name]}" for name in names if environ.get(name)), "")


def bind_process(cpus: Cpus) -> None:
    """Bind this process, its threads and their future child processes to these CPUs.

    Threads that are already bound to other CPUs keep their binding. Memory needs no binding: Linux
    allocates it on the NUMA node of the CPU that first writes to it, unless the launcher has set
    another policy.

    Raises OSError if the kernel refuses.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in process.thread_ids():
        with suppress(ProcessLookupError):  # the thread may have ended
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, cpus)


class HostMasks(NamedTuple):
    """The reports of one host's ranks. Each tuple has one entry per rank."""

    bind: bool  # whether to bind the ranks
    topology: str  # Topology.to_text(); "" if it is unknown
    binding: str  # value of DDPKIT_CPU_BIND; "" if it is unset
    masks: tuple[str, ...]  # hexadecimal masks of the CPUs that each rank may run on
    local_ranks: tuple[int, ...]
    gpu_nodes: tuple[int | None, ...]  # NUMA node of each rank's GPU; None if it is unknown
    openmp: str = ""  # a variable that makes OpenMP bind threads, such as "OMP_PROC_BIND=close"


class RankCores(NamedTuple):
    """The cores that a rank gets."""

    cpus: str  # CPUs to run on: "0-7,64-71"
    bind: bool  # whether these CPUs differ from the rank's mask
    cores: int  # number of cores; number of CPUs if the topology is unknown
    threads: int  # number of threads: the rank's share of the cores
    nodes: str  # NUMA nodes of the cores; "" if they are unknown
    gpu_node: int | None  # NUMA node of its GPU if the rank runs on other nodes, else None


@functools.lru_cache(maxsize=256)
def masks_of_ranks(host: HostMasks) -> list[Cpus]:
    return [frozenset(cpus_of_mask(mask)) for mask in host.masks]


@functools.lru_cache(maxsize=256)
def choose_cores(host: HostMasks) -> list[RankCores]:
    """Return the cores of each rank of a host. Raises LaunchError for a bad DDPKIT_CPU_BIND."""
    masks = masks_of_ranks(host)
    bind = host.bind and host.binding != NO_BINDING
    known = Topology.from_text(host.topology if bind else "")
    known_nodes = {core.node for core in known.cores}
    if bind and host.binding:
        chosen = _bind_as_given(host, masks)
    else:
        chosen = divide(known, masks, host.gpu_nodes)

    cores: list[list[Hashable]] = [[*(cores_in(known, cpus) or cpus)] for cpus in chosen]
    ranks_on = Counter(core for its_cores in cores for core in its_cores)
    result = []
    for cpus, mask, its_cores, gpu_node in zip(chosen, masks, cores, host.gpu_nodes, strict=True):
        # A core shared by several ranks counts in equal parts; 1/3 + 1/3 + 1/3 may give 0.999...
        share = sum(1 / ranks_on[core] for core in its_cores) + 1e-9
        nodes = {core.node for core in cores_in(known, cpus)}
        is_far = bool(nodes) and gpu_node in known_nodes - nodes
        result.append(
            RankCores(
                cpus=format_ranges(cpus),
                bind=cpus != mask,
                cores=len(its_cores),
                threads=max(1, int(share)),
                nodes=format_ranges(nodes),
                gpu_node=gpu_node if is_far else None,
            )
        )
    return result


def _bind_as_given(host: HostMasks, masks: Sequence[Cpus]) -> list[Cpus]:
    """Return the CPUs that DDPKIT_CPU_BIND gives each rank, without CPUs outside its mask."""
    try:
        bindings = parse_binding(host.binding, max(host.local_ranks) + 1)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    entries = (bindings[local_rank] for local_rank in host.local_ranks)
    return [entry & mask or mask for entry, mask in zip(entries, masks, strict=True)]

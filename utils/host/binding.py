"""Choose the CPUs of each local rank: whole cores on the NUMA node of its GPU. No torch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from . import process
from .topology import Core, Topology, parse_ranges

VARIABLE = "DDPKIT_CPU_BIND"  # a binding by site or user: "list:4-7:8-11", "mask_cpu:0xf0,0xf00"
NO_BINDING = "none"  # its value that leaves all cores as the launcher has set them

# A rank needs a core besides that of its main thread: gloo and NCCL communicate in threads of their
# own. With one core for each of two ranks, a step over gloo took 1.01 to 1.02 times as long as with
# both cores for both (medians of 2000 and of 400 pairs; DDPKIT_CPU_BIND=list:0:1 bench_binding.py).
_LEAST_CORES = 2

_CPUS = r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*"  # "0-3,8"
_MASK = "(?:0x)?[0-9a-fA-F]{1,10000}"

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

    masks: the CPUs that each rank may run on now. gpu_nodes: None for no GPU or an unknown node.
    """
    ranks_with: dict[Cpus, list[int]] = {}
    for rank, mask in enumerate(masks):
        ranks_with.setdefault(mask, []).append(rank)

    result = list(masks)
    for mask, ranks in ranks_with.items():
        overlaps = any(mask & other for other in ranks_with if other is not mask)
        own_mask = len(ranks) == 1 and len(masks) > 1
        cores = cores_in(topology, mask)
        all_known = mask <= _cpus(cores)
        if overlaps or own_mask or not all_known or len(cores) < len(ranks):
            continue
        parts = _divide_cores(cores, [gpu_nodes[rank] for rank in ranks])
        for rank, part in zip(ranks, parts, strict=True):
            result[rank] = _cpus(part) & mask
    return result


def cores_in(topology: Topology, cpus: Cpus) -> list[Core]:
    """Return the cores to which these CPUs belong."""
    return [core for core in topology.cores if not cpus.isdisjoint(core.cpus)]


def _cpus(cores: Sequence[Core]) -> Cpus:
    return frozenset(cpu for core in cores for cpu in core.cpus)


def _divide_cores(cores: Sequence[Core], gpu_nodes: Sequence[int | None]) -> list[list[Core]]:
    """Divide cores among ranks; there are at least as many cores as ranks.

    The ranks with a GPU on a node get equal shares of its cores. All ranks get equal shares of all
    cores if a rank would have less than half of that, or a node has a single core or is unknown.
    """
    ranks_near: dict[int | None, list[int]] = {}
    for rank, node in enumerate(gpu_nodes):
        ranks_near.setdefault(node, []).append(rank)
    near = {node: [core for core in cores if core.node == node] for node in ranks_near}
    if any(
        len(near[node]) < _LEAST_CORES
        or 2 * (len(near[node]) // len(ranks)) * len(gpu_nodes) < len(cores)
        for node, ranks in ranks_near.items()
    ):
        nodes = [-1 if None in gpu_nodes else node or 0 for node in gpu_nodes]
        by_node = sorted(range(len(nodes)), key=nodes.__getitem__)
        ranks_near, near = {None: by_node}, {None: list(cores)}

    parts: list[list[Core]] = [[] for _ in gpu_nodes]
    for node, ranks in ranks_near.items():
        for rank, part in zip(ranks, _split(near[node], len(ranks)), strict=True):
            parts[rank] = part
    return parts


def _split(cores: list[Core], count: int) -> list[list[Core]]:
    """Split cores into contiguous parts of equal size; all of them to each if a part has one."""
    if len(cores) < _LEAST_CORES * count:
        return [cores] * count
    ends = [(2 * part * len(cores) + count) // (2 * count) for part in range(count + 1)]
    return [cores[first:last] for first, last in itertools.pairwise(ends)]


def is_far(topology: Topology, cpus: Cpus, gpu_node: int | None) -> bool:
    """Return whether the GPU's NUMA node has cores, but none of these CPUs."""
    nodes = {core.node for core in cores_in(topology, cpus)}
    known = {core.node for core in topology.cores}
    return bool(nodes) and gpu_node in known - nodes


# A binding given by the site or the user ---------------------------------------------------------


def parse_binding(text: str) -> list[Cpus]:
    """Return the CPUs of each local rank from the value of DDPKIT_CPU_BIND.

    "list:0-3,8-11:4-7" is the syntax of PALS, "mask_cpu:0xf0f,0xf0" that of srun. Raises ValueError
    for other text.
    """
    form = re.fullmatch("(?:(?:verbose|v|quiet|q),)?(list|mask_cpu):(.*)", text.strip())
    found: list[Cpus] = []
    if form and form[1] == "list" and re.fullmatch(f"{_CPUS}(:{_CPUS})*", form[2]):
        found = [frozenset(parse_ranges(part)) for part in form[2].split(":")]
    elif form and form[1] == "mask_cpu" and re.fullmatch(f"{_MASK}(,{_MASK})*", form[2]):
        found = [frozenset(cpus_of_mask(part)) for part in form[2].split(",")]
    if not found or not all(found):
        raise ValueError(
            f'{VARIABLE} is {text!r}. Expected "list:" and the CPUs of each local rank, as in '
            'list:0-3:4-7, or "mask_cpu:" and their masks, as in mask_cpu:0xf,0xf0. Correct the '
            "variable, or unset it"
        )
    return found


def binding_for(text: str, local_ranks: int) -> list[Cpus]:
    """Return the CPUs of each local rank from the value of DDPKIT_CPU_BIND.

    Raises ValueError if the value is malformed, or has fewer entries than local_ranks.
    """
    given = parse_binding(text)
    if local_ranks > len(given):
        raise ValueError(
            f"{VARIABLE}={text} has CPUs for {len(given)} local ranks, but there is a local rank "
            f"{local_ranks - 1}. Expected an entry for each rank of a host. Start fewer ranks on "
            "each host, or correct or unset the variable"
        )
    return given


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

    With such a variable, GNU's OpenMP binds the main thread to the first place when torch loads it.
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
        with suppress(ProcessLookupError):  # the thread has ended
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, cpus)

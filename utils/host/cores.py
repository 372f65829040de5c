"""Choose the CPUs and the threads of each rank of a host, from what its ranks report. No torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from ..launch_error import LaunchError
from .binding import (
    NO_BINDING,
    VARIABLE,
    Cpus,
    binding_for,
    cores_in,
    cpus_of_mask,
    divide,
    is_far,
    parse_binding,
)
from .topology import Topology, format_ranges


class HostMasks(NamedTuple):
    """What the ranks of one host have reported. The tuples have one entry for each of them."""

    bind: bool  # whether to bind the ranks
    topology: str  # Topology.to_text(); "" if it is unknown
    binding: str  # DDPKIT_CPU_BIND; "" if it is unset
    masks: tuple[str, ...]  # the CPUs that each rank may run on, as a hexadecimal mask
    local_ranks: tuple[int, ...]
    gpu_nodes: tuple[int | None, ...]  # the NUMA node of each rank's GPU; None if it is unknown
    openmp: str = ""  # a variable that makes OpenMP bind threads, such as "OMP_PROC_BIND=close"


class RankCores(NamedTuple):
    """The cores of a rank."""

    cpus: str  # the CPUs that it runs on, such as "0-7,64-71"
    bind: bool  # whether these CPUs differ from its mask
    cores: int  # the number of cores; of CPUs if the topology is unknown
    threads: int  # the number of threads: its share of the cores
    nodes: str  # the NUMA nodes of the cores; "" if they are unknown
    gpu_node: int | None  # the NUMA node of its GPU, if the rank runs on other nodes; else None


class CoreNote(NamedTuple):
    """A problem with the cores of a host's ranks, and what to do."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"


@functools.lru_cache(maxsize=256)  # most hosts of a job are alike
def choose_cores(host: HostMasks) -> list[RankCores]:
    """Return the cores of each rank of a host. Raises LaunchError for a bad DDPKIT_CPU_BIND."""
    masks = [frozenset(cpus_of_mask(mask)) for mask in host.masks]
    bind = host.bind and host.binding != NO_BINDING
    known = _topology(host.topology if bind else "")
    chosen = masks
    if bind and host.binding:
        chosen = _bind_as_given(host, masks)
    elif known.cores:
        chosen = divide(known, masks, host.gpu_nodes)

    cores: list[list[Hashable]] = [[*(cores_in(known, cpus) or cpus)] for cpus in chosen]
    return [
        RankCores(
            cpus=format_ranges(cpus),
            bind=cpus != mask,
            cores=len(its_cores),
            threads=threads,
            nodes=format_ranges({core.node for core in cores_in(known, cpus)}),
            gpu_node=gpu_node if is_far(known, cpus, gpu_node) else None,
        )
        for cpus, mask, its_cores, threads, gpu_node in zip(
            chosen, masks, cores, _share_out(cores), host.gpu_nodes, strict=True
        )
    ]


def _bind_as_given(host: HostMasks, masks: Sequence[Cpus]) -> list[Cpus]:
    """Return the CPUs that DDPKIT_CPU_BIND gives to each rank, without those outside its mask."""
    try:
        given = binding_for(host.binding, max(host.local_ranks) + 1)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    entries = (given[local_rank] for local_rank in host.local_ranks)
    return [entry & mask or mask for entry, mask in zip(entries, masks, strict=True)]


def _share_out(cores: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the number of threads of each rank of a host: its share of the cores that it has.

    A core that several ranks have counts in equal parts for each of them.
    """
    ranks_on = Counter(core for its_cores in cores for core in its_cores)
    shares = [sum(1 / ranks_on[core] for core in its_cores) for its_cores in cores]
    return [max(1, int(share + 1e-9)) for share in shares]  # 1/3 + 1/3 + 1/3 may be 0.999...


def notes_on_cores(
    host: str, host_cores: int, ranks: Sequence[int], reported: HostMasks
) -> Iterator[CoreNote]:
    """Yield a warning about the cores of a host's ranks: at most one, the most important.

    host: its name. host_cores: the number of all its cores. ranks: in the order of `reported`.
    """
    chosen = choose_cores(reported)
    usable = _usable(reported)
    known = _topology(reported.topology)
    if len(cores_in(known, usable) or usable) < min(len(ranks), len(known.cores) or host_cores):
        remedy = (
            f"Unset {reported.openmp}, which binds them when torch is imported"
            if reported.openmp
            else "Request more cores, or start with --bind-to none (Open MPI), --cpu-bind none "
            "(PALS) or --cpus-per-task (srun)"
        )
        yield CoreNote(
            f"all {len(ranks)} ranks of {host} may run on core {format_ranges(usable)} only, of "
            f"{host_cores}",
            remedy,
        )
        return
    if reported.openmp and reported.bind and reported.binding != NO_BINDING:
        yield CoreNote(
            f"{reported.openmp} binds each rank when torch is imported: rank {ranks[0]} on {host} "
            f"and its DataLoader workers may run on CPUs "
            f"{format_ranges(cpus_of_mask(reported.masks[0]))} only",
            "Unset the variable: the kit then binds each rank to its share of the cores",
        )
        return
    given = reported.bind and reported.binding not in ("", NO_BINDING)
    entries = parse_binding(reported.binding) if given else []
    for rank, local_rank, one, mask in zip(
        ranks, reported.local_ranks, chosen, reported.masks, strict=True
    ):
        if entries and not entries[local_rank] <= frozenset(cpus_of_mask(mask)):
            yield CoreNote(
                f"{VARIABLE} gives CPUs {format_ranges(entries[local_rank])} to rank {rank} on "
                f"{host}, which may run on {format_ranges(cpus_of_mask(mask))} only; it runs on "
                f"{one.cpus}",
                f"Request whole nodes and start without --cpu-bind, or correct {VARIABLE}",
            )
            return
    far = [(rank, one) for rank, one in zip(ranks, chosen, strict=True) if one.gpu_node is not None]
    if far:
        rank, one = far[0]
        more = f" ({len(far)} ranks of this host are far from their GPU)" if len(far) > 1 else ""
        yield CoreNote(
            f"rank {rank} on {host} runs on CPUs {one.cpus} of NUMA node {one.nodes}, but its GPU "
            f"is on node {one.gpu_node}{more}",
            _remedy(reported, one),
        )


def _usable(reported: HostMasks) -> Cpus:
    """Return the CPUs that at least one rank of the host may run on."""
    return frozenset(cpu for mask in set(reported.masks) for cpu in cpus_of_mask(mask))


@functools.lru_cache(maxsize=256)
def _topology(text: str) -> Topology:
    """Return the topology of a host, without cores if it is unknown."""
    return Topology.from_text(text) if text else Topology(())


def _remedy(reported: HostMasks, far: RankCores) -> str:
    if is_far(_topology(reported.topology), _usable(reported), far.gpu_node):
        return "The job has no core on that node. Request more cores, or the whole host"
    if reported.binding:
        return f"Correct or unset {VARIABLE}"
    if far.bind:
        return "That node has too few cores for its ranks. Request more cores, or the whole host"
    return (
        "The launcher bound it there. Start with --cpu-bind=none (srun, PALS) or --bind-to none "
        "(Open MPI): the kit then binds each rank to cores near its GPU"
    )

"""Warn about the cores of a host's ranks: problem and remedy. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..ranges import format_ranges
from .cores import (
    CPU_BIND,
    NO_BINDING,
    HostMasks,
    Topology,
    choose_cores,
    cores_in,
    masks_of_ranks,
    parse_binding,
)


class CoreNote(NamedTuple):
    """A problem with the cores of a host's ranks, and its remedy."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"


def note_on_cores(
    host: str, host_cores: int, ranks: Sequence[int], reported: HostMasks
) -> CoreNote | None:
    """Return the most important warning about the cores of a host's ranks; None if all is well.

    host: its name. host_cores: number of its cores. ranks: rank numbers, in the order of
    `reported`.
    """
    chosen = choose_cores(reported)
    masks = masks_of_ranks(reported)
    usable = frozenset.union(*masks)
    known = Topology.from_text(reported.topology)
    if len(cores_in(known, usable) or usable) < min(len(ranks), len(known.cores) or host_cores):
        return CoreNote(
            f"all {len(ranks)} ranks of {host} may run on core {format_ranges(usable)} only, of "
            f"{host_cores}",
            f"Unset {reported.openmp}, which binds them when torch is imported"
            if reported.openmp
            else "Request more cores, or start with --bind-to none (Open MPI), --cpu-bind none "
            "(PALS) or --cpus-per-task (srun)",
        )
    binds = reported.bind and reported.binding != NO_BINDING
    if reported.openmp and binds:
        return CoreNote(
            f"{reported.openmp} binds each rank when torch is imported: rank {ranks[0]} on {host} "
            f"and its DataLoader workers may run on CPUs {format_ranges(masks[0])} only",
            "Unset the variable: the kit then binds each rank to its share of the cores",
        )
    entries = parse_binding(reported.binding) if binds and reported.binding else []
    for rank, local_rank, share, mask in zip(
        ranks, reported.local_ranks, chosen, masks, strict=True
    ):
        if entries and not entries[local_rank] <= mask:
            return CoreNote(
                f"{CPU_BIND} gives CPUs {format_ranges(entries[local_rank])} to rank {rank} on "
                f"{host}, which may run on {format_ranges(mask)} only; it runs on {share.cpus}",
                f"Request whole nodes and start without --cpu-bind, or correct {CPU_BIND}",
            )
    far = [
        (rank, share)
        for rank, share in zip(ranks, chosen, strict=True)
        if share.gpu_node is not None
    ]
    if not far:
        return None
    rank, share = far[0]
    more = f" ({len(far)} ranks of this host are far from their GPU)" if len(far) > 1 else ""
    return CoreNote(
        f"rank {rank} on {host} runs on CPUs {share.cpus} of NUMA node {share.nodes}, but its GPU "
        f"is on node {share.gpu_node}{more}",
        f"Correct or unset {CPU_BIND}"
        if entries
        else "Request the whole host and start with --cpu-bind=none (srun, PALS) or --bind-to none "
        "(Open MPI): the kit then binds each rank to cores near its GPU",
    )

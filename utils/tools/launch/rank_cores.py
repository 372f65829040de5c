"""Choose the CPUs and threads of ranks whose program does not call setup_distributed().

launch.py binds these ranks before the program starts. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

from ...host import binding
from ...host.cores import HostMasks, choose_cores
from ...host.gpus import visible_gpu_addresses
from ...host.topology import parse_ranges, pci_node, read_topology


class RankMask(TypedDict):
    """What a rank reports about its cores and GPUs."""

    mask: str  # the CPUs that it may run on: hexadecimal
    gpu_nodes: list[int | None]  # the NUMA nodes of the GPUs that it sees


def report_mask(environ: Mapping[str, str], root: Path = Path("/")) -> RankMask:
    """Return the CPUs of this process and the GPUs of a rank with this environment."""
    addresses = visible_gpu_addresses(environ, root)
    return {
        "mask": binding.mask_of_cpus(binding.available_cpus()),
        "gpu_nodes": [pci_node(address, root) if address else None for address in addresses],
    }


def divides_cores(words: Sequence[str]) -> bool:
    """Return whether the script or module of a command calls setup_distributed(), by its text."""
    modules = [
        f"{words[i + 1].replace('.', '/')}.py" for i, w in enumerate(words[:-1]) if w == "-m"
    ]
    for path in (word for word in (*words, *modules) if word.endswith(".py")):
        with suppress(OSError):
            return b"setup_distributed(" in Path(path).read_bytes()
    return False


class RankShare(NamedTuple):
    """What a rank gets of its host's cores."""

    cpus: set[int] = set()  # to bind it to; empty: do not bind it
    variables: Mapping[str, str] = {}  # OMP_NUM_THREADS, unless it is set


def shares_of_ranks(
    reports: Sequence[RankMask], environ: Mapping[str, str], root: Path = Path("/")
) -> list[RankShare]:
    """Return what each rank of this host gets of its cores.

    A rank that is alone on its host gets no variable: it may be an agent, whose workers would all
    use as many threads.

    reports: by local rank. environ: of any rank. Raises LaunchError for a bad DDPKIT_CPU_BIND.
    """
    topology = read_topology(root)
    chosen = choose_cores(
        HostMasks(
            bind=True,
            topology=topology.to_text() if topology else "",
            binding=environ.get(binding.VARIABLE, ""),
            masks=tuple(report["mask"] for report in reports),
            local_ranks=tuple(range(len(reports))),
            gpu_nodes=tuple(
                _gpu_node(report["gpu_nodes"], local_rank, len(reports))
                for local_rank, report in enumerate(reports)
            ),
        )
    )
    unset = not environ.get("OMP_NUM_THREADS") and len(reports) > 1
    return [
        RankShare(
            parse_ranges(one.cpus) if one.bind else set(),
            {"OMP_NUM_THREADS": str(one.threads)} if unset else {},
        )
        for one in chosen
    ]


def bind(cpus: set[int]) -> None:
    """Bind this process, which has one thread, to these CPUs; do nothing for an empty set."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass  # without the binding, the program is slower, not wrong


def _gpu_node(nodes: Sequence[int | None], local_rank: int, local_world_size: int) -> int | None:
    """Return the NUMA node of a rank's GPU: the one that it sees, or that of its local rank.

    Consecutive ranks may share a GPU, or use its tiles. A rank that sees more GPUs than there are
    ranks may use them all. A rank that is alone on its host may be an agent of torchrun or
    Accelerate, or may use no GPU.
    """
    if local_world_size == 1:
        return None
    if len(set(nodes)) == 1:
        return nodes[0]
    if nodes and local_world_size % len(nodes) == 0:
        return nodes[local_rank * len(nodes) // local_world_size]
    return None

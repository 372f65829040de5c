"""The processes that start on one host: ranks, each with its cores, or one torchrun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from ...errors import LaunchError
from ...host.cores import (
    CPU_BIND,
    HostMasks,
    available_cpus,
    choose_cores,
    mask_of_cpus,
    pci_node,
    read_topology,
)
from ...host.gpus import visible_gpu_addresses
from ...ranges import parse_ranges
from .child_processes import Processes
from .launch_plan import Plan
from .launch_result import print_status
from .rank_environment import rank_variables
from .rank_output import Outputs, open_file


def start_on_host(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    environ: Mapping[str, str],
    processes: Processes,
    outputs: Outputs | None,
    *,
    output_dir: str = "",
    stdin: bytes | int = b"",
) -> None:
    """Start ranks or a torchrun agent on this host.

    commands: words and variables of each process. outputs: receives their output; None if they
    share our streams. output_dir: folder for one file per rank instead; "" for none. stdin:
    standard input of the first process.
    """
    shares = _shares(commands, environ)
    for index, (words, variables) in enumerate(commands):
        target: int | None = None if outputs is None else subprocess.PIPE
        if output_dir:
            target = open_file(output_dir, variables["RANK"])
        child = processes.start(
            words,
            {**environ, **variables, **shares[index].variables},
            stdout=target,
            stderr=target,
            stdin=b"" if index else stdin,
            cpus=shares[index].cpus,
        )
        if output_dir and target is not None:
            os.close(target)
        if child is not None and outputs is not None:
            outputs.add(child, index)


def _shares(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], environ: Mapping[str, str]
) -> list[RankShare]:
    """Return the cores and variables of each rank."""
    unbound = [RankShare() for _ in commands]
    _, variables = commands[0]
    if "LOCAL_RANK" not in variables:  # torchrun's agent
        return unbound
    reports = [report_mask({**environ, **variables}) for _, variables in commands]
    try:
        return shares_of_ranks(reports, {**environ, **variables})
    except LaunchError as error:
        print_status(f"the ranks are not bound to cores: {error}")
        return unbound


class HostProcess(NamedTuple):
    """One process on a host: its words and the variables that only it has."""

    words: list[str]
    variables: dict[str, str]


def host_processes(
    plan: Plan, host: int, address: str, port: str, own_address: str
) -> list[HostProcess]:
    """Return the processes of the host with this index in the plan.

    address, port: where rank 0 or torchrun's store listens. own_address: address of this host.
    """
    threads = plan.threads[host]
    common = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if plan.options.torchrun:
        common["NODE_RANK"] = str(host)
        words = torchrun_words(plan, host, address, port, own_address)
        return [HostProcess([*plan.starter, *words], common)]

    return [
        HostProcess(
            [*plan.starter, *plan.program],
            rank_variables(
                rank=plan.first_rank(host) + local_rank,
                world_size=plan.world_size,
                local_rank=local_rank,
                local_world_size=plan.ranks[host],
                node_rank=host,
                address=address,
                port=port,
            )
            | common,
        )
        for local_rank in range(plan.ranks[host])
    ]


def torchrun_words(plan: Plan, host: int, address: str, port: str, own_address: str) -> list[str]:
    """Return the command of the torchrun agent of a host; arguments as in host_processes().

    The rendezvous is static. The c10d rendezvous, which --standalone also uses, unpickles what
    anybody has written into its store. A static one cannot restart ranks; ddpkit launch does.
    """
    options = [
        f"--nproc-per-node={plan.ranks[host]}",
        "--max-restarts=0",
        f"--nnodes={len(plan.hosts)}",
        f"--node-rank={host}",
        f"--local-addr={own_address}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]
    if plan.options.output_dir:
        options += [f"--log-dir={plan.options.output_dir}/{plan.hosts[host]}", "--redirects=3"]
    elif plan.options.label:
        options += ["--tee=3"]  # torchrun puts the local rank before each line: "[default0]:"

    command = plan.command if plan.is_script else ("--no-python", *plan.program)
    return [plan.python, "-m", "torch.distributed.run", *options, *command]


class RankMask(TypedDict):
    """What a rank reports about its cores and GPUs."""

    mask: str  # CPUs that the rank may run on, hexadecimal
    gpu_nodes: list[int | None]  # NUMA node of each visible GPU


def report_mask(environ: Mapping[str, str], root: Path = Path("/")) -> RankMask:
    """Return the CPUs of this process and the GPUs of a rank with this environment."""
    addresses = visible_gpu_addresses(environ, root)
    return {
        "mask": mask_of_cpus(available_cpus()),
        "gpu_nodes": [pci_node(address, root) if address else None for address in addresses],
    }


class RankShare(NamedTuple):
    """The share of a host's cores that a rank gets."""

    cpus: set[int] = set()  # CPUs to bind the rank to; empty: do not bind it
    variables: Mapping[str, str] = {}  # OMP_NUM_THREADS, unless it is set


def shares_of_ranks(
    reports: Sequence[RankMask], environ: Mapping[str, str], root: Path = Path("/")
) -> list[RankShare]:
    """Return what each rank of this host gets of its cores.

    A rank that is alone on its host gets no variable: it may be an agent, whose workers would all
    use as many threads.

    reports: one for each rank, by local rank. environ: environment of any rank. Raises LaunchError
    for a bad DDPKIT_CPU_BIND.
    """
    topology = read_topology(root)
    chosen = choose_cores(
        HostMasks(
            bind=True,
            topology=topology.to_text() if topology else "",
            binding=environ.get(CPU_BIND, ""),
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
            parse_ranges(share.cpus) if share.bind else set(),
            {"OMP_NUM_THREADS": str(share.threads)} if unset else {},
        )
        for share in chosen
    ]


def _gpu_node(nodes: Sequence[int | None], local_rank: int, local_world_size: int) -> int | None:
    """Return the NUMA node of a rank's GPU; None if unknown.

    It is the only node of the visible GPUs, or the node of the GPU for the local rank.

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

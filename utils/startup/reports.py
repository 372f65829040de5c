"""Per-rank start-up report, rank 0's consistency checks, and the start-up table.

check_reports() compares the reports of all ranks and assigns each rank its local rank, device,
CPUs and threads. No torch.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ..errors import LaunchError
from ..host import network, process
from ..host.core_notes import note_on_cores
from ..host.cores import (
    CPU_BIND,
    HostMasks,
    RankCores,
    available_cpus,
    choose_cores,
    mask_of_cpus,
    openmp_binding,
    read_topology,
)
from ..launchers.launcher import Placement
from ..launchers.rank_variables import INDEPENDENT, launch_rank, without_set_threads
from ..ranges import format_ranges, name_ranks

_SHOWN_HOSTS = 16
_SHOWN_RANKS = 16  # ranks of the first host, shown with their CPUs
_SHOWN_NOTES = 3

# Fields that must be equal on all ranks, and their names in the message.
_COMPARED = {
    "torch_version": "torch version",
    "kit_version": "kit version",
    "launcher": "launcher",
    "backend": "backend",
}


class RankReport(TypedDict):
    """A rank's description of itself and its host. It travels as JSON."""

    host: str
    boot_id: str  # tells containers apart that are all called localhost
    pid: int
    launcher: str
    local_rank: int | None  # from the launcher; None if it sets none
    local_world_size: int | None
    cores: str  # hexadecimal mask of the CPUs that the rank may run on
    host_cores: int
    topology: str  # sent by local rank 0 for its host; "" from other ranks
    bind: bool  # whether setup_distributed() may bind the rank
    binding: str  # DDPKIT_CPU_BIND; "" if it is unset
    omp_num_threads: str  # "" if it is unset
    openmp_binding: str  # "OMP_PROC_BIND=close"; "" if OpenMP binds no threads
    launch_rank: str  # "2/4": process 2 of ddpkit launch's 4; "" outside of a launch
    notes: list[str]
    backend: str
    devices: list[str]  # identities of the visible devices; empty for the CPU
    device_nodes: list[int | None]  # NUMA node of each device; None where unknown
    device_masks: str  # "CUDA_VISIBLE_DEVICES=0,1"
    torch_version: str
    kit_version: str
    gloo_interfaces: str  # GLOO_SOCKET_IFNAME; "" if it is unset
    addresses: list[str]  # addresses of this host's interfaces
    age: float  # seconds from the start of this process to this report
    error: str  # why this rank cannot start; "" if it can


class Assignment(TypedDict):
    """Rank 0's decision for a rank. It travels as JSON."""

    node_rank: int
    num_nodes: int
    local_rank: int
    local_world_size: int
    device_index: int | None  # index in the rank's visible devices; None for the CPU
    cpus: str  # CPUs to bind the rank to: "0-7,64-71"; "" for no binding
    threads: int


@dataclass(frozen=True)
class CheckResult:
    """The result of rank 0's check of all reports."""

    assignments: list[Assignment]  # indexed by rank
    table: str  # one row per host
    notes: list[str]
    slowest: str  # host whose rank reported last


def make_report(
    placement: Placement,
    *,
    backend: str = "",
    devices: Sequence[str] = (),
    device_nodes: Sequence[int | None] = (),
    device_masks: str = "",
    torch_version: str = "",
    kit_version: str = "",
    gloo_interfaces: str = "",
    bind: bool = True,
    error: str = "",
) -> RankReport:
    """Return this process's report. device_nodes: one for each device, or none at all."""
    # One rank per host reports it, because it has 2 kB for 256 CPUs.
    topology = read_topology() if bind and not placement.local_rank else None
    return {
        "host": socket.gethostname(),
        "boot_id": process.boot_id(),
        "pid": os.getpid(),
        "launcher": placement.launcher,
        "local_rank": placement.local_rank,
        "local_world_size": placement.local_world_size,
        "cores": mask_of_cpus(available_cpus()),
        "host_cores": os.cpu_count() or 1,
        "topology": topology.to_text() if topology else "",
        "bind": bind,
        "binding": os.environ.get(CPU_BIND, ""),
        "omp_num_threads": without_set_threads(os.environ).get("OMP_NUM_THREADS", ""),
        "openmp_binding": openmp_binding(os.environ),
        "launch_rank": launch_rank(os.environ),
        "notes": list(placement.notes),
        "backend": backend,
        "devices": list(devices),
        "device_nodes": list(device_nodes) or [None] * len(devices),
        "device_masks": device_masks,
        "torch_version": torch_version,
        "kit_version": kit_version,
        "gloo_interfaces": gloo_interfaces,
        "addresses": list(network.interfaces().values()),
        "age": round(process.age(), 1),
        "error": error,
    }


def check_reports(reports: Sequence[RankReport]) -> CheckResult:
    """Compare the reports of all ranks, given in rank order, and assign each rank its part.

    Raises LaunchError when the ranks cannot train together: they differ in a version, the
    launcher or the backend, the GPUs do not match the ranks, or gloo is bound to loopback.
    """
    _check_same_everywhere(reports)
    _check_whole_launch(reports)
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        hosts.setdefault((report["host"], report["boot_id"]), []).append(rank)
    _check_gloo_interfaces(reports, len(hosts))

    by_rank: dict[int, Assignment] = {}
    for node_rank, ranks in enumerate(hosts.values()):
        by_rank |= _assign_host(reports, ranks, node_rank, len(hosts))
    assignments = [by_rank[rank] for rank in range(len(reports))]

    host_ranks = list(hosts.values())
    cores: list[list[RankCores]] = []
    notes = list(_launch_notes(reports))
    noted = False
    for on_host in host_ranks:
        ranks = sorted(on_host, key=lambda rank: assignments[rank]["local_rank"])
        masks = _masks_of(reports, ranks, assignments)
        cores.append(choose_cores(masks))
        for rank, chosen in zip(ranks, cores[-1], strict=True):
            assignments[rank]["threads"] = chosen.threads
            assignments[rank]["cpus"] = chosen.cpus if chosen.bind else ""
        if not noted:  # one note for the first host that has one
            first = reports[ranks[0]]
            note = note_on_cores(first["host"], first["host_cores"], ranks, masks)
            notes += [str(note)] if note else []
            noted = note is not None
    slowest = max(reports, key=lambda report: report["age"])["host"]
    table = _table(reports, host_ranks, assignments, cores)
    return CheckResult(assignments, table, notes, slowest)


def _masks_of(
    reports: Sequence[RankReport], ranks: Sequence[int], assignments: Sequence[Assignment]
) -> HostMasks:
    """Return what the ranks of a host, by local rank, have reported about its cores."""
    on_host = [reports[rank] for rank in ranks]
    indices = [assignments[rank]["device_index"] for rank in ranks]
    return HostMasks(
        bind=all(report["bind"] for report in on_host),
        topology=next((report["topology"] for report in on_host if report["topology"]), ""),
        binding=on_host[0]["binding"],
        masks=tuple(report["cores"] for report in on_host),
        local_ranks=tuple(assignments[rank]["local_rank"] for rank in ranks),
        gpu_nodes=tuple(
            None if index is None else report["device_nodes"][index]
            for report, index in zip(on_host, indices, strict=True)
        ),
        openmp=on_host[0]["openmp_binding"],
    )


# Checks ------------------------------------------------------------------------------------------


def _check_same_everywhere(reports: Sequence[RankReport]) -> None:
    for field, name in _COMPARED.items():
        ranks_of: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            ranks_of.setdefault(str(report.get(field)), []).append(rank)
        if len(ranks_of) == 1:
            continue
        rows = "\n".join(
            f"  {value}: {len(ranks)} ranks, the first is rank {ranks[0]} "
            f"on {reports[ranks[0]]['host']}"
            for value, ranks in ranks_of.items()
        )
        raise LaunchError(
            f"the ranks differ in {name}; expected the same everywhere:\n{rows}\n"
            "Use one environment on all hosts, and start all ranks by one launch"
        )


def _check_whole_launch(reports: Sequence[RankReport]) -> None:
    """Raise LaunchError if processes started by ddpkit launch are missing in this group."""
    started = {report["launch_rank"] for report in reports if report["launch_rank"]}
    for text in sorted(started):
        index, _, count = text.partition("/")
        if len(started) < int(count):
            world = f"{len(reports)} rank{'s' * (len(reports) > 1)}"
            raise LaunchError(
                f"{reports[0]['launcher']} has started a group of {world} below rank {index} of "
                f"ddpkit launch, which started {count} ranks. Expected one group of all {count}. "
                f"Leave {reports[0]['launcher']} out of its command, or give "
                f"--independent ({INDEPENDENT}=1) if each rank is a program of its own"
            )


def _check_gloo_interfaces(reports: Sequence[RankReport], num_hosts: int) -> None:
    for rank, report in enumerate(reports):
        if num_hosts > 1 and "lo" in report["gloo_interfaces"].split(","):
            raise LaunchError(
                f"rank {rank} on {report['host']} has "
                f"GLOO_SOCKET_IFNAME={report['gloo_interfaces']}, the loopback interface, but the "
                f"ranks run on {num_hosts} hosts. Unset it, or name the interface that connects "
                "the hosts",
                rank=rank,
                host=report["host"],
            )


# Assignments -------------------------------------------------------------------------------------


def _assign_host(
    reports: Sequence[RankReport], ranks: Sequence[int], node_rank: int, num_nodes: int
) -> dict[int, Assignment]:
    """Assign the ranks of one host. Raises LaunchError if its GPUs do not match the ranks."""
    on_host = [reports[rank] for rank in ranks]
    known = all(
        report["local_rank"] is not None and report["local_world_size"] for report in on_host
    )
    # With several torchrun agents on one host, each of them counts local ranks from 0.
    several_agents = known and len({report["local_rank"] for report in on_host}) < len(ranks)

    assignments: dict[int, Assignment] = {}
    for index, (rank, report) in enumerate(zip(ranks, on_host, strict=True)):
        # All ranks of a host use one source: the launcher, or the order of the ranks.
        local_rank, local_world_size = index, len(ranks)
        if known and not several_agents:
            local_rank = report["local_rank"] or 0
            local_world_size = report["local_world_size"] or 1
        assignments[rank] = {
            "node_rank": node_rank,
            "num_nodes": num_nodes,
            "local_rank": local_rank,
            "local_world_size": local_world_size,
            "device_index": None,
            "cpus": "",
            "threads": 1,
        }

    for rank in ranks:
        assignments[rank]["device_index"] = _choose_device(
            reports, rank, assignments[rank], ranks if several_agents else None
        )
    _check_one_rank_per_device(reports, assignments)
    return assignments


def _choose_device(
    reports: Sequence[RankReport],
    rank: int,
    assignment: Assignment,
    several_agents_ranks: Sequence[int] | None,
) -> int | None:
    """Return a rank's index in the devices that it sees; None for the CPU.

    If it sees one device, that is the one. If it sees at least as many devices as the host has
    ranks, its local rank is the index. Otherwise mask and number of ranks contradict each other:
    LaunchError.

    several_agents_ranks: all ranks of the host, if several agents share it. Agents may have
    different masks, so only ranks that see the same devices are counted together.
    """
    visible = reports[rank]["devices"]
    local_rank, local_world_size = assignment["local_rank"], assignment["local_world_size"]
    if several_agents_ranks is not None:
        alike = [other for other in several_agents_ranks if reports[other]["devices"] == visible]
        local_rank, local_world_size = alike.index(rank), len(alike)

    if not visible:
        return None
    if len(visible) == 1:
        return 0
    if len(visible) >= local_world_size:
        return local_rank
    raise LaunchError(
        f"rank {rank} (local rank {local_rank}) on {reports[rank]['host']} sees {len(visible)} "
        f"GPUs for {local_world_size} ranks ({reports[rank]['device_masks']}); expected one GPU, "
        f"or one for each rank of the host. Start at most {len(visible)} ranks per host, request "
        "more GPUs, or let the launcher give each rank its own",
        rank=rank,
        host=reports[rank]["host"],
    )


def _check_one_rank_per_device(
    reports: Sequence[RankReport], assignments: dict[int, Assignment]
) -> None:
    """Raise LaunchError if two ranks of a host have the same device."""
    device_of = {
        rank: reports[rank]["devices"][assignment["device_index"]]
        for rank, assignment in assignments.items()
        if assignment["device_index"] is not None
    }
    if len(set(device_of.values())) == len(device_of):
        return
    rows = "\n".join(
        f"  rank {rank} (local rank {assignments[rank]['local_rank']}): "
        f"index {assignments[rank]['device_index']} = {device}, {reports[rank]['device_masks']}"
        for rank, device in device_of.items()
    )
    host = reports[next(iter(assignments))]["host"]
    raise LaunchError(
        f"several ranks on {host} use the same GPU; expected a GPU for each rank:\n{rows}\n"
        "Start at most one rank per GPU, or let the launcher give each its own GPU "
        "(srun --gpus-per-task=1)",
        host=host,
    )


# Notes and the table -----------------------------------------------------------------------------


def _launch_notes(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield the launchers' notes, each once with the number of ranks."""
    counts = Counter(note for report in reports for note in report["notes"])
    # Ranks may word the same note differently, each with its number: some examples are enough.
    for note, count in list(counts.items())[:_SHOWN_NOTES]:
        yield note if count == 1 else f"{note} ({count} ranks)"
    if len(counts) > _SHOWN_NOTES:
        yield f"... and {len(counts) - _SHOWN_NOTES} more notes of this kind"


def _table(
    reports: Sequence[RankReport],
    host_ranks: Sequence[Sequence[int]],
    assignments: Sequence[Assignment],
    cores: Sequence[Sequence[RankCores]],
) -> str:
    """Format one row per host: ranks, devices, cores and their NUMA nodes, threads.

    cores: for each host, its ranks' cores by local rank. A last line lists the first host's cores.
    """
    rows: list[tuple[str, ...]] = [("host", "ranks", "device", "cores/rank", "NUMA", "threads")]
    for ranks, chosen in list(zip(host_ranks, cores, strict=True))[:_SHOWN_HOSTS]:
        devices = [
            _device_name(reports[rank]["backend"], assignments[rank]["device_index"])
            for rank in ranks
        ]
        counts = [str(share.cores) for share in chosen]
        nodes = [share.nodes or "?" for share in chosen]
        threads = [
            reports[rank]["omp_num_threads"] or str(assignments[rank]["threads"]) for rank in ranks
        ]
        columns = (",".join(dict.fromkeys(values)) for values in (devices, counts, nodes, threads))
        rows.append((reports[ranks[0]]["host"], format_ranges(ranks, most=20), *columns))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    if len(host_ranks) > _SHOWN_HOSTS:
        lines.append(f"  ... and {len(host_ranks) - _SHOWN_HOSTS} more hosts")
    if all(share.nodes for share in cores[0]) and len(cores[0]) <= _SHOWN_RANKS:
        cpus = ":".join(share.cpus for share in cores[0])  # the format of DDPKIT_CPU_BIND=list:
        lines.append(f"  CPUs of {name_ranks(host_ranks[0])}: {cpus}")
    return "\n".join(lines)


def _device_name(backend: str, index: int | None) -> str:
    if index is None:
        return "cpu"
    return f"{'xpu' if backend == 'xccl' else 'cuda'}:{index}"


def did_not_join(missing: Sequence[int], world_size: int) -> str:
    """Return "2 of 8 ranks did not join: ranks 3,5"."""
    return f"{len(missing)} of {world_size} ranks did not join: {name_ranks(missing)}"

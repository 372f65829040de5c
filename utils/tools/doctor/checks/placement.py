"""Check where the ranks run: hosts of the job, a GPU for each rank, cores, threads.

Without torch: the drivers show which GPUs each rank sees under its masks.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....errors import LaunchError
from ....host import gpus, masks
from ....host.core_notes import note_on_cores
from ....host.cores import (
    CPU_BIND,
    HostMasks,
    available_cpus,
    choose_cores,
    cpus_of_mask,
    mask_of_cpus,
    openmp_binding,
    pci_node,
    read_topology,
)
from ....job.notation import same_host
from ....launchers.detect import detect
from ...schedulers import current_allocation
from ...schedulers.allocation import AllocationError
from ..check import Check, Finding, Level, RankPlace, Ranks, Reported
from ..networking import show

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SHOWN = 8


@dataclass(frozen=True)
class PlacementFacts:
    """The place of one rank.

    notes: its launcher's. mask: CPUs that it may run on. cpus: number of the host's CPUs that its
    control group allows. gpus: identities of the GPUs it sees; gpu_nodes: their NUMA nodes.
    allowed_gpus: identities of the GPUs it would see without device masks. threads: 0 if no
    variable sets their number. job_*: the scheduler's allocation, on rank 0.
    """

    notes: list[str]
    mask: str
    cpus: int
    topology: str
    binding: str
    openmp: str
    gpus: list[str]
    gpu_nodes: list[int | None]
    allowed_gpus: list[str]
    device_masks: str
    threads: int
    threads_variable: str
    job_id: str = ""
    job_hosts: list[str] | None = None
    job_gpus: list[int | None] | None = None
    job_cores: list[int | None] | None = None
    job_error: str = ""


class PlacementCheck(Check[PlacementFacts]):
    """Where the ranks run."""

    name = "placement"
    per = "rank"
    quick = True
    seconds = 15.0
    facts = PlacementFacts

    def collect(self, ranks: Ranks) -> PlacementFacts:
        topology = read_topology() if ranks.me.local_rank == 0 else None
        addresses = gpus.visible_gpu_addresses(os.environ)
        job = _job() if ranks.me.rank == 0 else {}
        threads, threads_variable = _threads()
        return PlacementFacts(
            notes=_notes(),
            mask=mask_of_cpus(available_cpus()),
            cpus=_allowed_cpus(),
            topology=topology.to_text() if topology else "",
            binding=os.environ.get(CPU_BIND, ""),
            openmp=openmp_binding(os.environ),
            gpus=_identities(addresses),
            gpu_nodes=[pci_node(address) if address else None for address in addresses],
            allowed_gpus=_identities(gpus.visible_gpu_addresses({})),
            device_masks=masks.set_masks(),
            threads=threads,
            threads_variable=threads_variable,
            **job,
        )

    def conclude(self, reported: Sequence[Reported[PlacementFacts]]) -> Iterator[Finding]:
        hosts: dict[int, list[Reported[PlacementFacts]]] = defaultdict(list)
        for report in reported:
            hosts[report.place.node].append(report)
        findings = [
            *_launcher_notes(reported),
            *_equal_names(hosts),
            *_unused_hosts(reported),
        ]
        job = reported[0].facts if reported else None
        for on_host in hosts.values():
            findings += _check_gpus(on_host, _job_value("job_gpus", job, on_host))
            findings += _check_cores(on_host, _job_value("job_cores", job, on_host))
        if not findings:
            findings = [Finding(Level.GOOD, _describe(list(hosts.values())))]
        yield from findings


# Facts of this rank -------------------------------------------------------------------------------


def _notes() -> list[str]:
    try:
        return list(detect().notes)
    except LaunchError as error:
        return [str(error)]


def _job() -> dict[str, Any]:
    try:
        allocation = current_allocation()
    except AllocationError as error:
        return {"job_error": str(error)}
    if allocation is None:
        return {}
    return {
        "job_id": allocation.job_id,
        "job_hosts": list(allocation.hosts),
        "job_gpus": list(allocation.gpus_per_host),
        "job_cores": list(allocation.cores_per_host),
    }


def _allowed_cpus() -> int:
    """Return the number of CPUs of this host, or of this container."""
    try:
        return len(os.sched_getaffinity(1))  # no launcher has bound the first process
    except (OSError, AttributeError):
        return os.cpu_count() or 1


def _threads() -> tuple[int, str]:
    """Return the largest number of threads set by a variable, and the variable."""
    found = [
        (int(value), name)
        for name in _THREAD_VARIABLES
        if (value := os.environ.get(name, "").partition(",")[0]).isdecimal()
    ]
    return max(found, default=(0, ""))


def _identities(addresses: Sequence[str]) -> list[str]:
    """Return an identity of each GPU: UUID, PCI address, or entry in the mask."""
    entries = next((os.environ[name] for name in masks.MASKS if os.environ.get(name)), "").split(
        ","
    )
    found = []
    for index, address in enumerate(addresses):
        entry = entries[index] if index < len(entries) else str(index)
        found.append((_uuid(address) or address) if address else entry)
    # The partitions of an AMD GPU share one address.
    seen: Counter[str] = Counter()
    for index, identity in enumerate(found):
        seen[identity] += 1
        if seen[identity] > 1:
            found[index] = f"{identity} partition {seen[identity] - 1}"
    return found


def _uuid(address: str) -> str:
    """Return the UUID of an NVIDIA GPU, such as "GPU-3f2a..."; "" if it is unknown."""
    try:
        text = Path("/proc/driver/nvidia/gpus", address, "information").read_text()
    except OSError:
        return ""
    words = text.partition("GPU UUID:")[2].split()
    return words[0] if words and "?" not in words[0] else ""


# What rank 0 concludes ----------------------------------------------------------------------------


def _launcher_notes(reported: Sequence[Reported[PlacementFacts]]) -> Iterator[Finding]:
    ranks_with: dict[str, list[RankPlace]] = defaultdict(list)
    for report in reported:
        for note in report.facts.notes:
            ranks_with[note].append(report.place)
    for note, places in list(ranks_with.items())[:3]:  # ranks may word the same cause differently
        where = f"{show(places)}: " if len(reported) > 1 else ""
        yield _finding(
            Level.WARNING, f"{where}{note.rstrip('.')}", "Follow the note, and start again", places
        )


def _equal_names(hosts: dict[int, list[Reported[PlacementFacts]]]) -> Iterator[Finding]:
    nodes: dict[str, list[RankPlace]] = defaultdict(list)
    for on_host in hosts.values():
        nodes[on_host[0].place.host].append(on_host[0].place)
    for host, places in nodes.items():
        if len(places) > 1:
            yield _finding(
                Level.BAD,
                f"{len(places)} hosts have the name {host}: {show(places)} run on different "
                "hosts. Expected a name for each host, since NCCL and MPI recognise hosts by it",
                "Give each host its own name, or give each container its own --hostname",
                places,
            )


def _unused_hosts(reported: Sequence[Reported[PlacementFacts]]) -> Iterator[Finding]:
    """Report hosts of the job without a rank, and wrong variables of the scheduler."""
    job = next((report.facts for report in reported if report.place.rank == 0), None)
    if job is None:
        return
    if job.job_error:
        yield Finding(
            Level.WARNING,
            job.job_error.rstrip("."),
            "Unset the variables of the scheduler that were changed or are left over",
        )
    used = {report.place.host for report in reported}
    unused = [
        host for host in job.job_hosts or () if not any(same_host(host, name) for name in used)
    ]
    # If no host matches, the names are only spelled differently.
    matched = len(job.job_hosts or ()) - len(unused)
    if unused and matched:
        names = ", ".join(unused[:_SHOWN]) + (" ..." if len(unused) > _SHOWN else "")
        yield Finding(
            Level.WARNING,
            f"no rank runs on {names}: {len(unused)} of the {len(job.job_hosts or ())} hosts of "
            f"job {job.job_id}. Expected ranks on each",
            "Start ranks on all hosts of the job (ddpkit launch does), or request fewer hosts",
            hosts=tuple(unused),
        )


def _job_value(
    name: Literal["job_gpus", "job_cores"],
    job: PlacementFacts | None,
    on_host: Sequence[Reported[PlacementFacts]],
) -> int | None:
    """Return the scheduler's allocation on a host: 0 outside of a job, None if unknown."""
    if job is None or job.job_hosts is None:
        return 0
    values = (job.job_gpus if name == "job_gpus" else job.job_cores) or []
    host = on_host[0].place.host
    pairs = zip(job.job_hosts, values, strict=False)
    return next((value for other, value in pairs if same_host(other, host)), None)


def _check_gpus(
    on_host: Sequence[Reported[PlacementFacts]], allocated: int | None
) -> Iterator[Finding]:
    """Compare a host's ranks with its GPUs. allocated: number of the job's GPUs there."""
    host = on_host[0].place.host
    allowed = {gpu for report in on_host for gpu in report.facts.allowed_gpus}
    used: dict[str, list[RankPlace]] = defaultdict(list)
    without: list[Reported[PlacementFacts]] = []
    for report in on_host:
        visible = report.facts.gpus
        if not visible:
            without.append(report)
        elif len(visible) == 1:
            used[visible[0]].append(report.place)
        else:
            used[visible[report.place.local_rank % len(visible)]].append(report.place)

    if without and allowed:
        yield _finding(
            Level.BAD if used else Level.WARNING,
            f"{show([report.place for report in without])} see{'s' * (len(without) == 1)} no GPU "
            f"({without[0].facts.device_masks}), but the host has {len(allowed)}. Expected a GPU "
            "for each rank; they would train on CPUs",
            "Correct or unset the mask, or request GPUs for each rank",
            [report.place for report in without],
        )
    shared = {gpu: places for gpu, places in used.items() if len(places) > 1}
    for gpu, places in list(shared.items())[:_SHOWN]:
        masks = {report.facts.device_masks for report in on_host if report.place in places}
        yield _finding(
            Level.BAD,
            f"{show(places)} share GPU {gpu} ({'; '.join(sorted(masks))}). Expected a GPU "
            "for each rank",
            "Start at most one rank per GPU, or let the launcher give each rank its own "
            "(srun --gpus-per-task=1)",
            places,
        )
    available = max(len(allowed), allocated or 0)
    if used and not shared and not without and len(on_host) > 1 and len(used) < available:
        yield _finding(
            Level.WARNING,
            f"{len(on_host)} ranks use {len(used)} of the {available} GPUs on {host}. Expected a "
            "rank for each GPU",
            "Start one rank per GPU (ddpkit launch does), or request fewer GPUs",
            hosts=(host,),
        )


def _check_cores(
    on_host: Sequence[Reported[PlacementFacts]], allocated: int | None
) -> Iterator[Finding]:
    """Check the cores of a host's ranks. allocated: number of the job's CPUs there, 0: no job."""
    place, facts = on_host[0].place, on_host[0].facts
    ranks = [report.place.rank for report in on_host]
    masks = HostMasks(
        bind=True,
        topology=facts.topology,
        binding=facts.binding,
        masks=tuple(report.facts.mask for report in on_host),
        local_ranks=tuple(report.place.local_rank for report in on_host),
        gpu_nodes=tuple(_gpu_node(report) for report in on_host),
        openmp=facts.openmp,
    )
    places = [report.place for report in on_host]
    try:
        note = note_on_cores(place.host, facts.cpus, ranks, masks)
    except LaunchError as error:
        yield _finding(Level.BAD, str(error), "Correct or unset the variable", places)
        return
    if note:
        yield _finding(Level.WARNING, note.problem, note.remedy, places)

    usable = {cpu for report in on_host for cpu in cpus_of_mask(report.facts.mask)}
    # 0: outside of a job, where all CPUs count. None: unknown, because other jobs may run there.
    cpus = facts.cpus if allocated == 0 else min(allocated or 0, facts.cpus)
    if not note and 2 * len(usable) <= cpus:
        yield _finding(
            Level.WARNING,
            f"the {len(on_host)} ranks of {place.host} may run on {len(usable)} of its {cpus} "
            f"CPUs, {len(usable) / len(on_host):.3g} for each rank; its DataLoader workers share "
            "them",
            "Start with --bind-to none (Open MPI), --cpu-bind none (PALS) or --cpus-per-task "
            "(srun): the kit then divides the CPUs among the ranks",
            places,
        )
    if not note and len(on_host) > facts.cpus:
        yield _finding(
            Level.WARNING,
            f"{len(on_host)} ranks on {place.host} share {facts.cpus} CPUs. Expected at least one "
            "for each rank",
            f"Start at most {facts.cpus} ranks on this host",
            places,
        )
    threads = sum(report.facts.threads for report in on_host)
    if threads > max(len(usable), len(on_host)):
        count, name = max(
            (report.facts.threads, report.facts.threads_variable) for report in on_host
        )
        yield _finding(
            Level.WARNING,
            f"{len(on_host)} ranks on {place.host} would start {threads} threads ({name}={count}) "
            f"on {len(usable)} CPUs. Expected at most one thread for each CPU",
            f"Unset {name}: setup_distributed() then divides the cores; or set it to "
            f"{max(1, len(usable) // len(on_host))}",
            places,
        )


def _gpu_node(report: Reported[PlacementFacts]) -> int | None:
    """Return the NUMA node of a rank's GPU; None if unknown."""
    nodes = report.facts.gpu_nodes
    return nodes[report.place.local_rank % len(nodes)] if nodes else None


def _describe(hosts: Sequence[Sequence[Reported[PlacementFacts]]]) -> str:
    """Return "2 ranks on each of 4 hosts, a GPU each, 8 cores each"."""
    counts = Counter(len(on_host) for on_host in hosts)
    ranks = " or ".join(f"{count} rank{'s' * (count > 1)}" for count in sorted(counts))
    has_gpus = any(report.facts.gpus for on_host in hosts for report in on_host)
    cores: set[int] = set()
    for on_host in hosts:
        facts = on_host[0].facts
        masks = tuple(report.facts.mask for report in on_host)
        local_ranks = tuple(range(len(on_host)))
        nodes = tuple(_gpu_node(report) for report in on_host)
        chosen = choose_cores(
            HostMasks(True, facts.topology, facts.binding, masks, local_ranks, nodes)
        )
        cores |= {share.threads for share in chosen}
    of_hosts = f"each of {len(hosts)} hosts" if len(hosts) > 1 else hosts[0][0].place.host
    each = f"{min(cores)}" if len(cores) == 1 else f"{min(cores)} to {max(cores)}"
    plural = "" if cores == {1} else "s"
    return (
        f"{ranks} on {of_hosts}, {'a GPU' if has_gpus else 'no GPU'} and {each} core{plural} each"
    )


def _finding(
    level: Level,
    message: str,
    remedy: str,
    places: Iterable[RankPlace] = (),
    hosts: Sequence[str] = (),
) -> Finding:
    ranks = tuple(place.rank for place in places)
    named = tuple(hosts or dict.fromkeys(place.host for place in places))
    return Finding(level, message, remedy, ranks, named)

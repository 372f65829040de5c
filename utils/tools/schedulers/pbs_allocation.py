"""What PBS allocated to a job: each host once, although PBS names it in several ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...job.notation import parse_number, same_host, short_name
from ...job.pbs_job import Fields, query_running_job
from .allocation import Allocation, AllocationError


@dataclass
class Host:
    """A host of a job. None: not known."""

    name: str
    lines: int = 0  # number of its lines in the node file
    cores: int | None = None
    gpus: int | None = None


class PbsHosts:
    """Hosts in the order of their first mention; "n1" and "n1.pbs.lab" are one host."""

    def __init__(self) -> None:
        self.all: list[Host] = []
        self._by_short_name: dict[str, list[Host]] = {}

    def find(self, name: str) -> Host:
        """Return the host of this name; add it if it is new."""
        namesakes = self._by_short_name.setdefault(short_name(name), [])
        for host in namesakes:
            if same_host(host.name, name):
                return host
        host = Host(name)
        self.all.append(host)
        namesakes.append(host)
        return host


def read_nodefile(lines: Iterable[str]) -> PbsHosts:
    """Return the hosts of a node file with their numbers of lines. Lines need not be adjacent."""
    hosts = PbsHosts()
    for line in lines:
        if line.strip():
            hosts.find(line.strip()).lines += 1
    return hosts


_CHUNK = re.compile(r"\(([^()]*)\)|([^()+]+)")


def chunk_resources(exec_host: str, exec_vnode: str) -> list[tuple[str, dict[str, int]]]:
    """Return host and resources of every chunk of a job, in order.

    "n1/0*2+n2/0" and "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1+n2[1]:ncpus=1)" ->
    [("n1", {"ncpus": 2, "ngpus": 1}), ("n2", {"ncpus": 2})]. The two lists have one part for each
    chunk. A virtual node need not be named after its host.
    """
    hosts = [part.partition("/")[0] for part in exec_host.split("+") if part]
    chunks = [inner or single for inner, single in _CHUNK.findall(exec_vnode)]
    if len(chunks) != len(hosts):
        chunks = [""] * len(hosts)
    return [(host, _sum_vnodes(chunk)) for host, chunk in zip(hosts, chunks, strict=True)]


def _sum_vnodes(chunk: str) -> dict[str, int]:
    """Sum the resources of "n2[0]:ncpus=1:mem=5kb+n2[1]:ncpus=1" -> {"ncpus": 2}."""
    sums: dict[str, int] = {}
    for vnode in chunk.split("+"):
        for resource in vnode.split(":")[1:]:
            name, _, value = resource.partition("=")
            if value.isdecimal():
                sums[name] = sums.get(name, 0) + int(value)
    return sums


def pbs_allocation(environ: Mapping[str, str], *, query: bool = True) -> Allocation:
    """Return what PBS allocated to the job around this process.

    query: whether to run qstat for facts that the node file and variables lack.

    Raises AllocationError where the node file cannot be read or no host is found.
    """
    job_id = environ["PBS_JOBID"]
    job = query_running_job(job_id) if query else {}
    hosts = _read_nodefile(environ, job)
    chunks = chunk_resources(job.get("exec_host", ""), job.get("exec_vnode", ""))
    in_order = _add_chunks(hosts, chunks)
    in_order += [host for host in hosts.all if host not in in_order]
    if not in_order:
        raise AllocationError(
            f"PBS job {job_id} has no host: PBS_NODEFILE={environ.get('PBS_NODEFILE', '')} names "
            "none, and neither does qstat. A running job has at least one. Start from a shell of "
            "the job itself."
        )

    runs = parse_number(job.get("run_count", ""))
    return Allocation(
        "pbs",
        job_id,
        tuple(host.name for host in in_order),
        tuple(host.lines for host in in_order),
        tuple(host.gpus for host in in_order),
        tuple(host.cores for host in in_order),
        None if runs is None else max(0, runs - 1),
        _notes(job, len(chunks), in_order),
        outlives_host=job.get("tolerate_node_failures") == "all" if job else None,
    )


def _add_chunks(hosts: PbsHosts, chunks: list[tuple[str, dict[str, int]]]) -> list[Host]:
    """Add the resources of all chunks to their hosts; return these hosts in order."""
    in_order: list[Host] = []
    counts_gpus = any("ngpus" in resources for _, resources in chunks)  # else PBS knows no GPUs
    for name, resources in chunks:
        host = hosts.find(name)
        if host not in in_order:
            in_order.append(host)
        if "ncpus" in resources:
            host.cores = (host.cores or 0) + resources["ncpus"]
        if counts_gpus:
            host.gpus = (host.gpus or 0) + resources.get("ngpus", 0)
    return in_order


def _notes(job: Fields, chunks: int, hosts: list[Host]) -> tuple[str, ...]:
    if len(hosts) > 1 or chunks < 2 or "pack" in job.get("Resource_List.place", ""):
        return ()
    select = job.get("Resource_List.select", "")
    return (
        f"PBS has placed all {chunks} chunks of select={select} on one host, {hosts[0].name}. "
        f"For {chunks} hosts request -l place=scatter",
    )


def _read_nodefile(environ: Mapping[str, str], job: Fields) -> PbsHosts:
    """Return the hosts of PBS_NODEFILE; none if it is not set: then qstat has them.

    It is not set in pbsdsh's tasks on the first host.
    """
    path = environ.get("PBS_NODEFILE")
    if not path:
        return PbsHosts()
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return read_nodefile(file)
    except OSError as error:
        if job.get("exec_host"):
            return PbsHosts()
        raise AllocationError(
            f"PBS job {environ['PBS_JOBID']}: the node file PBS_NODEFILE={path} cannot be read "
            f"({error.strerror}). It was expected on every host of a running job. "
            "Start from a shell of the job itself."
        ) from None

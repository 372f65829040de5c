"""What PBS allocated to the job around this process, from its node file, variables and qstat."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .allocation import Allocation, AllocationError
from .commands import SchedulerError
from .pbs_nodefile import Host, Hosts, read_nodefile
from .pbs_output import Fields, chunk_resources, parse_time
from .pbs_query import query_job
from .units import parse_duration, parse_number

_TIMEOUT_SECONDS = 10.0  # of a query; a job is waiting


class PbsAllocation(Allocation):
    """An allocation of PBS."""

    def seconds_left(self) -> float | None:
        """Query the seconds until the walltime limit; None without a limit or a response.

        What PBS counted is up to two minutes old: the time since the start counts too.
        """
        job = _query_job(self.job_id)
        limit = _seconds(job, "Resource_List.walltime")
        if limit is None:
            return None
        used = float(_seconds(job, "resources_used.walltime") or 0)
        start = parse_time(job.get("stime", ""))
        since_start = time.time() - start if start is not None else 0.0
        if 0 <= since_start <= limit + 3600:
            used = max(used, since_start)
        return max(0.0, limit - used)


def pbs_allocation(environ: Mapping[str, str], *, query: bool = True) -> PbsAllocation:
    """Return what PBS allocated to the job around this process.

    query: whether to run qstat for what node file and variables lack.

    Raises AllocationError where the node file cannot be read or no host is found.
    """
    job_id = environ["PBS_JOBID"]
    job = _query_job(job_id) if query else {}
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
    return PbsAllocation(
        "pbs",
        job_id,
        tuple(host.name for host in in_order),
        tuple(host.lines for host in in_order),
        tuple(host.gpus for host in in_order),
        tuple(host.cores for host in in_order),
        parse_number(environ.get("PBS_ARRAY_INDEX", "")),
        None if runs is None else max(0, runs - 1),
        _notes(job, len(chunks), in_order),
    )


def _add_chunks(hosts: Hosts, chunks: list[tuple[str, dict[str, int]]]) -> list[Host]:
    """Add the resources of all chunks to their hosts; return these hosts in order."""
    in_order: list[Host] = []
    counts_gpus = any("ngpus" in resources for _, resources in chunks)  # else PBS has no GPUs
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


def _read_nodefile(environ: Mapping[str, str], job: Fields) -> Hosts:
    """The hosts of PBS_NODEFILE; none without the variable, as in pbsdsh's tasks on the first host.

    qstat then has them.
    """
    path = environ.get("PBS_NODEFILE")
    if not path:
        return Hosts()
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return read_nodefile(file)
    except OSError as error:
        if job.get("exec_host"):
            return Hosts()
        raise AllocationError(
            f"PBS job {environ['PBS_JOBID']}: the node file PBS_NODEFILE={path} cannot be read "
            f"({error.strerror}). It was expected on every host of a running job. "
            "Start from a shell of the job itself."
        ) from None


def _query_job(job_id: str) -> Fields:
    """The record of a job; empty where qstat does not respond."""
    try:
        return query_job(job_id, timeout_seconds=_TIMEOUT_SECONDS) or {}
    except SchedulerError:
        return {}


def _seconds(job: Fields, name: str) -> int | None:
    return parse_duration(job.get(name, ""), plain_number_seconds=1)

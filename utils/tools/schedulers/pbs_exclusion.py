"""Let PBS jobs avoid hosts. PBS cannot exclude a host: the job names the hosts that it requests.

A select statement compares resources for equality only (PBS Reference Guide, "Requesting
Resources"). So the hosts are chosen here, among those that have the same resources as the bad ones,
free hosts first. The job waits for exactly these hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...job.allocation import parse_number, same_host
from ...job.commands import run_command
from ...job.pbs_job import Fields, find_program, members, query_job, query_objects

_TIMEOUT_SECONDS = 10.0  # of each query; a job or a user waits
_MAX_LENGTH = 3000  # of the select statement in a directive
_DIFFER = ("host", "vnode", "mem", "vmem")  # between hosts of one kind
_DOWN = {"down", "offline", "unknown", "state-unknown", "stale", "maintenance", "provisioning"}


class _Host(NamedTuple):
    name: str  # resources_available.host
    names: tuple[str, ...]  # that one too, and in full: "n1.pbs.lab"
    kind: object  # equal for hosts that one job may use alike
    is_up: bool
    is_free: bool

    def is_one_of(self, names: Iterable[str]) -> bool:
        return any(same_host(own, name) for own in self.names for name in names)


def without_hosts(select: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return a select statement that requests other hosts, and why there is none; or "".

    Raises SchedulerError.
    """
    known = _query_hosts()
    if not any(host.is_one_of(hosts) for host in known):
        return select, ""
    return _select_without(select, known, hosts, ())


def exclude_hosts(
    job_id: str, hosts: Sequence[str], preferred: Sequence[str], dry_run: bool = False
) -> str:
    """Let a queued job request other hosts, `preferred` first; return why it cannot, or "".

    Raises SchedulerError.
    """
    job = query_job(job_id, timeout_seconds=_TIMEOUT_SECONDS) or {}
    select, place = (job.get(f"Resource_List.{name}", "") for name in ("select", "place"))
    if "scatter" not in place:
        return f"PBS cannot exclude a host, and the job is placed with place={place}, not scatter"
    changed, problem = _select_without(select, _query_hosts(), hosts, preferred)
    if not problem and changed != select and not dry_run:
        options = ["-l", f"select={changed}", "-l", f"place={place}"]
        run_command([find_program("qalter"), *options, job_id])
    return problem


def _select_without(
    select: str, hosts: Sequence[_Host], bad_names: Sequence[str], preferred: Sequence[str]
) -> tuple[str, str]:
    """Return a select statement that names other hosts than the bad ones, or why there is none."""
    bad = [host for host in hosts if host.is_one_of(bad_names)]
    chunks = [_parse(chunk) for chunk in _expand(select)]
    if all(chunk.get("host") and not _names(chunk["host"], bad_names) for chunk in chunks):
        return select, ""
    if any("vnode" in chunk for chunk in chunks):
        return select, "the job names vnodes, and PBS cannot exclude a host"

    kinds = [host.kind for host in bad]
    good = [host for host in hosts if host.is_up and not host.is_one_of(bad_names)]
    usable = [host for host in good if host.is_one_of(preferred) or host.kind in kinds]
    usable.sort(key=lambda host: (not host.is_one_of(preferred), not host.is_free))
    if len(usable) < len(chunks):
        names = ", ".join(host.name for host in bad) or ", ".join(bad_names)
        return select, (
            f"PBS cannot exclude a host, and besides {names} it has {len(usable)} hosts with the "
            f"same resources, of the {len(chunks)} that the job requests"
        )
    named = [{**chunk, "host": host.name} for chunk, host in zip(chunks, usable, strict=False)]
    changed = "+".join(":".join(["1", *map("=".join, chunk.items())]) for chunk in named)
    if len(changed) > _MAX_LENGTH:
        return select, (
            f"PBS cannot exclude a host, and a select that names {len(chunks)} hosts is too long"
        )
    return changed, ""


def _expand(select: str) -> Iterable[str]:
    """ "2:ncpus=4+1:ncpus=8" -> "ncpus=4", "ncpus=4", "ncpus=8"."""
    for group in select.split("+"):
        first, _, rest = group.partition(":")
        count = parse_number(first)
        yield from [group] if count is None else [rest] * count


def _parse(chunk: str) -> dict[str, str]:
    words = (word.partition("=") for word in chunk.split(":") if word)
    return {name: value for name, _, value in words}


def _names(host: str, others: Iterable[str]) -> bool:
    return any(same_host(host, other) for other in others)


def _query_hosts() -> list[_Host]:
    """Query the hosts of all vnodes. Raises SchedulerError."""
    vnodes = query_objects("nodes", "pbsnodes", "-a", timeout_seconds=_TIMEOUT_SECONDS)
    by_host: dict[str, list[Fields]] = {}
    for name, vnode in vnodes.items():
        host = vnode.get("resources_available.host", name)
        by_host.setdefault(host, []).append(vnode)
    return [_host(name, of_host) for name, of_host in by_host.items()]


def _host(name: str, vnodes: Sequence[Mapping[str, str]]) -> _Host:
    states = {word.strip() for vnode in vnodes for word in vnode.get("state", "").split(",")}
    assigned = [parse_number(vnode.get("resources_assigned.ncpus", "")) for vnode in vnodes]
    return _Host(
        name,
        tuple(dict.fromkeys([name, *(vnode.get("Mom", name) for vnode in vnodes)])),
        sorted(_kind(vnode) for vnode in vnodes),
        is_up=not states & _DOWN,
        is_free=states == {"free"} and not any(assigned),
    )


def _kind(vnode: Mapping[str, str]) -> list[tuple[str, str]]:
    resources = members(dict(vnode), "resources_available")
    kept = {name: value for name, value in resources.items() if name not in _DIFFER}
    kept["queue"] = vnode.get("queue", "")
    return sorted(kept.items())

"""The queues, server and hosts of a PBS site, and the limits that a job exceeds.

Limits are resources_max and resources_min of a queue or the server (PBS Reference Guide, queue and
server attributes). They hold for a job as a whole: a job with select=3:ncpus=4 requests ncpus=12
and nodect=3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...job.allocation import format_walltime, parse_duration, parse_number, parse_size
from ...job.commands import SchedulerError
from ...job.pbs_job import Fields, members, query_objects
from .job_spec import option_name, option_value
from .scheduler import Queue

_TIMEOUT_SECONDS = 10.0  # of each query; a user waits for the submission
_PER_PROCESS = ("ompthreads",)  # not summed over the chunks


@dataclass(frozen=True)
class _HostSize:
    cores: int = 0
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class ServerState:
    """What the server reports of its queues, itself and its hosts; empty where it does not."""

    queues: Mapping[str, Fields]
    server: Fields
    host_sizes: Mapping[str, _HostSize]

    @classmethod
    def query(cls) -> ServerState:
        """Query the server. Nothing is raised where it does not respond."""
        queues = _query("Queue", "qstat", "-Qf")
        if not queues:
            return cls({}, {}, {})
        servers = _query("Server", "qstat", "-Bf")
        vnodes = _query("nodes", "pbsnodes", "-a")
        return cls(queues, next(iter(servers.values()), {}), _sum_hosts(vnodes))

    @property
    def default_queue(self) -> str:
        """The queue of a job that names none; "" where it is not known."""
        return self.server.get("default_queue", "")

    def as_queues(self) -> list[Queue]:
        """Return all queues with the hosts of the whole site, and without limits.

        PBS ties hosts to queues in too many ways. For the limits see limit_problems().
        """
        sizes = self.host_sizes.values()
        return [
            Queue(
                name,
                is_default=name == self.default_queue,
                is_open=queue.get("enabled") != "False" and queue.get("from_route_only") != "True",
                max_nodes=len(sizes) or None,
                cores_per_node=max((size.cores for size in sizes), default=0) or None,
                gpus_per_node=max((size.gpus for size in sizes), default=0) or None,
                memory_per_node_bytes=max((size.memory_bytes for size in sizes), default=0) or None,
            )
            for name, queue in self.queues.items()
        ]

    def limit_problems(self, options: Sequence[Sequence[str]], queue: str) -> list[str]:
        """Return the limits that a job with these options exceeds in a queue, with remedies."""
        record = self.queues.get(queue, {})
        default_chunk = members(self.server, "default_chunk") | members(record, "default_chunk")
        requested = _requested(options, default_chunk)
        defaults = members(self.server, "resources_default") | members(record, "resources_default")
        for resource, value in defaults.items():
            default = _amount(value)
            if default is not None:
                requested.setdefault(resource, default)

        problems = []
        for attribute, is_max in (("resources_max", True), ("resources_min", False)):
            of_queue = members(record, attribute)
            for resource, value in (members(self.server, attribute) | of_queue).items():
                limit = _amount(value)
                amount = requested.get(resource)
                if limit is None or amount is None:
                    continue
                if amount <= limit if is_max else amount >= limit:
                    continue
                owner = f"queue {queue}" if resource in of_queue else "the server"
                whole = "" if ":" in value else " for the whole job"
                found, remedy = ("more", "less") if is_max else ("less", "more")
                problems.append(
                    f"{resource}: {_show(amount, value)}{whole} is {found} than the "
                    f"{_show(limit, value)} of {owner} ({attribute}). Request {remedy}, or take "
                    "another queue."
                )
        return problems


def _query(kind: str, program: str, option: str) -> dict[str, Fields]:
    try:
        return query_objects(kind, program, option, timeout_seconds=_TIMEOUT_SECONDS)
    except SchedulerError:
        return {}


def _sum_hosts(vnodes: Mapping[str, Fields]) -> dict[str, _HostSize]:
    """Sum the virtual nodes of each host."""
    sizes: dict[str, _HostSize] = {}
    for name, vnode in vnodes.items():
        available = members(vnode, "resources_available")
        host = available.get("host", name)
        before = sizes.get(host, _HostSize())
        sizes[host] = _HostSize(
            before.cores + (parse_number(available.get("ncpus", "")) or 0),
            before.gpus + (parse_number(available.get("ngpus", "")) or 0),
            before.memory_bytes + (parse_size(available.get("mem", "")) or 0),
        )
    return sizes


def _requested(
    options: Sequence[Sequence[str]], default_chunk: Mapping[str, str]
) -> dict[str, float]:
    """The amounts for the whole job of options such as ["-l", "select=2:ncpus=8+1:mem=4gb"].

    Resources without an amount (host=n1) are left out.
    """
    requested: dict[str, float] = {}
    for words in options:
        if option_name(words) != "-l":
            continue
        for part in option_value(words).split(","):
            name, _, value = part.strip().partition("=")
            if name in ("select", "nodes"):
                # What is given for the whole job takes precedence.
                requested = _sum_chunks(value, default_chunk) | requested
            elif (amount := _amount(value)) is not None:
                requested[name] = amount
    return requested


def _sum_chunks(select: str, default_chunk: Mapping[str, str]) -> dict[str, float]:
    """Sum the chunks of "2:ncpus=8:mpiprocs=4+1:ngpus=2"; nodect is their number.

    Torque's "2:ppn=4+n3" means 2:ncpus=4:mpiprocs=4 and one more chunk.
    """
    sums: dict[str, float] = {}
    for chunk in select.split("+"):
        words = chunk.split(":")
        count = parse_number(words[0])
        given = dict(word.split("=", 1) for word in words if "=" in word)
        resources = {**default_chunk, **given, "nodect": "1"}
        if "ppn" in resources:
            resources["ncpus"] = resources["mpiprocs"] = resources.pop("ppn")
        for name, value in resources.items():
            amount = _amount(value)
            if amount is not None and name not in _PER_PROCESS:
                sums[name] = sums.get(name, 0) + amount * (1 if count is None else count)
    return sums


def _amount(value: str) -> float | None:
    """A number, the bytes of "4gb" or the seconds of "02:00:00"; None for any other text."""
    if ":" in value:
        return parse_duration(value)
    size = parse_size(value)
    if size is not None:
        return size
    return float(value) if re.fullmatch(r"[0-9]+\.[0-9]+", value) else None


def _show(amount: float, like: str) -> str:
    """An amount in the form of another one: "01:00:00", "4.5gb", "12"."""
    if ":" in like:
        return format_walltime(int(amount))
    is_size = not like.isdecimal() and parse_size(like) is not None
    return f"{amount / (1 << 30):.4g}gb" if is_size else f"{amount:g}"

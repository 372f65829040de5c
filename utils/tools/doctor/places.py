"""Find which rank runs on which host, as far as lines of the output show it."""

from __future__ import annotations

import re
from typing import NamedTuple

from .labels import HOST, split_labels

_RANK_AND_HOST = tuple(
    re.compile(pattern.format(rank=r"(?P<rank>\d+)", host=rf"(?P<host>{HOST})"))
    for pattern in (
        " on rank {rank} on {host}: ",  # messages that the kit logs
        r"\[rank {rank}/\d+ {host}\] ",
    )
)
# The launcher's number of a process, which is a rank or one of torchrun's agents.
_TASK_AND_HOST = tuple(
    re.compile(pattern.format(task=r"(?P<task>\d+)", host=rf"(?P<host>{HOST})"))
    for pattern in (
        "srun: error: {host}: task {task}:",
        r"process rank {task} with PID \S+ on node {host}",  # Open MPI
        "{host}: rank {task} (?:died|exited)",  # PALS
        r"RANK {task} PID \d+ RUNNING AT {host}",  # MPICH
    )
)
_TASKS_OF_HOST = re.compile(rf"srun: error: ({HOST}): tasks ([\d,-]+): ")
_RANK = re.compile(
    r"\[[Rr]ank ?(\d+)\]|[Rr]ank (\d+) failed to pass|did not receive grad for rank (\d+)"
    r"|\(rank (\d+) in comm|^  rank +: (\d+)|calls at and around rank (\d+)"
)
_TASK = re.compile(r"Process name: \[\S+,(\d+)\]")
# "n2:41:97 [0] NCCL", "[n2:41] *** Process received signal", torchrun's summary, LSF's report
_HOST = re.compile(
    rf"(?<![\w.-])({HOST}):\d+:\d+ \[\d+\] "
    rf"|\[(?!(?:pid|tid|line)\b)([A-Za-z][\w.-]*)(?<!\.py):\d+[]: ]"
    rf"|srun: error: ({HOST}): tasks|  ?ON ({HOST}) CANCELLED|^  host +: ({HOST})"
    rf"|PID \d+ RUNNING AT ({HOST})|slurmstepd-({HOST}): "
    rf"|executed on host\(s\) <(?:\d+\*)?({HOST})>, in queue"
)
_LOCAL_RANK = re.compile(r"^  rank +: (\d+) \(local_rank: (\d+)\)")
# Lines that torchrun prints, or that show it has started the ranks: a task is then an agent.
_TORCHRUN = re.compile(
    r"torch[./]distributed[./]elastic[./]|ChildFailedError|\(local_rank: \d+\)|local_rank: \d+ \("
    r"|torch/distributed/run\.py|bin/torchrun|elastic_launch|^ *\d+: \[default\d+\]|\[default\d+\]:"
)


class Place(NamedTuple):
    """The place that a line comes from, or is about.

    task: the launcher's number of a process, which is a rank or one of torchrun's agents.
    local: number of a rank on its host.
    """

    rank: int | None = None
    host: str | None = None
    task: int | None = None
    local: int | None = None


def place_of(line: str) -> Place:
    """Return the place a line is about, else the place in its labels.

    Rank and host belong to one process: they are next to each other, or in labels of one line.
    """
    for pattern in _RANK_AND_HOST:
        if both := pattern.search(line):
            return Place(int(both["rank"]), both["host"])
    for pattern in _TASK_AND_HOST:
        if both := pattern.search(line):
            return Place(None, both["host"], int(both["task"]))
    labels = split_labels(line)
    rank = _RANK.search(line) or _RANK.search(labels.message)
    host = _HOST.search(line) or _HOST.search(labels.message)
    task = _TASK.search(line)
    return Place(
        int(rank[rank.lastindex or 0]) if rank else labels.rank,
        host[host.lastindex or 0] if host else labels.host,
        int(task[1]) if task else labels.task,
        labels.local,
    )


def tasks_of_host(line: str) -> tuple[str, list[int]]:
    """Return host and numbers in "srun: error: n7: tasks 0-2,5: Killed"; none for other lines."""
    found = _TASKS_OF_HOST.search(line)
    if not found:
        return "", []
    numbers: list[int] = []
    for part in found[2].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers += range(int(first), int(last or first) + 1)
    return found[1], numbers


def is_by_torchrun(line: str) -> bool:
    """Whether torchrun, or one of its ranks, has printed a line."""
    return _TORCHRUN.search(line) is not None


def differs_from_local_rank(line: str) -> bool:
    """Whether torchrun's summary shows that ranks are not numbered by their place on a host."""
    found = _LOCAL_RANK.search(line)
    return found is not None and found[1] != found[2]


class Places:
    """Knows which rank runs on which host, as far as single lines name both."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()  # hosts that any line names
        self._host_of_rank: dict[int, str] = {}
        self._host_of_task: dict[int, str] = {}
        self._by_torchrun = False  # a task is then an agent
        self._several_hosts = False

    @property
    def hosts_without_rank(self) -> set[str]:
        """The host, if all lines name the same one, and none names a rank or task on it."""
        is_free = len(self.hosts) == 1 and not self._host_of_rank and not self._host_of_task
        return self.hosts if is_free else set()

    def note(self, text: str, place: Place) -> None:
        """Record the names in a line."""
        self._by_torchrun = self._by_torchrun or is_by_torchrun(text)
        self._several_hosts = self._several_hosts or differs_from_local_rank(
            split_labels(text).message
        )
        host, tasks = tasks_of_host(text)
        for task in tasks:
            self._host_of_task.setdefault(task, host)
        if place.host:
            self.hosts.add(place.host)
            if place.rank is not None:
                self._host_of_rank.setdefault(place.rank, place.host)
            if place.task is not None:
                self._host_of_task.setdefault(place.task, place.host)

    def resolve(self, place: Place) -> tuple[int | None, str | None]:
        """Return the rank and the host of a place."""
        rank, host = place.rank, place.host
        if rank is None and not self._by_torchrun:
            rank = place.task
        if rank is None and len(self.hosts) < 2 and not self._several_hosts:
            rank = place.local  # otherwise each host has a rank with that number
        if host is None and rank is not None:
            host = self._host_of_rank.get(rank)
            if host is None and not self._by_torchrun:
                host = self._host_of_task.get(rank)
        if host is None and place.task is not None:
            host = self._host_of_task.get(place.task)
        return rank, host

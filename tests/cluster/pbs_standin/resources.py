"""The resource requests of qsub -l: select, place and walltime; and where chunks are placed."""
from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

COUNTS = ("ncpus", "ngpus")  # what a node has a number of
KNOWN = {*COUNTS, "mpiprocs", "ompthreads", "host"}


class Refused(Exception):
    """A command fails with this exit status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def illegal(name: str) -> Refused:
    return Refused(166, f"Illegal attribute or resource value {name}")


def walltime(text: str) -> str:
    """Convert "90" or "1:30" to "00:01:30"."""
    words = text.split(":")
    if len(words) > 3 or not all(re.fullmatch(r"\d+", word) for word in words):
        raise illegal("Resource_List.walltime")
    total = sum(int(word) * 60 ** power for power, word in enumerate(reversed(words)))
    minutes, rest = divmod(total, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def seconds(text: str) -> int:
    hours, minutes, rest = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(rest)


@dataclass
class Chunk:
    """One chunk of a select statement, with its resources in the order in which they were requested."""

    requested: dict[str, str]
    host: str = ""  # where it was placed
    slot: int = 0

    def count(self, name: str) -> int:
        return int(self.requested.get(name, 1 if name == "ncpus" else 0))

    @property
    def lines(self) -> int:
        """The number of lines that its host has in the node file."""
        return int(self.requested.get("mpiprocs", 1))

    @property
    def threads(self) -> int:
        return int(self.requested.get("ompthreads", self.count("ncpus")))

    def vnode(self) -> str:
        """Its part of exec_vnode: "(n1:ncpus=2:ngpus=1)"."""
        names = [name for name in self.requested if name in COUNTS]
        names = names if "ncpus" in names else ["ncpus", *names]
        return f"({self.host}:{':'.join(f'{name}={self.count(name)}' for name in names)})"

    def place(self) -> str:
        """Its part of exec_host: "n1/0*2"."""
        count = self.count("ncpus")
        return f"{self.host}/{self.slot}{f'*{count}' if count > 1 else ''}"


def chunks(select: str) -> list[Chunk]:
    """Return the chunks of a select statement."""
    result = []
    for group in select.split("+"):
        words = group.split(":")
        number = "1" if "=" in words[0] else words.pop(0)
        if not re.fullmatch("[1-9][0-9]*", number):
            raise illegal("Resource_List.select")
        requested = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not value:
                raise illegal("Resource_List.select")
            if name not in KNOWN:
                raise Refused(187, f"Unknown resource: {name}")
            if name != "host" and not value.isdigit():
                raise illegal(f"select.{name}")
            requested[name] = value
        result += [Chunk(dict(requested)) for _ in range(int(number))]
    return result


def resource_list(requested: Mapping[str, str]) -> dict[str, str]:
    """Check a request; return the job's Resource_List with select, place, and the sums over all chunks."""
    for name in requested:
        if name not in ("select", "place", "walltime"):
            raise Refused(187, f"Unknown resource Resource_List.{name}")
    result = {"select": "1:ncpus=1", "place": "free" if "select" in requested else "pack", **requested}
    if "walltime" in result:
        result["walltime"] = walltime(result["walltime"])
    if result["place"] not in ("free", "pack", "scatter"):
        raise illegal("Resource_List.place")

    parts = chunks(result["select"])
    sums = {"ncpus": sum(part.count("ncpus") for part in parts), "nodect": len(parts),
            "ngpus": sum(part.count("ngpus") for part in parts),
            "mpiprocs": sum(part.count("mpiprocs") for part in parts)}
    return result | {name: str(value) for name, value in sums.items() if value or name == "ncpus"}


@dataclass
class Node:
    """An execution host. mom: its name in node files. slots: the numbers after the slash in exec_host, with the job."""

    name: str
    mom: str
    total: dict[str, int]
    used: dict[str, dict[str, int]] = field(default_factory=dict)  # by job
    slots: dict[int, str] = field(default_factory=dict)

    def free(self, name: str) -> int:
        return self.total[name] - sum(used[name] for used in self.used.values())

    def take(self, part: Chunk, job: str) -> None:
        """Give resources to a chunk of a job."""
        part.host = self.name
        part.slot = next(number for number in itertools.count() if number not in self.slots)
        self.slots[part.slot] = job
        used = self.used.setdefault(job, dict.fromkeys(COUNTS, 0))
        for name in COUNTS:
            used[name] += part.count(name)

    def release(self, job: str) -> None:
        self.used.pop(job, None)
        self.slots = {slot: other for slot, other in self.slots.items() if other != job}


def placed(parts: Sequence[Chunk], place: str, nodes: Iterable[Node]) -> list[Node] | None:
    """Return the node of each chunk, the first with room as on equal idle hosts; None where there is no room."""
    left = {node.name: {name: node.free(name) for name in COUNTS} for node in nodes}

    def fits(together: Sequence[Chunk], node: Node) -> bool:
        return all(part.requested.get("host", node.name) == node.name for part in together) and all(
            sum(part.count(name) for part in together) <= left[node.name][name] for name in COUNTS)

    if place == "pack":
        found = next((node for node in nodes if fits(parts, node)), None)
        return [found] * len(parts) if found else None
    chosen: list[Node] = []
    for part in parts:
        found = next((node for node in nodes if fits([part], node) and not (place == "scatter" and node in chosen)),
                     None)
        if found is None:
            return None
        chosen.append(found)
        for name in COUNTS:
            left[found.name][name] -= part.count(name)
    return chosen

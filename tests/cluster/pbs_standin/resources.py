"""The resource requests of qsub -l: select, place, nodes=:ppn=, walltime, sizes; and where chunks are placed."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

COUNTS = ("ncpus", "ngpus")  # what a node has a number of; memory is apart because it has units
KNOWN = {"ncpus", "ngpus", "mem", "mpiprocs", "ompthreads", "host", "vnode", "arch"}
UNITS = {"": 0, "b": 0, "kb": 1, "mb": 2, "gb": 3, "tb": 4}


class Refused(Exception):
    """A command fails with this exit status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def illegal(name: str = "") -> Refused:
    return Refused(166, f"Illegal attribute or resource value{' ' + name if name else ''}")


def kilobytes(text: str, name: str = "Resource_List.mem") -> int:
    found = re.fullmatch(r"(\d+)([kmgt]?b?)", text.lower())
    if found is None:
        raise illegal(name)
    unit = found[2] if found[2].endswith("b") or not found[2] else found[2] + "b"
    size_in_bytes = int(found[1]) << 10 * UNITS[unit]
    return -(-size_in_bytes // 1024)


def size(amount: int) -> str:
    """Kilobytes as PBS shows a sum: in the largest unit that needs no fraction."""
    for unit in ("kb", "mb", "gb"):
        if amount % 1024 or amount == 0:
            return f"{amount}{unit}"
        amount //= 1024
    return f"{amount}tb"


def walltime(text: str) -> str:
    """"90" or "1:30" as "00:01:30"."""
    words = text.split(":")
    if len(words) > 3 or not all(re.fullmatch(r"\d+", word) for word in words):
        raise illegal("Resource_List.walltime")
    return clock(sum(int(word) * 60 ** power for power, word in enumerate(reversed(words))))


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def seconds(text: str) -> int:
    hours, minutes, rest = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(rest)


@dataclass
class Chunk:
    """One chunk of a select statement, with its resources in the order in which they were requested for."""

    requested: dict[str, str]
    host: str = ""  # where it was placed
    slot: int = 0

    def count(self, name: str) -> int:
        if name == "mem":
            return kilobytes(self.requested["mem"]) if "mem" in self.requested else 0
        return int(self.requested.get(name, 1 if name == "ncpus" else 0))

    @property
    def lines(self) -> int:
        """How often its host is in the node file."""
        return int(self.requested.get("mpiprocs", 1))

    @property
    def threads(self) -> int:
        return int(self.requested.get("ompthreads", self.count("ncpus")))

    def wanted_host(self) -> str | None:
        return self.requested.get("host", self.requested.get("vnode"))

    def vnode(self) -> str:
        """As in exec_vnode: "(n1:ncpus=2:ngpus=1:mem=1048576kb)"."""
        words = {name: f"{self.count(name)}{'kb' if name == 'mem' else ''}" for name in self.requested
                 if name in (*COUNTS, "mem")}
        words = words if "ncpus" in words else {"ncpus": "1", **words}
        return f"({self.host}:{':'.join(f'{name}={value}' for name, value in words.items())})"

    def place(self) -> str:
        """As in exec_host: "n1/0*2"."""
        count = self.count("ncpus")
        return f"{self.host}/{self.slot}{f'*{count}' if count > 1 else ''}"


def chunks(select: str) -> list[Chunk]:
    """What a select statement asks for, one Chunk per chunk."""
    result = []
    for group in select.split("+"):
        words = group.split(":")
        number = "1" if "=" in words[0] else words.pop(0)
        if not number.isdigit():
            raise illegal("Resource_List.select")
        if int(number) == 0:
            raise illegal()
        requested = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not value:
                raise illegal("Resource_List.select")
            if name not in KNOWN:
                raise Refused(187, f"Unknown resource: {name}")
            if name not in ("mem", "host", "vnode", "arch") and not value.isdigit():
                raise illegal("" if name == "ngpus" else f"select.{name}")
            if name == "mem":
                kilobytes(value, "select.mem")
            requested[name] = value
        result += [Chunk(dict(requested)) for _ in range(int(number))]
    return result


def check_place(place: str) -> None:
    words = place.split(":")
    arrangements = [word for word in words if word in ("free", "pack", "scatter", "vscatter")]
    sharings = [word for word in words if word in ("excl", "exclhost", "shared")]
    groups = [word for word in words if re.fullmatch(r"group=\w+", word)]
    if len(arrangements) + len(sharings) + len(groups) != len(words) or max(map(len, (arrangements, sharings))) > 1:
        raise illegal("Resource_List.place")


def select_of_nodes(nodes: str) -> str:
    """The select statement that PBS makes of nodes=2:ppn=2."""
    groups = []
    for group in nodes.split("+"):
        first, *properties = group.split(":")
        ppn = [word.removeprefix("ppn=") for word in properties if re.fullmatch(r"ppn=\d+", word)]
        if len(ppn) != len(properties) or len(ppn) > 1 or not re.fullmatch(r"[\w.-]+", first):
            raise Refused(241, "node(s) specification error")
        words = [first if first.isdigit() else "1", f"ncpus={ppn[0] if ppn else 1}"]
        words += [] if first.isdigit() else [f"host={first}"]
        words += [f"mpiprocs={ppn[0]}"] if ppn else []
        groups.append(":".join(words))
    return "+".join(groups)


def resource_list(requested: Mapping[str, str]) -> dict[str, str]:
    """The job's Resource_List: `requested` checked, with select, place, and the sums over all chunks."""
    requested = dict(requested)
    loose = [name for name in requested if name in KNOWN]
    unknown = [name for name in requested if name not in KNOWN | {"select", "place", "nodes", "walltime"}]
    if unknown:
        raise Refused(187, f"Unknown resource Resource_List.{unknown[0]}")
    if "walltime" in requested:
        requested["walltime"] = walltime(requested["walltime"])
    if "select" in requested and "nodes" in requested:
        raise Refused(6, "Cannot be used with select or place: nodes")
    if "select" in requested and loose:
        raise Refused(5, f'"-lresource=" cannot be used with "select" or "place", resource is: {loose[0]}')
    if "place" in requested:
        check_place(requested["place"])
        if "select" not in requested:
            raise Refused(7, 'Cannot have "place" without "select"')
    if "nodes" in requested:
        requested["select"], requested["place"] = select_of_nodes(requested["nodes"]), "scatter"
    elif "select" not in requested:
        for name in loose:
            if name == "mem":
                kilobytes(requested[name])
            elif name in COUNTS and not requested[name].isdigit():
                raise illegal(f"Resource_List.{name}")
        own = {"ncpus": "1", **{name: requested[name] for name in loose}}
        requested["select"] = "1:" + ":".join(f"{name}={value}" for name, value in own.items())
        requested["place"] = "pack"
    requested.setdefault("place", "free")
    parts = chunks(requested["select"])
    sums = {"ncpus": sum(part.count("ncpus") for part in parts), "nodect": len(parts),
            "ngpus": sum(part.count("ngpus") for part in parts),
            "mpiprocs": sum(int(part.requested.get("mpiprocs", 0)) for part in parts)}
    requested.update({name: str(value) for name, value in sums.items() if value or name in ("ncpus", "nodect")})
    if any("mem" in part.requested for part in parts):
        requested["mem"] = size(sum(part.count("mem") for part in parts))
    return dict(sorted(requested.items()))


@dataclass
class Node:
    """What a host has, and what of it jobs use. `mom` is its name in node files."""

    name: str
    mom: str
    total: dict[str, int]
    used: dict[str, dict[str, int]] = field(default_factory=dict)  # by job
    slots: dict[int, str] = field(default_factory=dict)  # the number behind the slash in exec_host -> job
    exclusive: set[str] = field(default_factory=set)
    changed: int = 0
    last_used: int = 0

    def free(self, name: str) -> int:
        return self.total[name] - sum(used[name] for used in self.used.values())


def fits(part: Chunk, node: Node, left: Mapping[str, int]) -> bool:
    return part.wanted_host() in (None, node.name) and all(part.count(name) <= left[name] for name in node.total)


def placed(parts: Sequence[Chunk], place: str, nodes: Iterable[Node], *, empty: bool = False) -> list[str] | None:
    """The host of each chunk: the first with room, as the scheduler chooses on idle equal hosts; None where none has.

    empty: as if no job ran.
    """
    words = place.split(":")
    usable = [node for node in nodes if empty or not node.exclusive and not (
        {"excl", "exclhost"} & set(words) and node.used)]
    left = {node.name: {name: node.total[name] if empty else node.free(name) for name in node.total}
            for node in usable}
    if "pack" in words:
        for node in usable:
            if all(part.wanted_host() in (None, node.name) for part in parts) and all(
                    sum(part.count(name) for part in parts) <= left[node.name][name] for name in node.total):
                return [node.name] * len(parts)
        return None
    hosts: list[str] = []
    for part in parts:
        apart = hosts if {"scatter", "vscatter"} & set(words) else []
        found = next((node for node in usable if node.name not in apart and fits(part, node, left[node.name])), None)
        if found is None:
            return None
        hosts.append(found.name)
        for name in found.total:
            left[found.name][name] -= part.count(name)
    return hosts


def why_not(parts: Sequence[Chunk], place: str, nodes: Sequence[Node]) -> str:
    """The comment of a job that cannot start now."""
    for part in parts:
        wanted = part.wanted_host()
        if wanted is not None and wanted not in [node.name for node in nodes]:
            names = ",".join(node.name for node in nodes)
            return f"Can Never Run: Insufficient amount of resource: host ({wanted} != {names})"
    for name in ("ncpus", "ngpus"):
        wanted_sum, total = sum(part.count(name) for part in parts), sum(node.total[name] for node in nodes)
        # The scheduler looks at the sum of the CPUs of all hosts, but not at that of the GPUs.
        if name == "ncpus" and wanted_sum > total:
            free = sum(node.free(name) for node in nodes)
            return f"Can Never Run: Insufficient amount of resource: {name} (R: {wanted_sum} A: {free} T: {total})"
    if "scatter" in place and len(parts) > len(nodes):
        return "Can Never Run: Not enough total nodes available"
    if placed(parts, place, nodes, empty=True) is None:
        for name in ("ncpus", "ngpus"):
            room = max(node.total[name] for node in nodes)
            wanted_each = [part.count(name) for part in parts]
            if (sum(wanted_each) if "pack" in place else max(wanted_each)) > room:
                return f"Not Running: Insufficient amount of resource: {name} "
    return "Not Running: Not enough free nodes available"

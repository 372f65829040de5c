"""Expand Slurm's lists: host names such as n[1-2,04]-ib, counts per node such as 2(x3),1."""

from __future__ import annotations

import itertools
import re

_MAX_HOSTS = 1 << 17  # twice Slurm's own limit (MAX_SLURM_NODES, 65536)
_PART = re.compile(r"([^\[\],]*)((?:\[[^\[\]]*\][^\[\],]*)*)(,|$)")
_BRACKET = re.compile(r"\[([^\[\]]*)\]([^\[\],]*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?$")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of a Slurm node list, in the order of `scontrol show hostnames`.

    For example "n[1-2,04]-ib,login1,rack[0-1]n[2-3]" (scontrol(1), hostlist expressions).

    Raises ValueError where the text does not follow the grammar or means more hosts than a cluster
    can have.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or not part[0].strip(","):
            raise ValueError(
                f"node list {text[:80]!r}: cannot read it from "
                f"{text[position : position + 20]!r} on; expected the form n[1-2,04]-ib,login1"
            )
        prefix = part[1]
        brackets = _BRACKET.findall(part[2])
        suffixes = [suffix for _, suffix in brackets]
        numbers = [_expand_numbers(inside, text) for inside, _ in brackets]

        count = 1
        for choices in numbers:
            count *= len(choices)
        if len(hosts) + count > _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} means more than {_MAX_HOSTS} hosts")

        # scontrol changes the last bracket fastest, then the first, the second, and so on:
        # r[1-2]c[0,3]n[1-2] starts with r1c0n1, r1c0n2, r2c0n1.
        for choice in itertools.product(*reversed(numbers[:-1]), *numbers[-1:]):
            in_order = [*reversed(choice[:-1]), *choice[-1:]]
            pairs = zip(in_order, suffixes, strict=True)
            hosts.append(prefix + "".join(number + suffix for number, suffix in pairs))
        position = part.end()
    return hosts


def _expand_numbers(numbers: str, text: str) -> list[str]:
    """Expand "1-2,04" to ["1", "2", "04"]: leading zeros give the width."""
    found: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.match(part)
        if match is None or (match[2] and int(match[1]) > int(match[2])):
            raise ValueError(
                f"node list {text[:80]!r}: [{numbers[:40]}] is not a list of numbers and rising "
                "ranges"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} means more than {_MAX_HOSTS} hosts")
        width = len(match[1])
        found += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Return one number for each node: "2,1(x2)" -> [2, 1, 1], the form of SLURM_TASKS_PER_NODE.

    Raises ValueError where the text does not follow the grammar or means more nodes than a cluster
    can have.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(
                f"counts per node {text[:80]!r}: cannot read {part[:40]!r}; expected a form like "
                "2,1(x2)"
            )
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MAX_HOSTS:
            raise ValueError(f"counts per node {text[:80]!r} mean more than {_MAX_HOSTS} nodes")
        counts += [int(match[1])] * repeats
    return counts

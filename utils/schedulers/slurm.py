"""Slurm: the grammar of its node lists. Standard library only."""
from __future__ import annotations

import itertools
import re

_PART = re.compile(r"([^\[\],]*)((?:\[[^\[\]]*\][^\[\],]*)*)(,|$)")
_GROUP = re.compile(r"\[([^\[\]]*)\]([^\[\],]*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?$")
_MAX_HOSTS = 1 << 17  # twice Slurm's own limit (MAX_SLURM_NODES, 65536)


def expand_hostlist(text: str) -> list[str]:
    """The host names of a Slurm node list, in order, as `scontrol show hostnames` prints them.

    For example "n[1-2,04]-ib,login1,rack[0-1]n[2-3]" (scontrol(1), hostlist expressions). ValueError when the text
    does not follow the grammar or stands for more hosts than a cluster can have.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or not match[0].strip(","):
            raise ValueError(f"node list {text[:80]!r}: cannot read it from {text[position:position + 20]!r} on; "
                             "expected the form n[1-2,04]-ib,login1")
        choices = [[match[1]]]
        for numbers, suffix in _GROUP.findall(match[2]):
            choices += [_expand_numbers(numbers, text), [suffix]]
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(hosts) + count > _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} stands for more than {_MAX_HOSTS} hosts")
        hosts += ["".join(words) for words in itertools.product(*choices)]
        position = match.end()
    return hosts


def _expand_numbers(numbers: str, text: str) -> list[str]:
    """"1-2,04" -> ["1", "2", "04"]: leading zeros give the width."""
    found: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.match(part)
        if match is None or (match[2] and int(match[1]) > int(match[2])):
            raise ValueError(f"node list {text[:80]!r}: [{numbers[:40]}] is no list of numbers and rising ranges")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MAX_HOSTS:
            raise ValueError(f"node list {text[:80]!r} stands for more than {_MAX_HOSTS} hosts")
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found

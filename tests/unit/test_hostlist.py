"""Slurm's lists, expanded as `scontrol show hostnames` does."""
from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable

import pytest

from utils.schedulers.slurm.hostlist import expand_counts, expand_hostlist

KNOWN = {
    "": [],
    "plain": ["plain"],
    "alpha,beta": ["alpha", "beta"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "a[1-2],b[03-04]": ["a1", "a2", "b03", "b04"],
    "rack[0-1]n[2-3]": ["rack0n2", "rack0n3", "rack1n2", "rack1n3"],
    "n[1-2][3-4]": ["n13", "n14", "n23", "n24"],
    "n[001-010]": [f"n{number:03d}" for number in range(1, 11)],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1,3-4,007]": ["n1", "n3", "n4", "n007"],
    "login1,node[001-002]": ["login1", "node001", "node002"],
    "b,a[2,1],b": ["b", "a2", "a1", "b"],
    "n[5]": ["n5"],
    "n[00001-10000]": [f"n{number:05d}" for number in range(1, 10001)],
}
BROKEN = ["n[1-2", "n1]", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[-1]", "n[1,,2]", "n[1-2-3]",
          "n[1-2]]", "[[1]]", "n[\u0663]", "n[1-2] n[3", "n[1-999999999]", "n[0-99999][0-99999]",
          "n[" + "1" * 5000 + "]x["]


@pytest.mark.parametrize("text", KNOWN)
def test_a_node_list_is_expanded_in_order(text: str) -> None:
    assert expand_hostlist(text) == KNOWN[text]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_node_list_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_hostlist(text)


def test_counts_per_node_are_expanded() -> None:
    assert expand_counts("2,1(x2),3") == [2, 1, 1, 3]


@pytest.mark.parametrize(("expand", "alphabet", "error"), [
    (expand_hostlist, "[[]],,--0019anb \u0663\n", ""),
    (expand_counts, "0123,(x)9 -\n\u0663", "counts per node")])
def test_any_text_is_expanded_or_a_value_error(
        expand: Callable[[str], list[str] | list[int]], alphabet: str, error: str) -> None:
    chance = random.Random(1)
    for _ in range(3000):
        text = "".join(chance.choice(alphabet) for _ in range(chance.randint(0, 20)))
        try:
            found = expand(text)
        except ValueError as refused:
            assert error in str(refused)
            continue
        for one in found:
            assert one >= 0 if isinstance(one, int) else one and not set(one) & set("[],"), text


def random_list(chance: random.Random) -> str:
    """A node list that follows the grammar."""
    parts = []
    for _ in range(chance.randint(1, 4)):
        numbers = []
        for _ in range(chance.randint(1, 3)):
            first, width = chance.randint(0, 120), chance.choice([0, 0, 2, 3])
            last = f"-{first + chance.randint(0, 12):0{width}d}" if chance.random() < 0.6 else ""
            numbers.append(f"{first:0{width}d}{last}")
        prefix, inside = chance.choice(["n", "rackn", "a-b", "x9ygpu"]), ",".join(numbers)
        parts.append(chance.choice([
            prefix, f"{prefix}{chance.randint(0, 99)}", *[f"{prefix}[{inside}]"] * 2,
            f"{prefix}[0-1]n[{inside}]", f"r[1-2]c[0,3]{prefix}[{inside}]"]))
    return ",".join(parts)


def test_node_lists_are_expanded_as_by_scontrol(scontrol: str) -> None:
    chance = random.Random(7)
    valid = [*filter(None, KNOWN), *(random_list(chance) for _ in range(2000))]
    newer_form = re.compile(r"\][^][,]+(,|$)")  # older versions refuse text behind the last bracket
    lists = [text for text in valid if not newer_form.search(text)]
    assert len(lists) >= len(valid) - 1
    for start in range(0, len(lists), 200):
        text = ",".join(lists[start:start + 200])
        done = subprocess.run([scontrol, "show", "hostnames", text], capture_output=True, text=True, timeout=20)
        assert done.stdout.split() == expand_hostlist(text), done.stderr

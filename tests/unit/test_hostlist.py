"""Slurm's lists, expanded as `scontrol show hostnames` does."""
from __future__ import annotations

import itertools
import subprocess

import pytest

from utils.job.slurm_job import expand_hostlist

KNOWN = {
    "": [],
    "login1,node[001-002]": ["login1", "node001", "node002"],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "r[1-2]c[0,3]n[1-2]": ["r1c0n1", "r1c0n2", "r2c0n1", "r2c0n2", "r1c3n1", "r1c3n2", "r2c3n1", "r2c3n2"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1,3-4,007]": ["n1", "n3", "n4", "n007"],
    "b,a[2,1],b": ["b", "a2", "a1", "b"],
    "n[00001-10000]": [f"n{number:05d}" for number in range(1, 10001)],
}
BROKEN = ["n[1-2", "n1]", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[1,,2]", "n[1-2-3]", "[[1]]", "n[\u0663]",
          "n[1-2] n[3", "n[1-999999999]", "n[0-99999][0-99999]"]


@pytest.mark.parametrize("text", KNOWN)
def test_a_node_list_is_expanded_in_order(text: str) -> None:
    assert expand_hostlist(text) == KNOWN[text]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_node_list_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_hostlist(text)


def test_node_lists_are_expanded_as_by_scontrol(scontrol: str) -> None:
    numbers = ["", "7", "[5]", "[2,1]", "[9-11]", "[098-101]", "[1,3-4,007]"]
    # Older versions refuse text behind the last bracket.
    parts = itertools.product(["n", "a-b", "r[1-2]u"], numbers, ["c", ""], numbers[2:])
    text = ",".join(map("".join, parts))
    done = subprocess.run([scontrol, "show", "hostnames", text], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == expand_hostlist(text), done.stderr

"""Slurm's node lists: expanded as `scontrol show hostnames` does."""
from __future__ import annotations

import random
import subprocess
import time

import pytest

from utils.schedulers.slurm import expand_hostlist

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
}
BROKEN = ["n[1-2", "n1]", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[-1]", "n[1,,2]", "n[1-2-3]", "n[1-2]]", "[[1]]",
          "n[\u0663]", "n[1-2] n[3", "n[1-999999999]", "n[0-99999][0-99999]", "n[" + "1" * 5000 + "]x["]


@pytest.mark.parametrize("text", KNOWN)
def test_a_node_list_is_expanded_in_order(text: str) -> None:
    assert expand_hostlist(text) == KNOWN[text]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_node_list_is_a_value_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_hostlist(text)


@pytest.mark.parametrize("seed", range(5))
def test_any_text_at_all_gives_hosts_or_a_value_error(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3000):
        text = "".join(chance.choice("[[]],,--0019anb \u0663\n") for _ in range(chance.randint(0, 20)))
        try:
            hosts = expand_hostlist(text)
        except ValueError as error:
            assert str(error)
            continue
        assert all(host and not set(host) & set("[],") for host in hosts), (text, hosts)


def test_ten_thousand_hosts_take_no_time() -> None:
    start = time.perf_counter()
    hosts = expand_hostlist("n[00001-10000]")
    assert time.perf_counter() - start < 0.5
    assert (len(hosts), hosts[0], hosts[-1]) == (10000, "n00001", "n10000")


def test_ten_thousand_single_hosts_take_no_time() -> None:
    names = [f"n{number}" for number in range(10000)]
    start = time.perf_counter()
    assert expand_hostlist(",".join(names)) == names
    assert time.perf_counter() - start < 0.5


def test_what_slurm_expands_is_expanded_as_slurm_does(scontrol: str) -> None:
    compared = 0
    for text in [text for text in KNOWN if text]:
        shown = subprocess.run([scontrol, "show", "hostnames", text], capture_output=True, text=True, timeout=20)
        if "Invalid hostlist" not in shown.stderr:  # older versions know no text behind the bracket
            assert shown.stdout.split() == expand_hostlist(text), text
            compared += 1
    assert compared >= len(KNOWN) - 2

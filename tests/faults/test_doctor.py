"""doctor.py on broken hosts. `python -m tests.faults.doctor` runs all faults."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.doctor import FAULTS, examine, problem
from tests.faults.packets import TCP, longer_than, program


@pytest.mark.parametrize(("name", "check"), [
    ("one name on two hosts", "placement"), ("one-way loss between two hosts", "connections"),
    ("path MTU black hole", "connections"), ("hung file system", "storage"),
    ("loopback on two hosts", "equality,connections"), ("another configuration", "equality")])
def test_doctor_names_the_fault_and_nothing_else(need: Callable[[str], Path], name: str, check: str) -> None:
    for needed in ("hosts", "sshd"):
        need(needed)
    if name == "hung file system" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse, which this user may not open")
    outcome = examine(FAULTS[name], "--only", check)
    assert not problem(FAULTS[name], outcome), outcome.output


def test_packet_filter_drops_frames_for_which_all_conditions_hold() -> None:
    assert program([TCP, longer_than(1400)]) == (
        "6,48 0 0 23,21 0 3 6,128 0 0 0,37 0 1 1400,6 0 0 2,6 0 0 4294967295")

"""stops.py finds no problem in a few stops, on real Slurm and on the PBS stand-in."""
from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STOPS = 6


@pytest.mark.parametrize(("needs", "options"), [(["hosts", "slurm"], []), (["hosts"], ["--pbs"])])
def test_a_stopped_job_has_saved_before_it_is_killed(
        needs: list[str], options: list[str], need: Callable[[str], Path]) -> None:
    for what in needs:
        need(what)
    program = str(Path(__file__).with_name("stops.py"))
    ended = subprocess.run([sys.executable, program, "--stops", str(STOPS), *options], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400)
    assert ended.returncode == 0, ended.stdout
    summary = re.search(rf"^{STOPS} of {STOPS} stops were right; (\d+) of them had", ended.stdout,
                        re.MULTILINE)
    assert summary is not None and int(summary[1]) >= STOPS // 2, ended.stdout

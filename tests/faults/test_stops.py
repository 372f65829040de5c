"""What stops.py says of a few stops, on the real Slurm and on the stand-in of PBS."""
from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STOPS = 6


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_that_is_stopped_has_saved_before_it_is_killed(scheduler: str, need: Callable[[str], Path]) -> None:
    need("hosts")
    if scheduler == "slurm":
        need("slurm")
    command = [sys.executable, str(Path(__file__).with_name("stops.py")), "--stops", str(STOPS),
               *(["--pbs"] if scheduler == "pbs" else [])]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout
    summary = re.search(rf"^{STOPS} of {STOPS} stops were right; (\d+) of them had something to save", ended.stdout,
                        re.MULTILINE)
    assert summary is not None, ended.stdout
    assert int(summary[1]) >= STOPS // 2, ended.stdout

"""launch.py in jobs of PBS: pbs_tmrsh, pbsdsh, and every mpiexec with pbs_tmrsh in place of ssh.

On the stand-in, or with --real-pbs on a real OpenPBS.
"""
from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import WORK, Pbs
from tests.launch.launchers import MPIS, RANK_PROGRAM, launch_py

EXPECTED = [("0", "0", "2", "n1"), ("1", "1", "2", "n1"), ("2", "0", "1", "n2")]
CHUNKS = "1:ncpus=2:mpiprocs=2+1:ncpus=1:mpiprocs=1"


def run(pbs: Pbs, launch: list[str], *, line: str = "exec {}", chunks: str = CHUNKS) -> tuple[int, str]:
    """Run launch.py in a job of two hosts; the job's exit status and output."""
    folder = f"{WORK}/launch {time.monotonic_ns()}"
    notes = pbs.write(f"{folder}/notes/.keep", "")[:-len("/.keep")]
    command = shlex.join([*launch, str(RANK_PROGRAM), "--notes", notes, "a b"])
    pbs.write(f"{folder}/job.sh", f"#!/bin/bash\nexec 2>&1\ncd {shlex.quote(folder)}\n"
                                  f"export VALUE=$'two\\nlines'\n{line.format(command)}\n")
    job = pbs.wait(pbs.submit("-l", f"select={chunks}", "-l", "place=scatter", "job.sh", cwd=folder))
    wait_until(lambda: bool(pbs.output(job)), "the output of the job")
    return int(job.get("Exit_status", -999)), pbs.output(job)


def ranks(output: str, launcher: str) -> list[tuple[str, ...]]:
    """(rank, local rank, local size, host) of each rank that has the environment and the arguments."""
    return sorted(re.findall(rf"rank (\d) of 3, local (\d) of (\d), on (\w+), by {launcher}, GPU \S+, "
                             r"notes \(\), value 'two\\nlines', threads 1, folder /.*, arguments \['a b'\]", output))


@pytest.mark.parametrize(("name", "options"), [
    *((name, []) for name in ("", "pbsdsh", *MPIS)), ("intel", ["--dry-run"]), ("openmpi5", ["--dry-run"])])
def test_ranks_have_environment_and_arguments(pbs: Pbs, name: str, options: list[str],
                                              need: Callable[[str], Path]) -> None:
    """There is no ssh. --dry-run prints a command that does the same."""
    line = 'command=$({}) && eval "$command"' if options else "exec {}"
    status, output = run(pbs, [*launch_py(name, need), *options], line=line)
    assert status == 0, output
    assert ranks(output, MPIS[name][1] if name in MPIS else "env") == EXPECTED, output
    assert name in MPIS or f"by {name or 'pbs_tmrsh'}\n" in output


@pytest.mark.parametrize("name", ["pbs_tmrsh", "pbsdsh", "mpich5", "openmpi5", "openmpi4"])
def test_first_host_without_slots_waits_for_nobody(pbs: Pbs, name: str, need: Callable[[str], Path]) -> None:
    """PBS does not report to such a host that a task on the first host with slots has ended."""
    status, output = run(pbs, launch_py(name, need), chunks="1:ncpus=1:mpiprocs=0+2:ncpus=2:mpiprocs=2")
    if name == "mpich5":
        assert status == 2 and "choose --launcher pbs_tmrsh" in output, output
    else:
        assert status == 0, output
        assert sorted(re.findall(r"rank (\d) of 4, local \d of 2, on (\w+), by", output)) == [
            ("0", "n2"), ("1", "n2"), ("2", "n3"), ("3", "n3")], output


@pytest.mark.parametrize("name", ["", "mpich5", "openmpi5"])
def test_launch_on_a_part_of_a_job(pbs: Pbs, name: str, need: Callable[[str], Path]) -> None:
    status, output = run(pbs, [*launch_py(name, need), "--nodelist", "n2"])
    assert status == 0, output
    assert re.findall(r"rank (\d) of (\d), local \d of \d, on (\w+), by", output) == [("0", "1", "n2")], output

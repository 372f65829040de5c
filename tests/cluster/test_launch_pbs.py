"""launch.py in jobs of PBS: pbs_tmrsh, pbsdsh, and every mpiexec with pbs_tmrsh in place of ssh.

On the stand-in, or with --real-pbs on a real OpenPBS.
"""
from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import WORK, Pbs
from tests.launch.launchers import LAUNCH, LIBRARIES, MPIS, RANK_PROGRAM, launch_py
from tests.matrix import with_all

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
    ("", []), ("mpich5", []), ("openmpi5", []), ("intel", ["--dry-run"]), *with_all(
        *((name, []) for name in ("pbsdsh", "mpich4", "intel", "openmpi4")), ("openmpi5", ["--dry-run"]))])
def test_ranks_have_their_environment(pbs: Pbs, name: str, options: list[str], need: Callable[[str], Path]) -> None:
    """There is no ssh. --dry-run prints a command that does the same."""
    line = 'command=$({}) && eval "$command"' if options else "exec {}"
    status, output = run(pbs, [*launch_py(name, need), *options], line=line)
    assert status == 0, output
    assert ranks(output, MPIS[name][1] if name in MPIS else "env") == EXPECTED, output
    assert name in MPIS or f"by {name or 'pbs_tmrsh'}\n" in output


FIRST_WITHOUT_SLOTS = "1:ncpus=1:mpiprocs=0+2:ncpus=2:mpiprocs=2"


@pytest.mark.parametrize(("name", "options", "chunks", "hosts"), [
    ("pbs_tmrsh", [], FIRST_WITHOUT_SLOTS, "n2 n2 n3 n3"), ("", ["--nodelist", "n2"], CHUNKS, "n2"), *with_all(
        *((name, [], FIRST_WITHOUT_SLOTS, "n2 n2 n3 n3") for name in ("pbsdsh", "openmpi5", "openmpi4")),
        ("mpich5", ["--nodelist", "n2"], CHUNKS, "n2"))])
def test_first_host_of_a_job_may_get_no_rank(pbs: Pbs, name: str, options: list[str], chunks: str, hosts: str,
                                             need: Callable[[str], Path]) -> None:
    """PBS does not report to a host without slots that a task on the first host with slots has ended."""
    status, output = run(pbs, [*launch_py(name, need), *options], chunks=chunks)
    assert status == 0, output
    found = sorted(re.findall(r"rank (\d) of (\d), local \d of \d, on (\w+), by", output))
    size = str(len(hosts.split()))
    assert found == [(str(rank), size, host) for rank, host in enumerate(hosts.split())], output


@pytest.mark.parametrize("name", ["mpich5", *with_all("openmpi5", "intel")])
def test_mpi_sends_the_packages_to_each_host(pbs: Pbs, name: str, need: Callable[[str], Path]) -> None:
    """mpiexec starts one process on each host by pbs_tmrsh; the ranks start by pbs_tmrsh alone."""
    folder = f"{WORK}/stage{time.monotonic_ns()}"
    pbs.write(f"{folder}/program.py", "import mpi4py, sys\nsys.stdout.write(f'from {mpi4py.__file__}\\n')\n")
    library = need(MPIS[name][0]).parents[1] / LIBRARIES[name]
    pbs.write(f"{folder}/job.sh", f"""\
#!/bin/bash
exec 2>&1
cd {folder}
{shlex.quote(sys.executable)} -m venv --without-pip env
mkdir disk
cp -r {shlex.quote(str(need("mpi4py")))}/mpi4py env/lib/python*/site-packages
export PATH="{need(MPIS[name][0]).parent}:$PATH" MPI4PY_LIBMPI="{library}" LD_LIBRARY_PATH="{library.parent}"
{shlex.join(LAUNCH)} --python env/bin/python --independent --stage-dir {folder}/disk -- python program.py
ls disk
""")
    job = pbs.wait(pbs.submit("-l", f"select={CHUNKS}", "-l", "place=scatter", "job.sh", cwd=folder))
    wait_until(lambda: bool(pbs.output(job)), "the output of the job")
    output = pbs.output(job)
    assert job.get("Exit_status") == 0 and "MPI has sent the archive to 2 nodes" in output, output
    assert output.count(f"from {folder}/disk/ddpkit-stage-") == 3 and "warning" not in output, output
    assert re.search(r"\nddpkit-stage-\d+\n$", output), output

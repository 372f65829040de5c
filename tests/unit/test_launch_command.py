"""scripts/launch.py as a command: what it refuses, and what the processes that it starts on this host are given."""
from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
MODULE = """
import os, sys
sys.stdout.write(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]} by {sys.executable}\\n")
"""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
             "MASTER_PORT")


def launch(*words: str, folder: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items()
            if name not in VARIABLES and not name.startswith(("PBS_", "SLURM_", "DDPKIT_", "TORCHELASTIC"))}
    return subprocess.run([*LAUNCH, *words], env={**kept, "PYTHON": sys.executable, **(environ or {})}, cwd=folder,
                          capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "a b" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text(MODULE)
    return package.parent


@pytest.mark.parametrize("words", [
    ["-m", "package.module", "--lr", "3"], ["--", "-m", "package.module", "--lr", "3"],
    ["python", "-m", "package.module", "--lr", "3"], ["package/module.py", "--lr", "3"]])
def test_modules_programs_and_scripts_are_run_by_the_chosen_python(folder: Path, words: list[str]) -> None:
    done = launch("-n", "2", *words, folder=folder, environ={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 2: ['--lr', '3'] by {sys.executable}" for rank in range(2)]


def test_every_rank_of_this_host_has_all_variables(folder: Path) -> None:
    done = launch("-n", "2", "sh", "-c", f"echo {' '.join(f'{name}=${name}' for name in VARIABLES)}", folder=folder)
    found = sorted(done.stdout.splitlines())
    port = re.search(r"MASTER_PORT=(\d+)", found[0])
    assert port is not None and found == [
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 NODE_RANK=0 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 "
        f"MASTER_PORT={port[1]}" for rank in range(2)]


@pytest.mark.parametrize(("words", "says"), [
    (["srun", "python", "x.py"], "the command is srun, which starts ranks itself.* as in launch.py --by srun train.py"),
    (["/opt/bin/mpiexec.hydra", "-n", "2", "x"], "the command is mpiexec.hydra.* launch.py --by mpiexec train.py"),
    (["torchrun", "x.py"], "the command is torchrun.* as in launch.py --torchrun train.py"),
    (["-m", "torch.distributed.run", "x.py"], "the command is -m torch.distributed.run.* launch.py --torchrun"),
    (["--by", "/no/mpiexec", "x"], "--by is /no/mpiexec, which is not there. Expected the path of an mpiexec"),
    (["--by", "/bin/true", "x"], "--by is /bin/true, which is none of PALS, Open MPI, Intel MPI, MPICH"),
    (["missing.py"], "there is no file missing.py in")])
def test_what_cannot_be_started_is_refused_at_once(folder: Path, words: list[str], says: str) -> None:
    done = launch(*words, folder=folder)
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr


def test_launch_py_as_every_rank_of_launch_py_is_refused(folder: Path) -> None:
    done = launch("-n", "2", sys.executable, LAUNCH[1], "package/module.py", folder=folder)
    assert done.returncode == 2 and not done.stdout
    assert "launch.py itself was started as rank 0 of 2 by launch.py" in done.stderr


def test_launch_py_under_pbsdsh_is_refused(folder: Path) -> None:
    """On a job's first host it has no node file, and would train alone there."""
    task = {"PBS_JOBID": "7.head", "PBS_TASKNUM": "20000001", "PBS_NODENUM": "1"}
    done = launch("package/module.py", folder=folder, environ=task)
    assert done.returncode == 2 and "launch.py itself was started by pbsdsh or pbs_tmrsh" in done.stderr


def test_each_line_may_start_with_its_rank(folder: Path) -> None:
    done = launch("-n", "2", "--prefix-output", "sh", "-c", "echo one; printf two; echo error >&2", folder=folder)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]
    assert {"[rank 0] error", "[rank 1] error"} < set(done.stderr.splitlines())


def test_each_rank_may_write_into_a_file_of_its_own(folder: Path) -> None:
    for _ in range(2):  # a run that goes on later goes on in the same files
        done = launch("-n", "2", "--output-dir", "out/now", "sh", "-c", "echo rank $RANK; echo error >&2",
                      folder=folder)
        assert done.returncode == 0 and not done.stdout, done.stderr
    for rank in range(2):
        assert (folder / f"out/now/rank-{rank}.log").read_text() == f"rank {rank}\nerror\n" * 2


def test_a_shell_can_handle_a_stop(folder: Path) -> None:  # it could not, were it started to ignore the signal
    done = launch("sh", "-c", "trap 'echo stopped' USR1; kill -USR1 $$; :", folder=folder)
    assert done.stdout == "stopped\n"


def test_an_mpiexec_that_starts_no_rank_and_ends_with_0_is_a_failure(folder: Path) -> None:
    mpiexec = folder / "mpiexec"
    mpiexec.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "HYDRA build details"; fi\n')
    mpiexec.chmod(0o755)
    (folder / "nodes").write_text(f"{socket.gethostname()}\n" * 2)
    done = launch("--by", str(mpiexec), "-n", "2", "package/module.py", folder=folder,
                  environ={"PBS_JOBID": "1.server", "PBS_NODEFILE": str(folder / "nodes")})
    assert done.returncode == 1, done.stderr
    assert "mpiexec ended with exit status 0 before all ranks had joined" in done.stderr
    assert "2 of 2 ranks did not join: 0, 1" in done.stderr


def test_an_option_in_place_of_the_script_is_refused(folder: Path) -> None:
    done = launch("--", "-N", "2", "train.py", folder=folder)
    assert done.returncode == 2 and "go before the job script" in done.stderr

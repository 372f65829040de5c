"""scripts/launch.py as a command: what it refuses, and what it starts on this host."""
from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from utils.launch.environment import RANK_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
MODULE = f"""
import os, sys
shown = " ".join(os.environ[name] for name in {RANK_VARIABLES})
sys.stdout.write(f"{{shown}} {{sys.argv[1:]}} {{sys.executable}}\\n")
"""


def launch(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    of_launches = ("PBS_", "SLURM_", "DDPKIT_", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items()
            if name not in RANK_VARIABLES and not name.startswith(of_launches)}
    return subprocess.run([*LAUNCH, *words], env={**kept, "PYTHON": sys.executable, **variables},
                          cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "a b" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text(MODULE)
    return package.parent


def test_ranks_have_all_variables_and_the_chosen_python(folder: Path) -> None:
    done = launch("-n", "2", "--", "-m", "package.module", "--lr", "3", folder=folder, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    port = done.stdout.split()[7]
    assert port.isdecimal() and sorted(done.stdout.splitlines()) == [
        f"{rank} 2 {rank} 2 0 0 127.0.0.1 {port} ['--lr', '3'] {sys.executable}" for rank in range(2)]


@pytest.mark.parametrize(("words", "message"), [
    (["/opt/bin/mpiexec.hydra", "-n", "2", "x"], "is mpiexec.hydra.* launch.py --launcher mpiexec train.py"),
    (["torchrun", "x.py"], "the command is torchrun.* as in launch.py --torchrun train.py"),
    (["-m", "torch.distributed.run", "x.py"], "the command is -m torch.distributed.run.* launch.py --torchrun"),
    (["--launcher", "/no/mpiexec", "x"],
     "--launcher is /no/mpiexec, which does not exist. Expected the path of an mpiexec"),
    (["--launcher", "/bin/true", "x"],
     "--launcher is /bin/true, which is not an mpiexec of PALS, Open MPI, Intel MPI, MPICH"),
    (["missing.py"], "there is no file missing.py in"),
    (["--lable", "x.py"], "unrecognized arguments: --lable. Did you mean --label?"),
    ([], "no script is given"), (["-m"], "-m needs the name of a module"),
    (["--", "-N", "2", "train.py"], "Options of sbatch and qsub go before the job script"),
    (["-n", "2", *LAUNCH, "package/module.py"], "launch.py itself was started as rank 0 of 2 by launch.py")])
def test_what_cannot_be_started_is_refused(folder: Path, words: list[str], message: str) -> None:
    done = launch(*words, folder=folder)
    assert done.returncode == 2 and not done.stdout and re.search(message, done.stderr), done.stderr


def test_launch_py_under_pbsdsh_is_refused(folder: Path) -> None:
    task = {"PBS_JOBID": "7.head", "PBS_TASKNUM": "20000001", "PBS_NODENUM": "1"}
    done = launch("package/module.py", folder=folder, **task)
    assert done.returncode == 2 and "launch.py itself was started by pbsdsh or pbs_tmrsh" in done.stderr


def test_each_line_may_start_with_its_rank(folder: Path) -> None:
    done = launch("--label", "sh", "-c", "echo one; printf two; echo error >&2", folder=folder)
    assert done.stdout.splitlines() == ["[rank 0] one", "[rank 0] two"]
    assert "[rank 0] error" in done.stderr.splitlines()


def test_each_rank_may_write_its_own_file(folder: Path) -> None:
    for _ in range(2):  # a continued run appends to the same file
        done = launch("--output-dir", "out/now", "sh", "-c", "echo rank $RANK; echo error >&2", folder=folder)
        assert done.returncode == 0 and not done.stdout, done.stderr
    assert (folder / "out/now/rank-0.log").read_text() == "rank 0\nerror\n" * 2


def test_shell_can_handle_a_stop(folder: Path) -> None:  # unless started with the signal ignored
    done = launch("sh", "-c", "trap 'echo stopped' USR1; kill -USR1 $$; :", folder=folder)
    assert done.stdout == "stopped\n"


def test_mpiexec_that_starts_no_rank_is_a_failure(folder: Path) -> None:
    mpiexec = folder / "mpiexec"
    mpiexec.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "HYDRA build details"; fi\n')
    mpiexec.chmod(0o755)
    (folder / "nodes").write_text(f"{socket.gethostname()}\n" * 2)
    done = launch("--launcher", str(mpiexec), "-n", "2", "package/module.py", folder=folder,
                  PBS_JOBID="1.server", PBS_NODEFILE=str(folder / "nodes"))
    assert done.returncode == 1, done.stderr
    assert "mpiexec ended with exit status 0 before all ranks had joined" in done.stderr
    assert "2 of 2 ranks did not join: ranks 0, 1" in done.stderr

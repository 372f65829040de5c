"""Example 01, copied out of the kit into a folder that is empty or has a package `utils` of its own, runs there."""
from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import WORK, Pbs
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT, STARTED, TORCHRUN, Lab, Result
from tests.matrix import with_all

EXAMPLE = (ROOT / "examples" / "01_ddp_minimal.py").read_text()
OTHER = 'raise ImportError("this is not the kit")\n'
UTILS = ["utils/__init__.py"]
LAUNCH = [str(Path(sys.executable).with_name("ddpkit")), "launch"]
TRAIN = ["train.py", "--epochs", "1"]


def copy(folder: Path, others: list[str]) -> Path:
    """Write the example and files with OTHER to a folder."""
    for name, text in {"train.py": EXAMPLE, **dict.fromkeys(others, OTHER)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def assert_trained(done: Result, hosts: int, start: str) -> None:
    assert done.status == 0, done.output
    assert f"2 ranks on {hosts} host{'s' * (hosts > 1)}, {start}, backend gloo" in done.output, done.output
    assert "\nglobal batch 2 x 64 = 128 samples\n" in done.output, done.output
    assert "final loss: " in done.output, done.output


@pytest.mark.parametrize(("by", "others"), [
    ("ddpkit launch", []), *with_all(("torchrun", UTILS), ("mpich", UTILS), ("ddpkit launch", UTILS))],
    ids=["ddpkit launch, an empty folder", "torchrun", "mpich", "ddpkit launch"])
def test_a_copy_trains(by: str, others: list[str], tmp_path: Path, lab: Lab) -> None:
    copy(tmp_path, others)
    program, hosts, start = [str(tmp_path / TRAIN[0]), *TRAIN[1:]], 1, STARTED.get(by, f"started by {by}")
    if by == "torchrun":
        done = lab.run("h1", [*TORCHRUN, "--standalone", "--nproc-per-node=2", *program])
    elif by == "mpich":
        done, hosts = lab.mpi("mpich5", "h1 h2", [sys.executable, *program]), 2
    else:
        done = lab.run("h1", ["env", "-C", str(tmp_path), *LAUNCH, "-n", "2", *TRAIN])
    assert_trained(done, hosts, start)


def test_a_copy_trains_in_slurm(tmp_path: Path, slurm: SlurmCluster) -> None:
    copy(tmp_path, UTILS)
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", sys.executable, *TRAIN], cwd=tmp_path)
    assert_trained(done, 2, STARTED["slurm"])


def test_a_copy_trains_in_pbs_from_a_copied_job_script(pbs: Pbs) -> None:
    folder = f"{WORK}/copied {time.monotonic_ns()}"
    script = (ROOT / "jobs" / "pbs.sh").read_text()
    activate = 'source ".venv/bin/activate"'  # the line that a user edits
    assert script.count(activate) == 1
    files = {"train.py": EXAMPLE, **dict.fromkeys(UTILS, OTHER),
             "pbs.sh": script.replace(activate, f"source {Path(sys.executable).with_name('activate')}")}
    for name, text in files.items():
        pbs.write(f"{folder}/{name}", text)
    job = pbs.wait(pbs.submit("-l", "select=2:ncpus=1:mpiprocs=1", "pbs.sh", cwd=folder,
                              env={"ARGS": " ".join(TRAIN)}), 120)
    wait_until(lambda: bool(pbs.output(job)), "the output of the job")
    assert_trained(Result(int(job.get("Exit_status", -999)), pbs.output(job)), 2, "started by ddpkit launch")

"""04_submitit.py on a real Slurm and on this machine: after a requeue the loss is that of 01_ddp_minimal.py."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.cluster.slurm import SlurmCluster
from tests.faults.programs import run_ranks
from tests.launch.launchers import ROOT, Lab

pytest.importorskip("submitit")

EPOCHS = ["--epochs", "12"]
THREADS = {"OMP_NUM_THREADS": "1"}
SUBMIT = [sys.executable, str(ROOT / "examples" / "04_submitit.py"), *EPOCHS]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of 01_ddp_minimal.py on two ranks."""
    minimal = str(ROOT / "examples" / "01_ddp_minimal.py")
    return run_ranks(tmp_path_factory.mktemp("minimal"), minimal, (2, EPOCHS)).splitlines()[-1]


def assert_resumes(process: subprocess.Popen[str], preempt: Callable[[str], object], expected: str) -> tuple[str, str]:
    """Preempt the job of 04_submitit.py after three epochs: its second start leaves them out, and the loss is right.

    Returns the job's id and the output of rank 0.
    """
    assert process.stdout is not None
    first = process.stdout.readline()
    found = re.fullmatch(r"job (\d+): the log of rank 0 is (.*)\n", first)
    assert found, first + process.stdout.read()
    job_id, path = found[1], Path(found[2])
    wait_until(lambda: path.exists() and "epoch 3/" in path.read_text(), "the third epoch", seconds=120)
    preempt(job_id)
    done, log = Lab.wait(process, 240), path.read_text()
    assert done.status == 0, done.output
    assert done.line("final loss:") == expected
    resumed = re.search(r"resuming after epoch (\d+)", log)
    assert resumed and int(resumed[1]) >= 2 and log.count("epoch 1/") == 1 and log.count("started by") == 2, log
    return job_id, log


@pytest.mark.usefixtures("slow_requeue")
def test_requeued_job_resumes_where_it_stopped(slurm: SlurmCluster, tmp_path: Path, expected: str) -> None:
    process = slurm.start([*SUBMIT, "--cluster", "slurm", "--nodes", "2", "--tasks-per-node", "1", "--gpus-per-node",
                           "1", "--folder", str(tmp_path / "a folder")], env=THREADS)
    with killed_at_end(process):
        job_id, log = assert_resumes(process, lambda job: slurm.run(["scancel", "--signal=USR2", job]), expected)
    assert "2 ranks on 2 hosts, started by srun (Slurm)" in log
    assert slurm.job(job_id)["Restarts"] == "1"


@pytest.mark.matrix
def test_local_executor_resumes_too(tmp_path: Path, expected: str) -> None:
    def preempt(job_id: str) -> None:
        for task in Path(f"/proc/{job_id}/task/{job_id}/children").read_text().split():
            os.kill(int(task), signal.SIGUSR2)

    process = subprocess.Popen([*SUBMIT, "--cluster", "local", "--tasks-per-node", "2", "--folder", str(tmp_path)],
                               env={**os.environ, **THREADS}, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with killed_at_end(process):
        assert_resumes(process, preempt, expected)

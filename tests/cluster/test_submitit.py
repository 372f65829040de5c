"""04_submitit.py on a real Slurm and on this machine: after a requeue the loss is that of 01_ddp_minimal.py."""
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT, Lab, Result

pytest.importorskip("submitit")
pytest_plugins = ["tests.cluster.slurm_fixture"]

EPOCHS = ["--epochs", "12"]
ON_TWO_NODES = ["--cluster", "slurm", "--nodes", "2", "--tasks-per-node", "1", "--gpus-per-node", "1"]
ON_THIS_MACHINE = ["--cluster", "local", "--tasks-per-node", "2"]


@pytest.fixture(scope="module")
def expected() -> str:
    """The last line of 01_ddp_minimal.py on two ranks."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(ROOT / "examples" / "01_ddp_minimal.py"), *EPOCHS], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


class Submitted:
    """A running 04_submitit.py that has printed its job id and the path of its log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.fullmatch(r"job (\d+): the log of rank 0 is (.*)\n", first)
        assert found, first + process.stdout.read()
        self.process, self.job_id, self._log = process, found[1], Path(found[2])

    def log(self, kind: str = "out") -> str:
        path = self._log.with_name(f"{self.job_id}_0_log.{kind}")
        return path.read_text() if path.exists() else ""

    def wait_for_epoch(self, epoch: int) -> None:
        wait_until(lambda: f"epoch {epoch}/" in self.log(), f"epoch {epoch}", seconds=120)

    def end(self) -> Result:
        return Lab.wait(self.process, 240)

    def assert_resumed(self, expected: str) -> None:
        """The second start leaves out the epochs of the first, and the loss is as expected."""
        done, log = self.end(), self.log()
        assert done.status == 0, done.output
        assert done.line("final loss:") == expected
        found = re.search(r"resuming after epoch (\d+)", log)
        assert found and int(found[1]) >= 2 and log.count("epoch 1/") == 1 and log.count(" by ") == 2, log


@contextlib.contextmanager
def submitted(folder: Path, options: Sequence[str], slurm: SlurmCluster | None = None) -> Iterator[Submitted]:
    command = [sys.executable, str(ROOT / "examples" / "04_submitit.py"), *EPOCHS, *options, "--folder", str(folder)]
    process = slurm.start(command) if slurm else subprocess.Popen(
        command, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with killed_at_end(process):
        yield Submitted(process)


@pytest.mark.usefixtures("slow_requeue")
def test_requeued_job_resumes_where_it_stopped(slurm: SlurmCluster, tmp_path: Path, expected: str) -> None:
    with submitted(tmp_path / "a folder", ON_TWO_NODES, slurm) as job:
        job.wait_for_epoch(3)
        slurm.run(["scancel", "--signal=USR2", job.job_id])
        job.assert_resumed(expected)
    assert "2 ranks on 2 hosts by slurm" in job.log()
    assert slurm.job(job.job_id)["Restarts"] == "1"


def test_killed_rank_is_an_error_with_the_cause(slurm: SlurmCluster, tmp_path: Path) -> None:
    with submitted(tmp_path, ON_TWO_NODES, slurm) as job:
        job.wait_for_epoch(1)
        listed = slurm.run(["scontrol", "listpids", f"{job.job_id}.0"], host="node2").output
        rows = [line.split() for line in listed.splitlines()]
        [pid] = [int(row[0]) for row in rows if row[-1] == "1"]  # PID JOBID STEPID LOCALID GLOBALID
        os.kill(pid, signal.SIGKILL)
        done = job.end()
    assert done.status == 1
    # Rank 0 is in a collective, or in a save.
    assert re.search("by peer|lost the connection to rank 1, which has ended", done.output), done.output
    assert "died without a message" in job.log("err")


def test_local_executor_resumes_too(tmp_path: Path, expected: str) -> None:
    with submitted(tmp_path, ON_THIS_MACHINE) as job:
        job.wait_for_epoch(3)
        tasks = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
        for task in tasks:
            os.kill(int(task), signal.SIGUSR2)
        job.assert_resumed(expected)

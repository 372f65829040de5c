"""examples/05_survive.py ends with the same bits through what Slurm and PBS do to a job."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import HEAD, WORK, Pbs
from tests.cluster.slurm import SlurmCluster

pytest_plugins = ["tests.cluster.pbs_fixture", "tests.cluster.slurm_fixture"]

ROOT = Path(__file__).resolve().parents[2]
SURVIVE = str(ROOT / "tests" / "faults" / "survive.py")
OPTIONS = ["--epochs", "2", "--save-every", "5"]
SLOWLY = ["--step-seconds", "0.15"]
MORE_SLOWLY = ["--step-seconds", "0.6"]  # Slurm looks at time limits every half a minute, and a start may take long


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of the run that was never touched, on two ranks."""
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--launcher", "local",
               "--ntasks-per-node", "2", SURVIVE,
               "--folder", str(tmp_path_factory.mktemp("whole")), *OPTIONS]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stdout
    return done(ended.stdout)


def done(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("done")]
    assert len(lines) == 1, output
    return lines[0]


def saved(folder: Path) -> bool:
    return len(list(folder.glob("step-*"))) > 1


# Slurm ---------------------------------------------------------------------------------------------------------------

def sbatch(slurm: SlurmCluster, folder: Path, *options: str) -> str:
    done = slurm.run(["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue",
                      str(ROOT / "jobs" / "slurm.sh"), SURVIVE, "--folder", str(folder), *OPTIONS, *options],
                     env={"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})
    assert done.status == 0, done.output
    return done.output.split()[-1]


def running(slurm: SlurmCluster, folder: Path, options: Sequence[str] = SLOWLY) -> str:
    job_id = sbatch(slurm, folder, *options)
    wait_until(lambda: saved(folder), "two checkpoints", seconds=100)
    return job_id


@pytest.fixture
def folder(slurm: SlurmCluster) -> Path:
    return slurm.work / f"survive {time.monotonic_ns()}"


def completed(slurm: SlurmCluster, job_id: str, whole: str) -> None:
    job = slurm.wait(job_id, 200)
    output = slurm.output(job_id)
    assert job["JobState"] == "COMPLETED", output
    assert re.search(r"resuming after step \d+", output), output
    assert done(output) == whole


def test_a_requeue_by_the_operator(slurm: SlurmCluster, folder: Path, whole: str) -> None:
    job_id = running(slurm, folder)
    assert slurm.run(["scontrol", "requeue", job_id]).status == 0
    completed(slurm, job_id, whole)


@pytest.mark.usefixtures("slow_requeue")
def test_a_signal_in_good_time_after_which_the_job_requeues_itself(slurm: SlurmCluster, folder: Path,
                                                                   whole: str) -> None:
    job_id = running(slurm, folder)
    assert slurm.run(["scancel", "--signal=USR1", "--batch", job_id]).status == 0
    completed(slurm, job_id, whole)
    assert "is back in the queue" in slurm.output(job_id)


def test_the_time_limit_at_which_the_job_requeues_itself(slurm: SlurmCluster, folder: Path, whole: str) -> None:
    job_id = running(slurm, folder, MORE_SLOWLY)
    assert slurm.run(["scontrol", "update", f"JobId={job_id}", "EndTime=now+2"]).status == 0
    wait_until(lambda: "is back in the queue" in slurm.output(job_id), "the requeue", seconds=120)
    # This has also shortened the limit of the runs to come, to a minute.
    assert slurm.run(["scontrol", "update", f"JobId={job_id}", "TimeLimit=10"]).status == 0
    completed(slurm, job_id, whole)
    assert "SIGTERM" in slurm.output(job_id)


def test_a_node_that_is_taken_down(slurm: SlurmCluster, folder: Path, whole: str) -> None:
    job_id = running(slurm, folder)
    node = slurm.job(job_id)["NodeList"].replace("[", "").replace("]", "").split("-")[0].split(",")[0]
    try:
        assert slurm.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"]).status == 0
        completed(slurm, job_id, whole)
    finally:
        slurm.run(["scontrol", "update", f"nodename={node}", "state=resume"])


# PBS -----------------------------------------------------------------------------------------------------------------

def qsub(pbs: Pbs, folder: str, *options: str, script: Sequence[str] = (SURVIVE,),
         slowly: Sequence[str] = SLOWLY) -> str:
    arguments = " ".join(f"'{word}'" for word in [*script, "--folder", folder, *OPTIONS, *slowly])
    return pbs.submit("-V", "-l", "select=2:ncpus=1:mpiprocs=1", *options, str(ROOT / "jobs" / "pbs.sh"),
                      env={"PYTHON": sys.executable, "ARGS": arguments})


def pbs_completed(pbs: Pbs, job_id: str, whole: str) -> None:
    job = pbs.wait(job_id, 200)
    wait_until(lambda: "done after" in pbs.output(job), "the output")
    assert job["Exit_status"] == 0
    assert re.search(r"resuming after step \d+", pbs.output(job)), pbs.output(job)
    assert done(pbs.output(job)) == whole


def new_folder() -> str:
    return f"{WORK}/survive {time.monotonic_ns()}"


def test_qrerun(pbs: Pbs, whole: str) -> None:
    folder = new_folder()
    job_id = qsub(pbs, folder, "-r", "y")
    wait_until(lambda: saved(pbs.local(folder)), "two checkpoints", seconds=100)
    assert pbs.run(HEAD, ["qrerun", job_id], user="root", cwd="/").status == 0
    pbs_completed(pbs, job_id, whole)


def test_the_clock_before_the_walltime_after_which_the_next_job_goes_on(pbs: Pbs, whole: str) -> None:
    folder = new_folder()
    job = pbs.wait(qsub(pbs, folder, "-l", "walltime=46"), 120)
    assert job["Exit_status"] == 75 and "stopped at step" in pbs.output(job), pbs.output(job)
    pbs_completed(pbs, qsub(pbs, folder), whole)


def test_the_kill_at_the_walltime_after_which_the_next_job_goes_on(pbs: Pbs, whole: str) -> None:
    folder = new_folder()
    no_clock = str(Path(__file__).with_name("no_clock.py"))
    job = pbs.wait(qsub(pbs, folder, "-l", "walltime=25", script=(no_clock, SURVIVE), slowly=MORE_SLOWLY), 120)
    assert job["Exit_status"] == -29 and "SIGTERM" in pbs.output(job), pbs.output(job)
    pbs_completed(pbs, qsub(pbs, folder), whole)

"""Trainings end with the same bits through what Slurm and PBS do to their jobs.

A training of two ranks on two hosts in one folder, which one job after the other continues.
"""
from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.jobs import Jobs, PbsJobs, SlurmJobs
from tests.cluster.pbs import HEAD, Pbs
from tests.cluster.slurm import SlurmCluster
from tests.faults.programs import SURVIVE, done_line

BEGUN = re.compile(r"^(?:starting|resuming after step (\d+))", re.MULTILINE)
ENDED = re.compile(r"^(?:stopped at step|done after) (\d+)", re.MULTILINE)
REQUEUED = "is back in the queue"


class Training:
    """A training with a slow disk, in a folder with checkpoints."""

    def __init__(self, jobs: Jobs, options: list[str], output: Callable[[str], str],
                 runs: Callable[[str], bool]) -> None:
        """output: what a job has written. runs: whether it runs, until its last process has ended."""
        self.jobs, self.options = jobs, options
        self.output, self.runs = output, runs
        self.path = f"checkpoints-{time.monotonic_ns()}"  # in the folder of the jobs
        self.step = 0  # of the newest checkpoint that was there before the last run

    def start(self, *options: str, step_seconds: float = 0.1) -> str:
        fsync_seconds = min(step_seconds, 0.1)  # a save calls fsync about eight times
        words = ["--step-seconds", str(step_seconds), "--fsync-seconds", str(fsync_seconds)]
        return self.jobs.start([*self.options, *options], *SURVIVE, *words, "--folder", self.path)

    def names(self) -> list[str]:
        folder = self.jobs.folder / self.path
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def newest_step(self) -> int:
        return max((int(name[5:]) for name in self.names() if name.startswith("step-")), default=0)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait with pauses, since the condition asks the scheduler."""
        wait_until(lambda: bool(condition()), what, seconds=150, pause=0.2)

    def wait_for_progress(self) -> None:
        step = self.newest_step()
        self.wait(lambda: self.newest_step() > step + 5, "two checkpoints")

    def wait_until_saving(self, job: str) -> None:
        self.wait(lambda: BEGUN.search(self.output(job)) and any(name.startswith(".saving-") for name in self.names()),
                  "a save")

    def check_stop(self, job: str, earlier: str = "") -> None:
        """Wait until a run has ended, and check that it has continued from the newest checkpoint, and saved."""
        self.wait(lambda: not self.runs(job) and not is_in_command_lines(self.path), f"the end of job {job}")
        output, names = self.output(job)[len(earlier):], self.names()
        begun, ended = BEGUN.search(output), ENDED.search(output)
        assert all(name.startswith("step-") for name in names), names
        assert (begun is None) == (ended is None), output
        if begun and ended:
            assert int(begun[1] or 0) == self.step and int(ended[1]) == self.newest_step(), (names, output)
        self.step = self.newest_step()


def is_in_command_lines(path: str) -> bool:
    return subprocess.run(["pgrep", "-f", path], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.matrix
@pytest.mark.usefixtures("slow_requeue")
def test_slurm_stops_signals_and_requeues_a_job(slurm: SlurmCluster, whole: str) -> None:
    def runs(job: str) -> bool:
        return slurm.job(job)["JobState"] in ("RUNNING", "COMPLETING")

    training = Training(SlurmJobs(slurm), ["-N2", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue"],
                        slurm.output, runs)
    job = training.start()
    training.wait(lambda: runs(job), "the job to run")
    time.sleep(random.uniform(0, 4))  # while it starts, or a little later
    slurm.run(["scancel", job])
    training.check_stop(job)

    job = training.start()
    training.wait_until_saving(job)
    time.sleep(random.uniform(0, 0.5))
    slurm.run(["scontrol", "requeue", job])
    training.check_stop(job)
    earlier = slurm.output(job)
    training.wait(lambda: runs(job), "the job to run again")
    training.wait_for_progress()
    slurm.run(["scancel", "--signal=USR1", "--batch", job])
    training.check_stop(job, earlier)
    assert REQUEUED in slurm.output(job) and slurm.job(job)["JobState"] == "PENDING", slurm.output(job)
    slurm.run(["scancel", job])

    job = training.start(step_seconds=1.0)  # Slurm looks at time limits every half a minute
    training.wait(lambda: training.newest_step() > training.step, "a checkpoint")
    assert slurm.run(["scontrol", "update", f"JobId={job}", "EndTime=now+2"]).status == 0
    training.wait(lambda: REQUEUED in slurm.output(job), "the requeue at the limit")
    training.check_stop(job)
    assert "SIGTERM" in slurm.output(job) and slurm.job(job)["JobState"] == "PENDING", slurm.output(job)
    slurm.run(["scancel", job])

    job = training.start(step_seconds=0)
    assert slurm.wait(job, 200)["JobState"] == "COMPLETED", slurm.output(job)
    assert f"resuming after step {training.step}" in slurm.output(job) and done_line(slurm.output(job)) == whole


def test_pbs_stops_and_reruns_a_job(pbs: Pbs, whole: str) -> None:
    def output(job: str) -> str:
        return pbs.output(pbs.job(job))

    def runs(job: str) -> bool:
        return pbs.state(job) in "RE"

    training = Training(PbsJobs(pbs), ["-l", "select=2:ncpus=1:mpiprocs=1"], output, runs)
    job = training.start()
    training.wait(lambda: runs(job), "the job to run")
    time.sleep(random.uniform(0, 4))  # while it starts, or a little later
    pbs.run(HEAD, ["qdel", job])
    training.check_stop(job)

    job = training.start()
    training.wait_until_saving(job)
    time.sleep(random.uniform(0, 0.5))
    pbs.run(HEAD, ["qdel", job])
    training.check_stop(job)

    job = training.start("-l", "walltime=46", step_seconds=0.3)  # it stops 35 seconds before
    ended = pbs.wait(job, 120)
    assert ended["Exit_status"] == 75, output(job)
    training.check_stop(job)

    job = training.start("-r", "y", step_seconds=0.05)
    training.wait_for_progress()
    assert pbs.run(HEAD, ["qrerun", job], user="root", cwd="/").status == 0
    ended = pbs.wait(job, 200)
    wait_until(lambda: "done after" in output(job), "the output")
    assert ended["Exit_status"] == 0 and "resuming after step" in output(job), output(job)
    assert done_line(output(job)) == whole

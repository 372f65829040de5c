"""Trainings end with the same bits through what Slurm and PBS do to their jobs.

Random stops: each job has two ranks on two hosts. scancel, scontrol requeue or qdel stops it: SIGTERM, and SIGKILL
when the grace time is over. The next job continues in the same folder. DDPKIT_STOPS=100 makes a hundred of them.
"""
from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import HEAD, WORK, Pbs
from tests.cluster.slurm import SlurmCluster
from tests.faults.programs import ROOT, SURVIVE, done_line
from utils.checkpoint import storage
from utils.checkpoint.rank_file import read_rank_file

pytest_plugins = ["tests.cluster.pbs_fixture", "tests.cluster.slurm_fixture"]

STOPS = int(os.environ.get("DDPKIT_STOPS", "3"))
BEGUN = re.compile(r"^(?:starting|resuming after step (\d+))", re.MULTILINE)
ENDED = re.compile(r"^(?:stopped at step|done after) (\d+)", re.MULTILINE)

# When to stop a job: a random time, up to so many seconds, after its output or its folder show a sign.
MOMENTS: dict[str, tuple[float, Callable[[str, Sequence[str]], object]]] = {
    "start-up": (4.0, lambda output, names: True),
    "any step": (2.0, lambda output, names: BEGUN.search(output)),
    "save": (0.5, lambda output, names: BEGUN.search(output) and any(name.startswith(".saving-") for name in names)),
    "last steps": (1.0, lambda output, names: "step 90/96" in output),
}


class SlurmJobs:
    """Jobs of a Slurm. stops: the commands that stop a job. grace: seconds from SIGTERM to SIGKILL."""

    stops: Sequence[str] = ("scancel", "scontrol requeue")

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm, self.grace = slurm, slurm.kill_wait

    def new_folder(self) -> str:
        return f"{self.slurm.work}/run {time.monotonic_ns()}"

    def local(self, path: str) -> Path:
        """Where this machine sees a path of the hosts."""
        return Path(path)

    def submit(self, folder: str, *words: str, options: Sequence[str] = ()) -> str:
        return self.slurm.sbatch(
            "-N2", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue", *options, str(ROOT / "jobs" / "slurm.sh"),
            *SURVIVE, *words, "--folder", folder, env={"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})

    def state(self, job: str) -> str:
        """Return "waits", "runs" (until its last process has ended) or "ended"."""
        states = {"PENDING": "waits", "RUNNING": "runs", "COMPLETING": "runs"}
        return states.get(self.slurm.job(job)["JobState"], "ended")

    def stop(self, job: str, command: str) -> None:
        self.slurm.run([*command.split(), job])

    def output(self, job: str) -> str:
        return read(self.slurm.work / f"slurm-{job}.out")


class PbsJobs:
    """Jobs of a PBS, as those of a Slurm."""

    stops: Sequence[str] = ("qdel",)
    grace = 10.0

    def __init__(self, pbs: Pbs) -> None:
        self.pbs = pbs
        self.local = pbs.local
        self._outputs: dict[str, Path] = {}

    def new_folder(self) -> str:
        return f"{WORK}/run {time.monotonic_ns()}"

    def submit(self, folder: str, *words: str, options: Sequence[str] = ()) -> str:
        arguments = " ".join(f"'{word}'" for word in [*SURVIVE, *words, "--folder", folder])
        return self.pbs.submit("-V", "-l", "select=2:ncpus=1:mpiprocs=1", *options, str(ROOT / "jobs" / "pbs.sh"),
                               env={"PYTHON": sys.executable, "ARGS": arguments})

    def state(self, job: str) -> str:
        return {"Q": "waits", "R": "runs", "E": "runs"}.get(self.pbs.state(job), "ended")

    def stop(self, job: str, command: str) -> None:
        self.pbs.run(HEAD, [command, job])

    def output(self, job: str) -> str:
        if job not in self._outputs:
            self._outputs[job] = self.local(str(self.pbs.job(job)["Output_Path"]).partition(":")[2])
        return read(self._outputs[job])


class Run:
    """A training in its folder of checkpoints, which one job after the other continues."""

    def __init__(self, jobs: SlurmJobs | PbsJobs) -> None:
        self.jobs, self.path = jobs, jobs.new_folder()
        self.folder = jobs.local(self.path)
        self.checkpoints: list[str] = []
        self.requeued = ""
        self.done = ""  # the last line of the training

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def stop_once(self, numbers: random.Random) -> bool:
        """Let a job run, stop it at a random moment, and check what it leaves; return whether it had begun to train."""
        jobs, moment, command = self.jobs, numbers.choice(list(MOMENTS)), numbers.choice(self.jobs.stops)
        words = ["--step-seconds", "0.05", "--fsync-seconds", "0.1"]  # a save calls fsync about eight times
        job = self.requeued or jobs.submit(self.path, *words)
        earlier = len(jobs.output(job)) if self.requeued else 0
        wait_slowly(lambda: jobs.state(job) == "runs", f"job {job} to run")
        seconds, sign = MOMENTS[moment]
        wait_slowly(lambda: sign(jobs.output(job)[earlier:], self.names()) or jobs.state(job) == "ended",
                    f"{moment} of job {job}")
        time.sleep(numbers.uniform(0, seconds))

        start, saved = time.monotonic(), 0.0
        if jobs.state(job) == "runs":
            jobs.stop(job, command)
        while is_in_command_lines(self.path) or jobs.state(job) == "runs":
            assert time.monotonic() < start + 100, f"job {job} does not end after {command}"
            ended = ENDED.search(jobs.output(job)[earlier:])
            if ended and not saved and newest_step(self.names()) == int(ended[1]):
                saved = time.monotonic() - start
            time.sleep(0.02)
        self.check(jobs.output(job)[earlier:], saved or time.monotonic() - start, f"{command}, {moment}")
        if not self.done:
            assert jobs.state(job) == ("waits" if "requeue" in command else "ended")
        self.requeued = job if jobs.state(job) == "waits" else ""
        return BEGUN.search(jobs.output(job)[earlier:]) is not None

    def check(self, output: str, saved: float, what: str) -> None:
        """Check what a job has left that was stopped. saved: seconds until it had saved, or had ended."""
        begun, ended, names = BEGUN.search(output), ENDED.search(output), self.names()
        what = f"{what}: {names} after {self.checkpoints}, {saved:.2f} s\n{output}"
        assert saved < self.jobs.grace, what
        if begun is None:
            assert names == self.checkpoints, what
        else:
            assert int(begun[1] or 0) == newest_step(self.checkpoints), what
            assert ended is not None and newest_step(names) == int(ended[1]), what
        for name in names:
            assert name.startswith("step-"), what
            for entry in storage.read_manifest(self.folder / name)["files"]:
                read_rank_file(self.folder / name, entry)
        self.checkpoints = names
        self.done = done_line(output) if ended and ended[0].startswith("done") else ""


def newest_step(names: Sequence[str]) -> int:
    return max((storage.step_of(name) for name in names if name.startswith("step-")), default=0)


def is_in_command_lines(path: str) -> bool:
    """Return whether a process has this path in its arguments."""
    return any(path in read(process / "cmdline") for process in Path("/proc").glob("[0-9]*"))


def read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def wait_slowly(condition: Callable[[], object], what: str) -> None:
    """Wait with pauses, since the condition asks the scheduler."""
    def look() -> bool:
        time.sleep(0.1)
        return bool(condition())
    wait_until(look, what, seconds=150)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_stopped_at_a_random_moment_has_saved_before_it_is_killed(
        scheduler: str, request: pytest.FixtureRequest, whole: str) -> None:
    cluster, numbers, begun = request.getfixturevalue(scheduler), random.Random(0), 0
    run = Run(SlurmJobs(cluster) if scheduler == "slurm" else PbsJobs(cluster))
    for _ in range(STOPS):
        begun += run.stop_once(numbers)
        if run.done:
            assert run.done == whole
            run = Run(run.jobs)
    assert begun >= STOPS // 2


def wait_for_progress(jobs: SlurmJobs | PbsJobs, folder: str) -> None:
    """Wait until two checkpoints are there that are not there now."""
    path = jobs.local(folder)
    before = set(path.glob("step-*"))
    wait_until(lambda: len(set(path.glob("step-*")) - before) > 1, "two checkpoints", seconds=100)


def check_end(output: str, whole: str) -> None:
    assert re.search(r"resuming after step \d+", output), output
    assert done_line(output) == whole


@pytest.mark.usefixtures("slow_requeue")
def test_slurm_signals_a_job_loses_its_node_and_ends_its_time(slurm: SlurmCluster, whole: str) -> None:
    jobs = SlurmJobs(slurm)
    folder = jobs.new_folder()
    # Slurm looks at time limits every half a minute, and a start may take long.
    job = jobs.submit(folder, "--step-seconds", "0.6")
    wait_for_progress(jobs, folder)
    assert slurm.run(["scancel", "--signal=USR1", "--batch", job]).status == 0
    wait_until(lambda: "is back in the queue" in jobs.output(job), "the requeue after the signal", seconds=120)

    wait_for_progress(jobs, folder)
    node = slurm.job(job)["NodeList"].replace("[", "").replace("]", "").split("-")[0].split(",")[0]
    try:
        assert slurm.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"]).status == 0
        wait_until(lambda: slurm.job(job)["Restarts"] == "2", "the requeue after the loss of a node", seconds=120)
    finally:
        slurm.run(["scontrol", "update", f"nodename={node}", "state=resume"])

    wait_for_progress(jobs, folder)
    assert slurm.run(["scontrol", "update", f"JobId={job}", "EndTime=now+2"]).status == 0
    wait_until(lambda: jobs.output(job).count("is back in the queue") == 2, "the requeue at the limit", seconds=120)
    # This has also shortened the limit of the runs to come, to a minute.
    assert slurm.run(["scontrol", "update", f"JobId={job}", "TimeLimit=10"]).status == 0
    ended = slurm.wait(job, 200)
    assert ended["JobState"] == "COMPLETED" and "SIGTERM" in jobs.output(job), jobs.output(job)
    check_end(jobs.output(job), whole)


def check_pbs_end(pbs: Pbs, job_id: str, whole: str) -> None:
    job = pbs.wait(job_id, 200)
    wait_until(lambda: "done after" in pbs.output(job), "the output")
    assert job["Exit_status"] == 0
    check_end(pbs.output(job), whole)


def test_a_job_that_pbs_runs_again(pbs: Pbs, whole: str) -> None:
    jobs = PbsJobs(pbs)
    folder = jobs.new_folder()
    job_id = jobs.submit(folder, "--step-seconds", "0.15", options=["-r", "y"])
    wait_for_progress(jobs, folder)
    assert pbs.run(HEAD, ["qrerun", job_id], user="root", cwd="/").status == 0
    check_pbs_end(pbs, job_id, whole)


def test_a_job_that_stops_before_its_walltime(pbs: Pbs, whole: str) -> None:
    jobs = PbsJobs(pbs)
    folder = jobs.new_folder()
    job = pbs.wait(jobs.submit(folder, "--step-seconds", "0.15", options=["-l", "walltime=46"]), 120)
    assert job["Exit_status"] == 75 and "stopped at step" in pbs.output(job), pbs.output(job)
    check_pbs_end(pbs, jobs.submit(folder), whole)

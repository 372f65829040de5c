"""The ready scripts and submit.py in jobs of Slurm and PBS: right ranks, exit statuses, stops, arrays, chains, errors.

Slurm is a real one; PBS is the stand-in, or with --real-pbs a real OpenPBS.
"""
from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.jobs import RANK, TRAIN, Jobs, PbsJobs, SlurmJobs, ranks_on
from tests.cluster.pbs import HEAD, Pbs
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT, Result
from tests.matrix import with_all

BOTH = pytest.mark.parametrize("jobs", ["slurm", *with_all("pbs")], indirect=True)
ONE_RANK = ["--nodes", "1", "--ntasks-per-node", "1"]
TWO_BY_TWO = "select=2:ncpus=2:mpiprocs=2"
# Each rank writes its process id and its signals, and ends after SIGTERM with status 5.
WAITS = f"import sys\nsys.argv += ['--notes', 'notes', '--wait']\n{RANK}"
# Rank 1 requests a stop in the first run; the second one runs to its end.
STOPS_ONCE = f"""\
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils import setup_distributed
from utils.preemption import StopSignal, requeue
from utils.job import current_job
with setup_distributed("gloo") as dist, StopSignal(dist) as stop:
    again = os.path.exists("saved")
    dist.barrier()
    if dist.rank == 1 and not again:
        stop.request("a test")
    while not again and not stop.should_stop():
        time.sleep(0.01)
    if dist.is_main:
        assert 200 < current_job().seconds_left() <= 300
        print("continues" if again else "saves", flush=True)
        open("saved", "w").close()
if stop.stopped and dist.is_main:
    requeue()
sys.exit(stop.exit_status)
"""
# The first job runs until it is asked to stop.
UNTIL_STOP = f"""\
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from utils import setup_distributed
from utils.preemption import StopSignal

with setup_distributed("gloo") as dist, StopSignal(dist, poll_seconds=0.5) as stop:
    runs = Path("runs")
    again = runs.exists()
    runs.write_text("<><" if again else "<")
    while not again and not stop.should_stop():
        time.sleep(0.05)
    runs.write_text("<><>" if again else "<>")
sys.exit(stop.exit_status)
"""
# A job of a chain. The second one runs until its time limit, which Slurm counts in minutes: there it moves its end.
STEPS = f"""\
import os, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils.job import current_job
from utils.preemption import requeue
assert 5 < current_job().seconds_left() <= 60
open("runs", "a").write("<")
run = open("runs").read().count("<")
if run == 2:
    if "SLURM_JOB_ID" in os.environ:
        subprocess.run(["scontrol", "update", "JobId=" + os.environ["SLURM_JOB_ID"], "EndTime=now+1"], check=True)
    time.sleep(100)
open("runs", "a").write(">")
if run == 1:
    requeue()
    sys.exit(75)
"""
@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Jobs:
    return request.getfixturevalue(f"{request.param}_jobs")  # type: ignore[no-any-return]


@pytest.fixture
def slurm_jobs(slurm: SlurmCluster) -> SlurmJobs:
    return SlurmJobs(slurm)


@pytest.fixture
def pbs_jobs(pbs: Pbs) -> PbsJobs:
    return PbsJobs(pbs)


def ids_of(submitted: Result) -> list[str]:
    assert submitted.status == 0, submitted.output
    return re.findall(r"^(\d\S*)$", submitted.output, re.MULTILINE)


@pytest.mark.parametrize(("jobs", "options", "expected"), [
    ("slurm", "-N4", [2, 2, 2, 2]),  # a rank for each GPU of whole nodes
    ("pbs", f"-l {TWO_BY_TWO}", [2, 2]),  # the script has place=scatter
    ("pbs", f"-l {TWO_BY_TWO} -l place=pack", [4]),
    ("pbs", "-l select=2:ncpus=1:ngpus=2 -l place=scatter", [2, 2]),
    ("pbs", "-l select=1:ncpus=1:mpiprocs=1+1:ncpus=2:mpiprocs=2 -l place=scatter", [1, 2]),
    ("pbs", "-l select=1:ncpus=2:mpiprocs=2+1:ncpus=2:mpiprocs=0 -l place=scatter", [2]),
    ("pbs", "-l select=1:ncpus=1:host=n1+1:ncpus=1:host=n2+1:ncpus=1:host=n1 -l place=free", [1, 2]),
], indirect=["jobs"])
def test_every_task_slot_or_gpu_gets_a_rank(jobs: Jobs, options: str, expected: list[int]) -> None:
    torchrun = ["--torchrun"] if options == f"-l {TWO_BY_TWO}" else []  # one agent on each host
    done = jobs.ended(jobs.start(options.split(), *torchrun, TRAIN))
    assert done.status == 0 and ("by torchrun" in done.output) == bool(torchrun), done.output
    assert sorted(ranks_on(done.output).values()) == expected


@pytest.mark.parametrize("args", [None, "it's", f"'{TRAIN}'", '"a, b"', "a\\ b"])
def test_words_that_qsub_loses_or_changes_are_refused(pbs_jobs: PbsJobs, args: str | None) -> None:
    env = {} if args is None else {"ARGS": args}
    words = ["qsub", "-l", TWO_BY_TWO, pbs_jobs.ready_script()]
    submitted = pbs_jobs.cluster.run(HEAD, words, cwd=pbs_jobs.path, env=env)
    if args in (None, "it's"):
        assert submitted.status == 1 and "cannot send environment with the job" in submitted.output
    else:
        done = pbs_jobs.ended(submitted.output.strip())
        assert done.status == 2 and "qsub changes quotes and backslashes" in done.output, done.output


def test_elements_of_a_pbs_array_are_separate_launches(pbs_jobs: PbsJobs) -> None:
    array = pbs_jobs.start(["-J", "0-2", "-l", "select=1:ncpus=1:mpiprocs=2"], TRAIN)
    for index in range(3):
        done = pbs_jobs.ended(array.replace("[]", f"[{index}]"))
        assert done.status == 0 and list(ranks_on(done.output).values()) == [2], done.output


@pytest.mark.matrix
def test_job_is_requeued_after_a_stop_under_torchrun(slurm_jobs: SlurmJobs) -> None:
    (slurm_jobs.folder / "stops.py").write_text(STOPS_ONCE)
    job_id = slurm_jobs.start(["-N2", "-n2", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue", "--time=5"],
                              "--torchrun", "stops.py")
    done = slurm_jobs.submit_py("logs", "--follow", job_id)
    assert done.status == 0, done.output
    assert done.output.index("saves\n") < done.output.index("restart 1 of") < done.output.index("continues\n")
    assert slurm_jobs.cluster.job(job_id)["Restarts"] == "1"


def test_stop_reaches_the_ranks_of_every_host(pbs_jobs: PbsJobs) -> None:
    pbs = pbs_jobs.cluster
    pbs.write(f"{pbs_jobs.path}/notes/.keep", "")
    (pbs_jobs.folder / "waits.py").write_text(WAITS)
    job_id = pbs_jobs.start(["-l", TWO_BY_TWO], "waits.py", "two words")  # qsub -- : without a login shell
    notes = [pbs_jobs.folder / "notes" / f"{rank}.signals" for rank in range(4)]
    wait_until(lambda: len(list(pbs_jobs.folder.glob("notes/[0-3]"))) == 4, "four ranks", seconds=60)
    assert pbs.run(HEAD, ["qsig", "-s", "USR1", job_id]).status == 0
    wait_until(lambda: all(note.read_text() == "SIGUSR1\n" for note in notes), "USR1 in all ranks")
    assert pbs.state(job_id) == "R"
    assert pbs.run(HEAD, ["qdel", job_id]).status == 0
    assert pbs_jobs.ended(job_id).status == 5
    assert [note.read_text() for note in notes] == ["SIGUSR1\nSIGTERM\n"] * 4
    pids = ",".join(note.with_suffix("").read_text() for note in notes)
    for host in ("n1", "n2", "n3"):
        shown = pbs.run(host, ["ps", "-o", "args=", "-p", pids]).output
        assert not [line for line in shown.splitlines() if ".py" in line and "defunct" not in line]


@BOTH
def test_following_shows_output_and_ends_with_the_jobs_status(jobs: Jobs) -> None:
    """sbatch reads the path of the output from a quoted directive."""
    (jobs.folder / "module.py").write_text(RANK)
    folder = "a  b 'c' \"d\" # $(touch x) 50%j \u00e9;&" if jobs.scheduler == "slurm" else "jobs-out"
    done = jobs.submit("--nodes", "2", "--ntasks-per-node", "2", "--cpus-per-task", "1", "--gpus-per-node", "0",
                       "--time", "5:00", "--folder", folder, "--follow", "-m", "module", "a b", "1")
    assert done.status == 0 and "completed, exit status 0" in done.output, done.output
    assert sorted(ranks_on(done.output).values()) == [2, 2]
    assert done.output.count("arguments ['a b', '1']") == 4


@BOTH
def test_chain_continues_after_a_stop_and_the_time_limit_until_a_job_completes(jobs: Jobs) -> None:
    (jobs.folder / "steps.py").write_text(STEPS)
    limit = {"slurm": "1:00", "pbs": "20s"}[jobs.scheduler]
    done = jobs.submit(*ONE_RANK, "--time", limit, "--chain", "4", "--follow", "steps.py", seconds=240)
    ids = ids_of(done)
    assert "stopped after saving, to be continued" in done.output and "timeout" in done.output, done.output
    assert "the training is complete; the rest of the chain is not needed" in done.output
    jobs.cluster.wait(ids[3])
    done = jobs.submit_py("status", ids[3])
    assert done.status == 0 and f"not needed: job {ids[2]} of its chain has completed" in done.output, done.output
    assert (jobs.folder / "runs").read_text() == "<><<>"  # one after the other; the second was killed
    if jobs.scheduler == "slurm":
        assert jobs.cluster.job(ids[0])["Restarts"] == "0"  # although it has called requeue()
    else:
        assert "time limit" in {file.read_text().strip() for file in jobs.folder.glob("jobs-out/*/*.status")}


@BOTH
def test_submit_stop_lets_a_job_save_and_the_next_of_its_chain_go_on(jobs: Jobs) -> None:
    (jobs.folder / "until_stop.py").write_text(UNTIL_STOP)
    ids = ids_of(jobs.submit(*ONE_RANK, "--time", "5:00", "--chain", "2", "until_stop.py"))
    wait_until(lambda: (jobs.folder / "runs").exists(), "the first job", seconds=60)
    done = jobs.submit_py("stop", ids[0])
    assert done.status == 0 and f"cancel {ids[0]}" in done.output, done.output
    jobs.cluster.wait(ids[1])
    assert (jobs.folder / "runs").read_text() == "<><>"
    assert "stopped after saving" in jobs.submit_py("status", ids[0]).output


@BOTH
def test_running_job_is_queried_and_cancelled_with_its_chain(jobs: Jobs) -> None:
    (jobs.folder / "long.py").write_text("import time\nprint('it runs', flush=True)\ntime.sleep(100)\n")
    ids = ids_of(jobs.submit(*ONE_RANK, "--chain", "2", "long.py"))
    wait_until(lambda: "it runs" in jobs.submit_py("logs", ids[0]).output, "the output", seconds=60)
    done = jobs.submit_py("status", ids[0])
    assert done.status == 0 and "running, on " in done.output
    assert jobs.submit_py("cancel", ids[1]).status == 0
    for job_id in ids:
        jobs.cluster.wait(job_id)
        done = jobs.submit_py("status", job_id)
        assert done.status == 1 and "cancelled" in done.output, done.output


@pytest.mark.parametrize(("jobs", "words", "messages"), [
    ("slurm", "--no-check --queue nosuch", ["Invalid partition name specified", "job.sh"]),
    ("slurm", "--no-check --directive=--gres=gpu:7", ["node configuration is not available", "job.sh"]),
    ("slurm", "--no-check --directive=--constraint=foo", ["Invalid feature specif", "job.sh"]),
    ("slurm", "--queue short --time 5:00:00 --nodes 5 --gpus-per-node 3", ["00:10:00", "nodes: 5", "GPUs", "nothing"]),
    ("pbs", "--no-check --queue nosuch", ["nknown queue", "-q nosuch"]),
    ("pbs", "--nodes 9 --gpus-per-node 0", ["nodes: 9 is more than the", "nothing was submitted"]),
], indirect=["jobs"])
def test_job_that_cannot_run_is_refused_with_the_reason(jobs: Jobs, words: str, messages: Sequence[str]) -> None:
    """Before the submission, or by the scheduler, whose message is shown with the script."""
    done = jobs.submit_py("run", "--site", f"generic-{jobs.scheduler}", *words.split(), TRAIN)
    assert done.status == 1
    for message in messages:
        assert message in done.output, done.output
    # A script that the scheduler has refused is kept, without a record of a job.
    names = {path.name for path in jobs.folder.glob("jobs-out/*/*")}
    assert names == ({"job.sh", "environment"} if "--no-check" in words else set())

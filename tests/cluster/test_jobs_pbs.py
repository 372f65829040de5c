"""The ready PBS scripts, launch.py and submit.py in jobs of PBS: right ranks, signals, exit statuses, arrays, chains.

On the stand-in, or with --real-pbs on a real OpenPBS.
"""
from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.job_ranks import RANK, STEP, STOPS_ONCE, TRAIN, one_after_the_other, ranks_on
from tests.cluster.pbs import HEAD, WORK, Pbs
from tests.launch.launchers import MINIMAL, ROOT, Result

pytest_plugins = ["tests.cluster.pbs_fixture"]

FOLDER = f"{WORK}/a folder"
READY = str(ROOT / "jobs" / "pbs.sh")
SUBMIT = [sys.executable, str(ROOT / "scripts" / "submit.py"), "run", "--site", "generic-pbs", "--no-check"]
# Each rank notes its signals, and needs two seconds to save after SIGTERM.
SLOW = f"""\
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils.launchers import detect
rank = detect().rank
def note(number, frame):
    open(f"got {{rank}}", "a").write(signal.Signals(number).name + " ")
    if number == signal.SIGTERM:
        time.sleep(2)
        open(f"saved {{rank}}", "w").write("yes")
        sys.exit(3)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, note)
open(f"runs {{rank}}", "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def folder(pbs: Pbs) -> Path:
    """A new folder with spaces in its name and a training script; where this machine has it."""
    path = pbs.local(pbs.write(f"{FOLDER} {time.monotonic_ns()}/{TRAIN}", RANK)).parent
    return path


def qsub(pbs: Pbs, folder: Path, *words: str, arguments: str = f"'{TRAIN}'") -> str:
    return pbs.submit("-V", *words, cwd=f"{WORK}/{folder.name}", env={"PYTHON": sys.executable, "ARGS": arguments})


def ended(pbs: Pbs, job_id: str, seconds: float = 90) -> Result:
    job = pbs.wait(job_id, seconds)
    wait_until(lambda: bool(pbs.output(job)), f"the output of {job_id}")
    return Result(int(job.get("Exit_status", -999)), pbs.output(job))


@pytest.mark.parametrize(("select", "place", "expected"), [
    ("2:ncpus=2:mpiprocs=2", "scatter", [2, 2]),
    ("2:ncpus=2:mpiprocs=2", "pack", [4]),
    ("2:ncpus=2:mpiprocs=1", "scatter", [1, 1]),
    ("2:ncpus=1:ngpus=2", "scatter", [2, 2]),
    ("1:ncpus=1:mpiprocs=1+1:ncpus=2:mpiprocs=2", "scatter", [1, 2]),
    ("1:ncpus=2:mpiprocs=2+1:ncpus=2:mpiprocs=0", "scatter", [2]),
    ("1:ncpus=1:host=n1+1:ncpus=1:host=n2+1:ncpus=1:host=n1", "free", [1, 2]),
])
def test_every_slot_or_gpu_of_every_host_gets_a_rank(pbs: Pbs, folder: Path, select: str, place: str,
                                                     expected: list[int]) -> None:
    done = ended(pbs, qsub(pbs, folder, "-l", f"select={select}", "-l", f"place={place}", READY))
    assert done.status == 0, done.output
    assert sorted(ranks_on(done.output).values()) == expected


def test_one_torchrun_agent_on_each_host_starts_the_ranks(pbs: Pbs, folder: Path) -> None:
    done = ended(pbs, qsub(pbs, folder, "-l", "select=2:ncpus=2:mpiprocs=2", READY,
                           arguments=f"--torchrun '{TRAIN}'"))
    assert done.status == 0, done.output
    assert sorted(ranks_on(done.output).values()) == [2, 2]
    assert "by torchrun" in done.output


def test_ranks_and_torchrun_agents_train_to_the_same_loss(pbs: Pbs, folder: Path) -> None:
    losses = []
    for options in ([], ["--torchrun"]):
        done = ended(pbs, qsub(pbs, folder, "-l", "select=2:ncpus=2:mpiprocs=2", READY,
                               arguments=" ".join(f"'{word}'" for word in [*options, *MINIMAL[1:]])), 150)
        assert done.status == 0, done.output
        losses.append(done.line("final loss:"))
    assert losses[0] == losses[1]


def test_the_elements_of_an_array_are_launches_of_their_own(pbs: Pbs, folder: Path) -> None:
    array = qsub(pbs, folder, "-J", "0-2", "-l", "select=1:ncpus=1:mpiprocs=2", READY)
    for index in range(3):
        done = ended(pbs, array.replace("[]", f"[{index}]"))
        assert done.status == 0 and list(ranks_on(done.output).values()) == [2], done.output


def test_the_exit_status_is_that_of_the_rank_that_failed_first_and_nothing_is_left(pbs: Pbs, folder: Path) -> None:
    (folder / "fails.py").write_text(SLOW.replace("time.sleep(60)", "sys.exit(7) if rank == 3 else time.sleep(60)"))
    began = time.monotonic()
    done = ended(pbs, qsub(pbs, folder, "-l", "select=2:ncpus=2:mpiprocs=2", READY,
                           arguments="fails.py"))
    assert done.status == 7, done.output
    assert time.monotonic() - began < 30
    assert not alive(pbs, folder)


def test_a_stop_reaches_the_ranks_of_every_host_and_leaves_them_time(pbs: Pbs, folder: Path) -> None:
    job_id = running(pbs, folder)
    assert pbs.run(HEAD, ["qsig", "-s", "USR1", job_id]).status == 0
    wait_for_notes(folder, "got", 4)
    assert pbs.state(job_id) == "R"
    assert pbs.run(HEAD, ["qdel", job_id]).status == 0
    job = pbs.wait(job_id)
    assert job["Exit_status"] == 3
    wait_for_notes(folder, "saved", 4)
    assert Counter((folder / f"got {rank}").read_text() for rank in range(4)) == {"SIGUSR1 SIGTERM ": 4}
    assert not alive(pbs, folder)


@pytest.mark.parametrize(("words", "environment"), [
    (["-V"], {"BASH_ENV": "/dev/null"}),  # as Lmod sets it where the job is submitted
    (["-v", f"ARGS=slow.py,PYTHON={sys.executable}"], {})])
def test_a_login_shell_that_would_end_the_job_is_reported_before_it_trains(
        pbs: Pbs, folder: Path, words: list[str], environment: dict[str, str]) -> None:
    job_id = running(pbs, folder, *words, environment=environment)
    pbs.run(HEAD, ["qsig", "-s", "USR1", job_id])
    done = ended(pbs, job_id)
    assert done.status == 266, done.output  # it was right to warn
    assert re.search("warning: the login shell of this job .* ends at USR1 and TERM", done.output), done.output


def test_without_v_a_ready_script_does_not_train_something_else(pbs: Pbs, folder: Path) -> None:
    job_id = pbs.submit("-l", "select=1:ncpus=1", READY, cwd=f"{WORK}/{folder.name}",
                        env={"PYTHON": sys.executable, "ARGS": TRAIN})
    done = ended(pbs, job_id)
    assert done.status == 2 and "there is nothing to run" in done.output, done.output


def running(pbs: Pbs, folder: Path, *words: str, environment: dict[str, str] | None = None) -> str:
    """A job of four slow ranks on two hosts, once all of them run."""
    (folder / "slow.py").write_text(SLOW)
    job_id = pbs.submit(*(words or ["-V"]), "-l", "select=2:ncpus=2:mpiprocs=2", READY,
                        cwd=f"{WORK}/{folder.name}",
                        env={"PYTHON": sys.executable, "ARGS": "slow.py", **(environment or {})})
    wait_for_notes(folder, "runs", 4)
    return job_id


def wait_for_notes(folder: Path, what: str, ranks: int) -> None:
    wait_until(lambda: len(list(folder.glob(f"{what} *"))) == ranks, f"{ranks} ranks to write {what!r}", seconds=40)


def alive(pbs: Pbs, folder: Path) -> list[str]:
    """Ranks that are still there, on any host."""
    pids = [file.read_text() for file in folder.glob("runs *")]
    shown = [pbs.run(host, ["ps", "-o", "args=", "-p", ",".join(pids)]).stdout for host in ("n1", "n2", "n3")]
    return [line for lines in shown for line in lines.splitlines() if ".py" in line and "defunct" not in line]


def submit(pbs: Pbs, folder: Path, *words: str) -> Result:
    done = pbs.run(HEAD, [*SUBMIT, *words], cwd=f"{WORK}/{folder.name}", env={"PYTHON": sys.executable}, seconds=120)
    return Result(done.status, done.output)


def test_following_shows_output_and_ends_with_the_jobs_status(pbs: Pbs, folder: Path) -> None:
    options = ["--nodes", "2", "--cpus-per-task", "1", "--ntasks-per-node", "2", "--time", "5:00", "--follow"]
    done = submit(pbs, folder, *options, TRAIN)
    assert done.status == 0, done.output
    assert sorted(ranks_on(done.output).values()) == [2, 2]
    (folder / "fails.py").write_text("import sys; sys.exit(5)\n")
    done = submit(pbs, folder, *options, "fails.py")
    assert done.status == 5, done.output
    assert "failed, exit status 5" in done.output


def test_each_job_of_a_chain_starts_when_the_one_before_has_ended(pbs: Pbs, folder: Path) -> None:
    (folder / "step.py").write_text(STEP)
    done = submit(pbs, folder, "--nodes", "1", "--ntasks-per-node", "1", "--chain", "3", "--follow", "step.py")
    assert done.status == 0, done.output
    assert one_after_the_other(folder, 3)


def test_nothing_of_a_chain_runs_after_a_failure(pbs: Pbs, folder: Path) -> None:
    (folder / "fails.py").write_text("import sys, time\nopen('ran', 'a').write('x')\ntime.sleep(3)\nsys.exit(3)\n")
    done = submit(pbs, folder, "--nodes", "1", "--ntasks-per-node", "1", "--chain", "3", "--follow", "fails.py")
    assert done.status == 3, done.output
    assert (folder / "ran").read_text() == "x", done.output


def test_a_job_of_a_chain_refuses_to_start_after_one_that_failed(pbs: Pbs, folder: Path) -> None:
    """Its predecessor could not take it from the queue."""
    (folder / "train.py").write_text("open('ran', 'a').write('x')\n")
    assert submit(pbs, folder, "--nodes", "1", "--ntasks-per-node", "1", "--follow", "train.py").status == 0
    [script] = folder.glob("jobs-out/*/job.sh")
    for previous, starts in (("3", False), ("75", True), ("time limit", True)):
        (folder / "ran").unlink(missing_ok=True)
        (script.parent / "999999.status").write_text(previous)
        script.write_text(re.sub("PREVIOUS=\\S+", "PREVIOUS=999999.pbs", script.read_text()))
        options = ["-l", "select=1:ncpus=1", "-j", "oe", "--", "/bin/bash", "-l", f"{WORK}/{folder.name}/"
                   + str(script.relative_to(folder))]
        job = pbs.wait(pbs.submit(*options, cwd=f"{WORK}/{folder.name}"))
        assert (job["Exit_status"] == 0, (folder / "ran").exists()) == (starts, starts), (previous, pbs.output(job))


def test_a_chain_goes_on_after_a_stop_that_torchrun_takes_for_a_failure(pbs: Pbs, folder: Path) -> None:
    (folder / "stops.py").write_text(STOPS_ONCE)
    done = submit(pbs, folder, "--nodes", "2", "--gpus-per-node", "0", "--launcher", "torchrun", "--chain", "2",
                  "--follow", "stops.py")
    assert done.status == 0, done.output
    assert "stopped after saving, to be continued, exit status 75" in done.output, done.output
    assert re.findall("^(?:saves|goes on)$", done.output, re.MULTILINE) == ["saves", "goes on"], done.output


def test_a_refusal_is_shown_in_pbs_own_words(pbs: Pbs, folder: Path) -> None:
    done = submit(pbs, folder, "--nodes", "1", "--queue", "nosuch", TRAIN)
    assert done.status == 1
    assert re.search(r"[Uu]nknown queue", done.output) and "nosuch" in done.output, done.output

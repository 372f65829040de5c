"""The ready Slurm scripts and submit.py on a real Slurm: right ranks, states, chains, refusals, exit statuses."""
from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.cluster.job_ranks import RANK, STEP, STOPS_ONCE, TRAIN, one_after_the_other, ranks_on
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import MINIMAL, ROOT, Lab, Result
from tests.unit.pythons import make_environment

pytest_plugins = ["tests.cluster.slurm_fixture"]

READY = str(ROOT / "jobs" / "slurm.sh")
AGENTS = [[], ["--torchrun"]]  # options of launch.py
SUBMIT = [sys.executable, str(ROOT / "scripts" / "submit.py"), "run", "--site", "generic-slurm"]
UNCHECKED = [*SUBMIT, "--no-check"]  # the nodes here share /tmp, which is an error elsewhere


@pytest.fixture()
def folder(slurm: SlurmCluster) -> Path:
    """A folder that is not the kit's, with a training script; both have spaces in their names."""
    made = slurm.work / f"jobs of {time.monotonic_ns()}"
    made.mkdir()
    (made / TRAIN).write_text(RANK)
    return made


def sbatch(slurm: SlurmCluster, folder: Path, *words: str) -> str:
    """Submit from the folder; the job id."""
    done = slurm.run(["sbatch", "--parsable", *words], cwd=folder, env={"PYTHON": sys.executable})
    assert done.status == 0, done.output
    return done.output.split()[-1]


def submit(slurm: SlurmCluster, folder: Path, *words: str, seconds: float = 90) -> Result:
    return slurm.run([*UNCHECKED, *words], cwd=folder, seconds=seconds)


def ids_of(submitted: Result) -> list[str]:
    return re.findall(r"^(\d+)$", submitted.output, re.MULTILINE)


@pytest.mark.parametrize("agents", AGENTS)
@pytest.mark.parametrize(("options", "expected"), [
    (["-N2"], [2, 2]),  # as it stands: a rank for each GPU of whole nodes
    (["-N4"], [2, 2, 2, 2]),
    (["-N2", "--gres=gpu:2"], [2, 2]),
])
def test_a_ready_script_gives_every_gpu_a_rank(slurm: SlurmCluster, folder: Path, agents: Sequence[str],
                                               options: Sequence[str], expected: list[int]) -> None:
    job_id = sbatch(slurm, folder, *options, READY, *agents, TRAIN)
    job = slurm.wait(job_id)
    output = slurm.output(job_id)
    assert job["JobState"] == "COMPLETED", output
    assert sorted(ranks_on(output).values()) == expected


@pytest.mark.parametrize(("options", "expected"), [
    (["-N4", "--ntasks-per-node=1", "--gpus-per-node=1"], [1, 1, 1, 1]),
    (["-N2", "-n3"], [1, 2]),
    (["-N2", "--ntasks-per-node=2"], [2, 2]),
    (["-N2", "--ntasks-per-node=2", "--distribution=cyclic"], [2, 2]),
    (["-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-task=1"], [2, 2]),
])
def test_a_number_of_tasks_is_that_of_the_ranks(slurm: SlurmCluster, folder: Path, options: Sequence[str],
                                                expected: list[int]) -> None:
    job_id = sbatch(slurm, folder, *options, READY, TRAIN)
    job = slurm.wait(job_id)
    output = slurm.output(job_id)
    assert job["JobState"] == "COMPLETED", output
    assert sorted(ranks_on(output).values()) == expected


def test_ranks_and_torchrun_agents_train_to_the_same_loss(slurm: SlurmCluster, folder: Path) -> None:
    job_ids = [sbatch(slurm, folder, "-N2", READY, *agents, *MINIMAL[1:]) for agents in AGENTS]
    losses = []
    for job_id in job_ids:
        job = slurm.wait(job_id, 120)
        output = slurm.output(job_id)
        assert job["JobState"] == "COMPLETED", output
        losses.append(Result(0, output).line("final loss:"))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("agents", AGENTS)
def test_a_conda_base_without_torch_does_not_hide_the_kits_python(
        slurm: SlurmCluster, folder: Path, agents: Sequence[str]) -> None:
    base = make_environment(folder / "base", torch=False)
    done = slurm.run(["sbatch", "--parsable", "-N2", READY, *agents, TRAIN], cwd=folder, env={
        "PYTHON": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": str(folder / "base"),
        "PATH": f"{base.parent}:{slurm.environment['PATH']}"})
    job_id = done.output.split()[-1]
    slurm.wait(job_id)
    output = slurm.output(job_id)
    assert sorted(ranks_on(output).values()) == [2, 2], output
    assert f"{ROOT}/.venv/bin/python (the kit's .venv). Passed over: {base} (CONDA_PREFIX) has no torch" in output


def test_the_elements_of_an_array_run_side_by_side(slurm: SlurmCluster, folder: Path) -> None:
    job_id = sbatch(slurm, folder, "-N1", "--array=0-3", "-o", "%a.out", READY, TRAIN)
    slurm.wait(job_id)
    for index in range(4):
        output = (folder / f"{index}.out").read_text()
        assert list(ranks_on(output).values()) == [2], output


def test_following_shows_output_and_ends_with_the_jobs_status(slurm: SlurmCluster, folder: Path) -> None:
    done = submit(slurm, folder, "--nodes", "2", "--time", "5:00", "--follow", TRAIN)
    assert done.status == 0, done.output
    assert sorted(ranks_on(done.output).values()) == [2, 2]
    assert "completed, exit status 0" in done.output
    (folder / "fails.py").write_text("import sys; sys.exit(5)\n")
    done = submit(slurm, folder, "--nodes", "2", "--time", "5:00", "--follow", "fails.py")
    assert done.status == 5, done.output
    assert "failed, exit status 5" in done.output


def test_a_module_is_run_on_every_rank(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "module.py").write_text(RANK)
    done = submit(slurm, folder, "-N", "2", "-n", "4", "--time", "5m", "--follow", "-m",
                  "package.module", "a b", "1")
    assert done.status == 0, done.output
    assert sorted(ranks_on(done.output).values()) == [2, 2]
    assert done.output.count("arguments ['a b', '1']") == 4


def test_following_an_array_names_each_element(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "index.py").write_text("import os, sys\nprint('this is', os.environ['SLURM_ARRAY_TASK_ID'])\n"
                                     "sys.exit(75 if os.environ['SLURM_ARRAY_TASK_ID'] == '1' else 0)\n")
    done = submit(slurm, folder, "-N", "1", "--ntasks-per-node", "1", "--array", "0-2", "--time", "5", "--follow",
                  "index.py")
    assert done.status == 75 and "stopped after saving, to be continued" in done.output, done.output
    pieces = re.split(r"==> array element (\d): .*\n", done.output)
    for index in range(3):  # each may come in several pieces
        text = "".join(piece for of, piece in zip(pieces[1::2], pieces[2::2], strict=True) if of == str(index))
        assert re.findall(r"this is (\d)", text) == [str(index)], done.output


def test_a_restart_is_reported_in_the_output(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "twice.py").write_text("import os, time\nif not os.environ.get('SLURM_RESTART_COUNT'):\n"
                                     "    open('runs', 'w').close()\n    time.sleep(100)\nprint('done')\n")
    one_rank = ["-N", "1", "--ntasks-per-node", "1"]
    [job_id] = ids_of(submit(slurm, folder, *one_rank, "--time", "5", "--requeue", "twice.py"))
    wait_until((folder / "runs").exists, "the first run", seconds=60)
    assert slurm.run(["scontrol", "requeue", job_id]).status == 0
    done = slurm.run([SUBMIT[0], SUBMIT[1], "logs", "--follow", job_id], cwd=folder, seconds=120)
    assert done.status == 0, done.output
    assert done.output.count("restart ") == 1 and f"restart 1 of Slurm job {job_id}" in done.output, done.output


def test_a_job_is_listed_and_submitted_again(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "runs.py").write_text("open('runs', 'a').write('x')\n")
    [job_id] = ids_of(submit(slurm, folder, "-N", "1", "--ntasks-per-node", "1", "--time", "5", "--follow", "runs.py"))
    done = slurm.run([SUBMIT[0], SUBMIT[1], "resubmit", "--no-check", "--follow", job_id], cwd=folder, seconds=90)
    assert done.status == 0 and (folder / "runs").read_text() == "xx", done.output
    listed = slurm.run([SUBMIT[0], SUBMIT[1], "list"], cwd=folder).output.splitlines()
    assert [line.split()[:2] for line in listed] == [["JOB", "STATE"], [*ids_of(done), "completed"],
                                                     [job_id, "completed"]]


def test_a_heterogeneous_job_is_one_launch(slurm: SlurmCluster, folder: Path) -> None:
    done = submit(slurm, folder, "--nodes", "1", "--gpus-per-node", "1", "--component=--nodes=2 --gpus-per-node=2",
                  "--time", "5:00", "--follow", TRAIN)
    assert done.status == 0, done.output
    assert sorted(ranks_on(done.output).values()) == [1, 2, 2]


def test_each_job_of_a_chain_starts_when_the_one_before_has_ended(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "step.py").write_text(STEP)
    done = submit(slurm, folder, "--nodes", "1", "--ntasks-per-node", "1", "--chain", "3", "--follow", "step.py")
    assert done.status == 0, done.output
    assert one_after_the_other(folder, 3)


def test_nothing_of_a_chain_runs_after_a_failure(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "once.py").write_text("import sys, time\nopen('runs', 'a').write('x')\ntime.sleep(2)\nsys.exit(3)\n")
    done = submit(slurm, folder, "--nodes", "1", "--ntasks-per-node", "1", "--chain", "3", "--follow", "once.py")
    assert done.status == 3, done.output
    assert "the rest of its chain was cancelled" in done.output, done.output
    assert (folder / "runs").read_text() == "x"
    ids = json.loads(next(folder.glob("jobs-out/*/submission.json")).read_text())["job_ids"]
    assert [slurm.job(one)["JobState"] for one in ids] == ["FAILED", "CANCELLED", "CANCELLED"]
    done = slurm.run([SUBMIT[0], SUBMIT[1], "status", ids[-1]], cwd=folder)
    assert done.status == 1 and "earlier in its chain" in done.output, done.output


def test_a_job_of_a_chain_refuses_to_start_when_its_failed_predecessor_is_forgotten(slurm: SlurmCluster,
                                                                                    folder: Path) -> None:
    """Without accounting Slurm soon knows it no more: what the job itself has kept, or nothing, decides."""
    (folder / "train.py").write_text("open('runs', 'a').write('x')\n")
    ids = ids_of(submit(slurm, folder, "--nodes", "1", "--ntasks-per-node", "1", "--chain", "2", "train.py"))
    slurm.wait(ids[1])
    record = next(folder.glob("jobs-out/*"))
    script = (record / "job-2.sh").read_text().replace(f"PREVIOUS={ids[0]}", "PREVIOUS=999999")
    assert "PREVIOUS=999999" in script
    (record / "job-2.sh").write_text(script)
    for kept, starts in (("3", False), ("75", True), ("time limit", True), ("0", True), (None, False)):
        (folder / "runs").unlink(missing_ok=True)
        (record / "999999.status").unlink(missing_ok=True)
        if kept is not None:
            (record / "999999.status").write_text(kept)
        job = slurm.wait(sbatch(slurm, folder, "--dependency=", str(record / "job-2.sh")))
        assert (job["ExitCode"] == "0:0", (folder / "runs").exists()) == (starts, starts), kept


def test_a_chain_goes_on_after_the_time_limit_and_after_a_stop(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "steps.py").write_text(
        "import os, sys, time\nopen('runs', 'a').write('x')\nruns = len(open('runs').read())\n"
        "print('run', runs, flush=True)\n"
        "sys.exit(75) if runs == 1 else time.sleep(100) if runs == 2 else sys.exit(0)\n")
    done = submit(slurm, folder, "--nodes", "1", "--ntasks-per-node", "1", "--time", "1s", "--chain", "3", "--follow",
                  "steps.py", seconds=240)
    assert done.status == 0, done.output
    assert "stopped after saving, to be continued" in done.output and "timeout" in done.output, done.output
    assert (folder / "runs").read_text() == "xxx"
    assert "time limit" in {file.read_text().strip() for file in folder.glob("jobs-out/*/*.status")}


def test_cancelling_a_job_ends_its_chain(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "long.py").write_text("import time\ntime.sleep(100)\n")
    ids = ids_of(submit(slurm, folder, "--nodes", "1", "--ntasks-per-node", "1", "--chain", "3", "long.py"))
    slurm.wait_for(ids[0], {"RUNNING"}, 30)
    assert slurm.run([SUBMIT[0], SUBMIT[1], "cancel", ids[0]], cwd=folder).status == 0
    assert [slurm.wait(one)["JobState"] for one in ids] == ["CANCELLED"] * 3


def test_a_subcommand_that_is_mistyped_submits_nothing(slurm: SlurmCluster, folder: Path) -> None:
    before = slurm.run(["squeue", "--all", "--noheader", "--states", "all"]).output
    done = slurm.run([SUBMIT[0], SUBMIT[1], "cancle", "77"], cwd=folder)
    assert done.status == 2 and "submit.py cancel 77" in done.output
    assert slurm.run(["squeue", "--all", "--noheader", "--states", "all"]).output == before


def test_a_job_goes_back_into_the_queue_after_a_stop_under_torchrun(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "stops.py").write_text(STOPS_ONCE)
    job_id = sbatch(slurm, folder, "-N2", "-n2", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue",
                    READY, "--torchrun", "stops.py")
    job = slurm.wait(job_id)
    output = slurm.output(job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), output
    assert output.index("saves\n") < output.index("goes on\n")


@pytest.mark.parametrize(("words", "message", "line"), [
    (["--queue", "nosuch"], "Invalid partition name specified", "#SBATCH --partition=nosuch"),
    (["--directive=--no-such-option=1"], "unrecognized option '--no-such-option=1'", "#SBATCH --no-such-option=1"),
    (["--array", "0-99999999"], "Invalid job array specification", "#SBATCH --array=0-99999999"),
    (["--directive=--gres=gpu:7"], "Requested node configuration is not available", "#SBATCH --gres=gpu:7"),
    (["--mem", "9999G"], "Memory specification can not be satisfied", "#SBATCH --mem=9999G"),
])
def test_a_refusal_is_shown_with_the_line_that_caused_it(slurm: SlurmCluster, folder: Path, words: Sequence[str],
                                                         message: str, line: str) -> None:
    done = submit(slurm, folder, *words, TRAIN)
    assert done.status == 1, done.output
    assert message in done.output and line in done.output
    assert not (folder / "jobs-out").exists()


def test_what_the_partition_does_not_allow_is_found_before(slurm: SlurmCluster, folder: Path) -> None:
    done = slurm.run([*SUBMIT, "--queue", "short", "--time", "5:00:00", "--gpus-per-node", "3", TRAIN], cwd=folder)
    assert done.status == 1
    assert "00:10:00" in done.output and "GPUs" in done.output and "nothing was submitted" in done.output
    assert not (folder / "jobs-out").exists()


def test_a_running_job_can_be_looked_at_and_cancelled(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "long.py").write_text("import time\nprint('it runs', flush=True)\ntime.sleep(60)\n")
    done = submit(slurm, folder, "--nodes", "2", "--time", "5:00", "long.py")
    assert done.status == 0, done.output
    [job_id] = ids_of(done)
    about = [SUBMIT[0], SUBMIT[1]]
    with killed_at_end(slurm.start([*about, "logs", "--follow", job_id], cwd=folder)) as process:
        slurm.wait_for(job_id, {"RUNNING"}, 30)
        limit = time.monotonic() + 30
        while "it runs" not in slurm.run([*about, "logs", job_id], cwd=folder).output:
            assert time.monotonic() < limit
            time.sleep(0.2)
        done = slurm.run([*about, "status", job_id], cwd=folder)
        assert done.status == 0 and "running, on " in done.output
        assert slurm.run([*about, "cancel", job_id], cwd=folder).status == 0
        followed = Lab.wait(process)
    assert followed.status not in (0, None) and "it runs" in followed.output and "cancelled" in followed.output
    assert slurm.run([*about, "status", job_id], cwd=folder).status == 1

"""Submitted jobs: followed, listed, cancelled, and what each does itself inside the job."""
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.submission import Programs, Scripted, slurm, submit, use_scheduler
from utils.schedulers import Job, SchedulerError, Status
from utils.submission import following, in_job, records
from utils.submission.records import NOT_STARTED, TIME_LIMIT, Submission

pytest_plugins = ["tests.unit.submission_fixture"]
pytestmark = pytest.mark.usefixtures("short_pauses")

Run = Callable[..., int]
DOWN = SchedulerError("scontrol does not respond")


def follow(scheduler: Scripted, chain: Submission, *job_ids: str) -> int:
    return following.follow(scheduler.status, chain.logs, job_ids)


@pytest.fixture()
def with_jobs(work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Make `submit` for a scheduler that knows these jobs."""
    def make(scheduler: Scripted | None = None, **statuses: list[Status | Exception]) -> Run:
        use_scheduler(monkeypatch, scheduler or Scripted(**statuses))
        return submit
    return make


# --- follow

def test_follow_prints_states_positions_and_output(chain: Submission,
                                                   capfd: pytest.CaptureFixture[str]) -> None:
    def statuses() -> Iterator[Status]:
        yield Status("1", "queued", position=3, reason="Resources")
        yield Status("1", "queued", position=1, reason="Priority")
        (chain.folder / "1.out").write_text("epoch 1\n")
        (chain.folder / "2.out").write_text("of another job\n")
        yield Status("1", "running", hosts=("n1", "n2"))
        with (chain.folder / "1.out").open("a") as file:
            file.write("epoch 2\n")
        yield Status("1", "completed", 0)
    steps = statuses()
    assert following.follow(lambda _: next(steps), chain.logs, ["1"]) == 0
    printed = capfd.readouterr()
    assert printed.out == "epoch 1\nepoch 2\n"
    assert printed.err.splitlines() == [
        "submit.py: job 1: queued, number 3 in the queue (Resources)",
        "submit.py: job 1: queued, number 1 in the queue (Priority)",
        "submit.py: job 1: running, on n1 n2", "submit.py: job 1: completed, exit status 0"]


@pytest.mark.parametrize(("status", "expected"), [
    (Status("1", "completed", 0), 0), (Status("1", "failed", 42), 42), (Status("1", "failed", 0), 1),
    (Status("1", "failed", 137), 137), (Status("1", "cancelled"), 1), (Status("1", "timeout", 0), 1),
    (Status("1", "node_fail"), 1), (Status("1", "never_ran"), 1), (Status("1", "unknown"), 1),
    (Status("1", "stopped", 75), 75), (Status("1", "held", reason="waits for ever for 7"), 1)])
def test_exit_status_of_follow_is_the_jobs(status: Status, expected: int, chain: Submission) -> None:
    assert follow(Scripted(_1=[status]), chain, "1") == expected


@pytest.mark.parametrize(("first", "expected"), [
    (Status("1", "completed", 0), 0), (Status("1", "timeout"), 0), (Status("1", "failed", 3), 3),
    (Status("1", "cancelled"), 1), (Status("1", "never_ran"), 1), (Status("1", "node_fail"), 1),
    (Status("1", "unknown"), 1), (Status("1", "stopped", 75), 0),
    (Status("1", "cancelled", scheduler_state="PREEMPTED"), 0)])
def test_chain_succeeds_if_each_job_can_be_continued(first: Status, expected: int,
                                                     chain: Submission) -> None:
    scheduler = Scripted(_1=[first], _2=[Status("2", "completed", 0)])
    assert follow(scheduler, chain, "1", "2") == expected


def test_chain_whose_last_job_reaches_the_time_limit_fails(chain: Submission) -> None:
    scheduler = Scripted(_1=[Status("1", "completed", 0)], _2=[Status("2", "timeout")])
    assert follow(scheduler, chain, "1", "2") == 1


def test_follow_queries_again_while_the_scheduler_is_down(chain: Submission,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    assert follow(Scripted(_1=[DOWN, DOWN, DOWN, Status("1", "completed", 0)]), chain, "1") == 0
    assert "Trying again" in capfd.readouterr().err
    with pytest.raises(SchedulerError):
        follow(Scripted(_1=[DOWN]), chain, "1")


# --- status, list, cancel

@pytest.mark.parametrize(("status", "expected"), [
    (Status("1", "running"), 0), (Status("1", "queued"), 0), (Status("1", "completed", 0), 0),
    (Status("1", "failed", 3), 1), (Status("1", "never_ran"), 1), (Status("1", "unknown"), 1),
    (Status("1", "stopped", 75), 75)])
def test_status_prints_the_state_and_fails_with_the_job(
        status: Status, expected: int, chain: Submission, with_jobs: Callable[..., Run],
        capsys: pytest.CaptureFixture[str]) -> None:
    assert with_jobs(_1=[status])("status", "1") == expected
    out = capsys.readouterr().out
    assert following.describe(status) in out and "train-1" in out


@pytest.mark.parametrize("state", ["failed", "cancelled", "never_ran", "unknown"])
def test_status_fails_after_an_earlier_failure_in_the_chain(
        state: str, chain: Submission, with_jobs: Callable[..., Run],
        capsys: pytest.CaptureFixture[str]) -> None:
    """As after scancel of one job, which the later ones do not know until they start."""
    jobs = {"_1": [Status("1", state)], "_2": [Status("2", "completed", 0)], "_3": [Status("3", "queued")]}
    run = with_jobs(**jobs)
    assert run("status", "2") == 1
    out = capsys.readouterr().out
    assert "earlier in its chain, job 1:" in out and "refuse" not in out
    assert run("status", "3") == 1
    assert "This job will refuse to start" in capsys.readouterr().out
    assert run("list") == 0
    assert "queued, will refuse to start" in capsys.readouterr().out.splitlines()[-1]


def test_job_that_refused_to_start_is_no_failed_training(chain: Submission, with_jobs: Callable[..., Run],
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    records.write_status(chain.folder, "2", NOT_STARTED)
    for status in (Status("2", "failed", 1), Status("2", "unknown")):
        run = with_jobs(_1=[Status("1", "cancelled")], _2=[status], _3=[Status("3", "queued")])
        assert run("status", "2") == 1
        out = capsys.readouterr().out
        assert "job 2: never ran, exit status 1 (it refused to start: the job before it" in out
        assert run("list") == 0
        assert capsys.readouterr().out.splitlines()[2].split()[:3] == ["2", "never", "ran"]


@pytest.mark.parametrize("order", [("1", "2"), ("2", "1")])
def test_failed_job_is_not_hidden_by_one_that_stopped(order: tuple[str, str], chain: Submission,
                                                      with_jobs: Callable[..., Run]) -> None:
    run = with_jobs(_1=[Status("1", "stopped", 75)], _2=[Status("2", "failed", 1)])
    assert run("status", *order) == 1


def test_list_shows_the_latest_submissions_first(programs: Programs, work: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("--chain", "2", "train.py") == slurm("--job-name", "other", "train.py") == 0
    for folder in (work / "jobs-out").iterdir():
        if folder.name.startswith("train"):
            os.utime(folder / "submission.json", (1, 1))
            records.write_status(folder, "101", 75)
    programs.add("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    capsys.readouterr()
    assert submit("list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["JOB", "103", "101", "102"]
    assert lines[1][1] == "unknown" and lines[2][1:3] == ["stopped", "(75)"] and "other" in lines[1]


def test_folder_that_cannot_be_listed_is_not_an_empty_one(
        chain: Submission, monkeypatch: pytest.MonkeyPatch, with_jobs: Callable[..., Run],
        capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))
    assert submit("list", "--folder", "nowhere") == 0
    assert "no submissions in nowhere" in capsys.readouterr().err
    monkeypatch.setattr(os, "listdir", refuse)
    assert submit("list") == 1
    assert "jobs-out: Permission denied" in capsys.readouterr().err
    assert with_jobs(_1=[Status("1", "running")])("status", "1", "--site", "generic-slurm") == 0


def test_cancel_ends_the_later_jobs_of_the_chain_too(chain: Submission, with_jobs: Callable[..., Run],
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Scripted(_2=[Status("2", "running")], _1=[Status("1", "unknown")])
    run = with_jobs(scheduler)
    assert run("cancel", "2") == 0
    assert scheduler.cancelled == ["3", "2"]  # the last first, so that none starts
    assert "later jobs of its chain" in capsys.readouterr().out
    assert run("cancel", "1") == 1
    assert scheduler.cancelled == ["3", "2"] and "no job 1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status", "../x"], ["cancel", "-rf"], ["logs", "train.py"]])
def test_text_that_is_no_job_id_is_refused(words: list[str], work: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*words) in (1, 2)
    assert capsys.readouterr().err


@pytest.mark.parametrize(("requested", "known", "same"), [
    ("12", "12.head", True), ("12.head", "12.head", True), ("12.other", "12.head", False),
    ("1", "12.head", False), ("79[2].head", "79[].head", True), ("79_2", "79", True)])
def test_job_is_found_by_its_short_id_too(requested: str, known: str, same: bool, work: Path) -> None:
    folder = work / "jobs-out" / "x"
    folder.mkdir(parents=True)
    records.write(folder, Job(command=("a",)), scheduler="pbs", site="x", job_ids=[known],
                  dependencies=[None])
    (work / "jobs-out" / "other").mkdir()
    (work / "jobs-out" / "other" / "submission.json").write_text("[]")
    assert (records.find(work / "jobs-out", requested) is not None) is same


# --- logs

def test_logs_prints_what_the_job_has_written(chain: Submission, with_jobs: Callable[..., Run],
                                              capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (chain.folder / "2.out").write_bytes(b"loss \xff\n")
    (chain.folder / "21.out").write_bytes(b"another job\n")
    run = with_jobs(_2=[Status("2", "running")], _1=[Status("1", "queued")])
    assert run("logs", "2") == 0
    assert capfdbinary.readouterr().out == b"loss \xff\n"
    assert run("logs", "1") == 1
    assert b"No output was found of job 1: queued" in capfdbinary.readouterr().err


@pytest.mark.parametrize(("name", "job_id"), [
    ("slurm-9.out", "9"), ("slurm-9_2.out", "9_2"), ("train.o11", "11.head"),
    ("train.o12.3", "12[3].head"), ("13.head.OU", "13.head"), ("named-by-slurm", "14")])
def test_output_of_a_job_without_a_record_is_found(
        name: str, job_id: str, work: Path, with_jobs: Callable[..., Run],
        capfd: pytest.CaptureFixture[str]) -> None:
    (work / name).write_text("loss 0.5\n")
    output = str(work / name) if job_id == "14" else None
    run = with_jobs(**{f"_{job_id}": [Status(job_id, "completed", 0, output=output)]})
    for words in (["logs", job_id], ["logs", "--follow", job_id]):
        assert run(*words, "--site", "generic-slurm") == 0
        assert capfd.readouterr().out.endswith("loss 0.5\n")


def test_each_array_element_has_a_heading(chain: Submission, with_jobs: Callable[..., Run],
                                          capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for index, text in enumerate(("a\nb\n", "c")):
        (chain.folder / f"1_{index}.out").write_text(text)
    assert with_jobs(_1=[Status("1", "completed", 0)])("logs", "1") == 0
    assert capfdbinary.readouterr().out == (b"==> array element 0: 1_0.out\na\nb\n"
                                            b"==> array element 1: 1_1.out\nc")


def test_lines_of_two_array_elements_do_not_mix(chain: Submission,
                                                capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    files = [chain.folder / f"1_{index}.out" for index in (0, 1)]
    for file in files:
        file.write_text("half a")
    log = following.Log(lambda: files, sys.stdout.buffer)
    assert not log.print_new(partial_lines=False)
    files[0].write_text("half a line\n")
    assert log.print_new(partial_lines=False) and log.print_new()
    assert capfdbinary.readouterr().out == (b"==> array element 0: 1_0.out\nhalf a line\n"
                                            b"==> array element 1: 1_1.out\nhalf a")


# --- recorded exit statuses

@pytest.mark.parametrize(("recorded", "status", "followed", "text"), [
    (0, 0, 0, "completed"), (75, 75, 75, "stopped after saving"), (3, 1, 3, "failed, exit status 3"),
    (TIME_LIMIT, 1, 1, "timeout")])
def test_recorded_status_counts_where_the_scheduler_has_none(
        recorded: int | str, status: int, followed: int, text: str, chain: Submission,
        with_jobs: Callable[..., Run], capfd: pytest.CaptureFixture[str]) -> None:
    """Slurm without accounting forgets a job soon, PBS without history at its end."""
    (chain.folder / "1.out").write_text("loss 0.5\n")
    assert with_jobs(_1=[DOWN])("status", "1") == 1
    assert "does not respond" in capfd.readouterr().err
    records.write_status(chain.folder, "1", recorded)
    for value in (DOWN, Status("1", "unknown")):
        assert with_jobs(_1=[value])("status", "1") == status
        assert f"job 1: {text}" in capfd.readouterr().out
    run = with_jobs(_1=[Status("1", "running"), Status("1", "unknown")])
    assert run("logs", "--follow", "1") == followed
    assert capfd.readouterr().out == "loss 0.5\n"


class InJob:
    """Job 2 of a chain, of Slurm, with a scripted scheduler and a function in place of `launch`."""

    def __init__(self, chain: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = chain.folder
        self.started = 0
        self.seconds_left: Callable[[], float | None] = lambda: None
        self.scheduler = Scripted()
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
        monkeypatch.setattr(in_job, "current_allocation", lambda query: self)

    def run(self, launch: Callable[[], int], previous: str = "",
            **statuses: list[Status | Exception]) -> int:
        def start(words: list[str]) -> int:
            assert words == ["--", "train.py"]
            self.started += 1
            return launch()
        self.scheduler = Scripted(**{"_2": [Status("2", "running")], **statuses})
        self._monkeypatch.setattr(in_job, "get_scheduler", lambda name: self.scheduler)
        self._monkeypatch.setattr("utils.launch.cli.main", start)
        return in_job.main([str(self.folder), previous, "--", "train.py"])

    @property
    def recorded(self) -> int | str | None:
        return records.read_status(self.folder, "2")


@pytest.fixture()
def job(chain: Submission, monkeypatch: pytest.MonkeyPatch) -> InJob:
    return InJob(chain, monkeypatch)


@pytest.mark.parametrize(("recorded", "status", "starts"), [
    (0, DOWN, True), (75, DOWN, True), (TIME_LIMIT, DOWN, True), (3, DOWN, False),
    (NOT_STARTED, Status("1", "completed", 0), False), (None, DOWN, False),
    (None, Status("1", "unknown"), False), (3, Status("1", "unknown"), False),
    (None, Status("1", "completed", 0), True), (None, Status("1", "timeout"), True),
    (143, Status("1", "timeout"), True),
    (143, Status("1", "cancelled", scheduler_state="PREEMPTED"), True),
    (143, Status("1", "cancelled"), False), (None, Status("1", "failed", 1), False),
    (None, Status("1", "node_fail"), False), (None, Status("1", "stopped", 75), True)])
def test_job_of_a_chain_starts_if_it_can_continue_the_one_before(
        recorded: int | str | None, status: Status | Exception, starts: bool, job: InJob,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if recorded is not None:
        records.write_status(job.folder, "1", recorded)
    monkeypatch.setattr(in_job, "QUERY_TIMEOUT_SECONDS", 0.0)
    assert job.run(lambda: 0, "1", _1=[status]) == (0 if starts else 1)
    assert job.started == starts
    assert job.recorded == (0 if starts else NOT_STARTED)
    assert ("not started" in capsys.readouterr().err) is not starts


def test_job_of_a_chain_waits_for_a_scheduler_that_is_down(
        job: InJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(in_job, "QUERY_PAUSE_SECONDS", 0.0)
    assert job.run(lambda: 0, "1", _1=[DOWN, DOWN, Status("1", "completed", 0)]) == 0
    assert job.started == 1
    message = "the state of job 1 is not known: scontrol does not respond"
    assert capsys.readouterr().err.count(message) == 2


def test_recorded_status_that_cannot_be_removed_is_reported(
        job: InJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(folder: Path, job_id: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(records, "remove_status", fail)
    assert job.run(lambda: 0) == 0
    assert "job 2 could not be removed" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "state", "cancelled"), [
    (0, "running", []), (75, "running", []), (3, "running", ["3"]), (143, "ending", [])])
def test_failure_cancels_the_rest_of_the_chain(status: int, state: str, cancelled: list[str],
                                               job: InJob) -> None:
    assert job.run(lambda: status, _2=[Status("2", state)]) == status  # type: ignore[arg-type]
    assert job.scheduler.cancelled == cancelled
    assert job.recorded == status


def test_launch_that_raises_has_failed(job: InJob) -> None:
    def fail() -> int:
        raise RuntimeError("a defect")
    with pytest.raises(RuntimeError):
        job.run(fail)
    assert job.recorded == 1 and job.scheduler.cancelled == ["3"]
    assert job.run(lambda: sys.exit(2)) == 2


def test_time_limit_is_recorded_when_it_is_reached(job: InJob) -> None:
    def until_recorded() -> int:
        while job.recorded is None:
            pass
        return 143
    job.seconds_left = lambda: 0.01
    assert job.run(until_recorded) == 143
    assert job.recorded == TIME_LIMIT and job.scheduler.cancelled == []
    assert job.run(lambda: 75) == 75  # a later run of the same job
    assert job.recorded == 75


def test_failure_after_an_extended_time_limit_is_a_failure(job: InJob) -> None:
    left = iter([0.01, 1000.0])
    extended = threading.Event()

    def seconds_left() -> float:
        seconds = next(left)
        if seconds > 1:
            extended.set()
        return seconds

    def fail_after_extension() -> int:
        assert extended.wait(10)
        while job.recorded is not None:
            pass
        return 3
    job.seconds_left = seconds_left
    assert job.run(fail_after_extension) == 3
    assert job.recorded == 3 and job.scheduler.cancelled == ["3"]

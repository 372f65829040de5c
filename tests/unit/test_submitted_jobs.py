"""Submitted jobs: followed, listed, cancelled, and what each does itself inside the job."""
from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler_commands import pbs_recording
from tests.unit.submission import Ended, Login, Scripted, use_scheduler
from utils.job import exclude_file
from utils.job.commands import SchedulerError
from utils.tools.launch.outcome import Outcome
from utils.tools.schedulers.allocation import Allocation
from utils.tools.schedulers.job_spec import Job
from utils.tools.schedulers.scheduler import Status
from utils.tools.submission import following, preflight
from utils.tools.submission import job_start as in_job
from utils.tools.submission import submissions as records
from utils.tools.submission.submissions import HOST_LOST, NOT_STARTED, TIME_LIMIT, Submission

DOWN = SchedulerError("scontrol does not respond")
DONE = Status("1", "completed", 0)
PREEMPTED = Status("1", "cancelled", scheduler_state="PREEMPTED")

Query = Callable[..., Ended]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_QUERY_SECONDS", "MAX_QUERY_SECONDS", "LOG_SECONDS"):
        monkeypatch.setattr(following, name, 0.01)
    monkeypatch.setattr(following, "NO_RESPONSE_SECONDS", 1.0)


@pytest.fixture
def chain(login: Login) -> Submission:
    folder = login.folder / "jobs-out" / "train-1"
    folder.mkdir(parents=True)
    records.write(folder, records.new_record(Job(command=("train.py",)), "slurm", "x"), ["1", "2", "3"])
    return records.read(folder)


@pytest.fixture
def query(login: Login, monkeypatch: pytest.MonkeyPatch) -> Query:
    """Run `submit` where jobs have these statuses."""
    def run(words: str, statuses: Any) -> Ended:
        use_scheduler(monkeypatch, statuses if isinstance(statuses, Scripted) else Scripted(statuses))
        return login.submit(*words.split())
    return run


def scripted(states: str) -> Scripted:
    """Jobs 1, 2, ... in these states."""
    codes = {"completed": 0, "failed": 3, "stopped": 75}
    return Scripted({str(number): DOWN if state == "down" else Status(str(number), state, codes.get(state))
                     for number, state in enumerate(states.split(), 1)})


def follow(chain: Submission, *statuses: Status | Exception | list[Status | Exception]) -> int:
    """The exit status of following jobs 1, 2, ..., which have these statuses."""
    scheduler = Scripted({str(number): one for number, one in enumerate(statuses, 1)})
    return following.follow(scheduler.status, chain.logs, [str(number + 1) for number in range(len(statuses))])


def test_follow_asks_seldom_while_a_running_job_prints(chain: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output shows that it runs. Once it prints no more, the scheduler is asked."""
    monkeypatch.setattr(following, "MAX_QUERY_SECONDS", 0.2)
    monkeypatch.setattr(following, "PRINTING_SECONDS", 0.6)
    began, asked = time.monotonic(), list[float]()

    def query(job_id: str) -> Status:
        asked.append(time.monotonic() - began)
        return Status("1", "running") if asked[-1] < 2 else DONE

    def logs(job_id: str) -> list[Path]:
        if time.monotonic() - began < 1.8:
            with open(chain.folder / "1.out", "a") as output:
                output.write("step\n")
        return [chain.folder / "1.out"]

    assert following.follow(query, logs, ["1"]) == 0
    assert len([when for when in asked if when < 1.7]) <= 4 and asked[-1] < 3, asked


def test_follow_prints_states_and_output(chain: Submission, capfd: pytest.CaptureFixture[str]) -> None:
    (chain.folder / "1.out").write_text("epoch 1\n")
    (chain.folder / "2.out").write_text("of another job\n")
    first, later = (Status("1", "queued", reason=reason) for reason in ("Resources", "Priority"))
    assert follow(chain, [first, later, later, Status("1", "running", hosts=("n1", "n2")), DONE]) == 0
    printed = capfd.readouterr()
    assert printed.out == "epoch 1\n"
    assert printed.err.splitlines() == [
        "ddpkit submit: job 1: queued (Resources)", "ddpkit submit: job 1: queued (Priority)",
        "ddpkit submit: job 1: running, on n1 n2", "ddpkit submit: job 1: completed, exit status 0"]
    cause = '"cause": "rank 3 on n2 failed: OutOfMemoryError: CUDA out of memory."'
    (chain.folder / "1.out").write_text(
        f'ddpkit-failure {{"kind": "exception", "rank": 3, "host": "n2", {cause}}}\n')
    assert follow(chain, Status("1", "failed", 1)) == 1
    assert "ddpkit submit: rank 3 on n2: cuda_oom. The model" in capfd.readouterr().err


def test_output_is_printed_once_where_its_file_is_found_by_another_path(
        chain: Submission, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server names the whole path; without a history only the working folder shows the file."""
    (chain.folder / "train.o1").write_text("epoch 1\n")
    monkeypatch.chdir(chain.folder)
    paths = iter([[chain.folder / "train.o1"]])
    following.follow(Scripted({"1": [Status("1", "running"), Status("1", "unknown")]}).status,
                     lambda job_id: next(paths, [Path("train.o1")]), ["1"])
    assert capfd.readouterr().out == "epoch 1\n"


@pytest.mark.parametrize(("status", "alone", "in_chain"), [
    (DONE, 0, 0), (Status("1", "failed", 42), 42, 42), (Status("1", "failed", 0), 1, 1),
    (Status("1", "cancelled"), 1, 1), (PREEMPTED, 1, 0), (Status("1", "timeout", 0), 1, 0),
    (Status("1", "node_fail"), 1, 0), (Status("1", "never_ran"), 1, 1), (Status("1", "unknown"), 1, 1),
    (Status("1", "stopped", 75), 75, 0)])
def test_exit_status_of_follow(status: Status, alone: int, in_chain: int, chain: Submission) -> None:
    """A job of a chain succeeds if the next one can continue it, the last one if it completed."""
    assert follow(chain, status) == alone
    assert follow(chain, status, DONE) == in_chain
    assert follow(chain, Status("1", "stopped", 75), status) == alone
    assert follow(chain, DONE, status) == 0  # which is cancelled


def test_scheduler_that_is_down_is_queried_again(chain: Submission, job: InJob, monkeypatch: pytest.MonkeyPatch,
                                                 capfd: pytest.CaptureFixture[str]) -> None:
    running = Status("1", "running")
    assert follow(chain, [*[DOWN] * 10, running, *[DOWN] * 10, running, DONE]) == 0
    assert capfd.readouterr().err.splitlines() == [
        "ddpkit submit: scontrol does not respond Trying again for 1 s.", "ddpkit submit: job 1: running",
        "ddpkit submit: job 1: completed, exit status 0"]
    two_lines = pbs_recording("commands/err_server_down_qstat_json")["stderr"]
    assert "\n" in two_lines.strip()
    assert follow(chain, [SchedulerError(two_lines), DONE]) == 0
    assert len(capfd.readouterr().err.splitlines()) == 2
    with pytest.raises(SchedulerError):
        follow(chain, DOWN)
    capfd.readouterr()

    monkeypatch.setattr(in_job, "QUERY_PAUSE_SECONDS", 0.0)
    assert (job.run(lambda: 0, [DOWN, DOWN, PREEMPTED]), job.started) == (0, 1)
    assert capfd.readouterr().err.count("the state of job 1 is not known: scontrol does not respond") == 2


@pytest.mark.parametrize(("recorded", "status", "followed", "text"), [
    (0, 0, 0, "completed, exit status 0"), (75, 75, 75, "stopped after saving"), (3, 1, 3, "failed, exit status 3"),
    (TIME_LIMIT, 1, 1, "timeout"), (HOST_LOST, 1, 1, "node fail"),
    (NOT_STARTED, 1, 1, "never ran, exit status 1 (it refused to start")])
def test_recorded_status_counts_where_the_scheduler_has_none(
        recorded: int | str, status: int, followed: int, text: str, chain: Submission, query: Query) -> None:
    """Slurm without accounting forgets a job soon, PBS without history at its end."""
    (chain.folder / "1.out").write_text("loss 0.5\n")
    (chain.folder / "11.out").write_text("another job\n")
    assert query("logs 1", {}) == (0, "loss 0.5\n", "")
    records.write_status(chain.folder, "1", recorded)
    for view in ("down", "unknown", *["failed"] * (recorded in (NOT_STARTED, HOST_LOST))):
        done = query("status 1", scripted(view))
        assert done.status == status and f"job 1: {text}" in done.out
    done = query("logs --follow 1", {"1": [Status("1", "running"), Status("1", "unknown")]})
    assert (done.status, done.out) == (followed, "loss 0.5\n")


@pytest.mark.parametrize(("recorded", "state", "text"), [
    (TIME_LIMIT, Status("1", "timeout", None, "the walltime limit was reached"),
     "timeout (the walltime limit was reached)"),
    (75, Status("1", "timeout", None, "the walltime limit was reached"), "stopped after saving, to be continued"),
    (HOST_LOST, Status("1", "failed", 1), "node fail (recorded by the job; the scheduler says: failed)"),
    (0, Status("1", "completed", 0), "completed, exit status 0"),
    (3, DOWN, "(recorded by the job; the scheduler does not respond)"),
    (3, Status("1", "unknown"), "(recorded by the job; the scheduler does not know it)")])
def test_what_the_scheduler_says_stands_beside_what_the_job_recorded(
        recorded: int | str, state: Status | SchedulerError, text: str, chain: Submission, query: Query) -> None:
    records.write_status(chain.folder, "1", recorded)
    line = query("status 1", {"1": [state] * 3}).out.splitlines()[0]
    assert text in line and ("not know" in line) == ("not know" in text), line


@pytest.mark.parametrize(("words", "states", "exit_status", "message"), [
    ("status 1", "down", 1, "does not respond"),
    ("status 1", "completed", 0, "job 1: completed, exit status 0\n  record: {folder}"),
    ("status 1", "unknown", 1, "job 1: unknown"),
    ("status 2 1", "stopped failed", 1, ""),
    # As after scancel of one job, which the later ones do not know until they start:
    *((f"status {number}", f"{state} queued queued", 1, message)
      for state in ("failed", "unknown")
      for number, message in ((2, "  earlier in its chain, job 1: "), (3, "This job will refuse to start"))),
    ("status 2", "completed cancelled", 0, "  not needed: job 1 of its chain has completed the training"),
    ("list", "failed completed queued", 0, "3    queued, will refuse to start"),
    ("list", "failed completed queued", 0, "2    completed  "),
    ("list --folder nowhere", "", 0, "no submissions in nowhere"),
    ("logs 1", "queued", 1, "No output was found of job 1: queued"),
    ("cancel 1", "unknown unknown unknown", 1, "no job 1")])
def test_queries(words: str, states: str, exit_status: int, message: str, chain: Submission, query: Query) -> None:
    done = query(words, scripted(states))
    assert done.status == exit_status
    assert message.format(folder=chain.folder.relative_to(Path.cwd())) in done.out + done.err
    assert ("refuse" in done.out) == (words == "list" or "failed queued" in states or "unknown queued" in states)


@pytest.mark.parametrize("state", ["failed", "running"])
def test_status_of_a_failed_job_has_its_cause(state: str, chain: Submission, query: Query) -> None:
    (chain.folder / "1.out").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    found = "cuda_oom. " in (out := query("status 1", scripted(state)).out) and "A restart does not help" in out
    assert found == (state == "failed"), out


def test_list_shows_the_latest_submissions_first(login: Login, chain: Submission, query: Query) -> None:
    assert login.submit("run", "--job-name", "other", "train.py").status == 0
    os.utime(chain.folder / "submission.json", (1, 1))
    records.write_status(chain.folder, "2", 75)
    jobs = {job_id: Status(job_id, "unknown") for job_id in ("101", "1", "2", "3")}
    lines = [line.split()[:3] for line in query("list", jobs).out.splitlines()]
    assert [line[0] for line in lines] == ["JOB", "101", "1", "2", "3"]
    assert lines[1][1] == "unknown" and lines[3][1:] == ["stopped", "(75)"]
    assert [json.loads(line)["job"] for line in query("list --json", jobs).out.splitlines()] == ["101", "1", "2", "3"]


def test_json_has_a_line_for_each_job(chain: Submission, query: Query) -> None:
    done = query("status --json 1 2", scripted("failed running queued"))
    one, two = map(json.loads, done.out.splitlines())
    assert (one["state"], one["exit_code"], two["state"], done.status) == ("failed", 3, "running", 1)
    assert Path(two["folder"]).name == "train-1"


@pytest.mark.parametrize(("states", "message"), [
    ("stopped running queued", ""), ("stopped ending queued", ""), ("down down down", ""),
    ("stopped queued queued", "job 2: queued. Expected a running job, which can save. To end this one: ddpkit submit"),
    ("stopped held queued", "job 2: held. Expected"), ("stopped cancelled queued", "job 2: cancelled. Expected"),
    ("stopped unknown queued", "There is nothing to stop")])
def test_stop_touches_the_file_that_the_running_job_watches(states: str, message: str, chain: Submission,
                                                            query: Query) -> None:
    done = query("stop 2", scripted(states))
    assert (done.status, message in done.err) == (int(bool(message)), True)
    assert (chain.folder / "2.stop").exists() == ("cancel 2" in done.out) == (not message)
    assert "no record of job 77" in query("stop 77", scripted("")).err


def test_stop_holds_for_one_run_of_one_job(job: InJob) -> None:
    def launch() -> int:
        watched = Path(os.environ["DDPKIT_STOP_FILE"])
        found = watched.exists()
        watched.touch()
        return 75 if found else 0

    (job.folder / "2.stop").touch()  # before the script of the running job has come so far
    (job.folder / "1.stop").touch()
    assert (job.run(launch), job.run(launch)) == (75, 0)  # the second run is of the same job, requeued


def test_list_queries_the_scheduler_once(login: Login, chain: Submission) -> None:
    for number in range(3):
        assert login.submit("run", "--job-name", f"n{number}", "--chain", "2", "train.py").status == 0
    before = len(login.commands.calls())
    login.commands.add("squeue")
    login.commands.add("sacct")
    assert login.submit("list").out.count("unknown") == 9
    assert [words[0] for words in login.commands.calls()[before:]] == ["squeue", "sacct"]


def test_status_and_the_next_job_agree_on_how_a_job_ended(job: InJob, query: Query) -> None:
    """scancel of a running job: it has saved and recorded that, and Slurm says CANCELLED."""
    records.write_status(job.folder, "1", 75)
    assert "refuse" not in query("status 2", scripted("cancelled queued queued")).out
    assert (job.run(lambda: 0, Status("1", "cancelled")), job.started) == (0, 1)


@pytest.mark.parametrize(("states", "cancelled"), [
    ("stopped running queued", ["3", "2"]), ("unknown running queued", ["3", "2"]),
    ("completed cancelled cancelled", [])])
@pytest.mark.parametrize("job_id", ["1", "2", "3"])
def test_cancel_ends_a_chain(job_id: str, states: str, cancelled: list[str], chain: Submission, query: Query) -> None:
    scheduler = scripted(states)
    done = query(f"cancel {job_id}", scheduler)
    assert scheduler.cancelled == cancelled  # the last first, so that none starts
    assert done.status == 0 and re.findall(r"^job (\d): cancelled$", done.out, re.MULTILINE) == cancelled
    assert ("already ended" in done.out) == (states.split()[int(job_id) - 1] in ("stopped", "completed", "cancelled"))


def test_cancelled_job_that_the_scheduler_forgets_stays_cancelled(chain: Submission, query: Query) -> None:
    """PBS without a history: the job's script then records the status of the signal."""
    query("cancel 1", scripted("running queued queued"))
    records.write_status(chain.folder, "1", 143)
    assert query("status 1", scripted("unknown unknown unknown")).out.startswith("job 1: cancelled")
    records.write_status(chain.folder, "1", 75)  # it has saved
    assert query("status 1", scripted("unknown unknown unknown")).out.startswith("job 1: stopped")


@pytest.mark.parametrize(("requested", "found"), [("12", True), ("12.head", True), ("12.other", False), ("1", False)])
def test_job_is_found_by_its_short_id_too(requested: str, found: bool, chain: Submission) -> None:
    records.write(chain.folder, records.new_record(Job(("a",)), "pbs", "x"), ["12.head"])
    (chain.folder.with_name("other")).mkdir()
    (chain.folder.with_name("other") / "submission.json").write_text("[]")
    assert (records.find(chain.folder.parent, requested) is not None) is found


@pytest.mark.parametrize(("name", "job_id"), [
    ("slurm-9.out", "9"), ("train.o11", "11.head"), ("13.head.OU", "13.head"), ("named-by-slurm", "14")])
def test_output_of_a_job_without_a_record_is_found(name: str, job_id: str, login: Login, query: Query) -> None:
    (login.folder / name).write_text("loss 0.5\n")
    output = str(login.folder / name) if job_id == "14" else None
    status = Status(job_id, "completed", 0, output=output)
    for option in ("", "--follow"):
        done = query(f"logs {option} {job_id} --site generic-slurm", {job_id: status})
        assert done.status == 0 and done.out.endswith("loss 0.5\n")


class InJob:
    """Job 2 of a chain, of Slurm, with a scripted scheduler and a function in place of `launch`."""

    def __init__(self, chain: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = chain.folder
        self.started = 0
        self.seconds_left: Callable[[], float | None] = lambda: None
        self.scheduler = Scripted({})
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
        monkeypatch.setattr(in_job, "current_job", lambda: self)

    def run(self, launch: Callable[[], int], before: Any = None, state: Any = "running",
            lost: tuple[str, ...] = ()) -> int:
        """Start the job in this state; `before`: the statuses of job 1, None where there is no such job.

        lost: hosts whose loss has ended the launch.
        """
        def start(words: list[str]) -> Outcome:
            assert words == ["--", "train.py"]
            self.started += 1
            status = launch()
            return Outcome(status, "lost" if lost else "status", lost_hosts=lost)

        self.scheduler = Scripted({"1": before, "2": Status("2", state)})
        self._monkeypatch.setattr(in_job, "get_scheduler", lambda name: self.scheduler)
        self._monkeypatch.setattr("utils.tools.launch.launch_cli.launch", start)
        return in_job.main([str(self.folder), "1" if before else "", "--", "train.py"])

    @property
    def recorded(self) -> int | str | None:
        return records.read_status(self.folder, "2")


@pytest.fixture
def job(chain: Submission, monkeypatch: pytest.MonkeyPatch) -> InJob:
    return InJob(chain, monkeypatch)


# Exit status, whether ranks start, what is recorded, and the message of a job after another of its chain.
STARTS, REFUSES, COMPLETE = (0, 1, 0, ""), (1, 0, NOT_STARTED, "not started"), (0, 0, 0, "1 has completed the training")


@pytest.mark.parametrize(("recorded", "status", "expected"), [
    (75, DOWN, STARTS), (TIME_LIMIT, DOWN, STARTS), (HOST_LOST, Status("1", "failed", 1), STARTS),
    (3, DOWN, REFUSES), (NOT_STARTED, DONE, REFUSES), (0, DOWN, COMPLETE), (None, DONE, COMPLETE),
    (None, DOWN, REFUSES), (None, Status("1", "unknown"), REFUSES), (143, Status("1", "timeout"), STARTS),
    (143, PREEMPTED, STARTS), (143, Status("1", "cancelled"), REFUSES), (None, Status("1", "failed", 1), REFUSES),
    (None, Status("1", "node_fail"), STARTS), (None, Status("1", "stopped", 75), STARTS)])
def test_job_of_a_chain_starts_if_it_can_continue_the_one_before(
        recorded: int | str | None, status: Status | Exception, expected: tuple[int, int, int | str, str], job: InJob,
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if recorded is not None:
        records.write_status(job.folder, "1", recorded)
    monkeypatch.setattr(in_job, "QUERY_TIMEOUT_SECONDS", 0.0)
    assert (job.run(lambda: 0, status), job.started, job.recorded) == expected[:3]
    printed = capfd.readouterr().err
    assert expected[3] in printed and ("not started" in printed) == (expected != STARTS)


@pytest.mark.parametrize(("ends", "state", "cancelled", "status"), [
    (lambda: 0, "running", ["3"], 0), (lambda: 75, "running", [], 75), (lambda: 3, "running", ["3"], 3),
    (lambda: 143, "ending", [], 143), (lambda: sys.exit(2), "running", ["3"], 2),
    (lambda: 1 // 0, "running", ["3"], 1)])
def test_failure_or_success_cancels_the_rest_of_the_chain(ends: Callable[[], int], state: str, cancelled: list[str],
                                                          status: int, job: InJob) -> None:
    with pytest.raises(ZeroDivisionError) if status == 1 else contextlib.nullcontext():  # a defect of launch
        assert job.run(ends, state=state) == status
    assert (job.scheduler.cancelled, job.recorded) == (cancelled, status)


def test_chain_continues_without_a_host_that_was_lost(job: InJob, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Allocation("pbs", "2", ("n1", "n2", "n3"), (1, 1, 1), (None,) * 3, (None,) * 3)
    monkeypatch.setattr(preflight, "current_allocation", lambda: hosts)

    def fail() -> int:
        exclude_file.add(os.environ[exclude_file.VARIABLE], {"n2.cluster": "launch: lost", "n9": "another job"})
        return 1

    assert (job.run(fail, lost=("n2",)), job.recorded) == (1, HOST_LOST)
    assert (job.scheduler.cancelled, job.scheduler.excluded) == ([], {"3": ["n2"]})


def test_an_error_after_a_replaced_host_is_the_end_of_the_chain(job: InJob) -> None:
    def fail() -> int:  # a spare has replaced n2 meanwhile
        exclude_file.add(os.environ[exclude_file.VARIABLE], {"n2.cluster": "launch: lost"})
        return 1

    assert (job.run(fail), job.recorded, job.scheduler.cancelled) == (1, 1, ["3"])


@pytest.mark.parametrize(("left", "seconds_left", "recorded", "cancelled"), [
    (0.0, 0.0, TIME_LIMIT, []), (0.0, None, TIME_LIMIT, []), (0.0, 1000.0, 3, ["3"]), (None, None, 3, ["3"])],
    ids=["reached", "no response", "extended", "no limit"])
def test_time_limit_is_recorded_unless_it_is_extended(
        left: float | None, seconds_left: float | None, recorded: int | str, cancelled: list[str], job: InJob) -> None:
    job.seconds_left = lambda: left

    def fail() -> int:
        assert job.recorded == (records.UNTIL if left == 0 else None)  # where nothing is left to record it
        job.seconds_left = lambda: seconds_left
        return 3

    assert job.run(fail) == 3
    assert (job.recorded, job.scheduler.cancelled) == (recorded, cancelled)
    job.seconds_left = lambda: None
    assert job.run(lambda: 75) == job.recorded == 75  # a later run of the same job


def test_job_that_recorded_only_its_limit_counts_as_timed_out_after_it(job: InJob) -> None:
    for limit, state, started in ((0.0, "unknown", 1), (2e9 * 2, "unknown", 1), (0.0, "failed", 1)):
        records.write_limit(job.folder, "1", limit)
        job.run(lambda: 75, Status("1", state))
        assert job.started == started

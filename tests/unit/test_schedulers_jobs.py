"""Jobs of Slurm and PBS: submitted, refused, cancelled, and their status from recorded output."""
from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler_commands import Commands, pbs_job, pbs_record, pbs_recording, slurm_output
from utils.job.commands import SchedulerError, run_command
from utils.tools.schedulers import get_scheduler
from utils.tools.schedulers.job_spec import Job
from utils.tools.schedulers.pbs_scheduler import Pbs
from utils.tools.schedulers.scheduler import Scheduler
from utils.tools.schedulers.slurm_scheduler import SlurmScheduler

CANCELLED = slurm_output("job-cancelled")


def ended(state: str, exit_code: str = "0:0", reason: str = "None", record: str = CANCELLED) -> str:
    """The record of a job of Slurm with another end."""
    record = re.sub(r"(?m)^   JobState=\S+ Reason=\S+", f"   JobState={state} Reason={reason}", record)
    return re.sub(r"\bExitCode=\S+", f"ExitCode={exit_code}", record)


def array(*ends: tuple[str, str]) -> str:
    """The records of an array whose elements ended so."""
    elements = re.findall(r"^JobId=.*?(?=^JobId|\Z)", slurm_output("job-array"), re.MULTILINE | re.DOTALL)
    return "".join(ended(*end, record=record) for record, end in zip(elements, ends, strict=True))


@pytest.mark.parametrize(("scheduler", "output", "job_id"), [
    (SlurmScheduler(), "1234;cluster", "1234"), *((Pbs(), job_id, job_id) for job_id in (
        "12", "12.pbs-head", "12.pbs_2.site.edu", "79[].pbs_head", "79[2].pbs_head", "12.s_1@s_2"))])
def test_a_job_is_submitted_and_cancelled(commands: Commands, scheduler: Scheduler, output: str, job_id: str) -> None:
    submit, cancel = ("sbatch", "scancel") if scheduler.name == "slurm" else ("qsub", "qdel")
    commands.add(submit, f"{output}\n")
    commands.add(cancel)
    hold = "-H" if scheduler.name == "slurm" else "-h"
    assert scheduler.submit("job.sh", Job(("a.py",), directives=(hold,))) == job_id
    scheduler.cancel(job_id)
    [submitted, cancelled] = commands.calls()
    assert (submitted[0], submitted[-1], cancelled) == (submit, "job.sh", [cancel, job_id])
    assert hold in submitted[:submitted.index("--") if submit == "qsub" else -1]  # SBATCH_* come before #SBATCH


@pytest.mark.parametrize("scheduler", [SlurmScheduler(), Pbs()])
def test_a_refusal_has_the_schedulers_message(commands: Commands, tmp_path: Path, scheduler: Scheduler) -> None:
    """Without qsub's list of options, which comes after the message."""
    recording = pbs_recording("commands/err_unknown_option")
    message, usage, _ = recording["stderr"].partition("\nusage: ")
    program = scheduler.submit_words([], "job.sh")[0]
    commands.add(program, error=recording["stderr"], status=recording["rc"])
    with pytest.raises(SchedulerError) as refused:
        scheduler.submit(tmp_path / "job.sh", Job(("a.py",)))
    assert usage and refused.value.exit_code == recording["rc"]
    assert str(refused.value).endswith(f"{tmp_path}/job.sh failed with exit status {recording['rc']}: {message}")

    commands.add(program, "Submitted\n")
    with pytest.raises(SchedulerError, match="Expected a job id"):
        scheduler.submit("job.sh", Job(("a.py",)))


@pytest.mark.parametrize(("scheduler", "job_ids"), [
    (SlurmScheduler(), ["12.head"]), (Pbs(), ["12 13", "x.head", "79[a].head", "12.head;ls", "12."])])
def test_other_texts_never_reach_a_command(commands: Commands, scheduler: Scheduler, job_ids: list[str]) -> None:
    for job_id in [*job_ids, "", "-x", "-u root", "--all", "1 2", "abc", "1;x", "*", "1\n2", "[1]"]:
        for action in (scheduler.status, scheduler.cancel):
            with pytest.raises(SchedulerError, match="is not a job id of"):
                action(job_id)


@pytest.mark.parametrize(("name", "outcome"), [
    ("finished", contextlib.nullcontext()), ("unknown", pytest.raises(SchedulerError, match="Unknown Job Id"))])
def test_cancelling_an_ended_job_is_no_error(commands: Commands, name: str, outcome: Any) -> None:
    recording = pbs_recording(f"commands/err_qdel_{name}")
    commands.add("qdel", error=recording["stderr"], status=recording["rc"])
    with outcome:
        Pbs().cancel("1")


def test_the_scheduler_is_that_whose_commands_are_found(commands: Commands) -> None:
    with pytest.raises(SchedulerError, match="Neither"):
        get_scheduler()
    commands.add("qsub")
    assert get_scheduler().name == "pbs"
    commands.add("sbatch")
    with pytest.raises(SchedulerError, match="Both"):
        get_scheduler()
    assert get_scheduler("slurm").name == "slurm"
    with pytest.raises(SchedulerError, match="no scheduler 'lsf'"):
        get_scheduler("lsf")

    # Of two that are installed the configured one counts.
    (commands.folder / "pbs.conf").write_text("PBS_SERVER=head\n")
    assert get_scheduler().name == "pbs"
    (commands.folder / "pbs.conf").unlink()
    (commands.folder / "slurm.conf").write_text("ClusterName=test\n")
    assert get_scheduler().name == "slurm"


def test_a_qsub_that_submits_to_slurm_is_not_pbs(commands: Commands) -> None:
    commands.add("sbatch")
    commands.write("qsub", "#!/usr/bin/perl -w\n# qsub - submit a batch job in familiar pbs format to Slurm.\n")
    assert get_scheduler().name == "slurm"
    (commands.folder / "bin").mkdir()
    commands.write("bin/qsub", "#!/bin/sh\necho 12.server\n")
    (commands.folder / "pbs.conf").write_text(f"PBS_SERVER=head\nPBS_EXEC={commands.folder}\n")
    assert Pbs().submit("job.sh", Job(("a.py",))) == "12.server"


@pytest.mark.parametrize(("scontrol", "state", "exit_code"), [
    (slurm_output("job-odd-name"), "running", None),  # its name has JobState=COMPLETED in it
    (slurm_output("job-newline"), "held", None), (slurm_output("job-never"), "queued", None),
    (CANCELLED, "cancelled", 143), (ended("CANCELLED", reason="Priority"), "cancelled", None),
    (ended("COMPLETED"), "completed", 0), (ended("COMPLETING"), "ending", None),
    (ended("FAILED", "3:0", "NonZeroExitCode"), "failed", 3),
    (ended("FAILED", "75:0", "NonZeroExitCode"), "stopped", 75),
    (ended("TIMEOUT", "0:15", "TimeLimit"), "timeout", 143), (ended("NODE_FAIL", "0:15", "NodeDown"), "node_fail", 143),
    (ended("OUT_OF_MEMORY", "0:125", "OutOfMemory"), "failed", 253),
    (ended("CANCELLED", "0:0", "DependencyNeverSatisfied"), "never_ran", None),
    (ended("SOMETHING_NEW", "0:15"), "unknown", None),
    # An array that was submitted with sbatch has completed when all elements have.
    (array(("COMPLETED", "0:0"), ("COMPLETED", "0:0"), ("FAILED", "2:0")), "failed", 2),
    (array(*[("COMPLETED", "0:0")] * 3), "completed", 0)])
def test_the_status_of_a_slurm_job(commands: Commands, scontrol: str, state: str, exit_code: int | None) -> None:
    commands.add("scontrol", scontrol)
    status = SlurmScheduler().status("33")
    assert (status.job_id, status.state, status.exit_code) == ("33", state, exit_code)
    assert state != "cancelled" or status.reason == ""  # not that of its wait in the queue
    if state == "running":
        assert (status.hosts, status.output) == (("node1", "node2"), "/cluster/log of 33.out")


@pytest.mark.parametrize(("sacct", "state", "hosts"), [
    (("33\x1fCANCELLED by 0\x1f0:0\x1fnode[1-2]\n",), "cancelled", ("node1", "node2")),
    (("", "Slurm accounting storage is disabled\n", 1), "unknown", ())])
def test_the_status_of_a_job_that_slurm_has_forgotten(commands: Commands, sacct: tuple[Any, ...], state: str,
                                                      hosts: tuple[str, ...]) -> None:
    commands.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", status=1)
    commands.add("sacct", *sacct)
    status = SlurmScheduler().status("33")
    assert (status.state, status.exit_code, status.hosts) == (state, None, hosts)


def test_many_slurm_jobs_are_queried_at_once(commands: Commands) -> None:
    """Recorded of Slurm 22.05 with the columns of the query; scontrol reports exit status 75 as 75:0."""
    rows = (("3", "CANCELLED", "JobHeldUser", "0", "0", "", "/w/slurm-3.out"),
            ("2", "FAILED", "NonZeroExitCode", "4294901758", "19200", "node1", "/w/slurm-2.out"),
            ("4", "FAILED", "JobLaunchFailure", "4294901757", "9", "node1", "/w/slurm-4.out"),
            ("6", "PENDING", "JobHeldUser", "0", "0", "", "/w/slurm-6.out"))
    commands.add("squeue", "".join("\x1f".join([*row, "\n"]) for row in rows))
    commands.add("sacct", "7\x1fCOMPLETED\x1f0:0\x1fnode1\n8_1\x1fFAILED\x1f3:0\x1fnode1\n")
    found = SlurmScheduler().statuses(["2", "3", "4", "6", "7", "8", "9"])
    assert {job_id: (one.state, one.exit_code) for job_id, one in found.items()} == {
        "2": ("stopped", 75), "3": ("cancelled", None), "4": ("failed", 137), "6": ("held", None),
        "7": ("completed", 0), "8": ("failed", 3), "9": ("unknown", None)}
    assert [words[0] for words in commands.calls()] == ["squeue", "sacct"]
    commands.add("squeue", error="slurm_load_jobs error: Invalid job id specified\n", status=1)  # of a single one
    commands.add("sacct", error="Slurm accounting storage is disabled\n", status=1)
    assert SlurmScheduler().statuses(["9"])["9"].state == "unknown"


@pytest.mark.parametrize("history", [True, False])
def test_many_pbs_jobs_are_queried_at_once(commands: Commands, history: bool) -> None:
    job = pbs_record("exitcodes/exit7") if history else {"job_state": "R"}
    commands.add("qstat", pbs_job(job, "7.server"), "qstat: Unknown Job Id 8.server\n", 153)
    if not history:
        commands.add("qstat", error="qstat: PBS is not configured to maintain job history\n", status=36, when="-x")
    found = Pbs().statuses(["7", "8.server"])
    assert (found["7"].state, found["8.server"].state) == ("failed" if history else "running", "unknown")
    assert len(commands.calls("qstat")) == 3 - history


def test_many_pbs_jobs_are_found_where_qstat_prints_one(commands: Commands) -> None:
    """OpenPBS after 2023 prints the JSON of the first job only, and exits with 0."""
    job_ids = [f"{number}.server" for number in range(4, 8)]
    for job_id in reversed(job_ids):
        commands.add("qstat", pbs_job({"job_state": "H"}, job_id), when=job_id)
    found = Pbs().statuses(job_ids)
    assert [found[job_id].state for job_id in job_ids] == ["held"] * 4


@pytest.mark.parametrize(("record", "expected"), [
    *((pbs_record(name), {"state": state, "exit_code": exit_code}) for name, state, exit_code in (
        ("exitcodes/exit0", "completed", 0), ("exitcodes/exit7", "failed", 7),
        ("commands/qdel_running_final", "cancelled", 143), ("signals/ckpt_qdel_profile_trapped", "cancelled", 85),
        ("nodefail/ms_poweroff_rn", "node_fail", None), ("signals/walltime_ignore", "timeout", None),
        ("commands/qdel_queued_final", "cancelled", None),
        # PBS gives these two the substate of success:
        ("depend/depend_on_unknown_job", "never_ran", None), ("flow/depend_after_failure", "never_ran", None))),
    ({**pbs_record("exitcodes/exit7"), "Exit_status": 75}, {"state": "stopped", "exit_code": 75}),
    # Its script has ended well, and one of its hosts, which a spare has replaced, does not respond:
    ({**pbs_record("exitcodes/exit0"), "substate": 93}, {"state": "completed", "exit_code": 0}),
    ({"job_state": "R", "Output_Path": "head.pbs.lab:/home/a b.log"}, {"output": "/home/a b.log"}),
    ({"job_state": "R", "Output_Path": "head:/nowhere/"}, {"output": "/nowhere/79[2].s.OU"}),
    (pbs_recording("commands/queued_never_run")["Jobs"].popitem()[1], {
        "state": "queued", "output": "/home/alice/jobs/ok.o37"})])
def test_the_status_of_a_pbs_job(commands: Commands, record: dict[str, Any], expected: dict[str, Any]) -> None:
    commands.add("qstat", pbs_job(record, "79[2].s"))
    status = Pbs().status("79[2].s")
    assert {name: getattr(status, name) for name in expected} == expected
    assert status.state != "queued" or "Can Never Run: Insufficient amount of resource: ncpus" in status.reason
    assert ("afterok" in status.reason) == (status.state == "never_ran")


@pytest.mark.parametrize(("output", "exit_status"), [("", 36), ('{"pbs_version": "23.06.06"}', 0)])
def test_a_pbs_server_without_a_history(commands: Commands, output: str, exit_status: int) -> None:
    """OpenPBS 23 was seen to exit with 0."""
    no_history = (output, "qstat: PBS is not configured to maintain job history 7.server\n", exit_status)
    commands.add("qstat", pbs_job({"job_state": "R"}))
    commands.add("qstat", *no_history, when="-x")
    assert Pbs().status("7.server").state == "running"
    commands.add("qstat", error="qstat: Unknown Job Id 7.server\n", status=153)
    commands.add("qstat", *no_history, when="-x")
    assert Pbs().status("7.server").state == "unknown"


def test_a_scheduler_that_is_down_or_hangs_is_an_error(commands: Commands) -> None:
    with pytest.raises(SchedulerError, match="did not respond within 0.2 s"):
        run_command(["/bin/sleep", "60"], timeout_seconds=0.2)
    commands.add("scontrol", error="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    with pytest.raises(SchedulerError, match="Unable to contact.*reachable Slurm controller"):
        SlurmScheduler().status("33")

    unknown, down = (pbs_recording(f"commands/err_{name}") for name in (
        "qstat_f_unknown_job", "server_down_qstat_json"))
    commands.add("qstat", unknown["stdout"], unknown["stderr"], unknown["rc"])
    assert Pbs().status("99999").state == "unknown"
    commands.add("qstat", down["stdout"], down["stderr"], down["rc"])
    with pytest.raises(SchedulerError, match="(?s)cannot connect to server.*Run this on a login node"):
        Pbs().status("99999")

"""The status of jobs, from recorded output of Slurm and PBS."""
from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.unit.scheduler_commands import Commands, pbs_job, pbs_record, pbs_recording, slurm_output
from utils.job.commands import SchedulerError
from utils.tools.schedulers.pbs_scheduler import Pbs
from utils.tools.schedulers.slurm_scheduler import Slurm

FORGOTTEN = ("", "slurm_load_jobs error: Invalid job id specified\n", 1)
NO_ACCOUNTING = ("", "Slurm accounting storage is disabled\n", 1)
RUNNING = {"state": "running", "exit_code": None, "ended": False, "exit_status": 1}

CANCELLED = slurm_output("job-cancelled")
# The records of an array.
FIRST, SECOND, LAST = re.findall(r"^JobId=.*?(?=^JobId|\Z)", slurm_output("job-array"), re.MULTILINE | re.DOTALL)


def with_end(record: str, state: str, exit_code: str = "0:0", reason: str = "None") -> str:
    """The record of a job with another end."""
    record = re.sub(r"(?m)^   JobState=\S+ Reason=\S+", f"   JobState={state} Reason={reason}", record)
    return re.sub(r"\bExitCode=\S+", f"ExitCode={exit_code}", record)


def array(*ends: tuple[str, str]) -> str:
    return "".join(with_end(record, *end) for record, end in zip((FIRST, SECOND, LAST), ends, strict=True))


@pytest.mark.parametrize(("outputs", "expected"), [
    ({"scontrol": slurm_output("job-odd-name")},  # its name has JobState=COMPLETED in it
     {**RUNNING, "hosts": ("node1", "node2"), "output": "/cluster/log of 33.out"}),
    ({"scontrol": slurm_output("job-newline")}, {"state": "held", "exit_code": None}),
    ({"scontrol": slurm_output("job-never")}, {"state": "queued"}),
    ({"scontrol": CANCELLED}, {"state": "cancelled", "exit_code": 143, "exit_status": 143}),
    ({"scontrol": with_end(CANCELLED, "COMPLETED")}, {"state": "completed", "exit_code": 0, "exit_status": 0}),
    ({"scontrol": with_end(CANCELLED, "FAILED", "3:0", "NonZeroExitCode")}, {"state": "failed", "exit_code": 3}),
    ({"scontrol": with_end(CANCELLED, "FAILED", "75:0", "NonZeroExitCode")}, {"state": "stopped", "exit_code": 75}),
    ({"scontrol": with_end(CANCELLED, "TIMEOUT", "0:15", "TimeLimit")}, {"state": "timeout", "exit_code": 143}),
    ({"scontrol": with_end(CANCELLED, "NODE_FAIL", "0:15", "NodeDown")}, {"state": "node_fail", "exit_code": 143}),
    ({"scontrol": with_end(CANCELLED, "OUT_OF_MEMORY", "0:125", "OutOfMemory")}, {"state": "failed", "exit_code": 253}),
    ({"scontrol": with_end(CANCELLED, "COMPLETING")}, {"state": "ending", "exit_code": None}),
    ({"scontrol": with_end(CANCELLED, "CANCELLED", "0:0", "DependencyNeverSatisfied")}, {"state": "never_ran"}),
    ({"scontrol": with_end(CANCELLED, "SOMETHING_NEW", "0:15")}, {"state": "unknown", "exit_code": None}),
    # An array that was submitted with sbatch has completed when all elements have.
    ({"scontrol": array(("COMPLETED", "0:0"), ("COMPLETED", "0:0"), ("FAILED", "2:0"))},
     {"state": "failed", "exit_status": 2}),
    ({"scontrol": array(*[("COMPLETED", "0:0")] * 3)}, {"state": "completed", "exit_status": 0}),
    # Slurm forgets jobs.
    ({"scontrol": FORGOTTEN, "sacct": "CANCELLED by 0\x1f0:0\x1fnode[1-2]\n"},
     {"state": "cancelled", "hosts": ("node1", "node2"), "exit_status": 1}),
    ({"scontrol": FORGOTTEN, "sacct": NO_ACCOUNTING}, {"state": "unknown", "exit_status": 1, "ended": False})])
def test_the_status_of_a_slurm_job(commands: Commands, outputs: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, output in outputs.items():
        commands.add(name, *(output if isinstance(output, tuple) else (output,)))
    status = Slurm().status("33")
    assert {name: getattr(status, name) for name in expected} == expected
    assert status.job_id == "33"


@pytest.mark.parametrize(("record", "expected"), [
    ("exitcodes/exit0", {"state": "completed", "exit_code": 0, "exit_status": 0, "ended": True}),
    ("exitcodes/exit7", {"state": "failed", "exit_code": 7, "exit_status": 7, "ended": True}),
    ("commands/qdel_running_final", {"state": "cancelled", "exit_code": 143}),
    ("signals/ckpt_qdel_profile_trapped", {"state": "cancelled", "exit_code": 85}),
    ("nodefail/ms_poweroff_rn", {"state": "node_fail", "exit_code": None, "exit_status": 1}),
    ("signals/walltime_ignore", {"state": "timeout", "exit_code": None, "exit_status": 1}),
    ("commands/qdel_queued_final", {"state": "cancelled", "exit_code": None, "exit_status": 1}),
    # PBS gives these two the substate of success:
    ("depend/depend_on_unknown_job", {"state": "never_ran", "exit_code": None, "exit_status": 1, "ended": True}),
    ("flow/depend_after_failure", {"state": "never_ran", "exit_code": None, "exit_status": 1, "ended": True}),
    ({**pbs_record("exitcodes/exit7"), "Exit_status": 75}, {"state": "stopped", "exit_code": 75}),
    ({"job_state": "R", "Output_Path": "head.pbs.lab:/home/a b.log"}, {"output": "/home/a b.log"}),
    ({"job_state": "R", "Output_Path": "head:/nowhere/"}, {"output": "/nowhere/79[2].s.OU"})])
def test_the_status_of_a_pbs_job(commands: Commands, record: Any, expected: dict[str, Any]) -> None:
    commands.add("qstat", pbs_job(pbs_record(record) if isinstance(record, str) else record, "79[2].s"))
    status = Pbs().status("79[2].s")
    assert {name: getattr(status, name) for name in expected} == expected
    assert ("afterok" in status.reason) == (status.state == "never_ran")


def test_jobs_after_a_deleted_one_wait_for_ever(commands: Commands) -> None:
    """204 was deleted; 205 waits for it, and 206 for 205."""
    recording = pbs_recording("flow/depend_parent_qdel_never_ran")
    second = recording["afterok"]
    third = {**second, "depend": "afterok:205.pbs-head@pbs-head"}
    commands.add("qstat", pbs_job(third, "206.pbs-head"))
    commands.add("qstat", pbs_job(second, "205.pbs-head"), when="205.pbs-head")
    assert "for ever" not in Pbs().status("206.pbs-head").reason  # 204 is not known to be deleted
    commands.add("qstat", pbs_job(recording["parent"], "204.pbs-head"), when="204.pbs-head")
    for job_id, awaited in (("205.pbs-head", "204.pbs-head"), ("206.pbs-head", "205.pbs-head")):
        status = Pbs().status(job_id)
        assert status.state == "held" and f"for ever for {awaited}" in status.reason


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


def test_a_job_with_invalid_json_is_read_from_the_listing(commands: Commands) -> None:
    """PBS before 2024 prints the value of X=005 as 005."""
    commands.add("qstat", pbs_recording("commands/qstat_xf_finished_plain")["stdout"])
    commands.add("qstat", '{"Jobs": {"1.pbs-head": {"Variable_List": {"X": 005}}}}', when="json")
    status = Pbs().status("1.pbs-head")
    assert (status.state, status.hosts) == ("completed", ("n1",))


def test_a_queued_pbs_job_has_a_reason(commands: Commands) -> None:
    commands.add("qstat", json.dumps(pbs_recording("commands/queued_never_run")))
    status = Pbs().status("37")
    assert (status.state, status.output) == ("queued", "/home/alice/jobs/ok.o37")
    assert status.reason.startswith("Can Never Run: Insufficient amount of resource: ncpus")


def test_a_scheduler_that_is_down_is_an_error(commands: Commands) -> None:
    commands.add("scontrol", error="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    with pytest.raises(SchedulerError, match="Unable to contact.*reachable Slurm controller"):
        Slurm().status("33")

    unknown, down = (pbs_recording(f"commands/err_{name}") for name in (
        "qstat_f_unknown_job", "server_down_qstat_json"))
    commands.add("qstat", unknown["stdout"], unknown["stderr"], unknown["rc"])
    assert Pbs().status("99999").state == "unknown"
    commands.add("qstat", down["stdout"], down["stderr"], down["rc"])
    with pytest.raises(SchedulerError, match="(?s)cannot connect to server.*Run this on a login node"):
        Pbs().status("99999")

"""The status of jobs, from recorded output of Slurm and PBS."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.scheduler_commands import Commands, commands, pbs_job, pbs_record, pbs_recording, slurm_output
from utils.schedulers import Pbs, SchedulerError, Slurm

__all__ = ["commands"]  # the fixture

# Slurm --------------------------------------------------------------------------------------------

FORGOTTEN = "slurm_load_jobs error: Invalid job id specified\n"
NO_ACCOUNTING = "Slurm accounting storage is disabled\n"


def ended(state: str, reason: str = "None", exit_code: str = "0:15") -> dict[str, str]:
    """What to change in the record of a cancelled job."""
    return {"CANCELLED Reason=None": f"{state} Reason={reason}", "=0:15": f"={exit_code}"}


@pytest.mark.parametrize(("name", "change", "state", "code"), [
    ("job-odd-name", {}, "running", None),
    ("job-newline", {}, "held", None),
    ("job-never", {}, "queued", None),
    ("job-cancelled", {}, "cancelled", 143),
    ("job-cancelled", ended("COMPLETED", exit_code="0:0"), "completed", 0),
    ("job-cancelled", ended("FAILED", "NonZeroExitCode", "3:0"), "failed", 3),
    ("job-cancelled", ended("FAILED", "NonZeroExitCode", "75:0"), "stopped", 75),
    ("job-cancelled", ended("TIMEOUT", "TimeLimit"), "timeout", 143),
    ("job-cancelled", ended("NODE_FAIL", "NodeDown"), "node_fail", 143),
    ("job-cancelled", ended("OUT_OF_MEMORY", "OutOfMemory", "0:125"), "failed", 253),
    ("job-cancelled", ended("COMPLETING"), "ending", None),
    ("job-cancelled", ended("CANCELLED", "DependencyNeverSatisfied", "0:0"), "never_ran", None),
    ("job-cancelled", ended("SOMETHING_NEW"), "unknown", None)])
def test_each_state_of_slurm(commands: Commands, name: str, change: dict[str, str], state: str,
                             code: int | None) -> None:
    text = slurm_output(name)
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    commands.add("scontrol", text)
    status = Slurm().status("33")
    assert (status.state, status.exit_code, status.job_id) == (state, code, "33")
    assert (status.exit_status == 0) == (state == "completed")


def test_a_slurm_job_has_hosts_queue_and_log(commands: Commands) -> None:
    commands.add("scontrol", slurm_output("job-odd-name"))
    status = Slurm().status("33")
    assert (status.hosts, status.queue, status.restart_count) == (("node1", "node2"), "main", 0)
    assert status.output == "/cluster/log of 33.out"
    assert not status.ended


def test_a_pending_slurm_job_has_a_position(commands: Commands) -> None:
    commands.add("scontrol", slurm_output("job-never"))
    commands.add("squeue", "20\n35\n38\n41\n")
    assert Slurm().status("38").position == 3


@pytest.fixture
def elements() -> list[str]:
    """The records of an array's elements; those of the last are pending, the others run."""
    text = slurm_output("job-array")
    starts = [text.index(f"JobId={number} ") for number in (40, 39)]
    return [text[:starts[0]], text[starts[0]:starts[1]], text[starts[1]:]]


def with_end(record: str, state: str, exit_code: int = 0) -> str:
    record = record.replace("=RUNNING", f"={state}").replace("=PENDING", f"={state}")
    return record.replace("ExitCode=0:0", f"ExitCode={exit_code}:0")


@pytest.mark.parametrize(("ends", "state", "exit_status", "reason"), [
    ([("COMPLETED", 2), ("COMPLETED", 2), ("FAILED", 2)], "failed", 2, "1 failed, 2 completed"),
    ([("FAILED", 3), ("FAILED", 3), ("FAILED", 75)], "failed", 3, "2 failed, 1 stopped"),
    ([("COMPLETED", 0)] * 2 + [("FAILED", 75)], "stopped", 75, "1 stopped, 2 completed")])
def test_a_failed_element_counts_more_than_others(
        commands: Commands, elements: list[str], ends: list[tuple[str, int]], state: str,
        exit_status: int, reason: str) -> None:
    records = [with_end(record, *end) for record, end in zip(elements, ends, strict=True)]
    commands.add("scontrol", "".join(records))
    status = Slurm().status("35")
    assert (status.state, status.exit_status, status.reason) == (state, exit_status, reason)


def test_an_array_runs_until_all_elements_ended(commands: Commands) -> None:
    commands.add("scontrol", slurm_output("job-array"))
    status = Slurm().status("35")
    assert (status.state, status.reason) == ("running", "2 running, 1 queued")


def test_a_forgotten_job_is_queried_from_the_accounting(commands: Commands) -> None:
    commands.add("scontrol", error=FORGOTTEN, status=1)
    commands.add("sacct", "33\x1fCANCELLED by 0\x1f0:0\x1fmain\x1fnode[1-2]\n")
    status = Slurm().status("33")
    assert (status.state, status.hosts, status.exit_status) == ("cancelled", ("node1", "node2"), 1)


def test_a_forgotten_element_counts_by_accounting(commands: Commands, elements: list[str]) -> None:
    """Slurm forgets each element on its own."""
    commands.add("scontrol", with_end(elements[1], "COMPLETED"))
    commands.add("sacct", "35_0\x1fFAILED\x1f3:0\x1fmain\x1fnode1\n"
                          "35_1\x1fCOMPLETED\x1f0:0\x1fmain\x1fnode1\n")
    status = Slurm().status("35")
    assert (status.state, status.exit_status) == ("failed", 3)
    assert status.reason == "1 failed, 1 completed"
    commands.add("scontrol", elements[1])
    assert Slurm().status("35").state == "running"


def test_a_forgotten_element_counts_without_accounting(
        commands: Commands, elements: list[str]) -> None:
    commands.add("sacct", error=NO_ACCOUNTING, status=1)
    slurm = Slurm()
    commands.add("scontrol", with_end(elements[1], "FAILED", 3) + elements[2])
    assert "1 failed" in slurm.status("35").reason
    commands.add("scontrol", elements[2])
    assert "1 failed" in slurm.status("35").reason
    commands.add("scontrol", with_end(elements[2], "COMPLETED"))
    status = slurm.status("35")
    assert (status.state, status.exit_status) == ("failed", 3)


def test_a_job_that_slurm_does_not_know_is_no_success(commands: Commands) -> None:
    commands.add("scontrol", error=FORGOTTEN, status=1)
    commands.add("sacct", error=NO_ACCOUNTING, status=1)
    status = Slurm().status("99999")
    assert (status.state, status.exit_status, status.ended) == ("unknown", 1, False)


def test_a_controller_that_is_down_is_an_error(commands: Commands) -> None:
    error = "slurm_load_jobs error: Unable to contact slurm controller\n"
    commands.add("scontrol", error=error, status=1)
    with pytest.raises(SchedulerError, match="Unable to contact.*reachable Slurm controller"):
        Slurm().status("33")


# PBS ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "change", "state", "code"), [
    ("exitcodes/exit0", {}, "completed", 0),
    ("exitcodes/exit7", {}, "failed", 7),
    ("exitcodes/exit7", {"Exit_status": 75}, "stopped", 75),
    ("exitcodes/exit_kill_parent", {}, "failed", 137),
    ("commands/qdel_running_final", {}, "cancelled", 143),
    ("signals/ckpt_qdel_profile_trapped", {}, "cancelled", 85),
    ("nodefail/ms_poweroff_rn", {}, "node_fail", None),
    ("signals/walltime_ignore", {}, "timeout", None),
    ("commands/qdel_queued_final", {}, "cancelled", None),
    # PBS gives these two the substate of success:
    ("depend/depend_on_unknown_job", {}, "never_ran", None),
    ("flow/depend_after_failure", {}, "never_ran", None)])
def test_each_end_of_a_pbs_job(commands: Commands, name: str, change: dict[str, Any], state: str,
                               code: int | None) -> None:
    commands.add("qstat", pbs_job(pbs_record(name) | change))
    status = Pbs().status("7.server")
    assert (status.state, status.exit_code, status.ended) == (state, code, True)
    assert ("afterok" in status.reason) == (state == "never_ran")
    assert (status.exit_status == 0) == (state == "completed")


@pytest.mark.parametrize(("codes", "state", "code"), [
    ((0, 2, 0), "failed", 2), ((75, 2, 0), "failed", 2), ((75, 0, 75), "stopped", 75)])
def test_a_pbs_array_ended_as_its_elements(commands: Commands, codes: tuple[int, ...], state: str,
                                           code: int) -> None:
    """PBS itself gives the whole array exit status 1."""
    jobs = json.loads(pbs_recording("array/array_qstat_xtf_json")["stdout"])["Jobs"]
    array, *elements = jobs
    assert jobs[array]["Exit_status"] == 1
    for element, one in zip(elements, codes, strict=True):
        jobs[element] |= {"Exit_status": one, "substate": 93 if one else 92}
    commands.add("qstat", pbs_job(jobs[array], array))
    commands.add("qstat", json.dumps({"Jobs": jobs}), when="-t")
    status = Pbs().status(array)
    assert (status.state, status.exit_code, status.job_id) == (state, code, array)
    assert f"qstat -x -t -f -F json {array}" in commands.calls()


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
    record = pbs_recording("flow/depend_parent_qdel_never_ran")["afterok"]
    error = "qstat: PBS is not configured to maintain job history 205.pbs-head\n"
    commands.add("qstat", pbs_job({**record, "job_state": "R"}, "205.pbs-head"))
    commands.add("qstat", output, error, exit_status, when="-x")
    assert Pbs().status("205.pbs-head").state == "running"
    commands.add("qstat", error="qstat: Unknown Job Id 205.pbs-head\n", status=153)
    commands.add("qstat", output, error, exit_status, when="-x")
    assert Pbs().status("205.pbs-head").state == "unknown"


def test_a_job_with_invalid_json_is_read_from_the_listing(commands: Commands) -> None:
    """PBS before 2024 prints the value of X=005 as 005."""
    commands.add("qstat", pbs_recording("commands/qstat_xf_finished_plain")["stdout"])
    commands.add("qstat", '{"Jobs": {"1.pbs-head": {"Variable_List": {"X": 005}}}}', when="json")
    status = Pbs().status("1.pbs-head")
    assert (status.state, status.hosts) == ("completed", ("n1",))


def test_a_queued_pbs_job_has_a_reason_and_a_position(commands: Commands) -> None:
    commands.add("qstat", json.dumps(pbs_recording("commands/queued_never_run")))
    commands.add("qselect", "30.pbs-head\n37.pbs-head\n")
    status = Pbs().status("37")
    assert (status.state, status.position) == ("queued", 2)
    assert status.output == "/home/alice/jobs/ok.o37"
    assert status.reason.startswith("Can Never Run: Insufficient amount of resource: ncpus")


def test_an_unknown_pbs_job_and_a_server_that_is_down(commands: Commands) -> None:
    unknown, down = map(pbs_recording, (
        "commands/err_qstat_f_unknown_job", "commands/err_server_down_qstat_json"))
    commands.add("qstat", unknown["stdout"], unknown["stderr"], unknown["rc"])
    assert Pbs().status("99999").state == "unknown"
    commands.add("qstat", down["stdout"], down["stderr"], down["rc"])
    with pytest.raises(SchedulerError, match="(?s)cannot connect to server.*Run this on a login node"):
        Pbs().status("99999")


@pytest.mark.parametrize(("output", "log"), [
    ("head.pbs.lab:/home/alice/a b.log", "/home/alice/a b.log"),
    ("head:/nowhere/", "/nowhere/79[2].s.OU"), ("head:/x/arr.o79.^array_index^", "/x/arr.o79.2")])
def test_the_log_of_a_pbs_job(commands: Commands, output: str, log: str) -> None:
    commands.add("qstat", pbs_job({"job_state": "R", "Output_Path": output}, "79[2].s"))
    assert Pbs().status("79[2].s").output == log

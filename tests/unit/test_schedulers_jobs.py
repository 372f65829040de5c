"""Jobs submitted, watched and cancelled: what is made of the recorded answers of Slurm and PBS."""
from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.scheduler_commands import ROOT, Commands, commands, pbs_job, pbs_recording, slurm_answer
from utils.schedulers import Pbs, Scheduler, SchedulerError, Slurm, get_scheduler
from utils.schedulers.command import ask

__all__ = ["commands"]  # the fixture


# Slurm: how a job stands ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "change", "state", "code"), [
    ("job-odd-name", {}, "running", None),
    ("job-newline", {}, "held", None),
    ("job-never", {}, "queued", None),
    ("job-cancelled", {}, "cancelled", 143),
    ("job-cancelled", {"CANCELLED Reason=None": "COMPLETED Reason=None", "=0:15": "=0:0"}, "completed", 0),
    ("job-cancelled", {"CANCELLED Reason=None": "FAILED Reason=NonZeroExitCode", "=0:15": "=3:0"}, "failed", 3),
    ("job-cancelled", {"CANCELLED Reason=None": "FAILED Reason=NonZeroExitCode", "=0:15": "=75:0"}, "stopped", 75),
    ("job-cancelled", {"CANCELLED Reason=None": "TIMEOUT Reason=TimeLimit"}, "timeout", 143),
    ("job-cancelled", {"CANCELLED Reason=None": "NODE_FAIL Reason=NodeDown"}, "node_fail", 143),
    ("job-cancelled", {"CANCELLED Reason=None": "OUT_OF_MEMORY Reason=OutOfMemory", "=0:15": "=0:125"}, "failed", 253),
    ("job-cancelled", {"CANCELLED Reason=None": "COMPLETING Reason=None"}, "ending", None),
    ("job-cancelled", {"Reason=None": "Reason=DependencyNeverSatisfied", "=0:15": "=0:0"}, "never_ran", None),
    ("job-cancelled", {"CANCELLED Reason=None": "SOMETHING_NEW Reason=None"}, "unknown", None)])
def test_each_state_of_slurm_has_its_meaning(commands: Commands, name: str, change: dict[str, str], state: str,
                                             code: int | None) -> None:
    text = slurm_answer(name)
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    commands.add("scontrol", text)
    status = Slurm().status("33")
    assert (status.state, status.exit_code, status.job_id) == (state, code, "33")
    assert (status.exit_status == 0) == (state == "completed")


def test_the_status_of_slurm_says_where_a_job_runs_and_writes(commands: Commands) -> None:
    commands.add("scontrol", slurm_answer("job-odd-name"))
    status = Slurm().status("33")
    assert (status.hosts, status.queue, status.output) == (("node1", "node2"), "main", "/cluster/log of 33.out")
    assert status.name.startswith("odd | name") and status.restart_count == 0 and not status.ended


def test_a_waiting_job_has_its_place_among_the_others(commands: Commands) -> None:
    commands.add("scontrol", slurm_answer("job-never"))
    commands.add("squeue", "20\n35\n38\n41\n")
    assert Slurm().status("38").position == 3


def test_an_array_is_as_far_as_its_elements(commands: Commands) -> None:
    commands.add("scontrol", slurm_answer("job-array"))
    status = Slurm().status("35")
    assert (status.state, status.reason) == ("running", "2 running, 1 queued")
    commands.add("scontrol", slurm_answer("job-array").replace("=RUNNING", "=COMPLETED").replace("=PENDING", "=FAILED")
                 .replace("ExitCode=0:0", "ExitCode=2:0"))
    assert (Slurm().status("35").state, Slurm().status("35").exit_status) == ("failed", 2)


def test_an_element_that_failed_is_not_hidden_by_one_that_stopped_after_saving(commands: Commands) -> None:
    ended = slurm_answer("job-array").replace("=RUNNING", "=FAILED").replace("=PENDING", "=FAILED")
    first, rest = ended[:ended.index("JobId=39 ")], ended[ended.index("JobId=39 "):]
    stopped = rest.replace("ExitCode=0:0", "ExitCode=75:0")
    commands.add("scontrol", first.replace("ExitCode=0:0", "ExitCode=3:0") + stopped)
    status = Slurm().status("35")
    assert (status.state, status.exit_status) == ("failed", 3) and "2 failed, 1 stopped" in status.reason
    commands.add("scontrol", first.replace("=FAILED", "=COMPLETED") + stopped)
    assert (Slurm().status("35").state, Slurm().status("35").exit_status) == ("stopped", 75)


def test_a_job_that_the_controller_forgot_is_asked_of_the_accounting(commands: Commands) -> None:
    commands.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", status=1)
    commands.add("sacct", "33\x1ftrain\x1fCANCELLED by 0\x1f0:0\x1fmain\x1fnode[1-2]\n")
    status = Slurm().status("33")
    assert (status.state, status.hosts, status.exit_status) == ("cancelled", ("node1", "node2"), 1)


def test_an_element_of_an_array_that_the_controller_forgot_still_counts(commands: Commands) -> None:
    ended = slurm_answer("job-array").replace("=RUNNING", "=COMPLETED").replace("=PENDING", "=COMPLETED")
    left = ended[ended.index("JobId=40 "):ended.index("JobId=39 ")]  # Slurm forgets each on its own
    commands.add("scontrol", left)
    commands.add("sacct", "35_0\x1fj.sh\x1fFAILED\x1f3:0\x1fmain\x1fnode1\n"
                          "35_1\x1fj.sh\x1fCOMPLETED\x1f0:0\x1fmain\x1fnode1\n")
    status = Slurm().status("35")
    assert (status.state, status.exit_status, status.reason) == ("failed", 3, "1 failed, 1 completed")
    commands.add("scontrol", left.replace("=COMPLETED", "=RUNNING"))
    assert Slurm().status("35").state == "running"


def test_an_element_that_failed_while_it_was_followed_counts_without_accounting(commands: Commands) -> None:
    commands.add("sacct", error="Slurm accounting storage is disabled\n", status=1)
    running = slurm_answer("job-array")
    first, rest = running[running.index("JobId=40 "):running.index("JobId=39 ")], running[running.index("JobId=39 "):]
    slurm = Slurm()
    commands.add("scontrol", first.replace("=PENDING", "=FAILED").replace("=RUNNING", "=FAILED")
                 .replace("ExitCode=0:0", "ExitCode=3:0") + rest)
    assert "1 failed" in slurm.status("35").reason
    commands.add("scontrol", rest)  # Slurm has forgotten it
    assert "1 failed" in slurm.status("35").reason
    commands.add("scontrol", rest.replace("=RUNNING", "=COMPLETED").replace("=PENDING", "=COMPLETED"))
    assert (slurm.status("35").state, slurm.status("35").exit_status) == ("failed", 3)


def test_a_job_that_nobody_knows_is_unknown_and_no_success(commands: Commands) -> None:
    commands.add("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", status=1)
    commands.add("sacct", error="Slurm accounting storage is disabled\n", status=1)
    status = Slurm().status("99999")
    assert (status.state, status.exit_status, status.ended) == ("unknown", 1, False)


def test_a_controller_that_does_not_answer_is_an_error_and_no_state(commands: Commands) -> None:
    commands.add("scontrol", error="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        Slurm().status("33")


# PBS: how a job stands ------------------------------------------------------------------------------------------------

FINALS = {  # recording: state, exit code
    "exitcodes/exit0.json": ("completed", 0), "exitcodes/exit7.json": ("failed", 7),
    "exitcodes/exit_kill_parent.json": ("failed", 137), "commands/qdel_running_final.json": ("cancelled", 143),
    "signals/ckpt_qdel_profile_trapped.json": ("cancelled", 85), "nodefail/ms_poweroff_rn.json": ("node_fail", None),
    "signals/walltime_ignore.json": ("timeout", None)}


@pytest.mark.parametrize("name", FINALS)
def test_each_end_of_a_job_of_pbs_has_its_meaning(commands: Commands, name: str) -> None:
    recording = pbs_recording(name)
    commands.add("qstat", pbs_job(recording.get("final") or recording))
    status = Pbs().status("7.server")
    assert (status.state, status.exit_code) == FINALS[name]
    assert status.ended and (status.exit_status == 0) == (status.state == "completed")


def test_a_job_of_pbs_that_stopped_after_saving_did_not_fail(commands: Commands) -> None:
    record = pbs_recording("exitcodes/exit7.json")
    record = record.get("final") or record
    commands.add("qstat", pbs_job({**record, "Exit_status": 75}))
    assert (Pbs().status("7.server").state, Pbs().status("7.server").exit_status) == ("stopped", 75)


@pytest.mark.parametrize(("codes", "state", "code"), [
    ((0, 2, 0), "failed", 2), ((75, 2, 0), "failed", 2), ((75, 0, 75), "stopped", 75)])
def test_an_array_of_pbs_ended_as_its_elements_did(commands: Commands, codes: tuple[int, ...], state: str,
                                                   code: int) -> None:
    """PBS itself gives the whole array exit status 1."""
    text = pbs_recording("array/array_qstat_xtf_json.json")["stdout"]
    jobs = json.loads(text)["Jobs"]
    for job, one in zip(list(jobs)[1:], codes, strict=True):
        jobs[job] |= {"Exit_status": one, "substate": 93 if one else 92}
    array = next(iter(jobs))
    assert jobs[array]["Exit_status"] == 1
    commands.add("qstat", pbs_job(jobs[array], array))
    commands.add("qstat", json.dumps({"Jobs": jobs}), when="-t")
    status = Pbs().status(array)
    assert (status.state, status.exit_code, status.job_id) == (state, code, array)


@pytest.mark.parametrize("name", ["depend/depend_on_unknown_job.json", "flow/depend_after_failure.json"])
def test_a_job_whose_predecessor_failed_or_is_unknown_never_ran(commands: Commands, name: str) -> None:
    """PBS ends it with the substate of success."""
    recording = pbs_recording(name)
    record = recording.get("afterok") or next(iter(recording["Jobs"].values()))
    assert record["substate"] == 92
    commands.add("qstat", pbs_job(record))
    status = Pbs().status("7.server")
    assert (status.state, status.exit_code, status.exit_status) == ("never_ran", None, 1)
    assert "afterok" in status.reason


def test_the_later_jobs_of_a_chain_wait_for_ever_with_the_one_after_the_deleted_one(commands: Commands) -> None:
    recording = pbs_recording("flow/depend_parent_qdel_never_ran.json")
    third = {**recording["afterok"], "depend": "afterok:205.pbs-head@pbs-head"}
    commands.add("qstat", pbs_job(third, "206.pbs-head"))
    commands.add("qstat", pbs_job(recording["afterok"], "205.pbs-head"), when="205.pbs-head")
    assert "for ever" not in Pbs().status("206.pbs-head").reason  # what that waits for is not known to be deleted
    commands.add("qstat", pbs_job(recording["parent"], "204.pbs-head"), when="204.pbs-head")
    assert "for ever for 205.pbs-head" in Pbs().status("206.pbs-head").reason


@pytest.mark.parametrize(("output", "status"), [("", 36), ('{"pbs_version": "23.06.06"}', 0)])  # the second was seen
def test_a_server_without_a_history_is_asked_for_the_jobs_that_it_has(commands: Commands, output: str,
                                                                      status: int) -> None:
    record = pbs_recording("flow/depend_parent_qdel_never_ran.json")["afterok"]
    said = "qstat: PBS is not configured to maintain job history 205.pbs-head\n"
    commands.add("qstat", pbs_job({**record, "job_state": "R"}, "205.pbs-head"))
    commands.add("qstat", output, said, status, when="-x")
    assert Pbs().status("205.pbs-head").state == "running"
    commands.add("qstat", error="qstat: Unknown Job Id 205.pbs-head\n", status=153)
    commands.add("qstat", output, said, status, when="-x")
    assert Pbs().status("205.pbs-head").state == "unknown"


def test_a_job_whose_json_is_invalid_is_read_from_the_listing(commands: Commands) -> None:
    """PBS before 2024 prints the value of X=005 as 005."""
    commands.add("qstat", pbs_recording("commands/qstat_xf_finished_plain.json")["stdout"])
    commands.add("qstat", '{"Jobs": {"1.pbs-head": {"Variable_List": {"X": 005}}}}', when="json")
    status = Pbs().status("1.pbs-head")
    assert (status.state, status.hosts, status.exit_code, status.name) == ("completed", ("n1",), 0, "probe")


def test_a_job_that_waits_for_a_deleted_one_says_that_it_waits_for_ever(commands: Commands) -> None:
    recording = pbs_recording("flow/depend_parent_qdel_never_ran.json")
    commands.add("qstat", pbs_job(recording["afterok"], "205.pbs-head"))
    commands.add("qstat", pbs_job(recording["parent"], "204.pbs-head"), when="204.pbs-head")
    status = Pbs().status("205.pbs-head")
    assert status.state == "held" and "for ever for 204.pbs-head" in status.reason


def test_a_queued_job_of_pbs_says_why_and_where_it_stands(commands: Commands) -> None:
    commands.add("qstat", json.dumps(pbs_recording("commands/queued_never_run.json")))
    commands.add("qselect", "30.pbs-head\n37.pbs-head\n")
    status = Pbs().status("37")
    assert (status.state, status.position) == ("queued", 2)
    assert status.reason.startswith("Can Never Run: Insufficient amount of resource: ncpus")
    assert status.output == "/home/alice/jobs/ok.o37"


def test_a_deleted_job_that_never_ran_is_cancelled(commands: Commands) -> None:
    commands.add("qstat", json.dumps(pbs_recording("commands/qdel_queued_final.json")))
    assert Pbs().status("37.pbs-head").state == "cancelled"


def test_a_job_that_pbs_does_not_know_is_unknown_and_a_dead_server_an_error(commands: Commands) -> None:
    for name, state in (("err_qstat_f_unknown_job", "unknown"), ("err_server_down_qstat_json", "")):
        recording = pbs_recording(f"commands/{name}.json")
        commands.add("qstat", recording["stdout"], recording["stderr"], recording["rc"])
        if state:
            assert Pbs().status("99999").state == state
        else:
            with pytest.raises(SchedulerError, match="cannot connect to server"):
                Pbs().status("99999")


@pytest.mark.parametrize(("output", "log"), [
    ("head.pbs.lab:/home/alice/a b.log", "/home/alice/a b.log"), ("head:/nowhere/", "/nowhere/79[2].s.OU"),
    ("head:/x/arr.o79.^array_index^", "/x/arr.o79.2")])
def test_the_log_of_a_job_is_found(commands: Commands, output: str, log: str) -> None:
    commands.add("qstat", pbs_job({"job_state": "R", "Output_Path": output}, "79[2].s"))
    assert Pbs().status("79[2].s").output == log


# Submitting, ending ---------------------------------------------------------------------------------------------------

def test_a_job_is_submitted_from_a_folder_and_its_id_returned(commands: Commands, tmp_path: Path) -> None:
    commands.add("sbatch", "1234;cluster\n")
    commands.add("qsub", "79[].pbs-head\n")
    assert Slurm().submit("job.sh", options=["--hold"], folder=tmp_path) == "1234"
    assert Pbs().submit("job.sh", folder=tmp_path) == "79[].pbs-head"
    assert commands.calls() == ["sbatch --parsable --hold job.sh", "qsub job.sh"]


REFUSED = {  # recorded message of qsub: the line that caused it
    "err_bad_queue": "#PBS -q nosuch", "err_unknown_resource": "#PBS -l select=1:ncpus=1:nosuchres=4",
    "err_place_syntax": "#PBS -l place=scattered",
    "err_walltime_syntax": "#PBS -l walltime=abc", "err_select_syntax2": "#PBS -l select=2:ncpus=abc",
    "err_bad_name_space": '#PBS -N "a b"'}


@pytest.mark.parametrize("name", REFUSED)
def test_what_qsub_refuses_is_shown_with_the_line_that_caused_it(commands: Commands, tmp_path: Path, name: str) -> None:
    recording = pbs_recording(f"commands/{name}.json")
    recording = recording.get("qsub", recording)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#PBS -j oe\n{REFUSED[name]}\n#PBS -o q\nqstat -q nosuch\n")
    commands.add("qsub", error=recording["stderr"], status=recording["rc"])
    with pytest.raises(SchedulerError) as refused:
        Pbs().submit(script)
    assert recording["stderr"].split("\nusage")[0].strip() in str(refused.value)
    assert str(refused.value).endswith(f"line 3 of {script}: {REFUSED[name]}")
    assert refused.value.exit_code == recording["rc"]


LIMITS = [  # recorded command line, refused with the same message: what the job is outside of
    ("err_ncpus_over_queue_max", "-l select=3:ncpus=4 -l walltime=00:01:00", "ncpus: 12 for the whole job is more than "
                                                                             "the 8 of queue small (resources_max)"),
    ("err_walltime_over_queue_max", "-l walltime=01:00:00", "walltime: 01:00:00 is more than the "
                                                            "00:10:00 of queue small (resources_max)")]


@pytest.mark.parametrize(("name", "asked", "outside"), LIMITS)
def test_the_limit_that_qsub_does_not_name_is_found(commands: Commands, tmp_path: Path, name: str, asked: str,
                                                    outside: str) -> None:
    recording = pbs_recording(f"commands/{name}.json")
    assert asked in recording["cmd"]
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n#PBS -q small\n#PBS {asked} # so much\n")
    commands.add("qsub", error=recording["stderr"], status=recording["rc"])
    with pytest.raises(SchedulerError) as refused:  # the server does not answer
        Pbs().submit("job.sh", folder=tmp_path)
    assert recording["stderr"].strip() in str(refused.value) and "does not say which limit" in str(refused.value)
    assert "probably" not in str(refused.value) and asked in str(refused.value)
    for words, answer in (("-Qf", "qstat_Qf_json"), ("-Bf", "qstat_Bf_json")):
        commands.add("qstat", pbs_recording(f"commands/{answer}.json")["stdout"], when=words)
    with pytest.raises(SchedulerError) as refused:
        Pbs().submit("job.sh", folder=tmp_path)
    assert recording["stderr"].strip() in str(refused.value)
    assert str(refused.value).split("\n")[1:] == [f"{outside}. Ask for less, or take another queue."]


@pytest.mark.parametrize(("message", "lines", "blamed"), [
    ("Invalid account or account/partition combination specified", ["--partition=gpu", "--account=other"], 1),
    ("Invalid account or account/partition combination specified", ["--ntasks-per-node=4"], None),  # has -p in it
    ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
     ["--account=mine", "--time=48:00:00"], 1)])
def test_an_innocent_line_is_not_blamed(commands: Commands, tmp_path: Path, message: str, lines: list[str],
                                        blamed: int | None) -> None:
    script = tmp_path / "job.sh"
    script.write_text("".join(f"#SBATCH {line}\n" for line in lines))
    commands.add("sbatch", error=f"sbatch: error: Batch job submission failed: {message}\n", status=1)
    with pytest.raises(SchedulerError) as refused:
        Slurm().submit(script)
    assert ("probably" in str(refused.value)) == (blamed is not None)
    assert blamed is None or str(refused.value).endswith(f"line {blamed + 1} of {script}: #SBATCH {lines[blamed]}")


def test_where_sbatch_does_not_say_which_part_of_a_policy_all_are_named(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#SBATCH --nodes=2\n#SBATCH --time=1:00\n#SBATCH --mem=1G\n")
    commands.add("sbatch", error="sbatch: error: Job violates accounting/QOS policy (job submit limit)\n", status=1)
    with pytest.raises(SchedulerError, match="one of: .*--time=1:00; .*--nodes=2$"):
        Slurm().submit("job.sh", folder=tmp_path)


@pytest.mark.parametrize(("message", "line"), [
    ("error: invalid partition specified: nosuch\nsbatch: error: Batch job submission failed: Invalid partition name "
     "specified", "--partition=nosuch"), ("error: Invalid --time specification", "--time=xx"),
    ("error: Batch job submission failed: Invalid feature specification", "--constraint=foo"),
    ("unrecognized option '--frob'\nTry \"sbatch --help\" for more information", "--frob=1"),
    ("error: Invalid generic resource (gres) specification", "--gres=foo:1"),
    ("error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
     "--time=99:00:00")])
def test_what_sbatch_refuses_is_shown_with_the_line_that_caused_it(commands: Commands, tmp_path: Path, message: str,
                                                                   line: str) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH {line}\nsrun hostname\n")
    commands.add("sbatch", error=f"sbatch: {message}\n", status=1)
    with pytest.raises(SchedulerError) as refused:
        Slurm().submit(script)
    assert message in str(refused.value) and str(refused.value).endswith(f"line 3 of {script}: #SBATCH {line}")


def test_an_option_of_the_command_line_is_named_as_the_cause(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    commands.add("qsub", error="qsub: Unknown queue\n", status=170)
    with pytest.raises(SchedulerError, match="the option -q nosuch$"):
        Pbs().submit("job.sh", options=["-N", "x", "-q", "nosuch", "--", "/bin/bash", "-q"], folder=tmp_path)


def test_an_answer_that_is_no_job_id_is_an_error(commands: Commands) -> None:
    commands.add("sbatch", "Submitted\n")
    commands.add("qsub", "\n")
    for scheduler in (Slurm(), Pbs()):
        with pytest.raises(SchedulerError, match="expected a job id"):
            scheduler.submit("job.sh")


@pytest.mark.parametrize("job_id", ["12", "12.pbs-head", "12.pbs_2.site.edu", "79[].pbs_head", "79[2].pbs_head",
                                    "12.sched_1@sched_2"])
def test_a_job_id_of_pbs_may_name_any_server(commands: Commands, job_id: str) -> None:
    commands.add("qsub", job_id + "\n")
    commands.add("qdel")
    assert Pbs().submit("job.sh") == job_id
    Pbs().cancel(job_id)
    assert commands.calls()[-1] == f"qdel {job_id}"


@pytest.mark.parametrize("job_id", ["", "-x", "12 13", "x.head", "79[a].head", "12.head;ls", "12."])
def test_what_is_no_job_id_is_not_given_to_pbs(job_id: str) -> None:
    with pytest.raises(SchedulerError, match="is no job id of PBS"):
        Pbs().cancel(job_id)


def test_cancelling_a_job_that_has_ended_is_no_error_but_an_unknown_one_is(commands: Commands) -> None:
    for name, fails in (("err_qdel_finished", False), ("err_qdel_unknown", True)):
        recording = pbs_recording(f"commands/{name}.json")
        commands.add("qdel", error=recording["stderr"], status=recording["rc"])
        if fails:
            with pytest.raises(SchedulerError, match="Unknown Job Id"):
                Pbs().cancel("1")
        else:
            Pbs().cancel("1")


@pytest.mark.parametrize("scheduler", [Slurm(), Pbs()])
@pytest.mark.parametrize("job_id", ["", "-u root", "--all", "1 2", "abc", "1;x", "*", "1\n2", "[1]"])
def test_what_is_no_job_id_never_reaches_a_command(commands: Commands, scheduler: Scheduler, job_id: str) -> None:
    for action in (scheduler.status, scheduler.cancel, scheduler.requeue):
        with pytest.raises(SchedulerError, match="no job id"):
            action(job_id)


# Which scheduler ------------------------------------------------------------------------------------------------------

def test_the_scheduler_is_the_one_whose_commands_are_here(commands: Commands) -> None:
    with pytest.raises(SchedulerError, match="Neither"):
        get_scheduler()
    commands.add("qsub", "")
    assert get_scheduler().name == "pbs"
    commands.add("sbatch", "")
    with pytest.raises(SchedulerError, match="Both"):
        get_scheduler()
    assert get_scheduler("slurm").name == "slurm"
    with pytest.raises(SchedulerError, match="no scheduler 'lsf'"):
        get_scheduler("lsf")


def test_where_packages_of_both_are_installed_the_one_that_is_set_up_counts(
        commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    commands.add("qsub", "")
    commands.add("sbatch", "")
    (commands.folder / "pbs.conf").write_text("PBS_SERVER=head\n")
    assert get_scheduler().name == "pbs"
    (commands.folder / "pbs.conf").unlink()
    (tmp_path / "slurm.conf").write_text("ClusterName=test\n")
    assert get_scheduler().name == "slurm"


def test_look_alikes_of_qsub_that_submit_to_slurm_are_no_pbs(commands: Commands, tmp_path: Path) -> None:
    commands.add("sbatch", "")
    (commands.folder / "qsub").write_text("#!/usr/bin/perl -w\n# qsub - submit a batch job in familiar pbs format to "
                                          "Slurm.\n")
    (commands.folder / "qsub").chmod(0o755)
    real = tmp_path / "pbs" / "bin" / "qsub"
    assert get_scheduler().name == "slurm"
    real.parent.mkdir(parents=True)
    real.write_text("#!/bin/sh\necho 12.server\n")
    real.chmod(0o755)
    (commands.folder / "pbs.conf").write_text(f"PBS_SERVER=head\nPBS_EXEC={tmp_path}/pbs\n")
    assert Pbs().submit("job.sh") == "12.server"


def test_a_command_that_hangs_is_given_up() -> None:
    start = time.monotonic()
    with pytest.raises(SchedulerError, match="no answer within 0.2 s"):
        ask(["sleep", "60"], seconds=0.2)
    assert time.monotonic() - start < 10


# Loading --------------------------------------------------------------------------------------------------------------

def test_node_lists_are_loaded_without_the_rest_and_nothing_loads_torch() -> None:
    """Ranks that start load slurm.py; every module more is paid for by each of them."""
    code = ("import sys; from utils.schedulers.slurm import expand_hostlist; light = set(sys.modules); "
            "from utils.schedulers import Job, Pbs, Slurm, current_allocation; "
            "print(*sorted(m for m in light if m.startswith('utils.s')), 'subprocess' in light, 'json' in light, "
            "'torch' in sys.modules)")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["utils.schedulers", "utils.schedulers.slurm", "False", "False", "False"]

"""Jobs submitted and cancelled, errors explained, and which scheduler a host has."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.scheduler_commands import Commands, pbs_recording
from utils.job.commands import SchedulerError, run_command
from utils.tools.schedulers.find_scheduler import get_scheduler
from utils.tools.schedulers.pbs_scheduler import Pbs
from utils.tools.schedulers.scheduler import Scheduler
from utils.tools.schedulers.slurm_scheduler import Slurm


@pytest.mark.parametrize(("scheduler", "output", "job_id"), [
    (Slurm(), "1234;cluster", "1234"), *((Pbs(), job_id, job_id) for job_id in (
        "12", "12.pbs-head", "12.pbs_2.site.edu", "79[].pbs_head", "79[2].pbs_head", "12.s_1@s_2"))])
def test_a_job_is_submitted_and_cancelled(commands: Commands, scheduler: Scheduler, output: str, job_id: str) -> None:
    for name in ("sbatch", "qsub"):
        commands.add(name, f"{output}\n")
    for name in ("scancel", "qdel"):
        commands.add(name)
    assert scheduler.submit("job.sh", options=["-H"]) == job_id
    scheduler.cancel(job_id)
    submit, cancel = (["sbatch", "--parsable"], "scancel") if scheduler.name == "slurm" else (["qsub"], "qdel")
    assert commands.calls() == [[*submit, "-H", "job.sh"], [cancel, job_id]]


@pytest.mark.parametrize("scheduler", [Slurm(), Pbs()])
def test_output_without_a_job_id_is_an_error(commands: Commands, scheduler: Scheduler) -> None:
    commands.add("sbatch", "Submitted\n")
    commands.add("qsub", "\n")
    with pytest.raises(SchedulerError, match="Expected a job id"):
        scheduler.submit("job.sh")


def refusal(scheduler: Scheduler, folder: Path, *lines: str, options: tuple[str, ...] = ()) -> SchedulerError:
    """The error of a submission of folder/job.sh, which has these lines."""
    (folder / "job.sh").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SchedulerError) as refused:
        scheduler.submit(folder / "job.sh", options=options)
    return refused.value


FAILED = "Batch job submission failed: "


@pytest.mark.parametrize(("error", "line"), [  # a recorded error of qsub, or the text of sbatch's
    ("err_bad_queue", "#PBS -q nosuch"),
    ("err_unknown_resource", "#PBS -l select=1:ncpus=1:nosuchres=4"),
    ("err_place_syntax", "#PBS -l place=scattered"),
    ("err_walltime_syntax", "#PBS -l walltime=abc"),
    ("err_select_syntax2", "#PBS -l select=2:ncpus=abc"),
    ("err_bad_name_space", '#PBS -N "a b"'),
    ("invalid partition specified: nosuch\nsbatch: error: Invalid partition name specified",
     "#SBATCH --partition=nosuch"),
    ("Invalid --time specification", "#SBATCH --time=xx"),
    ("Invalid generic resource (gres) specification", "#SBATCH --gres=foo:1"),
    ("unrecognized option '--frob'\nTry \"sbatch --help\"", "#SBATCH --frob=1"),
    (f"{FAILED}Invalid job array specification", "#SBATCH --array=0-99999999"),
    ("Memory specification can not be satisfied", "#SBATCH --mem=9999G"),
    (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", "#SBATCH --time=99:00:00")])
def test_the_line_that_is_refused_is_named(commands: Commands, tmp_path: Path, error: str, line: str) -> None:
    scheduler: Scheduler = Slurm()
    message, status = f"sbatch: error: {error}", 1
    if error.startswith("err_"):
        recording = pbs_recording(f"commands/{error}")
        recording = recording.get("qsub", recording)
        scheduler, status = Pbs(), recording["rc"]
        message = recording["stderr"].split("\nusage")[0].strip()
    for name in ("qsub", "sbatch"):
        commands.add(name, error=f"{message}\nusage: {name} ...\n", status=status)

    others = ("#PBS -j oe", "#PBS -o q", "#SBATCH --nodes=2", "qstat -q nosuch")
    refused = refusal(scheduler, tmp_path, "#!/bin/bash", others[0], line, *others[1:])
    assert message in str(refused) and refused.exit_code == status
    assert str(refused).endswith(f"line 3 of {tmp_path}/job.sh: {line}")


def test_lines_that_may_be_the_cause_are_named(commands: Commands, tmp_path: Path) -> None:
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    commands.add("sbatch", error=f"sbatch: error: {FAILED}{policy}\n", status=1)
    error = str(refusal(Slurm(), tmp_path, "#SBATCH --nodes=2", "#SBATCH --time=1:00", "#SBATCH --mem=1G"))
    assert "one of: " in error and "--time=1:00; " in error and error.endswith("--nodes=2")


def test_an_option_of_the_command_line_is_named(commands: Commands, tmp_path: Path) -> None:
    commands.add("qsub", error="qsub: Unknown queue\n", status=170)
    options = ("-N", "x", "-q", "nosuch", "--", "/bin/bash", "-q")
    assert str(refusal(Pbs(), tmp_path, options=options)).endswith("the option -q nosuch")


def test_the_limit_that_qsub_does_not_name(commands: Commands, tmp_path: Path) -> None:
    recording = pbs_recording("commands/err_ncpus_over_queue_max")
    options = "-l select=3:ncpus=4 -l walltime=00:01:00"
    assert options in recording["cmd"]
    lines = ("#!/bin/bash", "#PBS -q small", f"#PBS {options} # note")
    commands.add("qsub", error=recording["stderr"], status=recording["rc"])
    error = str(refusal(Pbs(), tmp_path, *lines))  # the server does not report its limits
    assert recording["stderr"].strip() in error and "does not name the limit" in error
    assert "probably" not in error and options in error

    for words, output in (("-Qf", "qstat_Qf_json"), ("-Bf", "qstat_Bf_json")):
        commands.add("qstat", pbs_recording(f"commands/{output}")["stdout"], when=words)
    error = str(refusal(Pbs(), tmp_path, *lines))
    assert recording["stderr"].strip() in error
    assert "\nncpus: 12 for the whole job is more than the 8 of queue small (resources_max)" in error


@pytest.mark.parametrize(("scheduler", "job_ids"), [
    (Slurm(), ["12.head"]), (Pbs(), ["12 13", "x.head", "79[a].head", "12.head;ls", "12."])])
def test_other_texts_never_reach_a_command(commands: Commands, scheduler: Scheduler, job_ids: list[str]) -> None:
    for job_id in [*job_ids, "", "-x", "-u root", "--all", "1 2", "abc", "1;x", "*", "1\n2", "[1]"]:
        for action in (scheduler.status, scheduler.cancel):
            with pytest.raises(SchedulerError, match="is not a job id of"):
                action(job_id)


def test_cancelling_an_ended_job_is_no_error(commands: Commands) -> None:
    finished, unknown = (pbs_recording(f"commands/err_qdel_{name}") for name in ("finished", "unknown"))
    commands.add("qdel", error=finished["stderr"], status=finished["rc"])
    Pbs().cancel("1")
    commands.add("qdel", error=unknown["stderr"], status=unknown["rc"])
    with pytest.raises(SchedulerError, match="Unknown Job Id"):
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
    assert Pbs().submit("job.sh") == "12.server"


def test_a_command_that_hangs_is_stopped() -> None:
    with pytest.raises(SchedulerError, match="did not respond within 0.2 s"):
        run_command(["sleep", "60"], timeout_seconds=0.2)

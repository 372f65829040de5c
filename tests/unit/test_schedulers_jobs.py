"""Jobs submitted and cancelled, errors explained, and which scheduler a host has."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.scheduler_commands import ROOT, Commands, pbs_recording
from utils.schedulers import Pbs, Scheduler, SchedulerError, Slurm, get_scheduler
from utils.schedulers.command import run_command


def test_a_job_is_submitted_and_its_id_returned(commands: Commands, tmp_path: Path) -> None:
    commands.add("sbatch", "1234;cluster\n")
    commands.add("qsub", "79[].pbs-head\n")
    assert Slurm().submit("job.sh", options=["--hold"], folder=tmp_path) == "1234"
    assert Pbs().submit("job.sh", folder=tmp_path) == "79[].pbs-head"
    assert commands.calls() == [["sbatch", "--parsable", "--hold", "job.sh"], ["qsub", "job.sh"]]


@pytest.mark.parametrize("scheduler", [Slurm(), Pbs()])
def test_output_without_a_job_id_is_an_error(commands: Commands, scheduler: Scheduler) -> None:
    commands.add("sbatch", "Submitted\n")
    commands.add("qsub", "\n")
    with pytest.raises(SchedulerError, match="Expected a job id"):
        scheduler.submit("job.sh")


# Refusals -----------------------------------------------------------------------------------------

def refusal(scheduler: Scheduler, folder: Path, *lines: str, options: tuple[str, ...] = ()) -> SchedulerError:
    """The error of a submission of folder/job.sh, which has these lines."""
    (folder / "job.sh").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SchedulerError) as refused:
        scheduler.submit(folder / "job.sh", options=options)
    return refused.value


FAILED = "Batch job submission failed: "
ACCOUNT = "Invalid account or account/partition combination specified"
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


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
    (f"{FAILED}Invalid feature specification", "#SBATCH --constraint=foo"),
    ("unrecognized option '--frob'\nTry \"sbatch --help\"", "#SBATCH --frob=1"),
    ("Invalid generic resource (gres) specification", "#SBATCH --gres=foo:1"),
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


@pytest.mark.parametrize(("message", "lines", "parts", "end"), [
    (ACCOUNT, ["--partition=gpu", "--account=other"], ["probably"], "#SBATCH --account=other"),
    (ACCOUNT, ["--ntasks-per-node=4"], [], "specified"),  # has -p in it
    (POLICY, ["--account=mine", "--time=48:00:00"], ["probably"], "#SBATCH --time=48:00:00"),
    (POLICY, ["--nodes=2", "--time=1:00", "--mem=1G"], ["one of: ", "--time=1:00; "], "--nodes=2")])
def test_lines_that_may_be_the_cause_are_named(commands: Commands, tmp_path: Path, message: str, lines: list[str],
                                               parts: list[str], end: str) -> None:
    commands.add("sbatch", error=f"sbatch: error: {FAILED}{message}\n", status=1)
    error = str(refusal(Slurm(), tmp_path, *(f"#SBATCH {line}" for line in lines)))
    assert error.endswith(end) and [part for part in parts if part not in error] == []
    assert bool(parts) == ("probably" in error or "one of" in error)


def test_an_option_of_the_command_line_is_named(commands: Commands, tmp_path: Path) -> None:
    commands.add("qsub", error="qsub: Unknown queue\n", status=170)
    options = ("-N", "x", "-q", "nosuch", "--", "/bin/bash", "-q")
    assert str(refusal(Pbs(), tmp_path, options=options)).endswith("the option -q nosuch")


@pytest.mark.parametrize(("name", "options", "problem"), [  # recorded with the same message
    ("err_ncpus_over_queue_max", "-l select=3:ncpus=4 -l walltime=00:01:00",
     "ncpus: 12 for the whole job is more than the 8 of queue small (resources_max)"),
    ("err_walltime_over_queue_max", "-l walltime=01:00:00",
     "walltime: 01:00:00 is more than the 00:10:00 of queue small (resources_max)")])
def test_the_limit_that_qsub_does_not_name(commands: Commands, tmp_path: Path, name: str, options: str,
                                           problem: str) -> None:
    recording = pbs_recording(f"commands/{name}")
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
    assert error.split("\n")[1:] == [f"{problem}. Request less, or take another queue."]


# Job ids ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("job_id", [
    "12", "12.pbs-head", "12.pbs_2.site.edu", "79[].pbs_head", "79[2].pbs_head", "12.s_1@s_2"])
def test_a_job_id_of_pbs_may_name_any_server(commands: Commands, job_id: str) -> None:
    commands.add("qsub", job_id + "\n")
    commands.add("qdel")
    assert Pbs().submit("job.sh") == job_id
    Pbs().cancel(job_id)
    assert commands.calls("qdel") == [["qdel", job_id]]


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


# Which scheduler ----------------------------------------------------------------------------------

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


def test_a_rank_loads_the_node_lists_alone() -> None:
    code = ("import sys; from utils.schedulers.slurm import expand_hostlist; light = set(sys.modules); "
            "from utils.schedulers import Job, Pbs, Slurm, current_allocation; "
            "print(*sorted(m for m in light if m.startswith('utils.sch')), 'subprocess' in light, "
            "'json' in light, 'torch' in sys.modules)")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.split() == ["utils.schedulers", "utils.schedulers.slurm",
                                    "utils.schedulers.slurm.hostlist", *["False"] * 3]

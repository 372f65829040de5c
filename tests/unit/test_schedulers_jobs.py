"""Jobs submitted, refused and cancelled, and which scheduler a host has."""
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


@pytest.mark.parametrize("scheduler", [Slurm(), Pbs()])
def test_a_refusal_has_the_schedulers_message_and_the_script(commands: Commands, tmp_path: Path,
                                                             scheduler: Scheduler) -> None:
    """Without qsub's list of options, which comes after the message."""
    recording = pbs_recording("commands/err_unknown_option")
    assert "\nusage: " in recording["stderr"]
    for name in ("sbatch", "qsub"):
        commands.add(name, error=recording["stderr"], status=recording["rc"])
    with pytest.raises(SchedulerError) as refused:
        scheduler.submit(tmp_path / "job.sh", options=["-H"])
    message = recording["stderr"].partition("\nusage: ")[0]
    assert str(refused.value).endswith(f"-H {tmp_path}/job.sh failed with exit status {recording['rc']}: {message}")
    assert refused.value.exit_code == recording["rc"]


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

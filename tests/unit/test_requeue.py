"""requeue(): which Slurm jobs put themselves back into the queue. A script stands in for scontrol."""
from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from utils.preemption import requeue

SLURM = {"SLURM_JOB_ID": "21", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)",
         "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
# What scontrol shows half a second after the event, to a job that has caught its SIGTERM.
ENDINGS = {
    "scancel": "Reason=None Restarts=0 PreemptTime=None",
    "scontrol requeue": "Reason=None Restarts=1",
    "time limit": "Reason=TimeLimit Restarts=0 PreemptTime=None",
    "preempted, to be cancelled": "Reason=None Restarts=0 PreemptTime=2026-11-21T14:16:05"}

Scontrol = Callable[[str], Callable[[], str]]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    """Install a scontrol that does what the test says; returns what reads its arguments."""
    def install(action: str) -> Callable[[], str]:
        program, log = tmp_path / "scontrol", tmp_path / "arguments"
        log.touch()
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{action}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return log.read_text
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    return install


@pytest.mark.parametrize("action", ["exit 0", "kill -TERM $$; exit 0"])
def test_a_slurm_job_is_requeued(action: str, scontrol: Scontrol) -> None:
    """Slurm may send SIGTERM to all processes of the job before scontrol has ended."""
    arguments = scontrol(action)
    assert requeue(SLURM)
    assert arguments() == "show job 21\nrequeue 21\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_array_element_alone_is_requeued(scontrol: Scontrol) -> None:
    """For the last element SLURM_JOB_ID is the id of the whole array."""
    arguments = scontrol("exit 0")
    assert requeue({**SLURM, "SLURM_ARRAY_JOB_ID": "21", "SLURM_ARRAY_TASK_ID": "3"})
    assert arguments() == "show job 21_3\nrequeue 21_3\n"


@pytest.mark.parametrize("how", ENDINGS)
def test_a_cancelled_job_is_not_requeued(how: str, scontrol: Scontrol) -> None:
    ending = f"JobId=21 JobState=COMPLETING {ENDINGS[how]}"
    arguments = scontrol(f"[ $1 = show ] && echo '{ending}'; exit 0")
    assert requeue(SLURM) == (how != "scancel")
    assert ("requeue" in arguments()) == (how not in ("scancel", "scontrol requeue"))


def test_a_refusal_of_slurm_is_logged(scontrol: Scontrol, caplog: pytest.LogCaptureFixture) -> None:
    scontrol("echo 'Requested operation is presently disabled for job 21' >&2; exit 1")
    assert not requeue(SLURM)
    assert "presently disabled" in caplog.text and "submit it again" in caplog.text


def test_the_number_of_restarts_is_limited(
        scontrol: Scontrol, caplog: pytest.LogCaptureFixture) -> None:
    arguments = scontrol("exit 0")
    assert not requeue({**SLURM, "SLURM_RESTART_COUNT": "5"}, limit=5)
    assert "restarted 5 times, and the limit is 5" in caplog.text
    assert "requeue" not in arguments()


@pytest.mark.parametrize("environ", [{}, {"PBS_JOBID": "12.server"}])
def test_outside_of_slurm_nothing_is_requeued(environ: dict[str, str], scontrol: Scontrol) -> None:
    arguments = scontrol("exit 0")
    assert not requeue(environ)
    assert arguments() == ""

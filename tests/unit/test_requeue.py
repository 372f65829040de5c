"""requeue(): which Slurm jobs put themselves back into the queue. A script stands in for scontrol."""
from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from utils.preemption import requeue

SLURM = {"SLURM_JOB_ID": "21", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2",
         "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
# For the last element of an array SLURM_JOB_ID is the id of the whole array.
ELEMENT = {**SLURM, "SLURM_ARRAY_JOB_ID": "21", "SLURM_ARRAY_TASK_ID": "3"}
RESTARTED = {**SLURM, "SLURM_RESTART_COUNT": "5"}
SHOW, REQUEUE = "show job 21\n", "show job 21\nrequeue 21\n"


def shows(ending: str) -> str:
    """What scontrol shows half a second after the event, to a job that has caught its SIGTERM."""
    return f"[ $1 = show ] && echo 'JobId=21 JobState=COMPLETING Reason={ending}'; exit 0"


@pytest.mark.parametrize(("environ", "scontrol", "requeued", "arguments", "message"), [
    (SLURM, "exit 0", True, REQUEUE, ""),
    (SLURM, "kill -TERM $$; exit 0", True, REQUEUE, ""),  # Slurm may signal the job before scontrol has ended
    (ELEMENT, "exit 0", True, "show job 21_3\nrequeue 21_3\n", ""),
    (SLURM, shows("None Restarts=0 PreemptTime=None"), False, SHOW, "it was cancelled"),
    (SLURM, shows("None Restarts=1"), True, SHOW, ""),
    (SLURM, shows("TimeLimit Restarts=0 PreemptTime=None"), True, REQUEUE, ""),
    (SLURM, shows("None Restarts=0 PreemptTime=2026-11-21T14:16:05"), True, REQUEUE, ""),
    (SLURM, "echo 'disabled for job 21' >&2; exit 1", False, SHOW, "disabled for job 21.*submit it again"),
    (RESTARTED, "exit 0", False, SHOW, "restarted 5 times, and the limit is 5"),
    ({**SLURM, "DDPKIT_CHAIN": "21"}, "exit 0", False, "", "job 21 is not put back .* it belongs to a chain"),
    ({**SLURM, "DDPKIT_CHAIN": "20"}, "exit 0", True, REQUEUE, ""),  # a job of a chain has submitted this one
    ({**SLURM, "DDPKIT_STOP_FILE": __file__}, "exit 0", False, "", "not put back .*: ddpkit submit stop ends it"),
    ({**SLURM, "DDPKIT_STOP_FILE": "/nonexistent"}, "exit 0", True, REQUEUE, ""),
    ({}, "exit 0", False, "", ""),
    ({"PBS_JOBID": "12.server"}, "exit 0", False, "", "")],
    ids=["works", "works with SIGTERM", "array element", "scancel", "scontrol requeue", "time limit", "preempted",
         "refused", "limit of restarts", "chain", "submitted in a chain", "submit stop", "no stop", "no job", "PBS"])
def test_requeue(environ: dict[str, str], scontrol: str, requeued: bool, arguments: str, message: str, tmp_path: Path,
                 monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    program, called = tmp_path / "scontrol", tmp_path / "arguments"
    called.touch()
    caplog.set_level("INFO", "ddpkit")
    program.write_text(f'#!/bin/sh\necho "$@" >> {called}\n{scontrol}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert requeue(environ, limit=5) is requeued
    assert called.read_text() == arguments
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert re.search(message, caplog.text)

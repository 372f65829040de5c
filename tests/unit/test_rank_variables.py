"""Programs that a rank starts inherit its variables and are no ranks, unless they are launched."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.programs import ROOT
from utils.launchers import detect
from utils.launchers.rank_variables import set_variables, without_inherited

VALUES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
          "NODE_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29000"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
         "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_GTIDS": "0,1", "SLURM_NODEID": "0"}
TORCHRUN = {**VALUES, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/a b/error.json"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LAUNCHERS = {"slurm": SLURM, "torchrun": TORCHRUN, "env": VALUES, "mpich": MPICH, "none": {}}


def left_by_a_rank(launcher: str) -> dict[str, str]:
    """The environment of a program that a rank of this launcher has started."""
    found = dict(LAUNCHERS[launcher])
    set_variables(VALUES, found)
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_of_a_rank_is_no_rank(launcher: str) -> None:
    found = detect(left_by_a_rank(launcher), ancestors=["python pool.py"])
    assert (found.launcher, found.rank, found.world_size) == ("single", 0, 1)
    (note,) = found.notes
    assert f"started by a rank (process {os.getpid()}) and by no launcher" in note


PROXY = ["hydra_pmi_proxy --control-port h1:1", "mpiexec -n 2 python x.py"]
SPAWNED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29501"}
WORKER = {**SPAWNED, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/2/error.json"}


@pytest.mark.parametrize(("outer", "changes", "ancestors", "expected"), [
    *((outer, WORKER, ["python -m torch.distributed.run x.py", "bash"], "torchrun") for outer in ("torchrun", "none")),
    *((outer, MPICH, PROXY, "mpich") for outer in ("slurm", "none")),
    ("slurm", {"SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, ["slurmstepd: [7.3]"],
     "slurm")])
def test_a_launch_below_a_rank_has_ranks(
        outer: str, changes: dict[str, str], ancestors: list[str], expected: str) -> None:
    environ = {**left_by_a_rank(outer), **changes}
    found = detect(environ, ancestors=ancestors)
    assert (found.launcher, found.rank, found.world_size) == (expected, 1, 2)
    if expected == "mpich":
        assert found.notes == () and "MASTER_ADDR" not in without_inherited(environ)


@pytest.mark.parametrize("outer", ["slurm", "env", "torchrun"])
def test_ranks_of_multiprocessing_below_a_rank_are_named_by_hand(outer: str) -> None:
    environ = {**left_by_a_rank(outer), **SPAWNED}
    assert detect(environ, ancestors=["python pool.py"]).launcher == "single"
    found = detect(environ, ancestors=["python pool.py"], launcher="env")
    assert (found.launcher, found.rank, found.world_size) == ("env", 1, 2)


def test_an_argument_named_like_a_launcher_starts_no_ranks() -> None:
    assert detect(left_by_a_rank("torchrun"), ancestors=["python train.py torchrun"]).launcher == "single"


def test_a_job_submitted_by_a_rank_has_no_rank() -> None:
    environ = {**left_by_a_rank("slurm"), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "8"}
    assert detect(environ, ancestors=["/bin/bash /var/spool/job8", "slurmstepd: [8.batch]"]).launcher == "single"


AFTER_EXEC = f"""
import os, sys
from utils.launchers import detect
from utils.launchers.rank_variables import set_variables
set_variables({VALUES})
print(detect().launcher, flush=True)
os.execv(sys.executable, [sys.executable, "-c", "from utils.launchers import detect; print(detect().launcher)"])
"""


@pytest.mark.parametrize(("environ", "launcher"), [(MPICH, "mpich"), (TORCHRUN, "torchrun")])
def test_a_rank_is_a_rank_after_exec(environ: dict[str, str], launcher: str) -> None:
    done = subprocess.run([sys.executable, "-c", AFTER_EXEC], cwd=ROOT, env={"PATH": "/usr/bin:/bin", **environ},
                          capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [launcher, launcher], done.stderr

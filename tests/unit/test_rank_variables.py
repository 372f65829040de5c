"""Programs that a rank starts: ranks by a launcher of their own or by variables set anew, and no ranks otherwise."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.launchers import detect
from utils.rank_variables import MARKER, set_variables, without_inherited

ROOT = Path(__file__).resolve().parents[2]
VALUES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0",
          "GROUP_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29000"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4",
         "SLURM_STEP_NUM_TASKS": "4", "SLURM_GTIDS": "0,1", "SLURM_NODEID": "0"}
TORCHRUN = {**VALUES, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/1/error.json"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def left_by_a_rank(environ: dict[str, str]) -> dict[str, str]:
    """What a program finds that a rank with this environment has started."""
    found = dict(environ)
    set_variables(VALUES, found)
    return found


@pytest.mark.parametrize("launcher", [SLURM, TORCHRUN, VALUES, MPICH, {}])
@pytest.mark.parametrize("between", [[], ["bash eval.sh"], ["python pool.py"]])
def test_a_program_of_a_rank_is_no_rank(launcher: dict[str, str], between: list[str]) -> None:
    placement = detect(left_by_a_rank(launcher), ancestors=between)
    assert (placement.launcher, placement.rank, placement.world_size) == ("single", 0, 1)
    assert len(placement.notes) == 1
    assert f"started by rank 1 of 4 (process {os.getpid()}) and by no launcher" in placement.notes[0]


def test_a_torchrun_below_a_rank_starts_ranks() -> None:
    worker = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_ERROR_FILE": "/tmp/2/error.json",
              "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for agent in ("python -m torch.distributed.run", "python own_agent.py"):
        placement = detect({**left_by_a_rank(TORCHRUN), **worker}, ancestors=[agent, "bash"])
        assert (placement.launcher, placement.rank, placement.world_size) == ("torchrun", 1, 2)


@pytest.mark.parametrize("outer", [SLURM, TORCHRUN, {}])
def test_an_mpiexec_below_a_rank_starts_ranks(outer: dict[str, str]) -> None:
    environ = {**left_by_a_rank(outer), **MPICH}
    placement = detect(environ, ancestors=["hydra_pmi_proxy --control-port h1:1", "mpiexec -n 2 python x.py"])
    assert (placement.launcher, placement.rank, placement.world_size) == ("mpich", 1, 2)
    assert placement.notes == ()
    assert "MASTER_ADDR" not in without_inherited(environ)


@pytest.mark.parametrize("outer", [SLURM, TORCHRUN, VALUES, {}])
def test_variables_that_were_set_anew_make_a_rank(outer: dict[str, str]) -> None:
    """As torch.multiprocessing.spawn() needs them."""
    spawned = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29501"}
    placement = detect({**left_by_a_rank(outer), **spawned}, ancestors=["python pool.py"])
    assert (placement.launcher, placement.rank, placement.world_size) == ("env", 0, 2)


def test_a_batch_job_that_a_rank_submits_is_no_rank() -> None:
    environ = {**left_by_a_rank(SLURM), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "8"}
    placement = detect(environ, ancestors=["/bin/bash /var/spool/job8", "slurmstepd: [8.batch]"])
    assert placement.launcher == "single"


def test_ranks_of_a_step_that_a_rank_starts() -> None:
    environ = {**left_by_a_rank(SLURM), "SLURM_STEP_ID": "3"}
    assert detect(environ, ancestors=["slurmstepd: [7.3]", "slurmd"]).launcher == "slurm"


@pytest.mark.parametrize("marker", ["", "x", "1 2", "x y RANK", "1 2 +RANK=7"])
def test_a_marker_of_no_use_breaks_nothing(marker: str) -> None:
    assert detect({**VALUES, MARKER: marker}, ancestors=["bash"]).launcher == "env"


def run(program: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={"PATH": "/usr/bin:/bin", **env},
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rank_itself_stays_the_rank_also_after_exec() -> None:
    program = ("import os, sys; from utils.launchers import detect; from utils.rank_variables import set_variables\n"
               f"set_variables({VALUES})\n"
               "show = 'from utils.launchers import detect; print(detect().launcher)'\n"
               "print(detect().launcher, flush=True)\n"
               "os.execv(sys.executable, [sys.executable, '-c', show])\n")
    assert run(program, {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
               ).split() == ["mpich", "mpich"]
    assert run(program, {}).split() == ["single", "single"]


def test_a_real_program_of_a_rank_is_no_rank() -> None:
    program = ("import subprocess, sys; from utils.rank_variables import set_variables\n"
               f"set_variables({VALUES})\n"
               "show = 'from utils.launchers import detect; print(detect())'\n"
               "subprocess.run(['/bin/sh', '-c', f'{sys.executable} -c \"{show}\"; true'], check=True)\n")
    assert "launcher='single', rank=0, world_size=1" in run(program, dict(VALUES))

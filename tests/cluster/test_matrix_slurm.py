"""launch.py in jobs of a real Slurm: each kind of request with the launchers that treat it differently."""
from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.jobs import ranks_on
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import LAUNCH, MPIS, RANK_PROGRAM, launch_py
from tests.matrix import with_all

TAKEN = re.compile(r"on (\S+), by (\S+), GPU (\d+),")
# The --launcher of launch.py -> the launcher that the ranks detect.
LAUNCHERS = {"srun": "slurm", "torchrun": "torchrun", "restarts": "torchrun",
             **{name: launcher for name, (_, launcher) in MPIS.items()}}
RUN = "exec {launch} {rank}"
IN_A_STEP = "exec srun -N1 -n1 {launch} {rank}"
PRINTED = 'command=$({launch} --dry-run {rank}) && eval "$command"'
NTASKS_PER_NODE = '[ "$SLURM_TASKS_PER_NODE" = 3,1 ] && exec {launch} --ntasks-per-node 2 {rank}'
# A job's request, the ranks expected on its nodes, the launchers to try, and what the job runs: each kind of request
# with launchers that treat it differently.
JOBS = [
    ("-N2 --ntasks-per-node=2 --gpus-per-node=2", [2, 2], "srun openmpi4", RUN),
    ("-N2 -n3 --gpus-per-node=2", [1, 2], "intel", RUN),
    ("-N2 --ntasks-per-node=2 --gpus-per-node=2 --distribution=cyclic", [2, 2], "openmpi5 srun", RUN),
    ("-N2 --gpus-per-node=2", [2, 2], "torchrun", RUN),  # one task per node is requested, and two GPUs
    ("-N2 -n4 --gpus-per-node=2", [2, 2], "srun", NTASKS_PER_NODE),
    ("-N2 --ntasks-per-node=2 --gpus-per-node=2", [2, 2], "srun openmpi5", IN_A_STEP),
    ("-N2 -n3 --gpus-per-node=2", [1, 2], "srun", PRINTED)]
MORE_JOBS = [
    ("-N4 --ntasks-per-node=1 --gpus-per-node=1", [1, 1, 1, 1], "mpich5", RUN),
    ("-N2 -n4 --ntasks-per-node=2 --gpus-per-task=1", [2, 2], "srun", RUN),
    ("-N2 --ntasks-per-node=1 --gpus-per-node=2", [2, 2], "srun mpich5", RUN),  # the header of a torchrun script
    ("-N2 --ntasks-per-node=1 --gpus-per-node=2", [1, 1], "srun", "exec {launch} --ntasks-per-node 1 {rank}"),
    ("-N2 -n2 --gpus-per-task=2", [2, 2], "srun intel", "exec {launch} --ntasks-per-node 2 {rank}"),
    ("-N2 -n3 --gpus-per-task=1", [1, 2], "torchrun openmpi5", RUN),
    ("-N2 --gpus=3", [1, 2], "mpich4", RUN),
    ("-N2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=single:1", [2, 2], "mpich5", RUN),
    ("-N2 --ntasks-per-node=2 --gres=gpu:2", [2, 2], "restarts", RUN),
    ("-N2 --exclusive", [2, 2], "srun intel", RUN),  # no GPUs are requested: a step gets none
    ("-N2 --gpus-per-node=2", [2, 2], "openmpi5", PRINTED)]


def with_launchers(jobs: list[tuple[str, list[int], str, str]], which: slice) -> list[tuple[str, list[int], str, str]]:
    """Each job with each of these of its launchers."""
    return [(options, expected, launcher, run) for options, expected, launchers, run in jobs
            for launcher in launchers.split()[which]]


def launched(slurm: SlurmCluster, need: Callable[[str], Path], options: str, launcher: str, *more: str,
             run: str = RUN) -> str:
    """Return the output of a job that has started launch.py with this launcher, and has completed."""
    launch = shlex.join([*launch_py(launcher, need), *more])
    return slurm.batch(options, run.format(launch=launch, rank=shlex.quote(str(RANK_PROGRAM)))).output


@pytest.mark.parametrize(("options", "expected", "launcher", "run"), [
    *with_launchers(JOBS, slice(1)),
    *with_all(*with_launchers(JOBS, slice(1, None)), *with_launchers(MORE_JOBS, slice(None)))])
def test_each_rank_has_a_gpu_to_itself(slurm: SlurmCluster, need: Callable[[str], Path], options: str,
                                       expected: list[int], launcher: str, run: str) -> None:
    output = launched(slurm, need, options, launcher, run=run)
    assert sorted(ranks_on(output).values()) == expected
    taken = TAKEN.findall(output)
    assert {detected for _, detected, _ in taken} == {LAUNCHERS[launcher]}
    assert len({(host, gpu) for host, _, gpu in taken}) == sum(expected), output


def test_a_heterogeneous_job_is_started_with_srun(slurm: SlurmCluster) -> None:
    """As the message of launch.py says. Newer Slurms apply SLURM_NTASKS, of the first component, to every one."""
    launch, rank = shlex.join(LAUNCH), shlex.quote(str(RANK_PROGRAM))
    python, srun = shlex.quote(sys.executable), "env -u SLURM_NTASKS -u SLURM_NPROCS srun --het-group=0,1"
    output = slurm.batch("-N1 -n1 --gpus-per-node=1 : -N2 --ntasks-per-node=2 --gpus-per-node=2",
                         f"{launch} {rank}; [ $? = 2 ] && exec {srun} {python} {rank}").output
    assert f"{srun} python train.py" in output and sorted(ranks_on(output).values()) == [1, 2, 2], output
    assert len({(host, gpu) for host, _, gpu in TAKEN.findall(output)}) == 5, output


@pytest.mark.parametrize("launcher", ["srun", *with_all("torchrun", "mpich5")])
def test_launch_on_a_part_of_a_job(slurm: SlurmCluster, need: Callable[[str], Path], launcher: str) -> None:
    output = launched(slurm, need, "-N4 --ntasks-per-node=2 --gpus=8", launcher, "--nodelist", "node[3-4]")
    assert sorted(TAKEN.findall(output)) == [
        (host, LAUNCHERS[launcher], gpu) for host in ("node3", "node4") for gpu in "01"], output


@pytest.mark.parametrize("launcher", ["srun", *with_all("mpich5")])
def test_no_rank_takes_the_gpu_of_another_job(slurm: SlurmCluster, need: Callable[[str], Path], launcher: str) -> None:
    other = slurm.sbatch("-w", "node1", "--gpus-per-node=1", script="#!/bin/bash\nsleep 100\n")
    slurm.wait_for(other, {"RUNNING"})
    output = launched(slurm, need, "-w node1,node2 -N2 -n2 --gpus-per-node=1", launcher)
    found = sorted((host, gpu) for host, _, gpu in TAKEN.findall(output))
    assert found == [("node1", "1"), ("node2", "0")], output

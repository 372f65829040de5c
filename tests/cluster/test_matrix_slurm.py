"""launch.py in jobs of a real Slurm: every shape of a job under every means, each rank on a GPU of its own."""
from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.job_ranks import ROOT, ranks_on
from tests.cluster.slurm import SlurmCluster

pytest_plugins = ["tests.cluster.slurm_fixture"]

# It says who it is and which of the host's GPUs it takes, by the rule of utils/rollcall.py, without torch.
RANK = f"""\
import os, socket, sys
sys.path.insert(0, {str(ROOT)!r})
from utils.launchers import detect
me = detect()
seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
gpu = seen[0] if len(seen) == 1 else seen[me.local_rank] if len(seen) >= me.local_world_size else "too few"
sys.stdout.write(f"rank {{me.rank}} of {{me.world_size}}, local {{me.local_rank}} of {{me.local_world_size}}, "
                 f"on {{socket.gethostname()}}, by {{me.launcher}}, GPU {{gpu}}\\n")
"""
TAKEN = re.compile(r"on (\S+), by (\S+), GPU (\d+)$", re.MULTILINE)
SHAPES = {
    "2x2": (["-N2", "--ntasks-per-node=2", "--gpus-per-node=2"], [2, 2]),
    "4x1": (["-N4", "--ntasks-per-node=1", "--gpus-per-node=1"], [1, 1, 1, 1]),
    "3 on 2": (["-N2", "-n3", "--gpus-per-node=2"], [1, 2]),
    "cyclic": (["-N2", "--ntasks-per-node=2", "--gpus-per-node=2", "--distribution=cyclic"], [2, 2]),
    "gpus-per-node": (["-N2", "--gpus-per-node=2"], [2, 2]),  # one task for each node is asked for, and two GPUs
    "gpus-per-task": (["-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-task=1"], [2, 2]),
    "two GPUs for a task": (["-N2", "-n2", "--gpus-per-task=2"], [2, 2]),
    "uneven GPUs": (["-N2", "-n3", "--gpus-per-task=1"], [1, 2]),
    "gpus": (["-N2", "-n2", "--gpus=3"], [1, 2]),
    "gpu-bind": (["-N2", "--ntasks-per-node=2", "--gpus-per-node=2", "--gpu-bind=single:1"], [2, 2]),
    "gres": (["-N2", "--ntasks-per-node=2", "--gres=gpu:2"], [2, 2]),
    "exclusive": (["-N2", "--exclusive"], [2, 2]),  # no GPUs are asked for: a step gets none by itself
    "exclusive, heterogeneous": (["-N1", "--exclusive", ":", "-N2", "--exclusive"], [2, 2, 2]),
    "heterogeneous": (["-N1", "-n1", "--gpus-per-node=1", ":", "-N2", "--ntasks-per-node=2", "--gpus-per-node=2"],
                      [1, 2, 2]),
    "heterogeneous, gpus-per-task": (["-n1", "--gpus-per-task=1", ":", "-N1", "-n2", "--gpus-per-task=1"], [1, 2])}
MEANS = {"srun": "slurm", "torchrun": "torchrun", "mpich": "mpich", "openmpi": "openmpi", "impi": "intel-mpi"}


def launched(slurm: SlurmCluster, need: Callable[[str], Path], options: Sequence[str], means: str,
             *more: str, run: str = "exec {launch} {rank}") -> str:
    """The output of a job that launch.py starts by this means, after it has ended well."""
    by = {"srun": ["--by", "srun"], "torchrun": ["--torchrun"]}.get(means) or ["--by", str(need(means))]
    script = slurm.work / "takes gpu.py"
    script.write_text(RANK)
    launch = shlex.join([sys.executable, str(ROOT / "scripts" / "launch.py"), *by, *more])
    line = run.format(launch=launch, rank=shlex.quote(str(script)))
    job_id = slurm.sbatch(*options, script=f"#!/bin/bash\n{line}\n")
    job = slurm.wait(job_id)
    output = slurm.output(job_id)
    assert job["JobState"] == "COMPLETED", output
    return output


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_is_right_and_has_a_gpu_of_its_own(slurm: SlurmCluster, need: Callable[[str], Path], shape: str,
                                                      means: str) -> None:
    options, expected = SHAPES[shape]
    output = launched(slurm, need, options, means)
    assert sorted(ranks_on(output).values()) == expected
    taken = TAKEN.findall(output)
    assert {launcher for _, launcher, _ in taken} == {MEANS[means]}
    assert len({(host, gpu) for host, _, gpu in taken}) == sum(expected), output


@pytest.mark.parametrize("means", MEANS)
def test_ranks_per_node_is_believed_whatever_tasks_were_asked_for(
        slurm: SlurmCluster, need: Callable[[str], Path], means: str) -> None:
    output = launched(slurm, need, ["-N2", "-n4", "--gpus-per-node=2"], means, "--ranks-per-node", "2",
                      run="echo tasks on $SLURM_TASKS_PER_NODE && exec {launch} {rank}")
    assert "tasks on 3,1\n" in output
    assert sorted(ranks_on(output).values()) == [2, 2]
    assert len(set(TAKEN.findall(output))) == 4, output


@pytest.mark.parametrize("means", MEANS)
def test_a_launch_inside_a_step_shares_what_that_holds(slurm: SlurmCluster, need: Callable[[str], Path],
                                                       means: str) -> None:
    output = launched(slurm, need, ["-N2", "--ntasks-per-node=2", "--gpus-per-node=2"], means,
                      run="exec srun -N1 -n1 {launch} {rank}")
    assert sorted(ranks_on(output).values()) == [2, 2]
    assert len(set(TAKEN.findall(output))) == 4, output


@pytest.mark.parametrize("means", [means for means in MEANS if means != "torchrun"])
@pytest.mark.parametrize("shape", ["3 on 2", "gpus-per-node", "heterogeneous"])
def test_the_printed_command_does_the_same(slurm: SlurmCluster, need: Callable[[str], Path], shape: str,
                                           means: str) -> None:
    options, expected = SHAPES[shape]
    output = launched(slurm, need, options, means, run="command=$({launch} --print {rank}) && eval \"$command\"")
    assert sorted(ranks_on(output).values()) == expected
    assert len(set(TAKEN.findall(output))) == sum(expected), output


@pytest.mark.parametrize("means", MEANS)
def test_a_launch_on_a_part_of_a_job(slurm: SlurmCluster, need: Callable[[str], Path], means: str) -> None:
    output = launched(slurm, need, ["-N4", "--ntasks-per-node=2", "--gpus=8"], means, "--hosts", "node[3-4]")
    assert sorted((host, launcher, gpu) for host, launcher, gpu in TAKEN.findall(output)) == [
        (host, MEANS[means], gpu) for host in ("node3", "node4") for gpu in "01"], output


@pytest.mark.parametrize("means", MEANS)
def test_no_rank_takes_the_gpu_of_another_job_on_a_shared_node(slurm: SlurmCluster, need: Callable[[str], Path],
                                                               means: str) -> None:
    other = slurm.sbatch("-w", "node1", "--gpus-per-node=1", script="#!/bin/bash\nsleep 100\n")
    slurm.wait_for(other, {"RUNNING"})
    output = launched(slurm, need, ["-w", "node1,node2", "-N2", "-n2", "--gpus-per-node=1"], means)
    assert sorted((host, gpu) for host, _, gpu in TAKEN.findall(output)) == [("node1", "1"), ("node2", "0")], output

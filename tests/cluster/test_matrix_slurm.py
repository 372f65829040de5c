"""launch.py in jobs of a real Slurm: each kind of request with the launchers that treat it differently."""
from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.job_ranks import ROOT, ranks_on
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import RANK_PROGRAM

pytest_plugins = ["tests.cluster.slurm_fixture"]

TAKEN = re.compile(r"on (\S+), by (\S+), GPU (\d+),")
# The --launcher of launch.py -> the launcher that the ranks detect.
LAUNCHERS = {"srun": "slurm", "torchrun": "torchrun", "mpich": "mpich", "openmpi": "openmpi", "impi": "intel-mpi"}
# Requests of a job, the ranks expected on its nodes, and the launchers to try: each pair of a kind of request and a
# launcher that treats it differently. All 75 combinations passed once.
JOBS: dict[str, tuple[str, list[int], str]] = {
    "2x2": ("-N2 --ntasks-per-node=2 --gpus-per-node=2", [2, 2], "srun torchrun openmpi"),
    "4x1": ("-N4 --ntasks-per-node=1 --gpus-per-node=1", [1, 1, 1, 1], "mpich"),
    "3 on 2": ("-N2 -n3 --gpus-per-node=2", [1, 2], "srun impi"),
    "cyclic": ("-N2 --ntasks-per-node=2 --gpus-per-node=2 --distribution=cyclic", [2, 2], "srun openmpi"),
    # One task per node is requested, and two GPUs.
    "gpus-per-node": ("-N2 --gpus-per-node=2", [2, 2], "openmpi torchrun"),
    "gpus-per-task": ("-N2 -n4 --ntasks-per-node=2 --gpus-per-task=1", [2, 2], "srun torchrun mpich"),
    "two GPUs for a task": ("-N2 -n2 --gpus-per-task=2", [2, 2], "srun impi"),
    "uneven GPUs": ("-N2 -n3 --gpus-per-task=1", [1, 2], "torchrun openmpi"),
    "gpus": ("-N2 -n2 --gpus=3", [1, 2], "mpich openmpi"),
    "gpu-bind": ("-N2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=single:1", [2, 2], "mpich impi"),
    "gres": ("-N2 --ntasks-per-node=2 --gres=gpu:2", [2, 2], "srun torchrun"),
    "exclusive": ("-N2 --exclusive", [2, 2], "srun impi"),  # no GPUs are requested: a step gets none
    "exclusive, heterogeneous": ("-N1 --exclusive : -N2 --exclusive", [2, 2, 2], "srun mpich"),
    "heterogeneous": ("-N1 -n1 --gpus-per-node=1 : -N2 --ntasks-per-node=2 --gpus-per-node=2", [1, 2, 2],
                      "srun openmpi"),
    "heterogeneous, gpus-per-task": ("-n1 --gpus-per-task=1 : -N1 -n2 --gpus-per-task=1", [1, 2],
                                     "torchrun mpich")}


def launched(slurm: SlurmCluster, need: Callable[[str], Path], options: str, launcher: str,
             *more: str, run: str = "exec {launch} {rank}") -> str:
    """The output of a job that launch.py starts with this launcher, after it has ended well."""
    by = {"srun": ["--launcher", "srun"], "torchrun": ["--torchrun"]}.get(launcher) or [
        "--launcher", str(need(launcher))]
    launch = shlex.join([sys.executable, str(ROOT / "scripts" / "launch.py"), *by, *more])
    line = run.format(launch=launch, rank=shlex.quote(str(RANK_PROGRAM)))
    job_id = slurm.sbatch(*options.split(), script=f"#!/bin/bash\n{line}\n")
    job = slurm.wait(job_id)
    output = slurm.output(job_id)
    assert job["JobState"] == "COMPLETED", output
    return output


@pytest.mark.parametrize(("name", "launcher"), [
    (name, launcher) for name, (_, _, launchers) in JOBS.items() for launcher in launchers.split()])
def test_each_rank_has_a_gpu_to_itself(slurm: SlurmCluster, need: Callable[[str], Path], name: str,
                                       launcher: str) -> None:
    options, expected, _ = JOBS[name]
    output = launched(slurm, need, options, launcher)
    assert sorted(ranks_on(output).values()) == expected
    taken = TAKEN.findall(output)
    assert {detected for _, detected, _ in taken} == {LAUNCHERS[launcher]}
    assert len({(host, gpu) for host, _, gpu in taken}) == sum(expected), output


@pytest.mark.parametrize("launcher", ["srun", "openmpi"])
def test_ntasks_per_node_overrides_the_tasks_of_the_job(
        slurm: SlurmCluster, need: Callable[[str], Path], launcher: str) -> None:
    output = launched(slurm, need, "-N2 -n4 --gpus-per-node=2", launcher, "--ntasks-per-node", "2",
                      run="echo tasks on $SLURM_TASKS_PER_NODE && exec {launch} {rank}")
    assert "tasks on 3,1\n" in output
    assert sorted(ranks_on(output).values()) == [2, 2]
    assert len(set(TAKEN.findall(output))) == 4, output


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "openmpi"])
def test_a_launch_inside_a_step_shares_its_resources(slurm: SlurmCluster, need: Callable[[str], Path],
                                                     launcher: str) -> None:
    output = launched(slurm, need, "-N2 --ntasks-per-node=2 --gpus-per-node=2", launcher,
                      run="exec srun -N1 -n1 {launch} {rank}")
    assert sorted(ranks_on(output).values()) == [2, 2]
    assert len(set(TAKEN.findall(output))) == 4, output


@pytest.mark.parametrize(("name", "launcher"), [("3 on 2", "srun"), ("gpus-per-node", "openmpi"),
                                                ("heterogeneous", "mpich"), ("heterogeneous", "impi")])
def test_the_printed_command_starts_the_same_ranks(slurm: SlurmCluster, need: Callable[[str], Path], name: str,
                                                   launcher: str) -> None:
    options, expected, _ = JOBS[name]
    output = launched(slurm, need, options, launcher,
                      run="command=$({launch} --dry-run {rank}) && eval \"$command\"")
    assert sorted(ranks_on(output).values()) == expected
    assert len(set(TAKEN.findall(output))) == sum(expected), output


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpich"])
def test_a_launch_on_a_part_of_a_job(slurm: SlurmCluster, need: Callable[[str], Path], launcher: str) -> None:
    output = launched(slurm, need, "-N4 --ntasks-per-node=2 --gpus=8", launcher, "--nodelist", "node[3-4]")
    assert sorted(TAKEN.findall(output)) == [
        (host, LAUNCHERS[launcher], gpu) for host in ("node3", "node4") for gpu in "01"], output


@pytest.mark.parametrize("launcher", ["srun", "openmpi", "mpich"])
def test_no_rank_takes_the_gpu_of_another_job(slurm: SlurmCluster, need: Callable[[str], Path],
                                              launcher: str) -> None:
    other = slurm.sbatch("-w", "node1", "--gpus-per-node=1", script="#!/bin/bash\nsleep 100\n")
    slurm.wait_for(other, {"RUNNING"})
    output = launched(slurm, need, "-w node1,node2 -N2 -n2 --gpus-per-node=1", launcher)
    found = sorted((host, gpu) for host, _, gpu in TAKEN.findall(output))
    assert found == [("node1", "1"), ("node2", "0")], output

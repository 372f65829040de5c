"""Problems of a job that are found before it is submitted."""
from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler_commands import Commands, pbs_job, pbs_record, pbs_recording, slurm_output
from utils.tools.cli.launch_options import LaunchOptions
from utils.tools.schedulers.job_checks import check_dependency, check_paths
from utils.tools.schedulers.job_spec import Job
from utils.tools.schedulers.pbs_scheduler import Pbs
from utils.tools.schedulers.scheduler import Scheduler, Status
from utils.tools.schedulers.slurm_scheduler import SlurmScheduler

SCRIPT = ("examples/01_ddp_minimal.py",)


def problems(scheduler: Scheduler, **values: Any) -> list[str]:
    found = scheduler.check(Job(SCRIPT, **values))
    return [problem for problem in found if "submit folder" not in problem]


def fields(found: list[str]) -> list[str]:
    return [problem.split(":")[0] for problem in found]


@pytest.mark.parametrize(("values", "problem"), [
    ({"cores_per_rank": 2, "walltime": 10**6}, ""),
    ({"nodes": 4}, "nodes: 4 is more than the 3 nodes of partition main"),
    ({"nodes": 1}, "nodes: 1 is less than the minimum of partition main, 2"),
    ({"cores_per_rank": 3}, "cores_per_rank: 3 is more than the 2"),
    ({"memory": "2G"}, "memory: 2G is more than the 1G"),
    ({"gpus_per_node": 3}, "gpus_per_node: 3 is more than the 2 GPUs"),
    ({"nodes": 5, "queue": "short"}, "nodes: 5 is more than the 4 nodes of partition short"),
    ({"queue": "short,main", "walltime": 601}, ""),
    ({"queue": "short", "gpus_per_node": 2, "cores_per_rank": 3},
     "cores_per_rank: 6 is more than the 4 cores of the largest node. 2 ranks per node have 3 cores each"),
    ({"queue": "shrot"}, "queue: there is no partition shrot. Did you mean short?"),
    ({"queue": "shut"}, "queue: partition shut takes no jobs now. Take one of: main, short.")])
def test_the_limits_of_a_slurm_partition(commands: Commands, values: dict[str, Any], problem: str) -> None:
    main, short = slurm_output("partitions").split("\n\n", 1)
    for name, limit in {"MaxNodes": 3, "MaxCPUsPerNode": 2, "MaxMemPerNode": 1024}.items():
        main = main.replace(f"{name}=UNLIMITED", f"{name}={limit}")
    main = main.replace("MinNodes=0", "MinNodes=2")
    columns = slurm_output("sinfo").splitlines()[1]
    commands.add("sinfo", slurm_output("sinfo") + columns.replace("short", "shut").replace("up", "down") + "\n")
    commands.add("scontrol", f"{main}\n\n{short}", when="partition")
    found = problems(SlurmScheduler(), **{"nodes": 2, **values})
    assert len(found) == bool(problem) and "".join(found).startswith(problem)


@pytest.mark.parametrize(("values", "variable", "expected"), [
    ({}, "", ["walltime"]), ({}, "main", []), ({"queue": "main"}, "", []), ({"directives": ("-p main",)}, "", []),
    ({"directives": ("-q x",)}, "", [])])
def test_the_partition_that_sbatch_will_use_counts(commands: Commands, monkeypatch: pytest.MonkeyPatch,
                                                   values: dict[str, Any], variable: str, expected: list[str]) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", variable)
    commands.add("sinfo", slurm_output("sinfo").replace("main*", "main").replace("short", "short*"))
    assert fields(problems(SlurmScheduler(), walltime=601, **values)) == expected


def test_the_queues_and_nodes_of_pbs_are_queried(commands: Commands) -> None:
    commands.add("qstat", pbs_recording("commands/qstat_Qf_json")["stdout"], when="-Qf")
    commands.add("qstat", pbs_recording("commands/qstat_Bf_json")["stdout"], when="-Bf")
    commands.add("pbsnodes", pbs_recording("commands/pbsnodes_a_json")["stdout"])
    found = problems(Pbs(), queue="small", walltime=601, gpus_per_node=5, nodes=4, cores_per_rank=1)
    assert fields(found) == ["nodes", "gpus_per_node", "cores_per_rank"]
    assert "nosuch" in problems(Pbs(), queue="nosuch")[0]


@pytest.mark.parametrize(("name", "count"), [
    ("commands/qdel_queued_final", 1), ("exitcodes/exit7", 1), ("exitcodes/exit0", 0)])
def test_a_dependency_that_can_no_longer_be_met(commands: Commands, name: str, count: int) -> None:
    """PBS runs a job after a deleted one as if that had succeeded."""
    commands.add("qstat", pbs_job(pbs_record(name)))
    found = problems(Pbs(), dependency="afterok:7.server")
    assert sum(problem.startswith("dependency: job 7.server") for problem in found) == count
    assert "dependency" not in fields(problems(Pbs(), dependency="afterany:7.server"))


def test_a_job_that_the_scheduler_has_forgotten_cannot_succeed() -> None:
    [problem] = check_dependency(Job(["true"], dependency="afterok:7"), lambda job_id: Status(job_id, "unknown"))
    assert "job 7 has to succeed first; its state is unknown" in problem


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder that all hosts share and one that each node has, both with train.py."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    monkeypatch.setattr("utils.tools.schedulers.job_checks.NODE_LOCAL", (str(local),))
    for folder in (shared, local, local / "empty", local / "filled"):
        folder.mkdir()
    for file in (shared / "train.py", local / "train.py", local / "filled" / "shard-0"):
        file.write_text("")
    return shared, local


@pytest.mark.parametrize(("command", "more", "problem"), [
    ("train.py --data=SHARED --out SHARED/new", {}, ""),
    ("train.py --data=LOCAL/train.py", {}, "exists on this host only"),
    ("train.py --data=LOCAL/filled", {}, "exists on this host only"),
    ("train.py --cache=LOCAL/empty", {}, ""), ("train.py --cache=LOCAL", {}, ""),
    ("train.py --cache=/mnt/bb/me/cache", {}, ""), ("python -m package.train", {}, ""),
    ("missing.py", {}, "command: no such file: missing.py (in "), ("train.py /nowhere/at/all", {}, "no such file"),
    ("trainer", {"setup": ("source tools",)}, ""),  # may bring it
    ("train.py", {"launch": LaunchOptions(container="image.sif")}, "container: no such file: image.sif"),
    ("train.py", {"output": "logs/x.out"}, "mkdir -p")])
def test_paths_unseen_by_nodes(folders: tuple[Path, Path], command: str, more: dict[str, Any], problem: str) -> None:
    shared, local = folders
    command = command.replace("SHARED", str(shared)).replace("LOCAL", str(local))
    found = check_paths(Job(tuple(command.split()), **more), shared)
    assert problem in found[0] if problem else found == []


def test_folders_that_cannot_be_used(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shared, local = folders
    assert "submit folder" in check_paths(Job(("train.py",)), local)[0]

    usage = shutil.disk_usage(shared)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1 << 20))
    assert "1 MB free" in check_paths(Job(("train.py",)), shared)[0]  # in the home

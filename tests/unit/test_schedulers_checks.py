"""What is found out about a job before it is submitted."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler_commands import ROOT, Commands, commands, pbs_job, pbs_recording, slurm_answer
from utils.schedulers import Job, Pbs, Slurm
from utils.schedulers.checks import Queue, check_paths, check_queue, parse_size

__all__ = ["commands"]  # the fixture

QUEUES = [Queue("main", is_default=True, nodes=4, cores=4, gpus=2, memory=4 << 30),
          Queue("short", walltime=600, nodes=4, cores=4, gpus=2, memory=4 << 30), Queue("shut", is_open=False)]


@pytest.mark.parametrize(("values", "said"), [
    ({}, ""), ({"queue": "shrot"}, "Did you mean short?"), ({"queue": "shut"}, "takes no jobs now"),
    ({"queue": "short", "walltime": 3600}, "walltime: 01:00:00 is more than the 00:10:00 of partition short"),
    ({"queue": "short,main", "walltime": 3600}, ""), ({"walltime": 3600}, ""), ({"nodes": 5}, "nodes: 5 is more than"),
    ({"gpus_per_node": 3}, "gpus_per_node: 3 is more than the 2"), ({"gpus_per_node": 2, "cores_per_rank": 2}, ""),
    ({"gpus_per_node": 2, "cores_per_rank": 3}, "2 ranks on a node have 3 cores each"),
    ({"memory": "5G"}, "memory: 5G is more than the 4G")])
def test_what_no_node_or_queue_has_is_a_problem_with_its_fix(values: dict[str, Any], said: str) -> None:
    found = check_queue(Job(("a.py",), **values), QUEUES, "partition")
    assert len(found) == bool(said)
    assert not said or said in found[0]


def test_what_the_scheduler_does_not_answer_is_no_problem(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = Job(("examples/01_ddp_minimal.py",), nodes=99, gpus_per_node=99, queue="nosuch", walltime=10**6)
    for scheduler in (Slurm(), Pbs()):
        assert [problem for problem in scheduler.check(job) if "submit folder" not in problem] == []


def test_slurm_is_asked_for_its_partitions(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands.add("sinfo", slurm_answer("sinfo"))
    found = Slurm().check(Job(("examples/01_ddp_minimal.py",), queue="short", walltime=601, gpus_per_node=3))
    assert [problem.split(":")[0] for problem in found if "submit folder" not in problem] == [
        "walltime", "gpus_per_node"]


@pytest.mark.parametrize(("values", "said"), [
    ({"nodes": 2, "cores_per_rank": 2}, ""), ({"nodes": 4}, "nodes: 4 is more than the 3 nodes of partition main"),
    ({"nodes": 1}, "nodes: 1 is less than the 2 that partition main takes"), ({"nodes": 4, "queue": "short"}, ""),
    ({"nodes": 2, "cores_per_rank": 3}, "cores_per_rank: 3 is more than the 2"),
    ({"nodes": 2, "memory": "2G"}, "memory: 2G is more than the 1G")])
def test_the_limits_of_a_partition_of_slurm_count(commands: Commands, monkeypatch: pytest.MonkeyPatch,
                                                  values: dict[str, Any], said: str) -> None:
    monkeypatch.chdir(ROOT)
    main, short = slurm_answer("partitions").split("\n\n", 1)
    main = main.replace("MaxNodes=UNLIMITED", "MaxNodes=3").replace("MinNodes=0", "MinNodes=2")
    main = main.replace("MaxCPUsPerNode=UNLIMITED", "MaxCPUsPerNode=2")
    main = main.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=1024")
    commands.add("sinfo", slurm_answer("sinfo"))
    commands.add("scontrol", f"{main}\n\n{short}", when="partition")
    found = [problem for problem in Slurm().check(Job(("examples/01_ddp_minimal.py",), **values))
             if "submit folder" not in problem]
    assert len(found) == bool(said) and (not said or found[0].startswith(said))


@pytest.mark.parametrize(("values", "submitted", "problems"), [
    ({}, "", ["walltime"]), ({"queue": "main"}, "", []), ({"directives": ("-p main",)}, "", []), ({}, "main", []),
    ({"directives": ("--partition=main",), "components": ("-p short",)}, "", []), ({"directives": ("-q x",)}, "", [])])
def test_a_job_is_judged_by_the_partition_that_sbatch_will_take(
        commands: Commands, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], submitted: str,
        problems: list[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SBATCH_PARTITION", submitted)
    commands.add("sinfo", slurm_answer("sinfo").replace("main*", "main").replace("short", "short*"))
    found = Slurm().check(Job(("examples/01_ddp_minimal.py",), walltime=601, **values))
    assert [problem.split(":")[0] for problem in found if "submit folder" not in problem] == problems


def test_pbs_is_asked_for_its_queues_and_nodes(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words, name in (("-Qf", "qstat_Qf_json"), ("-Bf", "qstat_Bf_json")):
        commands.add("qstat", pbs_recording(f"commands/{name}.json")["stdout"], when=words)
    commands.add("pbsnodes", pbs_recording("commands/pbsnodes_a_json.json")["stdout"])
    found = Pbs().check(Job(("examples/01_ddp_minimal.py",), queue="small", walltime=601, gpus_per_node=5, nodes=4,
                            cores_per_rank=1))
    assert [problem.split(":")[0] for problem in found if "submit folder" not in problem] == [
        "nodes", "gpus_per_node", "cores_per_rank", "ncpus", "walltime"]
    assert "nosuch" in Pbs().check(Job(("examples/01_ddp_minimal.py",), queue="nosuch"))[0]


LIMITED = {
    "enabled": "True", "resources_max": {"ncpus": 8, "ngpus": 4, "mem": "16gb", "mpiprocs": 6, "nodect": 3,
                                         "walltime": "00:10:00", "fpgas": 2, "site": "north"},
    "resources_min": {"ncpus": 2, "walltime": "00:01:00"}}


@pytest.mark.parametrize(("values", "said"), [
    ({"nodes": 2, "ranks_per_node": 3, "cores_per_rank": 1, "walltime": 600}, ""),
    ({"nodes": 3, "cores_per_rank": 3}, "ncpus: 9 for the whole job is more than the 8 of queue small (resources_max)"),
    ({"nodes": 2, "gpus_per_node": 3}, "ngpus: 6 for the whole job is more than the 4 of queue small"),
    ({"nodes": 3, "memory": "6G"}, "mem: 18gb for the whole job is more than the 16gb of queue small"),
    ({"nodes": 2, "ranks_per_node": 4}, "mpiprocs: 8 for the whole job is more than the 6"),
    ({"nodes": 4}, "nodect: 4 for the whole job is more than the 3"),
    ({"nodes": 2, "walltime": 601}, "walltime: 00:10:01 is more than the 00:10:00 of queue small"),
    ({"nodes": 2, "walltime": 59}, "walltime: 00:00:59 is less than the 00:01:00 of queue small"),
    ({"nodes": 1}, "ncpus: 1 for the whole job is less than the 2 of queue small (resources_min)"),
    ({"nodes": 2, "chunk": ("fpgas=2",)}, "fpgas: 4 for the whole job is more than the 2"),
    ({"nodes": 3, "chunk": ("nvme=1",)}, "nvme: 3 for the whole job is more than the 2 of the server"),
    ({"directives": ("-l select=2:ncpus=2+1:ncpus=5",)}, "ncpus: 9 for the whole job is more than the 8"),
    ({"directives": ("-l nodes=3:ppn=3",)}, "mpiprocs: 9 for the whole job is more than the 6"),
    ({"directives": ("-l nodes=2:ppn=3",)}, ""),
    ({"nodes": 2, "directives": ("-l walltime=1:00:00",)}, "walltime: 01:00:00 is more"),
    ({"nodes": 3, "cores_per_rank": 3, "queue": "big"}, ""),
    ({"nodes": 3, "cores_per_rank": 3, "directives": ("-q big",)}, ""),
    ({"nodes": 3, "cores_per_rank": 3, "queue": "route"}, ""),  # to big
    ({"nodes": 3, "cores_per_rank": 3, "queue": "narrow"}, "ncpus: 9 for the whole job is more than the 8 of"),
    ({"nodes": 60, "cores_per_rank": 10, "queue": "big"}, "ncpus: 600 for the whole job is more than the 500 of")])
def test_every_limit_of_a_queue_of_pbs_and_of_its_server_counts(
        commands: Commands, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], said: str) -> None:
    monkeypatch.chdir(ROOT)
    queues = {"small": LIMITED, "big": {"enabled": "True"},
              "route": {"queue_type": "Route", "enabled": "True", "route_destinations": "small,big"},
              "narrow": {"queue_type": "Route", "enabled": "True", "route_destinations": "small"}}
    server = {"default_queue": "small", "resources_max": {"nvme": 2, "ncpus": 500, "walltime": "99:00:00"}}
    commands.add("qstat", json.dumps({"Queue": queues}), when="-Qf")
    commands.add("qstat", json.dumps({"Server": {"head": server}}), when="-Bf")
    found = [problem for problem in Pbs().check(Job(("examples/01_ddp_minimal.py",), **values))
             if "submit folder" not in problem]
    assert any(problem.startswith(said) for problem in found) if said else found == []


def test_a_default_of_the_queue_counts_as_asked_for(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    queue = {"enabled": "True", "resources_default": {"walltime": "00:00:30"}, "default_chunk": {"ncpus": 4}, **LIMITED}
    commands.add("qstat", json.dumps({"Queue": {"small": queue}}), when="-Qf")
    found = Pbs().check(Job(("examples/01_ddp_minimal.py",), queue="small", directives=("-l select=3",)))
    assert [problem.split(":")[0] for problem in found if "submit folder" not in problem] == ["ncpus", "walltime"]


def test_an_account_is_missed_where_slurm_insists_on_one(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands.add("scontrol", "AccountingStorageEnforce = associations,limits\n")
    commands.add("sacctmgr", "projecta\nprojectb\n", when="associations")
    commands.add("sacctmgr", "", when="user")
    for account, problems in (("projecta", 0), ("ProjectA", 0), ("other", 1), (None, 1)):
        found = [line for line in Slurm().check(Job(("examples/01_ddp_minimal.py",), account=account))
                 if line.startswith("account")]
        assert len(found) == problems
        assert not found or "projecta, projectb" in found[0]


def test_files_that_nodes_cannot_see_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.schedulers.checks.NODE_LOCAL", (str(tmp_path / "local"),))
    shared, local = tmp_path / "shared", tmp_path / "local"
    for folder in (shared, local):
        folder.mkdir()
        (folder / "train.py").write_text("")
    assert check_paths(Job(("train.py", "--data=" + str(shared), "--out", str(shared / "new"))), shared) == []
    (local / "filled").mkdir()
    (local / "filled" / "shard-0").write_text("")
    (local / "empty").mkdir()
    for data in (local / "train.py", local / "filled"):
        assert "alone" in check_paths(Job(("train.py", f"--data={data}")), shared)[0]
    for cache in (local, local / "empty", local / "me" / "cache", "/mnt/bb/me/cache"):  # each node has its own
        assert check_paths(Job(("train.py", f"--cache={cache}")), shared) == []
    assert "submit folder" in check_paths(Job(("train.py",)), local)[0]
    assert "does not exist" in check_paths(Job(("missing.py",)), shared)[0]
    assert "does not exist" in check_paths(Job(("python", "-u", "missing.py")), shared)[0]
    assert "does not exist" in check_paths(Job(("train.py", "/nowhere/at/all")), shared)[0]
    assert check_paths(Job(("python", "-m", "package.train")), shared) == []
    assert "nor a program on PATH" in check_paths(Job(("cancle", "77")), shared)[0]
    assert check_paths(Job(("bash", "-c", "true")), shared) == []
    assert check_paths(Job(("trainer",), setup=("source tools",)), shared) == []  # may bring it
    assert "does not exist" in check_paths(Job(("train.py",), container="image.sif"), shared)[0]
    assert "mkdir -p" in check_paths(Job(("train.py",), output="logs/x.out"), shared)[0]


def test_a_folder_that_may_not_be_listed_stops_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    check_paths(Job(("train.py", "--data", str(tmp_path / "data"))), tmp_path)


@pytest.mark.parametrize(("name", "problems"), [
    ("commands/qdel_queued_final.json", 1), ("exitcodes/exit7.json", 1), ("exitcodes/exit0.json", 0)])
def test_a_job_that_should_follow_one_that_failed_or_was_deleted_is_a_problem(
        commands: Commands, monkeypatch: pytest.MonkeyPatch, name: str, problems: int) -> None:
    """PBS would run the job after a deleted one as if that had succeeded."""
    monkeypatch.chdir(ROOT)
    recording = pbs_recording(name)
    commands.add("qstat", pbs_job(recording.get("final") or next(iter(recording["Jobs"].values()))))
    job = Job(("examples/01_ddp_minimal.py",), dependency="afterok:7.server")
    assert sum(line.startswith("dependency: job 7.server") for line in Pbs().check(job)) == problems
    job = Job(("examples/01_ddp_minimal.py",), dependency="afterany:7.server")
    assert not any(line.startswith("dependency") for line in Pbs().check(job))


def test_a_full_home_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr("utils.schedulers.checks.NODE_LOCAL", ())
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1 << 20))
    assert "1 MB free" in check_paths(Job(("train.py",)), tmp_path)[0]


@pytest.mark.parametrize(("text", "size"), [("24684096kb", 24684096 << 10), ("4gb", 4 << 30), ("512", 512),
                                            ("1mw", None), ("x", None), ("", None)])
def test_sizes_of_pbs_are_read(text: str, size: int | None) -> None:
    assert parse_size(text) == size

"""Bad hosts: the file that lists them, and how jobs of Slurm and PBS avoid them."""
from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.scheduler_commands import Commands
from tests.unit.submission import Login, Scripted
from utils.job import exclude_file
from utils.job.commands import SchedulerError
from utils.job.requeue import requeue
from utils.tools.schedulers.job_spec import Job
from utils.tools.schedulers.slurm_scheduler import SlurmScheduler
from utils.tools.submission import preflight
from utils.tools.submission import submissions as records

NODES = "".join(f"node{number} host{number}\n" for number in range(1, 5))
SLURM_JOB = "JobId=21 JobName=x\n   JobState=PENDING Reason=None\n   Partition=main AllocNode:Sid=head:1\n" \
            "   ReqNodeList=(null) ExcNodeList={}\n   NumNodes={} NumCPUs=2\n"


def line(host: str, age_seconds: float) -> str:
    return f"{host} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(time.time() - age_seconds))} no disk\n"


# The file ---------------------------------------------------------------------------------------------------------

def test_hosts_are_listed_for_a_day_with_their_reason(tmp_path: Path) -> None:
    file = tmp_path / "bad-hosts.txt"
    assert exclude_file.read(file) == []
    file.write_text("# a comment\n" + line("n1", 86000) + line("n2", 86800) + "\nn3\n")
    exclude_file.add(file, {"n4.site.org": "storage: read-only\nand so on"})
    found = exclude_file.read(file)
    assert [entry.host for entry in found] == ["n1", "n3", "n4.site.org"]
    assert [entry.reason for entry in found] == ["no disk", "", "storage: read-only and so on"]
    assert found[1].since is None and abs((found[2].since or 0) - time.time()) < 60
    exclude_file.add(file, {"n1": "again"})  # is listed once
    assert [entry.reason for entry in exclude_file.read(file) if entry.host == "n1"] == ["again"]
    assert list(tmp_path.iterdir()) == [file]
    assert exclude_file.listed(file, ["n1.site.org", "n2", "n4", "n5"]) == ["n1.site.org", "n4"]


def test_jobs_that_add_hosts_at_once_lose_none(tmp_path: Path) -> None:
    file = tmp_path / "bad-hosts.txt"
    hosts = [f"n{number}" for number in range(40)]
    with ThreadPoolExecutor(40) as threads:
        list(threads.map(lambda host: exclude_file.add(file, {host: "no disk"}), hosts))
    assert {entry.host for entry in exclude_file.read(file)} == set(hosts)


# Slurm ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("directives", "nodes", "hosts", "expected", "problem"), [
    ((), 1, "host2.site.org host3 elsewhere", ["--exclude=node2,node3"], ""),
    (("-x node1", "--hold"), 1, "host2 host3", ["--exclude=node1,node2,node3"], ""),
    ((), 3, "host2 host3", [], "2 of the 4 nodes of the partition remain, and the job requests 3"),
    ((), 1, "elsewhere", [], "")])
def test_slurm_job_excludes_nodes_by_the_names_of_their_hosts(
        commands: Commands, directives: tuple[str, ...], nodes: int, hosts: str, expected: list[str],
        problem: str) -> None:
    commands.add("sinfo", NODES + NODES)  # a node is in several partitions
    job, found = SlurmScheduler().without_hosts(Job(("a.py",), directives=directives, nodes=nodes), hosts.split())
    assert problem in found and bool(problem) == bool(found)
    assert [word for [word, *_] in SlurmScheduler().directives(job) if word.startswith(("--exclude", "-x"))] == expected


@pytest.mark.parametrize(("given", "value"), [
    ("(null)", "node2"), ("node[1,3]", "node[1,3],node2"), ("node[2-3]", None)], ids=["none yet", "others", "already"])
def test_queued_slurm_job_excludes_nodes(commands: Commands, given: str, value: str | None) -> None:
    commands.add("sinfo", NODES)
    commands.add("scontrol", SLURM_JOB.format(given, "1-1"), when="show")
    commands.add("scontrol", when="update")
    assert not SlurmScheduler().exclude_hosts("21", ["host2"])
    updates = [words for words in commands.calls("scontrol") if words[1] == "update"]
    assert updates == ([["scontrol", "update", "JobId=21", f"ExcNodeList={value}"]] if value else [])


@pytest.mark.parametrize(("nodes", "calls", "message"), [
    (2, ["requeue", "show", "update"], "job 21 avoids node4 from now on"),
    (4, ["requeue", "show"], "may get node4 again, which are bad: without node4, 3 of the 4 nodes of the partition")])
def test_requeued_slurm_job_avoids_the_listed_hosts(commands: Commands, tmp_path: Path, nodes: int, calls: list[str],
                                                    message: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ddpkit")
    commands.add("sinfo", NODES)
    commands.add("scontrol")
    commands.add("scontrol", SLURM_JOB.format("(null)", nodes), when="show")
    exclude_file.add(tmp_path / "bad-hosts.txt", {"node4": "no disk"})
    assert requeue({"SLURM_JOB_ID": "21", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_TASKS_PER_NODE": "1(x2)",
                    "SLURM_JOB_CPUS_PER_NODE": "4(x2)", exclude_file.VARIABLE: str(tmp_path / "bad-hosts.txt")})
    # Slurm refuses the update while the job runs.
    assert [words[1] for words in commands.calls("scontrol")][-len(calls):] == calls and message in caplog.text


# submit.py --------------------------------------------------------------------------------------------------------

def test_submitted_jobs_avoid_listed_hosts(login: Login) -> None:
    login.commands.add("sinfo", NODES)
    login.commands.add("scontrol", "JobId=101 JobState=COMPLETED ExitCode=0:0\n")
    parent = login.folder / "jobs-out"
    parent.mkdir()
    exclude_file.add(parent / "bad-hosts.txt", {"node2": "storage: read-only", "gone": ""})
    done = login.submit(*"run --site generic-slurm --nodes 2 --no-check train.py".split())
    assert done.status == 0 and "avoided: node2 until 2" in done.err, done.err
    assert "storage: read-only" in done.err and "2 of 2 is more than a quarter" in done.err
    exclude_file.add(parent / "bad-hosts.txt", {"node3": ""})
    script = next(parent.glob("*/job.sh")).read_text()
    assert "--exclude=node2\n" in script
    assert "(jobs-out/bad-hosts.txt): node3" in login.submit("list").err


SPARE = ["--spare", "1", "--max-restarts", "2"]  # which doctor does not get


@pytest.mark.parametrize(("status", "bad", "problem", "options", "expected", "message"), [
    (1, [], "", [], None, ""), (127, ["n1"], "", [], None, "ended with status 127"),
    (2, [], "", SPARE, 2, "Other nodes would not help"),
    (2, ["n1"], "", [], 75, "job 13.head, which continues this one, avoids n1"),
    (2, ["n1"], "", SPARE, None, "n1 gets no rank; a spare takes its place"),
    (2, ["n1", "n2"], "no other hosts", SPARE, 75, "may get n1, n2 again: no other hosts"),
    (2, ["n1"], SchedulerError("scontrol failed"), [], 75, "may get n1 again: scontrol failed")])
def test_preflight_decides_what_becomes_of_the_job(
        status: int, bad: list[str], problem: str | Exception, options: list[str], expected: int | None, message: str,
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "jobs-out" / "train-1"
    folder.mkdir(parents=True)
    records.write(folder, records.new_record(Job(command=("train.py",)), "pbs", "x"), ["12.head", "13.head"])
    (tmp_path / "nodes").write_text("n1\nn2\n")
    monkeypatch.setenv("PBS_JOBID", "12.head")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    launched: list[list[str]] = []

    def launch(words: list[str]) -> int:
        launched.append(list(words))
        monkeypatch.setenv("CHANGED", "by launch")
        if bad:
            exclude_file.add(tmp_path / "jobs-out" / "bad-hosts.txt", dict.fromkeys(bad, "storage: read-only"))
        return status

    monkeypatch.setattr("utils.tools.launch.launch_cli.main", launch)
    queue = Scripted({}, problem)
    assert preflight.check(queue, folder, "12.head", ["--quick"],  # type: ignore[arg-type]
                           ["--torchrun", *options, "--", "train.py", "--", "x"]) == expected
    [words] = launched
    assert words[:2] == ["--torchrun", "--"] and words[2].endswith("utils/__main__.py")
    assert words[3] == "doctor" and words[-1] == "--quick"
    assert message in capfd.readouterr().err
    assert queue.excluded == ({"13.head": bad} if expected == 75 else {})

"""The Slurm of the tests is a real one: GPUs, arrays, requeue, accounting; and it is gone when its owner is."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.slurm import SlurmCluster

pytest_plugins = ["tests.cluster.slurm_fixture"]

BY_HAND = [sys.executable, str(Path(__file__).with_name("slurm.py"))]


def by_hand(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BY_HAND, "--folder", str(folder), *words], capture_output=True, text=True, timeout=60)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that have this folder in their environment, as all on the cluster do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue  # it ended meanwhile
    return found


def test_a_job_runs_on_two_nodes_and_tells_its_output(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("-N2", script="#!/bin/sh\nsrun --label hostname\nexit 3\n")
    job = slurm.wait(job_id)
    assert (job["JobState"], job["ExitCode"], job["NodeList"]) == ("FAILED", "3:0", "node[1-2]")
    assert sorted(slurm.output(job_id).splitlines()) == ["0: node1", "1: node2"]


@pytest.mark.parametrize("request_, seen", [("--gpus-per-node=2", ["0: 0,1", "1: 0,1"]),
                                            ("--gpus-per-task=1", ["0: 0", "1: 1"]),
                                            ("--gres=gpu:1", ["0: 0", "1: 0"])])
def test_tasks_see_the_gpus_that_were_asked_for(slurm: SlurmCluster, request_: str, seen: list[str]) -> None:
    done = slurm.run(["srun", "--label", "-N1", "-n2", request_, "printenv", "CUDA_VISIBLE_DEVICES"])
    assert sorted(done.output.splitlines()) == seen


def test_an_array_has_ended_when_all_its_elements_have(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("--array=0-3", "--output=element%a", "--wrap", "hostname; echo $SLURM_ARRAY_TASK_ID")
    slurm.wait(job_id)
    assert [job["JobState"] for job in slurm.jobs(job_id)] == ["COMPLETED"] * 4
    assert [(slurm.work / f"element{index}").read_text().split()[1] for index in range(4)] == list("0123")


def test_a_requeued_job_starts_again(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("--wrap", "echo start $SLURM_RESTART_COUNT; test -n \"$SLURM_RESTART_COUNT\" || sleep 60",
                          "--open-mode=append")
    slurm.wait_for(job_id, {"RUNNING"})
    slurm.run(["scontrol", "requeue", job_id])
    job = slurm.wait(job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert "start 1" in slurm.output(job_id)


def test_sacct_lists_the_jobs_that_ended(slurm: SlurmCluster) -> None:
    ids = [slurm.sbatch("--wrap", "true"), slurm.sbatch("--wrap", "false")]
    for job_id in ids:
        slurm.wait(job_id)

    def recorded() -> bool:
        done = slurm.run(["sacct", "-n", "-P", "-o", "JobID,State", "-j", ",".join(ids)])
        return sorted(done.output.split()) == sorted([f"{ids[0]}|COMPLETED", f"{ids[1]}|FAILED"])

    hosts.wait_until(recorded, "sacct to list both jobs")


@pytest.fixture
def by_hand_folder(need: Callable[[str], Path], tmp_path: Path) -> Path:
    need("hosts")
    need("slurm")
    return tmp_path / "cluster"


def test_by_hand_it_stays_until_it_is_taken_down(by_hand_folder: Path) -> None:
    try:
        assert "2 nodes are up" in by_hand(by_hand_folder, "up", "--nodes", "2").stdout
        assert "is up already" in by_hand(by_hand_folder, "up").stdout
        assert "node2 idle 4 CPUs gpu:2" in by_hand(by_hand_folder, "status").stdout
        assert by_hand(by_hand_folder, "run", "srun", "-N2", "hostname").stdout.split() in (["node1", "node2"],
                                                                                          ["node2", "node1"])
        assert by_hand(by_hand_folder, "run", "--host", "node2", "hostname").stdout == "node2\n"
    finally:
        by_hand(by_hand_folder, "down")
    assert not by_hand_folder.exists()
    assert processes_of(by_hand_folder) == []
    again = by_hand(by_hand_folder, "run", "hostname")
    assert again.returncode == 1 and "no cluster is up. Raise it:" in again.stderr
    assert by_hand(by_hand_folder, "down").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_start_that_was_ended_half_way(by_hand_folder: Path, number: signal.Signals) -> None:
    starting = subprocess.Popen([*BY_HAND, "--folder", str(by_hand_folder), "up"], stderr=subprocess.DEVNULL)
    hosts.wait_until((by_hand_folder / "log" / "slurmd.node1.log").exists, "the first slurmd", seconds=30)
    starting.send_signal(number)
    assert starting.wait(30) != 0
    hosts.wait_until(lambda: not by_hand_folder.exists() and not processes_of(by_hand_folder), "the guard to clear up")


def test_an_error_of_slurm_is_reported_with_its_log(need: Callable[[str], Path]) -> None:
    need("hosts")
    need("slurm")
    cluster = SlurmCluster(1, options={"SchedulerType": "sched/none-such"})
    with pytest.raises(RuntimeError, match="none-such"), cluster:
        pass
    assert not cluster.folder.exists()


def test_a_folder_without_an_installation_of_slurm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").touch()
    with pytest.raises(ValueError, match=r"has no sbin/slurmctld, sbin/slurmd\. Expected the folder of an install"):
        SlurmCluster(1, home=tmp_path)

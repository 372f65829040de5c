"""A spare host takes the place of one that fails; the training goes on from its last checkpoint, to the same bits."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import Lab, Result
from tests.launch.test_launch import Job
from tests.launch.test_launch_slurm import Launches
from tests.matrix import with_all

PROGRAM = str(Path(__file__).with_name("spare_program.py"))


@pytest.fixture(scope="module")
def lab(need: Callable[[str], Path]) -> Iterator[Lab]:
    need("hosts")
    with Hosts(3, subnet="10.79.23") as hosts:
        yield Lab(hosts, hosts.start_sshd(), need)


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> Job:
    return Job(lab, tmp_path, nodes=["h1", "h2", "h3"])


@pytest.fixture(scope="module")
def loss(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an undisturbed run prints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = Job(lab, folder, nodes=["h1", "h2"]).run("ssh", PROGRAM, str(folder))
    assert done.status == 0, done.output
    return done.line("final loss")


def start_event(folder: Path) -> dict[str, object]:
    """What the log says about the last start."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "start"][-1]["restart"]  # type: ignore[no-any-return]


def check(done: Result, folder: Path, loss: str, bad: str, spare: str, cause: str) -> None:
    assert done.status == 0 and done.line("final loss") == loss, done.output
    assert f"restart 1 without {bad}, with {spare} instead" in done.output, done.output
    assert re.search(cause, done.output), done.output
    restart = start_event(folder)
    assert restart["number"] == 1 and restart["without"] == [bad] and restart["steps_lost"] <= 5, restart
    assert re.search(cause, str(restart["cause"])), restart
    assert 0 < float(str(restart["seconds"])) < 60, restart


@pytest.mark.parametrize(("by", "fault", "cause"), [
    ("ssh", "outside", "h2.*"), *with_all(
        ("ssh", "kill", "rank 1 .*SIGKILL"),
        ("ssh", "stop", "rank 1 on h2 .*"), ("ssh", "agent", "h2"),
        ("mpich5", "agent", "hydra_pmi_proxy on h2 has ended before the ranks"),
        ("openmpi5", "agent", "prted on h2 has ended before the ranks"),
        ("mpich5", "kill", r"rank 1 on h2 was ended by SIGKILL \(exit status 137\)"))])
def test_a_spare_takes_the_place_of_a_host(job: Job, loss: str, by: str, fault: str, cause: str) -> None:
    bad = job.folder / "bad-hosts.txt"
    words = ["--spare", "1", "--hang-timeout", "5", PROGRAM, str(job.folder), fault, "1"]
    with killed_at_end(job.start(by, *words, DDPKIT_EXCLUDE_FILE=str(bad))) as process:
        failed = job.folder / "failed"
        wait_until(lambda: failed.exists() and failed.read_text(), "the fault", seconds=60)
        try:
            if fault == "outside":
                job.lab.hosts.set_link("h2", "down")
            done = job.lab.wait(process, 120)
        finally:
            if fault == "outside":
                job.lab.hosts.set_link("h2", "up")
    check(done, job.folder, loss, "h2", "h3", cause)


@pytest.mark.matrix
def test_a_failure_that_names_no_host_ends_the_launch(job: Job) -> None:
    """A full disk may be the one that all hosts share: the program's owner decides."""
    done = job.run("ssh", "--spare", "1", PROGRAM, str(job.folder), "disk", "1")
    assert done.status == 1 and "restart 1" not in done.output
    assert re.search(r"rank 1 on h2 failed: OSError: \[Errno 28\] No space left", done.output.splitlines()[-1])


def test_the_host_of_the_launch_can_be_left_out_too(job: Job, loss: str) -> None:
    done = job.run("ssh", "--spare", "1", PROGRAM, str(job.folder), "gpu", "0")
    check(done, job.folder, loss, "h1", "h3", "uncorrectable ECC error")


@pytest.mark.matrix
def test_without_another_spare_the_launch_ends_with_the_cause(job: Job) -> None:
    done = job.run("ssh", "--spare", "1", PROGRAM, str(job.folder), "gpu", "1", "always")
    assert done.status == 1 and "restart 1 without h2, with h3 instead" in done.output, done.output
    assert "no restart: no spare host is left in the place of h3" in done.output and "restart 2" not in done.output
    assert "rank 1 on h3 failed: RuntimeError: CUDA error: uncorrectable ECC" in done.output.splitlines()[-1]


@pytest.mark.matrix
def test_a_spare_of_a_slurm_job(need: Callable[[str], Path], loss: str) -> None:
    """When the host is cut off, and Slurm does not know it yet, the next step does not wait for it."""
    need("hosts")
    need("slurm")
    with SlurmCluster(3, slurmd_timeout=300, subnet="10.79.24") as slurm:
        launches = Launches(slurm, slurm.work, need)
        for fault in ("kill", "agent", "outside"):
            folder = slurm.work / f"fault-{fault}"
            folder.mkdir()
            line = launches.line("srun", "--spare", "1", "--hang-timeout", "5", PROGRAM, str(folder), fault, "1")
            job = launches.submit("-N3 -n3 --ntasks-per-node=1 --no-kill", line)
            failed = folder / "failed"
            wait_until(lambda f=failed: f.exists() and f.read_text(), "the fault", seconds=90)  # type: ignore[misc]
            if fault == "outside":
                slurm.set_link("node2", "down")
                slurm.wait_for(job, {"COMPLETING"}, 150)  # Slurm waits for the other host
            else:
                slurm.wait(job, 150)
            check(Result(0, slurm.output(job)), folder, loss, "node2", "node3", "node2")

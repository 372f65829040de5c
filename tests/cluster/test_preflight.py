"""Preflight in real jobs: a node made bad is avoided in Slurm, and no training starts there in PBS."""
from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.jobs import TRAIN, PbsJobs, SlurmJobs, ranks_on
from tests.cluster.pbs import Pbs
from tests.cluster.slurm import SlurmCluster

TWO_NODES = ["--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1", "--gpus-per-node", "0", "--time", "5"]


@contextlib.contextmanager
def read_only(enter: list[str], folder: Path) -> Iterator[None]:
    """Let one host see a folder read-only. enter: the start of commands there."""
    name = shlex.quote(str(folder))
    mount = f"mount --bind {name} {name} && mount -o remount,ro,bind {name} {name}"
    subprocess.run([*enter, "sh", "-c", mount], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", str(folder)], check=True)


def job_ids(jobs: SlurmJobs | PbsJobs) -> list[str]:
    record = next(jobs.folder.glob("jobs-out/*/submission.json"))
    return list(json.loads(record.read_text())["job_ids"])


@pytest.mark.matrix
def test_requeued_slurm_job_and_the_next_of_its_chain_avoid_a_bad_node(slurm: SlurmCluster) -> None:
    jobs = SlurmJobs(slurm)
    checkpoints = jobs.folder / "checkpoints"
    checkpoints.mkdir()
    with read_only(slurm.enter("node1"), checkpoints):
        done = jobs.submit(*TWO_NODES, "--requeue", "--preflight", "--checkpoints", str(checkpoints), "--chain", "2",
                           "--follow", TRAIN, seconds=240)
    assert done.status == 0, done.output
    first, second = (slurm.job(job_id) for job_id in job_ids(jobs))
    assert (first["Restarts"], second["Restarts"]) == ("1", "0")
    assert first["ExcNodeList"] == second["ExcNodeList"] == "node1", (first, second)
    assert first["NodeList"] == "node[2-3]", first
    output = Path(first["StdOut"]).read_text()
    assert re.search(r"node1 cannot write in the checkpoint folder .*Read-only file system", output), output
    assert "more than a quarter" in output and "restart 1 of" in output
    assert ranks_on(output) == {"node2": 1, "node3": 1}
    # A later submission from the same folder avoids it, too.
    done = jobs.submit(*TWO_NODES, "--follow", TRAIN)
    assert done.status == 0 and "avoided: node1 until" in done.output, done.output
    assert "node1" not in ranks_on(done.output)


def test_slurm_job_ends_where_no_other_node_helps(slurm: SlurmCluster) -> None:
    jobs = SlurmJobs(slurm)
    done = jobs.submit(*TWO_NODES, "--requeue", "--preflight", "--checkpoints", "/proc/none", "--chain", "2",
                       "--follow", TRAIN, seconds=240)
    assert done.status == 2 and "Other nodes would not help" in done.output, done.output
    assert "Restarts=0" in slurm.run(["scontrol", "show", "job", job_ids(jobs)[0]]).output
    assert not list(jobs.folder.glob("jobs-out/bad-hosts.txt"))


def test_pbs_jobs_of_a_chain_do_not_start_on_a_bad_host(pbs: Pbs) -> None:
    jobs = PbsJobs(pbs)
    pbs.write(f"{jobs.path}/checkpoints/.keep", "")
    folder = jobs.folder / "checkpoints"
    inside = Path(f"{jobs.path}/checkpoints")
    with read_only(pbs.command("n1", [], "root", "/", {}), inside):
        done = jobs.submit(*TWO_NODES, "--preflight", "--checkpoints", str(inside), "--chain", "2", "--follow", TRAIN,
                           seconds=240)
    assert folder.exists() and done.status == 75, done.output
    assert re.search(r"may get n1\S* again: PBS cannot exclude a host", done.output) and not ranks_on(done.output)
    for job_id in job_ids(jobs):
        job = pbs.job(job_id)
        assert "n1/" in job["exec_host"] and job["Exit_status"] == 75, job
    wait_until(lambda: pbs.state(job_ids(jobs)[1]) == "F", "the job to end")

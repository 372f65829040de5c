"""An attacker in the network of a job ends, misleads and reads nothing; a recording of its network holds no secret."""
from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT, Lab, Result, launch_py
from tests.launch.test_launch import Job
from tests.matrix import with_all

PORTS = "20900-20905"
TRAINS = f"""\
import os, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.path.insert(0, {str(ROOT)!r})
from tests.faults import quick_imports
from utils import setup_distributed
report = os.environ.get("DDPKIT_REPORT", "").rpartition("/")[2]
begin = time.monotonic()
with setup_distributed("gloo", hang_timeout=30) as dist:
    quick_imports.done()
    Path(sys.argv[1], f"{{dist.rank}}.secret").write_text(report)
    seconds = time.monotonic() - begin
    last = time.monotonic() + 3
    while dist.all_reduce_mean(float(time.monotonic() < last)) == 1:
        time.sleep(0.01)
    mean = dist.all_reduce_mean(float(dist.rank))
print(f"rank {{dist.rank}}: mean {{mean}}", f"set up in {{seconds:.2f}} s", sep="\\n")
"""
# Writes all that passes the interface to a file, until it is killed.
RECORDS = """\
import socket, sys
opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
opened.bind(("eth0", 0))
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(opened.recv(1 << 16))
"""


@pytest.fixture
def job(lab: Lab) -> Iterator[Job]:
    folder = lab.hosts.folder / "an attacked job"
    folder.mkdir()
    (folder / "trains.py").write_text(TRAINS)
    (folder / "secret").write_text("5ec2e7-of-the-file")
    (folder / "secret").chmod(0o600)
    yield Job(lab, folder, ["h1", "h2"])
    shutil.rmtree(folder)


def run(job: Job, by: str) -> Result:
    if by == "doctor":
        return job.run("ssh", str(ROOT / "utils" / "__main__.py"), "doctor", "--quick", DDPKIT_PORT_RANGE=PORTS,
                       OMP_NUM_THREADS="1")
    if by != "by hand":
        return job.run(by, "trains.py", str(job.folder), DDPKIT_PORT_RANGE=PORTS)
    # Rank 0 waits three seconds for rank 1.
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": job.lab.hosts.address["h1"], "MASTER_PORT": PORTS[:5],
           "DDPKIT_SECRET_FILE": str(job.folder / "secret"), "DDPKIT_REQUIRE_SECRET": "1"}
    words = [sys.executable, str(job.folder / "trains.py"), str(job.folder)]
    return job.lab.together([("h1", words, {**env, "RANK": "0"}),
                             ("h2", ["bash", "-c", 'sleep 3; exec "$@"', "rank 1", *words], {**env, "RANK": "1"})])


@pytest.mark.parametrize("by", ["ssh", *with_all("by hand", "doctor", "openmpi5", "torchrun")])
def test_an_attacker_ends_misleads_and_reads_nothing(job: Job, by: str) -> None:
    attack(job.lab.hosts, job.folder, ("h1", "h2", "h3"), by, lambda: run(job, by))


@pytest.mark.matrix
def test_an_attacker_of_a_slurm_job(slurm: SlurmCluster, need: Callable[[str], Path]) -> None:
    """From a node that is not of the job."""
    folder = slurm.folder / "attacked"
    folder.mkdir()
    try:
        (folder / "trains.py").write_text(TRAINS)
        command = shlex.join([*launch_py("srun", need), str(folder / "trains.py"), str(folder)])
        attack(slurm, folder, ("node1", "node2", "node4"), "srun", lambda: slurm.batch(
            "-N2 --ntasks-per-node=1", f"export DDPKIT_PORT_RANGE={PORTS} DDPKIT_REQUIRE_SECRET=1", command))
    finally:
        shutil.rmtree(folder)


def attack(hosts: Hosts, folder: Path, names: tuple[str, str, str], by: str, job: Callable[[], Result]) -> None:
    """Run a job on the first two hosts and an attacker on the third; check the job's result and what was heard.

    No recording holds a secret. srun and mpiexec send the environment of the ranks, as they always do.
    """
    first, second, third = names
    recording = folder / "recording"
    words = [str(ROOT / "tests" / "launch" / "attacker.py"), str(folder), *PORTS.split("-"),
             hosts.address[first], hosts.address[second]]
    with (killed_at_end(hosts.popen(second, [sys.executable, "-c", RECORDS, str(recording)])),
          killed_at_end(hosts.popen(third, [sys.executable, *words])) as attacker):
        wait_until(recording.exists, "the recording")
        begin = time.monotonic()
        done = job()
        seconds = time.monotonic() - begin
        (folder / "stop").touch()
        attacker.wait(60)
    print(f"{by}: {seconds:.2f} s", *(line for line in done.output.splitlines() if "set up in" in line))  # for -rP
    attacks, recorded = json.loads((folder / "attacks").read_text()), recording.read_bytes()
    assert done.status == 0 and len(attacks["attacks"]) == 40, f"{attacks}\n{done.output}"
    assert all(attacks["attacks"].values()), attacks["attacks"]
    assert "forged" not in done.output and b'"kind":"hello"' in recorded
    if by != "doctor":
        means = [line for line in done.output.splitlines() if ": mean " in line]
        assert sorted(means) == ["rank 0: mean 0.5", "rank 1: mean 0.5"], done.output
    assert by not in ("ssh", "torchrun") or b"'quotes'" not in recorded  # the environment: ssh carries it
    secrets = {file.read_text() for file in folder.glob("*secret")} - {""}
    assert secrets and not any(secret in attacks["heard"] for secret in secrets)
    assert by in ("srun", "openmpi5") or not any(secret.encode() in recorded for secret in secrets)

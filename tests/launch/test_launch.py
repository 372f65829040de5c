"""scripts/launch.py for real: over ssh and every mpiexec, on several hosts; what fails, is killed, is left behind."""
from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.hosts import CLEAN_ENV, killed_at_end, wait_until
from tests.launch.launchers import MINIMAL, MPIS, RANK_PROGRAM, ROOT, Lab, Result

LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
VALUE = "two\nlines, 'quotes' \"too\" $HOME"


@dataclass
class Job:
    """An allocation on hosts of the lab, as PBS describes one, and a folder with a space where ranks leave notes."""

    lab: Lab
    folder: Path
    nodes: list[str] = field(default_factory=lambda: ["h1", "h1", "h2"])

    @property
    def env(self) -> dict[str, str]:
        node_file = self.folder / "node file"
        node_file.write_text("".join(f"{node}\n" for node in self.nodes))
        return {"PATH": f"{self.lab.ssh.parent}:{CLEAN_ENV['PATH']}", "PBS_JOBID": "1.lab", "VALUE": VALUE,
                "PBS_NODEFILE": str(node_file), "NCPUS": "4", "OMP_NUM_THREADS": "4"}

    @property
    def rank(self) -> list[str]:
        """The rank program, by a path with spaces, that writes notes into the folder."""
        script = self.folder / "rank program.py"
        if not script.exists():
            script.write_text(f"import runpy; runpy.run_path({str(RANK_PROGRAM)!r}, run_name='__main__')")
        return [str(script), "--notes", str(self.folder)]

    def run(self, *words: str, seconds: float = 120) -> Result:
        with killed_at_end(self.start(*words)) as process:
            return self.lab.wait(process, seconds)

    def start(self, *words: str) -> subprocess.Popen[str]:
        # Entering a host changes the working folder.
        return self.lab.hosts.popen("h1", ["env", "-C", str(self.folder), *LAUNCH, *words], env=self.env,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for_ranks(self) -> list[int]:
        """Process ids of all ranks, once they all run."""
        files = [self.folder / str(rank) for rank in range(len(self.nodes))]
        wait_until(lambda: all(file.exists() for file in files), "all ranks")
        return [int(file.read_text()) for file in files]

    def signals(self, rank: int) -> list[str]:
        return (self.folder / f"{rank}.signals").read_text().split()


@pytest.fixture
def job(lab: Lab) -> Iterator[Job]:
    folder = lab.hosts.folder / "a job"
    folder.mkdir()
    yield Job(lab, folder)
    shutil.rmtree(folder)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 15) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"the end of {pids}", seconds=seconds)


def agents(job: Job) -> list[int]:
    """Process ids of the agents, whose command line names them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            network = os.readlink(process / "ns/net")
        except OSError:
            continue
        hosts = {os.readlink(f"/proc/{job.lab.hosts.pid(host)}/ns/net") for host in job.lab.hosts.hosts}
        if network in hosts and len(words) > 4 and b".agent import main" in words[4]:
            found.append(int(process.name))
    return sorted(pid for pid in found if parent(pid) not in found)  # each has a reaper with the same command line


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Starting -------------------------------------------------------------------------------------------------------------

def expected(rank: int, launcher: str, threads: int) -> str:
    host, local_rank, local_size = (("h1", 0, 2), ("h1", 1, 2), ("h2", 0, 1))[rank]
    return (f"rank {rank} of 3, local {local_rank} of {local_size}, on {host}, by {launcher}, GPU none, notes (), "
            f"value {VALUE!r}, "
            f"threads {threads}")


@pytest.mark.parametrize("name", list(MPIS))
def test_an_mpiexec_starts_the_ranks_with_environment_and_arguments(job: Job, name: str) -> None:
    needed, launcher = MPIS[name]
    done = job.run("--launcher", str(job.lab.need(needed)), *job.rank, "a b")
    assert done.status == 0, done.output
    assert [done.line(f"rank {rank} of") for rank in range(3)] == [
        f"{expected(rank, launcher, 2)}, folder {job.folder}, arguments ['a b']" for rank in range(3)]


def test_agents_over_ssh_start_the_ranks_with_environment_and_arguments(job: Job) -> None:
    done = job.run(*job.rank, "a b")
    assert done.status == 0, done.output
    assert "launch.py: 3 ranks on 2 hosts (1 to 2 each) by ssh" in done.output
    assert [done.line(f"rank {rank} of") for rank in range(3)] == [
        f"{expected(rank, 'env', 4 if rank == 2 else 2)}, folder {job.folder}, arguments ['a b']" for rank in range(3)]


def test_lines_of_a_node_file_that_lie_apart_are_one_host(job: Job) -> None:
    job.nodes = ["h2", "h1", "h2"]
    done = job.run(*job.rank)
    assert done.line("rank 0 of").startswith("rank 0 of 3, local 0 of 2, on h2, by env")
    assert done.line("rank 2 of").startswith("rank 2 of 3, local 0 of 1, on h1, by env")


def test_training_is_the_same_under_agents_and_where_rank_0_is_on_another_host(job: Job) -> None:
    job.nodes = ["h2", "h3"]
    done = job.run(*MINIMAL[1:])
    assert done.status == 0, done.output
    assert done.line("final loss:") == job.lab.minimal_loss(2)


@pytest.mark.parametrize("options", [(), ("--max-restarts", "1")])
def test_one_torchrun_agent_a_host_starts_uneven_ranks(job: Job, options: tuple[str, ...]) -> None:
    done = job.run("--torchrun", *options, *job.rank)
    assert done.status == 0, done.output
    for rank in range(3):
        assert done.line(f"rank {rank} of").startswith(
            expected(rank, "torchrun", 4 if rank == 2 else 2)), done.output


def test_without_a_job_this_host_alone_starts_its_ranks(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PBS_", "SLURM_", "CUDA_"))}
    rank = [str(RANK_PROGRAM), "--notes", str(tmp_path)]
    done = subprocess.run([*LAUNCH, "--ntasks-per-node", "2", *rank], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(rank \d) of 2, local \d of 2, on .*, by env, .* notes \(\)", done.stdout)
    assert sorted(found) == ["rank 0", "rank 1"], done.stdout


def test_print_starts_nothing(job: Job) -> None:
    done = job.run("--dry-run", *job.rank)
    assert done.status == 0 and not (job.folder / "0").exists()
    assert "env RANK=2 WORLD_SIZE=3 LOCAL_RANK=0" in done.output


# Code that knows the variables of torchrun and not the kit ------------------------------------------------------------

PUBLIC = str(ROOT / "tests/launch/public_code.py")


@pytest.mark.parametrize(("name", "nodes"), [
    *((name, "h1 h1 h2 h2") for name in [*MPIS, "ssh", "torchrun with restarts"]),
    *((name, "h2 h2 h3") for name in ("mpich5", "openmpi5", "torchrun"))])
def test_code_written_for_torchrun_is_one_training(job: Job, name: str, nodes: str) -> None:
    job.nodes = nodes = nodes.split()
    special = {"torchrun": ["--torchrun"], "torchrun with restarts": ["--max-restarts", "1"],
               "ssh": ["--launcher", "ssh"]}
    options = special.get(
        name) or ["--launcher", str(job.lab.need(MPIS[name][0]))]
    done = job.run(*options, PUBLIC)
    assert done.status == 0, done.output
    local = {rank: [other for other in range(len(nodes)) if nodes[other] == nodes[rank]] for rank in range(len(nodes))}
    assert sorted(line for line in done.output.splitlines() if line.startswith("public rank")) == [
        f"public rank {rank} of {len(nodes)}, {local[rank].index(rank)} of {len(local[rank])} on {nodes[rank]}, "
        f"node {int(nodes[rank] != nodes[0])}" for rank in range(len(nodes))]


@pytest.mark.parametrize("name", list(MPIS))
def test_mpi4py_in_a_rank_belongs_to_its_mpiexec(job: Job, name: str) -> None:
    environ = {**job.env, **job.lab.mpi4py(name)}
    show = [str(RANK_PROGRAM), "--torch", "--mpi4py", "before"]
    done = job.lab.run("h1", [*LAUNCH, "--launcher", str(job.lab.need(MPIS[name][0])), *show], env=environ)
    assert done.status == 0, done.output
    for rank in range(3):
        assert f"rank {rank} of 3, MPI says rank {rank} of 3, sum 3" in done.output, done.output


# Output ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("by", ["ssh", *MPIS])
def test_each_rank_may_write_into_a_file_or_with_its_rank_before_each_line(job: Job, by: str) -> None:
    options = ["--launcher", "ssh" if by == "ssh" else str(job.lab.need(MPIS[by][0]))]
    command = ["sh", "-c", "echo output of $RANK"]
    done = job.run(*options, "--output-dir", "logs", *command)
    assert done.status == 0 and "output of 0\n" not in done.output, done.output
    files = [(job.folder / f"logs/rank-{rank}.log").read_text() for rank in range(3)]
    assert files == [f"output of {rank}\n" for rank in range(3)]
    done = job.run(*options, "--label", *command)
    assert done.status == 0, done.output
    for rank in range(3):  # each mpiexec has a form of its own
        assert re.search(rf"^\S.*\b{rank}\b.*output of {rank}$", done.output, re.MULTILINE), done.output


def test_ranks_of_an_mpiexec_keep_the_limit_of_open_files(job: Job) -> None:
    """launch.py raises its own, 2 for each rank and 64 more, as each rank connects to it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (66, limits[1]))
    try:
        done = job.run("--launcher", str(job.lab.need("mpich")), "sh", "-c", "echo limit $(ulimit -Sn)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert done.output.count("limit 66\n") == 2, done.output  # on this host; the other one has its own limit


# What cannot be started -----------------------------------------------------------------------------------------------

def test_a_host_that_cannot_be_reached_is_named_and_nothing_runs(job: Job) -> None:
    job.nodes = ["h1", "h9"]
    done = job.run(*job.rank)
    assert done.status == 1 and not (job.folder / "0").exists()
    assert "ssh ended with exit status 255 before an agent has connected from h9" in done.output


def test_a_script_that_is_not_there_is_named(job: Job) -> None:
    done = job.run("missing.py")
    assert done.status == 2 and "there is no file missing.py in" in done.output


MISMATCHES = {"folder": "", "script": "there is no readable script train.py in",
              "same script": "the script train.py in .* differs from the one on the host of launch.py"}


@pytest.mark.parametrize(("by", "lacks"), [
    *((by, "folder") for by in ("ssh", "torchrun", "mpich5", "openmpi4", "openmpi5", "intel")),
    ("ssh", "script"), ("mpich5", "script"), ("torchrun", "same script"), ("openmpi5", "same script")])
def test_a_host_without_the_same_files_is_named_before_a_rank_starts(job: Job, by: str, lacks: str) -> None:
    """h2 has another folder, or none, where h1 has the script."""
    work, other = job.folder / "work", job.folder / "other"
    for folder in (work, other):
        folder.mkdir()
    started = f"open({str(job.folder)!r} + '/started.' + os.environ['RANK'], 'w')"
    (work / "train.py").write_text(f"import os; {started}\n")
    if lacks == "same script":
        (other / "train.py").write_text(f"import os; {started}  # an older version\n")
    over = ["mount", "-t", "tmpfs", "none", str(job.folder)] if lacks == "folder" else [
        "mount", "--bind", str(other), str(work)]
    on_h2 = job.lab.hosts.enter("h2")
    subprocess.run([*on_h2, *over], check=True)
    try:
        options = {"ssh": ["--launcher", "ssh"], "torchrun": ["--torchrun"]}.get(by) or [
            "--launcher", str(job.lab.need(MPIS[by][0]))]
        done = job.lab.run("h1", ["env", "-C", str(work), *LAUNCH, *options, "train.py"], env=job.env)
    finally:
        subprocess.run([*on_h2, "umount", "-l", over[-1]], check=True)
    assert done.status != 0, done.output
    assert not list(job.folder.glob("started.*"))
    assert "h2" in done.output and re.search(MISMATCHES[lacks] or re.escape(str(work)), done.output), done.output


def test_a_missing_program_is_reported_by_every_host(job: Job) -> None:
    for by in ("ssh", str(job.lab.need("mpich"))):
        done = job.run("--launcher", by, "no-such-program")
        assert done.status == 127 and "no-such-program could not be started: No such file" in done.output


def test_launch_py_as_the_program_of_a_launcher_is_refused(job: Job) -> None:
    mpiexec = str(job.lab.need("system-mpich"))
    done = job.lab.run("h1", [mpiexec, "-n", "2", *LAUNCH, *job.rank], env=CLEAN_ENV)
    assert done.status != 0 and "launch.py itself was started as rank 0 of 2 by mpich" in done.output


# What fails -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("fault", "status", "says"), [
    ("exit=7:2", 7, "rank 2 on h2 ended with exit status 7"),
    ("kill:1", 137, "rank 1 on h1 was ended by SIGKILL")])
def test_a_rank_that_fails_ends_the_others_and_gives_the_exit_status(
        job: Job, fault: str, status: int, says: str) -> None:
    done = job.run(*job.rank, "--wait", "--fault", fault)
    assert (done.status, says in done.output) == (status, True), done.output
    wait_until_gone(job.wait_for_ranks())


def test_a_rank_that_fails_under_torchrun_ends_it_on_every_host(job: Job) -> None:
    done = job.run("--torchrun", *job.rank, "--wait", "--fault", "exit=7:2")
    assert done.status == 1 and "torchrun on h2 ended with exit status 1" in done.output
    wait_until_gone(job.wait_for_ranks())


def test_a_killed_agent_takes_its_ranks_and_the_launch_with_it(job: Job) -> None:
    with killed_at_end(job.start(*job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        running = agents(job)
        assert len(running) == 2
        os.kill(running[-1], signal.SIGKILL)
        done = job.lab.wait(process, 40)
    assert done.status == 1 and re.search(r"the connection to h[12] was lost", done.output), done.output
    wait_until_gone([*pids, *running])


@pytest.mark.parametrize("options", [(), ("--torchrun",)])
def test_nothing_is_left_anywhere_when_launch_py_is_killed(job: Job, options: tuple[str, ...]) -> None:
    with killed_at_end(job.start(*options, *job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        running = agents(job)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_gone([*pids, *running], 30)


@pytest.mark.parametrize("name", list(MPIS))
def test_nothing_is_left_anywhere_when_launch_py_is_killed_above_an_mpiexec(job: Job, name: str) -> None:
    mpiexec = str(job.lab.need(MPIS[name][0]))
    with killed_at_end(job.start("--launcher", mpiexec, *job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_gone(pids, 30)


# Stops ----------------------------------------------------------------------------------------------------------------

def stop(job: Job, *words: str) -> tuple[Result, list[list[str]]]:
    """Run with USR1 and then TERM to launch.py; the result, and which signals each rank has got."""
    with killed_at_end(job.start(*words, *job.rank, "--wait")) as process:
        job.wait_for_ranks()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(process.pid, number)
            wait_until(lambda: all(job.signals(rank) for rank in range(3)), "the first signal")
        done = job.lab.wait(process, 30)
    return done, [job.signals(rank) for rank in range(3)]


def test_agents_pass_stops_on_once_to_every_rank(job: Job) -> None:
    done, signals = stop(job)
    assert signals == [["SIGUSR1", "SIGTERM"]] * 3, done.output
    assert done.status == 5


def test_stops_reach_the_workers_of_every_torchrun(job: Job) -> None:
    done, signals = stop(job, "--torchrun")
    # When one worker has left, torchrun asks the other one of the host to end, once more.
    assert [each[:2] for each in signals] == [["SIGUSR1", "SIGTERM"]] * 3, done.output


@pytest.mark.parametrize("name", ["mpich5", "mpich4", "intel"])
def test_hydra_passes_stops_on_to_every_rank(job: Job, name: str) -> None:
    done, signals = stop(job, "--launcher", str(job.lab.need(MPIS[name][0])))
    assert signals == [["SIGUSR1", "SIGTERM"]] * 3, done.output
    # The ranks end with 5. After a SIGTERM Hydra 4 may forget that, and Intel's may make 255 of it.
    assert done.status in {"mpich5": (5,), "mpich4": (0, 5), "intel": (5, 255)}[name]


@pytest.mark.parametrize("name", ["openmpi5", "openmpi4"])
def test_open_mpi_passes_a_request_to_end_on_as_a_signal_that_leaves_time(job: Job, name: str) -> None:
    with killed_at_end(job.start("--launcher", str(job.lab.need(MPIS[name][0])), *job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: all(job.signals(rank) == ["SIGUSR1"] for rank in range(3)), "the signal")
        time.sleep(5)  # Open MPI 4 kills after four
        assert all(map(is_running, pids))


def test_an_unknown_client_of_the_coordinator_changes_nothing(job: Job) -> None:
    with killed_at_end(job.start(*job.rank, "--wait")) as process:
        job.wait_for_ranks()
        command = Path(f"/proc/{agents(job)[0]}/cmdline").read_bytes().split(b"\0")
        address, port = (word.decode() for word in command[5:7])
        talk = (f"import socket; s = socket.create_connection(({address!r}, {port})); "
                "s.sendall(b'{\"hello\": 0, \"token\": \"no\"}\\n{\"done\": true}\\n'); assert not s.recv(1)")
        client = job.lab.run("h3", [sys.executable, "-c", talk])
        assert client.status == 0, client.output
        os.kill(process.pid, signal.SIGTERM)
        assert job.lab.wait(process, 30).status == 5


def test_a_second_interrupt_ends_everything(job: Job) -> None:
    with killed_at_end(job.start("sleep", "60")) as process:
        wait_until(lambda: len(agents(job)) == 2, "the agents")
        started: Callable[[], bool] = lambda: _count(job, b"sleep") >= 3  # noqa: E731
        wait_until(started, "the ranks")
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGINT)
        done = job.lab.wait(process, 30)
    assert done.status == 130
    wait_until(lambda: _count(job, b"sleep") == 0, "the end of the ranks")


def _count(job: Job, program: bytes) -> int:
    """Processes of the launch that run this program: those whose environment has the job's value."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"VALUE={VALUE}".encode() in (process / "environ").read_bytes().split(b"\0")
            found += ours and (process / "cmdline").read_bytes().split(b"\0")[0] == program
        except OSError:
            continue
    return found

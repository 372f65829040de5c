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

from tests.cluster.hosts import CLEAN_ENV, Hosts, killed_at_end, wait_until
from tests.launch.launchers import GROUPS, MPIS, PUBLIC, RANK_PROGRAM, ROOT, TRAINS_FOR_EVER, Lab, Result, launch_py
from tests.matrix import with_all
from utils.host import process as processes
from utils.job import exclude_file

VALUE = "two\nlines, 'quotes' \"too\" $HOME"
# What code finds that knows the variables of torchrun and not the kit, after the rank program.
RANK = f"""\
import runpy, sys
runpy.run_path({str(RANK_PROGRAM)!r}, run_name='__main__')
sys.argv.append("--sockets")
runpy.run_path({PUBLIC!r})
"""


@dataclass
class Job:
    """An allocation on hosts of the lab, as PBS describes one, and a folder with a space where ranks leave notes."""

    lab: Lab
    folder: Path
    nodes: list[str] = field(default_factory=lambda: ["h1", "h1", "h2"])
    started: list[subprocess.Popen[str]] = field(default_factory=list)

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
            script.write_text(RANK)
        return [str(script), "--notes", str(self.folder)]

    def run(self, by: str, *words: str, seconds: float = 120, **more: str) -> Result:
        with killed_at_end(self.start(by, *words, **more)) as process:
            return self.lab.wait(process, seconds)

    def start(self, by: str, *words: str, folder: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """Start launch.py on h1. Entering a host changes the working folder."""
        launch = launch_py(by, self.lab.need)
        self.started.append(self.lab.hosts.popen(
            "h1", ["env", "-C", str(folder or self.folder), *launch, *words], env={**self.env, **more},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return self.started[-1]

    def wait_for_ranks(self) -> list[int]:
        """Process ids of all ranks, once they all run."""
        files = [self.folder / str(rank) for rank in range(len(self.nodes))]
        try:
            wait_until(lambda: all(file.exists() and file.read_text() for file in files), "all ranks", seconds=60)
        except RuntimeError:
            os.killpg(self.started[-1].pid, signal.SIGKILL)
            pytest.fail(f"not all ranks have started: {self.started[-1].communicate(timeout=30)[0]}")
        return [int(file.read_text()) for file in files]

    def signals(self, rank: int) -> list[str]:
        return (self.folder / f"{rank}.signals").read_text().split()


@pytest.fixture
def job(lab: Lab) -> Iterator[Job]:
    folder = lab.hosts.folder / "a job"
    folder.mkdir()
    yield Job(lab, folder)
    shutil.rmtree(folder)


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(processes.start_time, pids)), f"the end of {pids}", seconds=30)


def agents(job: Job) -> list[int]:
    """Process ids of the agents, whose command line names them."""
    networks = {os.readlink(f"/proc/{job.lab.hosts.pid(host)}/ns/net") for host in job.lab.hosts.hosts}
    parents = processes.parents_by_pid()
    found = [pid for pid in parents
             if re.match(r"python.* -c .*\.agent import main", processes.command_line(pid), re.DOTALL)
             # not other users' processes
             and os.access(space := f"/proc/{pid}/ns/net", os.R_OK, effective_ids=True)
             and os.readlink(space) in networks]
    return sorted(pid for pid in found if parents[pid] not in found)  # a reaper has the same command line


@pytest.mark.parametrize(("by", "launcher", "nodes"), [
    ("mpich5", "mpich", "h2 h2 h3"), ("intel", "intel-mpi", "h1 h1 h2"), ("openmpi5", "openmpi", "h2 h2 h3"),
    ("", "env", "h2 h1 h2"), ("torchrun", "torchrun", "h2 h2 h3"), *with_all(
        ("mpich4", "mpich", "h1 h1 h2"), ("openmpi4", "openmpi", "h1 h1 h2"), ("restarts", "torchrun", "h1 h1 h2"))])
def test_ranks_start_with_environment_and_arguments(job: Job, by: str, launcher: str, nodes: str) -> None:
    job.nodes = nodes.split()
    hosts = sorted(job.nodes, key=job.nodes.index)  # lines of a node file that lie apart are one host
    done = job.run(by, *job.rank, "a b")
    assert done.status == 0, done.output
    for rank, (place, host) in enumerate(zip(("0 of 2", "1 of 2", "0 of 1"), hosts, strict=True)):
        threads = 4 if launcher in ("env", "torchrun") and rank == 2 else 2  # an mpiexec has one value for all
        assert done.line(f"rank {rank} of") == (
            f"rank {rank} of 3, local {place}, on {host}, by {launcher}, GPU none, notes (), value {VALUE!r}, "
            f"threads {threads}, folder {job.folder}, arguments ['a b']")
        assert done.line(f"public rank {rank} ") == f"public rank {rank} of 3, {place} on {host}, node {rank // 2}"
    if not by:
        assert "ddpkit launch: 3 ranks on 2 hosts (1 to 2 each) by ssh" in done.output


@pytest.mark.parametrize(("by", "when"), [("intel", "before"), *with_all(("openmpi5", "after"))])
def test_mpi4py_in_a_rank_belongs_to_its_mpiexec(job: Job, by: str, when: str) -> None:
    done = job.run(by, str(RANK_PROGRAM), "--join", "--mpi4py", when, **job.lab.mpi4py(by))
    assert done.status == 0, done.output
    for rank in range(3):
        assert f"MPI says rank {rank} of 3, sum 3" in done.line(f"rank {rank} of 3"), done.output


@pytest.mark.parametrize("by", ["ssh", "intel", *with_all(*(mpi for mpi in MPIS if mpi != "intel"))])
def test_output_of_each_rank_is_labelled_or_in_a_file(job: Job, by: str) -> None:
    program = ["sh", "-c", "echo output of $RANK"]
    done = job.run(by, "--label", *program)
    assert done.status == 0, done.output
    for rank in range(3):  # each mpiexec has a form of its own
        assert re.search(rf"^\S.*\b{rank}\b.*output of {rank}$", done.output, re.MULTILINE), done.output
    if by in ("ssh", "intel"):  # the files are the kit's
        done = job.run(by, "--output-dir", "logs", *program)
        assert done.status == 0 and "output of 0\n" not in done.output, done.output
        files = [(job.folder / f"logs/rank-{rank}.log").read_text() for rank in range(3)]
        assert files == [f"output of {rank}\n" for rank in range(3)]


def test_ranks_of_an_mpiexec_keep_the_limit_of_open_files(job: Job) -> None:
    """launch.py raises its own, 2 for each rank and 64 more, as each rank connects to it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (66, limits[1]))
    try:
        done = job.run("mpich5", "sh", "-c", "echo limit $(ulimit -Sn)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert done.output.count("limit 66\n") == 2, done.output  # on this host; the other one has its own limit


@pytest.mark.parametrize("by", ["ssh", *with_all("torchrun", "openmpi4")])
def test_hosts_with_ipv6_alone_and_a_range_of_ports(need: Callable[[str], Path], tmp_path: Path, by: str) -> None:
    need("hosts")
    with Hosts(2, subnet="fd79:0:0:1:") as hosts:
        job = Job(Lab(hosts, hosts.start_sshd(), need), tmp_path, ["h1", "h1", "h2"])
        done = job.run(by, str(RANK_PROGRAM), "--torch", DDPKIT_PORT_RANGE="20700-20720", DDPKIT_INTERFACE="eth0")
    assert done.status == 0 and re.search(r"3 ranks on 2 hosts.*rank 0 at fd79:0:0:1::1:207[0-2]\d \(", done.output,
                                          re.MULTILINE), done.output


LISTENS = f"""\
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from utils import setup_distributed
with setup_distributed("gloo") as dist:
    if dist.is_main:
        ports = [int(os.environ["DDPKIT_REPORT"].split("/")[1]), dist.master_port]
        tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        rows = [line.split() for line in tables.splitlines()]
        print("listening:", *(row[1] for port in ports for row in rows
                              if row[1].endswith(f":{{port:04X}}") and row[3] == "0A"))
"""


@pytest.mark.parametrize("by", ["ssh", *with_all("mpich5")])
def test_on_several_hosts_the_launch_listens_on_their_network_alone(job: Job, by: str) -> None:
    """So does rank 0. The host has another address, of loopback."""
    (job.folder / "listens.py").write_text(LISTENS)
    done = job.run(by, "listens.py")
    words = [int(word) for word in job.lab.hosts.address["h1"].split(".")]
    address = bytes(reversed(words)).hex().upper()
    found = done.line("listening:").split()[1:]
    assert len(found) == 2 and {one.rpartition(":")[0] for one in found} == {address}, done.output


def test_a_host_that_cannot_be_reached_is_named_and_nothing_runs(job: Job) -> None:
    job.nodes = ["h1", "h9"]
    done = job.run("ssh", *job.rank)
    assert done.status == 1 and not (job.folder / "0").exists()
    assert "ssh ended with exit status 255 before an agent has connected from h9" in done.output


MISMATCHES = {"folder": "a job/work", "script": "there is no readable script train.py in",
              "same script": "the script train.py in .* differs from the one on the host of ddpkit launch"}


@pytest.mark.parametrize(("by", "lacks"), [
    ("ssh", "folder"), ("mpich5", "script"), ("torchrun", "same script"), *with_all(("intel", "folder"))])
def test_a_host_without_the_same_files_is_named_before_a_rank_starts(job: Job, by: str, lacks: str) -> None:
    """h2 has another folder, or none, where h1 has the script."""
    work, other = job.folder / "work", job.folder / "other"
    for folder in (work, other):
        folder.mkdir()
    started = f"import os; open({str(job.folder)!r} + '/started.' + os.environ['RANK'], 'w')"
    (work / "train.py").write_text(started)
    if lacks == "same script":
        (other / "train.py").write_text(f"{started}  # an older version\n")
    over = ["mount", "-t", "tmpfs", "none", str(job.folder)] if lacks == "folder" else [
        "mount", "--bind", str(other), str(work)]
    on_h2 = job.lab.hosts.enter("h2")
    subprocess.run([*on_h2, *over], check=True)
    try:
        with killed_at_end(job.start(by, "train.py", folder=work)) as process:
            done = job.lab.wait(process)
    finally:
        subprocess.run([*on_h2, "umount", "-l", over[-1]], check=True)
    assert done.status != 0, done.output
    assert not list(job.folder.glob("started.*"))
    assert "h2" in done.output and re.search(MISMATCHES[lacks], done.output), done.output


@pytest.mark.parametrize(("by", "fault", "status", "cause"), [
    ("ssh", "exit=7:2", 7, "rank 2 on h2 ended with exit status 7"),
    ("ssh", "kill:1", 137, "rank 1 on h1 was ended by SIGKILL"),
    ("ssh", "", 127, "program could not be started: No such file"), *with_all(
        ("torchrun", "exit=7:2", 1, "rank 2 on h2 ended with exit status 7"),
        ("mpich5", "", 127, "program could not be started: No such file"))])
def test_a_rank_that_fails_ends_the_others(job: Job, by: str, fault: str, status: int, cause: str) -> None:
    program = job.folder / "program"
    program.write_text("#!/no-such-shell\n")
    program.chmod(0o755)
    done = job.run(by, *([*job.rank, "--wait", "--fault", fault] if fault else [str(program)]))
    assert (done.status, cause in done.output) == (status, True), done.output
    if fault:
        wait_until_gone(job.wait_for_ranks())


@pytest.mark.parametrize(("by", "words", "size"), [
    ("openmpi4", "torchrun 1 --hold", 1), ("mpich5", "env", 2), *with_all(
        ("ssh", "torchrun 2 --hold", 2), ("ssh", "spawn-all", 4))])
def test_process_groups_have_all_ranks_or_end_the_launch(job: Job, by: str, words: str, size: int) -> None:
    """One rank on each host, with torch alone."""
    job.nodes = ["h1", "h2"]
    done = job.run(by, GROUPS, *words.split())
    assert done.status == ("--hold" in words), done.output
    if done.status:
        assert f"rank 1 of 2 has formed a process group of {size} process" in done.output, done.output
    else:
        assert re.findall(r"group of (\d)", done.output) == [str(size)] * size, done.output


def test_the_ranks_of_another_launch_are_not_taken_for_its_own(job: Job) -> None:
    """Open MPI's mpiexec sends the ranks of other hosts no variable that it is not told to send."""
    job.nodes = ["h1", "h2"]
    other = {"DDPKIT_LAUNCH_RANK": "1/2", "TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    with subprocess.Popen(["sleep", "60"], env=other) as worker:
        try:
            done = job.run("openmpi4", "sleep", "2")
        finally:
            worker.kill()
    assert done.status == 0, done.output


@pytest.mark.parametrize(("by", "fault", "status", "first"), [
    ("ssh", "raise:1", 1, "rank 1 on h2 failed: ValueError: the loss is not a number"),
    ("ssh", "interface:1", 1, "rank 1 on h2.*GLOO_SOCKET_IFNAME=ib7"),
    ("openmpi4", "leave=7:1", 7, r"rank 1 on h2 ended with exit status 7 and without an exception"), *with_all(
        ("ssh", "more:2", 1, r"rank 2 on h2 called all_reduce\(\) at .*, and ranks? [013,-]+ .*left normally after"),
        ("torchrun", "kill-training:0", 1, r"rank 0 on h1 \(pid \d+\) ended without a report"))])
def test_the_last_line_names_what_failed_first(job: Job, by: str, fault: str, status: int, first: str) -> None:
    """It is not always the rank that ended first with a status other than 0."""
    job.nodes = ["h1", "h1", "h2", "h2"] if fault == "more:2" else ["h1", "h2"]
    done = job.run(by, str(RANK_PROGRAM), "--torch", "--fault", fault)
    assert done.status == status and "probably" not in done.output, done.output
    last = done.output.splitlines()[-1]
    assert re.match(f"ddpkit launch: {first}", last), done.output


def test_a_killed_agent_takes_its_ranks_and_the_launch_with_it(job: Job) -> None:
    with killed_at_end(job.start("ssh", *job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        running = agents(job)
        assert len(running) == 2
        os.kill(running[-1], signal.SIGKILL)
        done = job.lab.wait(process, 40)
    assert done.status == 1 and re.search(r"the connection to h[12] was lost", done.output), done.output
    wait_until_gone([*pids, *running])


@pytest.mark.parametrize("by", ["ssh", *with_all("mpich5")])
def test_a_host_that_is_cut_off_ends_the_launch(job: Job, by: str) -> None:
    """mpiexec would wait for it for ever. On that host, too, the ranks end, without anybody's help."""
    job.nodes, script = ["h1", "h2"], job.folder / "trains.py"
    script.write_text(TRAINS_FOR_EVER)
    bad = job.folder / "bad-hosts.txt"
    with killed_at_end(job.start(by, str(script), str(job.folder), DDPKIT_EXCLUDE_FILE=str(bad))) as process:
        pids = job.wait_for_ranks()
        running = agents(job)
        job.lab.hosts.set_link("h2", "down")
        try:
            done = job.lab.wait(process, 100)
            wait_until_gone([*pids, *running])
        finally:
            job.lab.hosts.set_link("h2", "up")
    assert done.status == 1, done.output
    last = done.output.splitlines()[-1]
    assert re.match(r"ddpkit launch: .*rank 1 on h2 .*its network is cut", last), (
        done.output)
    assert [entry.host for entry in exclude_file.read(bad)] == ["h2"], done.output


@pytest.mark.parametrize("by", ["ssh", "mpich5", *with_all("torchrun", *(mpi for mpi in MPIS if mpi != "mpich5"))])
def test_nothing_is_left_anywhere_when_launch_py_is_killed(job: Job, by: str) -> None:
    with killed_at_end(job.start(by, *job.rank, "--wait")) as process:
        pids = [*job.wait_for_ranks(), *agents(job)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_gone(pids)


# The ranks end with 5. After a SIGTERM Hydra 4 may forget that, and Intel's may make 255 of it.
@pytest.mark.parametrize(("by", "statuses"), [
    ("ssh", (5,)), ("mpich5", (5,)), *with_all(("torchrun", (1,)), ("mpich4", (0, 5)), ("intel", (5, 255)))])
def test_stops_of_launch_py_reach_every_rank_once(job: Job, by: str, statuses: tuple[int, ...]) -> None:
    with killed_at_end(job.start(by, *job.rank, "--wait")) as process:
        job.wait_for_ranks()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(process.pid, number)
            wait_until(lambda: all(job.signals(rank) for rank in range(3)), "the first signal")
        done = job.lab.wait(process, 30)
    signals = [job.signals(rank) for rank in range(3)]
    # When one worker has left, torchrun asks the other one of the host to end, once more.
    assert [each[:2] if by == "torchrun" else each for each in signals] == [["SIGUSR1", "SIGTERM"]] * 3, done.output
    assert done.status in statuses, done.output


@pytest.mark.parametrize("by", ["openmpi5", *with_all("openmpi4")])
def test_open_mpi_passes_a_request_to_end_on_as_a_signal_that_leaves_time(job: Job, by: str) -> None:
    with killed_at_end(job.start(by, *job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: all(job.signals(rank) == ["SIGUSR1"] for rank in range(3)), "the signal")
        time.sleep(5)  # Open MPI 4 kills after four
        assert all(map(processes.start_time, pids))


def test_an_unknown_client_changes_nothing_and_a_second_interrupt_ends_everything(job: Job) -> None:
    with killed_at_end(job.start("ssh", *job.rank, "--wait")) as process:
        pids = job.wait_for_ranks()
        command = Path(f"/proc/{agents(job)[0]}/cmdline").read_bytes().split(b"\0")
        address, port = (word.decode() for word in command[5:7])
        talk = (f"import socket; s = socket.create_connection(({address!r}, {port})); "
                "s.sendall(b'{\"hello\": 0, \"token\": \"no\"}\\n{\"done\": true}\\n'); assert not s.recv(1)")
        client = job.lab.run("h3", [sys.executable, "-c", talk])
        assert client.status == 0, client.output
        assert all(map(processes.start_time, pids))

        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGINT)
        done = job.lab.wait(process, 30)
    assert done.status == 130
    wait_until_gone(pids)

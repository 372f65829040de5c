"""scripts/launch.py in jobs of a real Slurm: which ranks start where, and how they are stopped.

Requests of GPUs with each launcher are in tests/cluster/test_matrix_slurm.py.
"""
from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import GROUPS, PUBLIC, RANK_PROGRAM, ROOT, TRAINS_FOR_EVER, assert_met, launch_py
from tests.matrix import with_all
from utils.host import process
from utils.job import exclude_file


@dataclass
class Launches:
    """Jobs that run launch.py with the rank program, which writes notes into a folder."""

    slurm: SlurmCluster
    folder: Path
    need: Callable[[str], Path]

    def line(self, by: str, *command: str) -> str:
        """The line of a job script that starts a command on each rank."""
        return shlex.join([*launch_py(by, self.need), *command])

    def rank(self, by: str, *options: str) -> str:
        return self.line(by, str(RANK_PROGRAM), "--notes", str(self.folder), *options)

    def submit(self, request: str, command: str) -> str:
        return self.slurm.sbatch(*request.split(), script=f"#!/bin/bash\nexec {command}\n")


@pytest.fixture
def launches(slurm: SlurmCluster, need: Callable[[str], Path]) -> Iterator[Launches]:
    folder = slurm.folder / "launches"
    folder.mkdir()
    yield Launches(slurm, folder, need)
    shutil.rmtree(folder)


@pytest.mark.matrix
def test_ranks_see_the_gpus_of_their_node(launches: Launches) -> None:
    both = [launches.line(by, "sh", "-c", "echo gpus $CUDA_VISIBLE_DEVICES") for by in ("srun", "torchrun")]
    for request in ("-N2 --exclusive", "-N2 --gres=gpu:2"):
        done = launches.slurm.batch(request, *both)
        assert re.findall(r"^gpus .*$", done.output, re.MULTILINE) == ["gpus 0,1"] * 8, done.output


def test_rank_0_reads_standard_input(launches: Launches) -> None:
    script = launches.folder / "reads.py"
    script.write_text("import os, sys\nif os.environ['LOCAL_RANK'] == '0': print('read', len(sys.stdin.read()))\n")
    done = launches.slurm.batch("-N2 -n2 --ntasks-per-node=1", f"seq 50000 | {launches.line('srun', str(script))}")
    assert sorted(re.findall("^read .*", done.output, re.MULTILINE)) == ["read 0", "read 288894"], done.output


@pytest.mark.matrix
def test_script_that_forms_no_group_is_named_at_its_end(launches: Launches) -> None:
    script = launches.folder / "train.py"
    script.write_text("import torch\n")
    line = launches.line("srun", str(script))
    output = launches.slurm.batch("-N2 -n2", line).output
    assert output.count("2 independent copies of train.py ran: no rank formed a process group of torch") == 1, output


@pytest.mark.parametrize("by", ["mpich5", *with_all("openmpi4")])
def test_ranks_of_an_mpiexec_have_slurm_variables_of_a_task(launches: Launches, by: str) -> None:
    """Not those of the mpiexec's daemons, of which there are two."""
    command = ["sh", "-c", "echo task $RANK: $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID of $SLURM_NTASKS, "
                           "$SLURM_NTASKS_PER_NODE each on $SLURM_NNODES"]
    done = launches.slurm.batch("-N2 -n4 --ntasks-per-node=2", launches.line(by, *command))
    assert sorted(re.findall(r"^task .*", done.output, re.MULTILINE)) == [
        f"task {rank}: {rank} {rank % 2} {rank // 2} of 4, 2 each on 2" for rank in range(4)], done.output


@pytest.mark.parametrize(("request_", "means", "expected", "with_torchrun"), [
    ("-N2 -n4 --ntasks-per-node=2 -m cyclic", "--sockets", ["0/2 node1 0", "0/2 node2 1", "1/2 node1 0", "1/2 node2 1"],
     ["0/2 node1 0", "1/2 node1 0", "0/2 node2 1", "1/2 node2 1"]), *with_all(
        ("-N2 -n3 --gres=gpu:2", "--torch", ["0/2 node1 0", "1/2 node1 0", "0/1 node2 1"], None))])
def test_code_written_for_torchrun_is_one_training(launches: Launches, request_: str, means: str, expected: list[str],
                                                   with_torchrun: list[str] | None) -> None:
    """Code that knows the variables of torchrun and not the kit."""
    ready = shlex.join([sys.executable, f"{ROOT}/scripts/launch.py"])
    for options, places in (("", expected), ("--torchrun", with_torchrun)):
        if places is not None:
            output = launches.slurm.batch(request_, f"{ready} {options} {shlex.quote(PUBLIC)} {means}").output
            found = sorted(re.findall(r"public rank (\d+) of \d+, (\d) of (\d) on (\w+), node (\d)", output))
            assert [f"{local}/{size} {host} {node}" for _, local, size, host, node in found] == places, output


@pytest.mark.parametrize(("words", "cause"), [
    ("torchrun 1 --hold", "rank 1 of 2 has formed a process group of 1 process without the other ranks"),
    *with_all(("spawn-all", None))])
def test_process_groups_below_srun_have_all_ranks(launches: Launches, words: str, cause: str | None) -> None:
    done = launches.slurm.run(["salloc", "-N2", "-n2", "sh", "-c", launches.line("", GROUPS, *words.split())])
    assert (done.status, cause in done.output if cause else re.findall(r"group of (\d)", done.output)) == (
        (1, True) if cause else (0, ["4"] * 4)), done.output


@pytest.mark.parametrize(("command", "expected"), [
    ("salloc -N2 --gres=gpu:2 sh -c", "node1 node1 node2 node2"),  # from the login host
    ("srun -N1 -n1 --gres=gpu:2 sh -c", "node1 node1"),  # a shell that is a step itself gives its resources
    *with_all(("salloc -N2 -n4 --ntasks-per-node=2 srun --interactive -N1 -n1 sh -c", "node1 node1 node2 node2"))])
def test_a_shell_in_an_allocation_starts_ranks(launches: Launches, command: str, expected: str) -> None:
    done = launches.slurm.run([*command.split(), launches.rank("")])
    assert_met(done, expected, "slurm")
    assert done.output.count("notes ()") == len(expected.split()), done.output


@pytest.mark.matrix
def test_ranks_start_in_an_allocation_that_is_held_elsewhere(launches: Launches) -> None:
    """As by salloc --no-shell, beside another step, which holds all cores and GPUs."""
    slurm = launches.slurm
    held = slurm.run(["salloc", "--no-shell", "-N2", "--ntasks-per-node=1", "--gpus-per-node=2"]).output
    [job_id] = re.findall("Granted job allocation ([0-9]+)", held)
    inside = launches.rank("").replace("launch.py ", f"launch.py --jobid {job_id} ")
    other = slurm.start(["srun", f"--jobid={job_id}", "--gpus-per-node=2", "sh", "-c", "echo started; exec sleep 60"])
    try:
        wait_until(lambda: f"{job_id}.0" in slurm.run(["squeue", "--steps", "--noheader"]).output, "step")
        assert_met(slurm.run(["sh", "-c", inside]), "node1 node1 node2 node2", "slurm")
        done = slurm.run(["env", f"SLURM_JOB_ID={job_id}", "sh", "-c", launches.rank("")])
        assert done.status == 2 and f"give ddpkit launch --jobid {job_id}" in done.output
    finally:
        slurm.run(["scancel", job_id])
        other.wait(60)
    done = slurm.run(["sh", "-c", inside])
    assert done.status == 2 and f"Slurm job {job_id} is CANCELLED. Expected a running job" in done.output


@pytest.mark.parametrize(("fault", "code", "cause"), [
    ("kill:1", "137:0", "rank 1 on node1 was ended by SIGKILL"), *with_all(
        ("exit=7:2", "7:0", "rank 2 on node2 ended with exit status 7"))])
def test_the_job_ends_with_the_status_of_the_first_rank_that_failed_and_names_it(
        launches: Launches, fault: str, code: str, cause: str) -> None:
    job = launches.submit("-N2 -n3", launches.rank("", "--wait", "--fault", fault))
    assert launches.slurm.wait(job, 60)["ExitCode"] == code, launches.slurm.output(job)
    own = [line for line in launches.slurm.output(job).splitlines() if line.startswith("ddpkit launch: ")]
    assert cause in own[-1] and not any("srun was" in line for line in own), own


@pytest.mark.parametrize(("by", "cancel", "expected", "code"), [
    ("", ["--batch --signal=USR1", "--batch --signal=TERM"], ["SIGUSR1", "SIGTERM"], "5:0"),
    ("", [""], ["SIGTERM"], None), *with_all(  # the end of the job
        ("torchrun", ["--batch --signal=USR1", "--batch --signal=TERM"], ["SIGUSR1", "SIGTERM"], "1:0"))])
def test_stops_reach_every_rank_once(launches: Launches, by: str, cancel: list[str], expected: list[str],
                                     code: str | None) -> None:
    job = launches.submit("-N2 -n3", launches.rank(by, "--wait"))
    notes = [launches.folder / f"{rank}.signals" for rank in range(3)]
    wait_until(lambda: all((launches.folder / str(rank)).exists() for rank in range(3)), "all ranks", seconds=60)
    for words, name in zip(cancel, expected, strict=True):
        launches.slurm.run(["scancel", *words.split(), job])
        wait_until(lambda n=name: all(n in note.read_text() for note in notes), name)  # type: ignore[misc]
    ended = launches.slurm.wait(job, 60)
    got = [note.read_text().split() for note in notes]
    # When one worker has left, torchrun asks the other one of the host to end, once more.
    assert [each[:2] if by else each for each in got] == [expected] * 3, launches.slurm.output(job)
    assert code in (None, ended["ExitCode"])


@pytest.mark.matrix
def test_a_host_that_is_cut_off_is_left_before_slurm_notices(need: Callable[[str], Path]) -> None:
    """srun waits for it until Slurm takes it for down, by default after 300 s."""
    need("hosts")
    need("slurm")
    with SlurmCluster(2, slurmd_timeout=300, subnet="10.79.8") as slurm:
        launches = Launches(slurm, slurm.work, need)
        script = slurm.work / "trains.py"
        script.write_text(TRAINS_FOR_EVER)
        bad = slurm.work / "bad-hosts.txt"
        line = f"env DDPKIT_EXCLUDE_FILE={bad} {launches.line('srun', str(script), str(slurm.work))}"
        job = launches.submit("-N2 -n2 --ntasks-per-node=1", line)
        notes = [slurm.work / str(rank) for rank in range(2)]
        wait_until(lambda: all(note.exists() for note in notes), "all ranks", seconds=60)
        pids = [int(note.read_text()) for note in notes]
        slurm.set_link("node2", "down")
        wait_until(lambda: not any(map(process.start_time, pids)), "the end of the ranks on both hosts", seconds=60)
        slurm.wait_for(job, {"COMPLETING"}, 60)  # Slurm waits for the other host
        last = slurm.output(job).splitlines()[-1]
        assert re.match(r"ddpkit launch: rank 1 on node2 .*its network is cut", last), last
        assert [entry.host for entry in exclude_file.read(bad)] == ["node2"]
        assert slurm.run(["srun", "-w", "node1", "hostname"]).output.splitlines()[-1] == "node1"


# One rank asks for a stop; after it rank 1 leaves in order, or with an error.
STOPS = f"""\
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.faults import quick_imports
from utils import setup_distributed
from utils.preemption import StopSignal
with setup_distributed("gloo") as dist, StopSignal(dist) as stop:
    quick_imports.done()
    if dist.rank == 1:
        stop.request("a test")
    while not stop.should_stop():
        time.sleep(0.01)
    if sys.argv[1] == "fails" and dist.rank == 1:
        sys.exit(9)
sys.exit(stop.exit_status)
"""


@pytest.mark.parametrize("by", ["srun", *with_all("openmpi5")])
def test_a_saved_run_is_distinguished_from_a_failed_one(launches: Launches, by: str) -> None:
    script = launches.folder / "stops.py"
    script.write_text(STOPS)
    # Side by side
    saves, fails = (launches.submit("-N2 -n2", launches.line(by, str(script), what)) for what in ("saves", "fails"))
    assert launches.slurm.wait(saves)["ExitCode"] == "75:0", launches.slurm.output(saves)
    lines = [line for line in launches.slurm.output(saves).splitlines() if line.startswith("ddpkit launch: ")]
    assert "all ranks have saved" in lines[-1] and not any("ended" in line for line in lines), lines
    assert launches.slurm.wait(fails)["ExitCode"] not in ("0:0", "75:0"), launches.slurm.output(fails)
    assert "all ranks have saved" not in launches.slurm.output(fails)


WATCHED = """
import os, sys, time, torch, torch.distributed as td
os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"], MASTER_ADDR="node1",
                  LOCAL_RANK=os.environ["SLURM_LOCALID"], MASTER_PORT="29511")
td.init_process_group("gloo")
rank = td.get_rank()
for step in range(3):
    td.all_reduce(torch.ones(1))
    time.sleep(1)
if rank == 1 and sys.argv[1] == "raise":
    raise ValueError("bad sample 17")
if rank == 1 and sys.argv[1] == "hang":
    time.sleep(600)
td.all_reduce(torch.ones(1))
td.destroy_process_group()
"""


@pytest.mark.parametrize(("fault", "status", "line"), [
    *with_all(("none", 0, r"ddpkit: 2 ranks on 2 hosts are watched, backend gloo"),
              ("raise", 1, r"rank 1 on node2 failed: ValueError: bad sample 17")),
    ("hang", 1, r"rank 1 on node2 \(pid \d+\) did not enter collective 4, in which rank 0 waits. It is at .*, line 14"),
])
def test_srun_starts_ranks_that_are_watched(slurm: SlurmCluster, tmp_path: Path, fault: str, status: int,
                                            line: str) -> None:
    (tmp_path / "train.py").write_text(WATCHED)
    done = slurm.run(["srun", "-N2", "--ntasks-per-node", "1", "--time", "3", sys.executable, str(ROOT / "utils"),
                      "watch", "--hang-timeout", "6", sys.executable, str(tmp_path / "train.py"), fault])
    assert done.status == status and re.search(line, done.output), done.output

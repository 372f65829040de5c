"""scripts/launch.py in jobs of a real Slurm: which ranks start where, on which GPUs, and how they are stopped."""
from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import MPIS, RANK_PROGRAM, ROOT

pytest_plugins = ["tests.cluster.slurm_fixture"]

LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]


@dataclass
class Launches:
    """Jobs that run launch.py with the rank program, which writes notes into a folder."""

    slurm: SlurmCluster
    folder: Path

    def words(self, options: str, *what: str) -> str:
        rank = [str(RANK_PROGRAM), "--notes", str(self.folder), *what]
        return f"{shlex.join(LAUNCH)} {options} {shlex.join(rank)}"

    def submit(self, request: str, command: str) -> str:
        return self.slurm.sbatch(*request.split(), script=f"#!/bin/bash\nexec {command}\n")

    def ranks(self, request: str, options: str = "", seconds: float = 120) -> list[str]:
        """Submit and wait; "rank local_rank/local_size host launcher" of each rank, in order."""
        job = self.submit(request, self.words(options))
        ended = self.slurm.wait(job, seconds)
        output = self.slurm.output(job)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
        return ranks(output)


def ranks(output: str) -> list[str]:
    found = re.findall(r"rank (\d+) of \d+, local (\d+) of (\d+), on (\w+), by (\S+), GPU \S+, notes \(\)", output)
    return [f"{rank} {local}/{size} {host} {launcher}"
            for rank, local, size, host, launcher in sorted(found, key=lambda one: int(one[0]))]


@pytest.fixture
def launches(slurm: SlurmCluster) -> Iterator[Launches]:
    folder = slurm.folder / "launches"
    folder.mkdir()
    yield Launches(slurm, folder)
    shutil.rmtree(folder)


TWO_BY_TWO = ["0 0/2 node1", "1 1/2 node1", "2 0/2 node2", "3 1/2 node2"]


@pytest.mark.parametrize(("request_", "expected"), [
    ("-N2 --exclusive", TWO_BY_TWO),  # one rank for each GPU
    ("-N2 --gpus-per-node=2", TWO_BY_TWO),
    ("-n4 --gpus-per-task=1", TWO_BY_TWO),
    ("-N2 -n3 --gres=gpu:2", ["0 0/2 node1", "1 1/2 node1", "2 0/1 node2"]),
    ("-N2 -n4 --ntasks-per-node=2 -m cyclic", ["0 0/2 node1", "1 0/2 node2", "2 1/2 node1", "3 1/2 node2"]),
    ("-N1 -n1 --gpus-per-node=2", ["0 0/2 node1", "1 1/2 node1"]),
    ("-N2", ["0 0/1 node1", "1 0/1 node2"])])
def test_ranks_are_those_asked_for_or_one_for_each_gpu(launches: Launches, request_: str, expected: list[str]) -> None:
    assert launches.ranks(request_) == [f"{one} slurm" for one in expected]


@pytest.mark.parametrize("request_", ["-N2 --exclusive", "-N2 --gres=gpu:2"])
def test_ranks_see_the_gpus_of_their_node(launches: Launches, request_: str) -> None:
    command = ["sh", "-c", "echo gpus $CUDA_VISIBLE_DEVICES"]
    for options in ([], ["--torchrun"]):
        job = launches.submit(request_, shlex.join([*LAUNCH, *options, *command]))
        launches.slurm.wait(job)
        output = launches.slurm.output(job)
        assert re.findall(r"^gpus .*$", output, re.MULTILINE) == ["gpus 0,1"] * 4, output


def test_components_of_a_heterogeneous_job_are_one_launch(launches: Launches) -> None:
    done = launches.slurm.run(["salloc", "-n1", ":", "-n2", "sh", "-c", launches.words("")])
    assert done.status == 0 and len(ranks(done.output)) == 3, done.output


def test_uneven_gpus_give_uneven_ranks(launches: Launches) -> None:
    command = launches.words("--launcher srun")
    done = launches.slurm.run(["salloc", "-w", "node1,node2", "-N2", "-n3", "--gres=gpu:2", "sh", "-c",
                               f"unset SLURM_NTASKS; {command}"])
    assert [one.split()[2] for one in ranks(done.output)] == ["node1", "node1", "node2"], done.output


@pytest.mark.parametrize("restarts", ["", "--max-restarts 1"])
def test_one_torchrun_agent_a_node(launches: Launches, restarts: str) -> None:
    assert launches.ranks("-N2 -n3 --gres=gpu:2", f"--torchrun {restarts}") == [
        "0 0/2 node1 torchrun", "1 1/2 node1 torchrun", "2 0/1 node2 torchrun"]


@pytest.mark.parametrize("name", list(MPIS))
def test_every_mpiexec_starts_the_ranks_of_a_job(launches: Launches, name: str, need: Callable[[str], Path]) -> None:
    needed, launcher = MPIS[name]
    assert launches.ranks("-N2 -n3", f"--launcher {need(needed)}") == [
        f"{one} {launcher}" for one in ("0 0/2 node1", "1 1/2 node1", "2 0/1 node2")]


# Interactive ----------------------------------------------------------------------------------------------------------

def test_from_the_login_host_salloc_is_enough(launches: Launches) -> None:
    done = launches.slurm.run(["salloc", "-N2", "--gres=gpu:2", "sh", "-c", launches.words("")])
    assert ranks(done.output) == [f"{one} slurm" for one in TWO_BY_TWO], done.output


def test_a_shell_that_is_a_step_itself_gives_its_resources(launches: Launches) -> None:
    done = launches.slurm.run(["srun", "-N1", "-n1", "--gres=gpu:2", "sh", "-c", launches.words("")])
    assert ranks(done.output) == ["0 0/2 node1 slurm", "1 1/2 node1 slurm"], done.output


def test_the_shell_of_salloc_on_a_node_uses_all_nodes(launches: Launches) -> None:
    done = launches.slurm.run(["salloc", "-N2", "-n4", "--ntasks-per-node=2", "srun", "--interactive", "-N1", "-n1",
                               "sh", "-c", launches.words("")])
    assert ranks(done.output) == [f"{one} slurm" for one in TWO_BY_TWO], done.output


def test_launch_py_under_srun_is_refused(launches: Launches) -> None:
    done = launches.slurm.run(["srun", "-n2", "sh", "-c", launches.words("")])
    assert done.status == 2 and "launch.py itself was started as rank 0 of 2 by slurm" in done.output


# Ends -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("fault", "code", "says"), [
    ("exit=7:2", "7:0", "rank 2 on node2 ended with exit status 7"),
    ("kill:1", "137:0", "rank 1 on node1 was ended by SIGKILL")])
def test_the_job_ends_with_the_status_of_the_first_rank_that_failed_and_names_it(
        launches: Launches, fault: str, code: str, says: str) -> None:
    job = launches.submit("-N2 -n3", launches.words("", "--wait", "--fault", fault))
    assert launches.slurm.wait(job, 30)["ExitCode"] == code, launches.slurm.output(job)
    own = [line for line in launches.slurm.output(job).splitlines() if line.startswith("launch.py: ")]
    assert says in own[-1] and not any("srun was" in line for line in own), own


def test_tasks_that_are_not_those_of_the_plan_end_the_launch(launches: Launches) -> None:
    """An option that only srun reads starts other ranks than launch.py has announced."""
    srun = launches.folder / "srun"
    srun.write_text('#!/bin/sh\nunset SLURM_NTASKS SLURM_TASKS_PER_NODE\n'
                    f'exec {launches.slurm.program("srun")} -N2 -n2 --ntasks-per-node=1 "$@"\n')
    srun.chmod(0o755)
    command = f"env PATH={launches.folder}:$PATH {launches.words('')}"
    job = launches.slurm.sbatch("-N2", "-n4", "--ntasks-per-node=2", script=f"#!/bin/bash\nexec {command}\n")
    ended = launches.slurm.wait(job, 60)
    output = launches.slurm.output(job)
    assert ended["ExitCode"] == "1:0" and not list(launches.folder.glob("[0-9]")), output
    assert "srun has started 2 ranks, one of them on node" in output, output
    assert "Expected 4 ranks (2 on node1, 2 on node2)" in output, output


@pytest.mark.parametrize("options", ["", "--torchrun"])
def test_stops_of_the_batch_script_reach_every_rank_once(launches: Launches, options: str) -> None:
    job = launches.submit("-N2 -n3", launches.words(options, "--wait"))
    notes = [launches.folder / f"{rank}.signals" for rank in range(3)]
    wait_until(lambda: all((launches.folder / str(rank)).exists() for rank in range(3)), "all ranks")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        launches.slurm.run(["scancel", "--batch", f"--signal={number.name[3:]}", job])
        wait_until(lambda n=number: all(n.name in note.read_text() for note in notes), number.name)  # type: ignore[misc]
    ended = launches.slurm.wait(job, 30)
    got = [note.read_text().split() for note in notes]
    # When one worker has left, torchrun asks the other one of the host to end, once more.
    assert [each[:2] if options else each for each in got] == [["SIGUSR1", "SIGTERM"]] * 3, launches.slurm.output(job)
    assert ended["ExitCode"] == ("1:0" if options else "5:0")


# One rank asks for a stop; after it rank 1 leaves in order, or with an error.
STOPS = f"""\
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils import setup_distributed
from utils.preemption import StopSignal
with setup_distributed("gloo") as dist, StopSignal(dist) as stop:
    if dist.rank == 1:
        stop.request("a test")
    while not stop.should_stop():
        time.sleep(0.01)
    if sys.argv[1] == "fails" and dist.rank == 1:
        sys.exit(9)
sys.exit(stop.exit_status)
"""


@pytest.mark.parametrize("by", ["srun", "torchrun", "mpich5", "intel", "openmpi5"])
def test_a_saved_run_is_distinguished_from_a_failed_one(launches: Launches, by: str,
                                                           need: Callable[[str], Path]) -> None:
    script = launches.folder / "stops.py"
    script.write_text(STOPS)
    options = {"srun": "--launcher srun", "torchrun": "--torchrun"}.get(by) or (
        f"--launcher {shlex.quote(str(need(MPIS[by][0])))}")
    command = f"{shlex.join(LAUNCH)} {options} {shlex.quote(str(script))}"
    saves, fails = (launches.submit("-N2 -n2", f"{command} {what}") for what in ("saves", "fails"))  # side by side
    assert launches.slurm.wait(saves)["ExitCode"] == "75:0", launches.slurm.output(saves)
    lines = [line for line in launches.slurm.output(saves).splitlines() if line.startswith("launch.py: ")]
    assert "all ranks have saved" in lines[-1] and not any("ended" in line for line in lines), lines
    assert launches.slurm.wait(fails)["ExitCode"] not in ("0:0", "75:0"), launches.slurm.output(fails)
    assert "all ranks have saved" not in launches.slurm.output(fails)


def test_the_end_of_the_job_reaches_every_rank_once(launches: Launches) -> None:
    job = launches.submit("-N2 -n3", launches.words("", "--wait"))
    wait_until(lambda: all((launches.folder / str(rank)).exists() for rank in range(3)), "all ranks")
    launches.slurm.run(["scancel", job])
    launches.slurm.wait(job, 30)
    notes = [(launches.folder / f"{rank}.signals").read_text().split() for rank in range(3)]
    assert notes == [["SIGTERM"]] * 3, launches.slurm.output(job)


@pytest.mark.parametrize("name", ["mpich5", "openmpi5", "openmpi4"])
def test_ranks_of_an_mpiexec_have_slurm_variables_of_a_task(launches: Launches, name: str,
                                                            need: Callable[[str], Path]) -> None:
    """Not those of the mpiexec's daemons, of which there are two."""
    command = ["sh", "-c", "echo task $RANK: $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID of $SLURM_NTASKS, "
                           "$SLURM_NTASKS_PER_NODE each on $SLURM_NNODES"]
    launch = [*LAUNCH, "--launcher", str(need(MPIS[name][0]))]
    job = launches.submit("-N2 -n4 --ntasks-per-node=2", shlex.join([*launch, *command]))
    launches.slurm.wait(job)
    output = launches.slurm.output(job)
    assert sorted(re.findall(r"^task .*", output, re.MULTILINE)) == [
        f"task {rank}: {rank} {rank % 2} {rank // 2} of 4, 2 each on 2" for rank in range(4)], output


# Code that knows the variables of torchrun and not the kit ------------------------------------------------------------

@pytest.mark.parametrize("command", ["launch.py", "jobs/slurm.sh", "jobs/slurm.sh --torchrun"])
@pytest.mark.parametrize(("request_", "expected"), [
    ("-N2 -n4 --ntasks-per-node=2", ["0/2 node1 0", "1/2 node1 0", "0/2 node2 1", "1/2 node2 1"]),
    ("-N2 -n3 --gres=gpu:2", ["0/2 node1 0", "1/2 node1 0", "0/1 node2 1"]),
    ("-N2 -n4 --ntasks-per-node=2 -m cyclic", ["0/2 node1 0", "0/2 node2 1", "1/2 node1 0", "1/2 node2 1"])])
def test_code_written_for_torchrun_is_one_training(launches: Launches, command: str, request_: str,
                                                   expected: list[str]) -> None:
    script = str(ROOT / "tests/launch/public_code.py")
    if command == "launch.py":
        job = launches.submit(request_, shlex.join([*LAUNCH, script]))
    else:
        job = launches.slurm.sbatch(*request_.split(), *f"{ROOT}/{command}".split(), script)
    ended = launches.slurm.wait(job)
    output = launches.slurm.output(job)
    assert ended["ExitCode"] == "0:0", output
    found = re.findall(r"public rank (\d+) of (\d+), (\d of \d) on (\w+), node (\d)", output)
    if command.endswith("--torchrun") and "cyclic" in request_:
        expected = ["0/2 node1 0", "1/2 node1 0", "0/2 node2 1", "1/2 node2 1"]
    assert [f"{local.replace(' of ', '/')} {host} {node}" for _, _, local, host, node in sorted(found)] == expected

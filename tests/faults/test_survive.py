"""Trainings end with the same bits, however they were interrupted; a full disk costs a save, not the run."""
from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, killed_at_end, wait_until
from tests.faults.programs import ENVIRONMENT, LAUNCH, ROOT, SURVIVE, done_line, run_ranks
from tests.matrix import with_all

SLOWLY = [*SURVIVE, "--step-seconds", "0.05"]


@contextlib.contextmanager
def started(output: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                                   start_new_session=True)
    with killed_at_end(process):
        yield process


def wait_for_progress(folder: Path) -> None:
    before = set(folder.glob("step-*"))
    wait_until(lambda: bool(set(folder.glob("step-*")) - before), "a checkpoint", seconds=100)


SHARDED = str(ROOT / "tests" / "faults" / "sharded.py")


@pytest.mark.parametrize("methods", [["fork", "spawn"], *with_all(["forkserver"])], ids="-".join)
def test_all_ranks_save_when_all_processes_are_terminated(methods: list[str]) -> None:
    """terminations.py does it as often as it is asked to, and with more workers."""
    stops = str(len(methods))
    program = [str(ROOT / "tests" / "faults" / "terminations.py"), "--stops", stops, "--workers", "2", "--methods"]
    ended = subprocess.run([sys.executable, *program, *methods], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, timeout=400)
    assert ended.returncode == 0 and f"{stops} of {stops} stops right" in ended.stdout, ended.stdout


SHARDED_KILLS = ["--kills", "2", "--ranks", "4", SHARDED]
COMPILED_KILLS = ["--kills", "1", "--preload", "torch._inductor.compile_fx", *SURVIVE, "--epochs", "1", "--compile"]


@pytest.mark.parametrize("words", [
    ["--kills", "2", "--ranks", "3", *SURVIVE, "--epochs", "1"],  # the sum of two is the same in either order
    SHARDED_KILLS, ["--kills", "2", "--log", str(ROOT / "examples" / "03_text_lm.py"), "--steps", "60"],
    *with_all([*COMPILED_KILLS, "outside", "--compiler", "aot_eager"], [*SHARDED_KILLS, "--zero"],
              [*COMPILED_KILLS, "inside", "--compiler", "inductor"]),
], ids=["plain", "sharded", "log", "compiled outside", "zero", "compiled inside"])
def test_ranks_killed_at_random_moments(words: list[str], need: Callable[[str], Path]) -> None:
    """kills.py does it as often as it is asked to."""
    if "inductor" in words:
        need("compiler")
    kills = [sys.executable, str(ROOT / "tests" / "faults" / "kills.py"), *words]
    environment = {**ENVIRONMENT, "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiles in the ranks, which are killed
                   "TORCHINDUCTOR_VEC_ISA_OK": "0"}  # without programs that try the vector instructions
    done = subprocess.run(kills, env=environment, capture_output=True, text=True, timeout=400)
    expected = f"\nthe same after {words[1]} of {words[1]} kills\n"
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
    assert ("60 steps, each once" in done.stdout) == ("--log" in words), done.stdout


def worker_of(agent: subprocess.Popen[str]) -> int | None:
    """Process id of the worker of an agent of torchrun, if there is one."""
    found = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()
    return int(found[-1]) if found else None


def train_under_two_agents(folder: Path, hosts: Hosts | None) -> str:
    """Continue a training under agents on two hosts, or on this one, of which a worker is killed; return its output."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    outputs = [folder.with_name(f"agent {node}") for node in range(2)]
    with contextlib.ExitStack() as stack:
        agents = []
        for node in range(2):
            enter = hosts.enter(hosts.hosts[node]) if hosts else []
            rendezvous = (["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address[hosts.hosts[0]]}:{port}"] if hosts
                          else [f"--node-rank={node}", "--master-addr=localhost", f"--master-port={port}"])
            agents.append(stack.enter_context(started(
                outputs[node], *enter, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                "--nproc-per-node=1", "--max-restarts=9", *rendezvous, *SLOWLY, "--folder", str(folder))))

        wait_for_progress(folder)
        victim = worker_of(agents[1 if hosts else random.randrange(2)])
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        if hosts:  # the same agent again: then the agents count different numbers of restarts
            wait_until(lambda: worker_of(agents[1]) not in (None, victim), "another worker", seconds=60)
            time.sleep(random.uniform(0, 4))
            if victim := worker_of(agents[1]):
                os.kill(victim, signal.SIGKILL)
        statuses = [agent.wait(200) for agent in agents]
    text = "".join(output.read_text() for output in outputs)
    assert statuses == [0, 0], text
    return text


@pytest.mark.matrix
def test_two_agents_on_one_host_recover_from_a_kill(tmp_path: Path, whole: str) -> None:
    text = train_under_two_agents(tmp_path / "checkpoints", None)
    assert "2 ranks on 1 host, started by torchrun" in text and "resuming after step" in text, text
    assert done_line(text) == whole


def test_each_launcher_resumes_what_another_one_began(
        tmp_path: Path, whole: str, need: Callable[[str], Path]) -> None:
    """mpiexec is killed, launch.py stops at a signal, and torchrun on two hosts starts killed ranks again."""
    need("hosts")
    output, folder = tmp_path / "output", tmp_path / "checkpoints"
    training = [*SLOWLY, "--folder", str(folder)]
    with started(output, str(need("mpich")), "-n", "2", sys.executable, *training) as process:
        wait_for_progress(folder)
        process.kill()
        ranks = ["pgrep", "-f", str(folder)]
        wait_until(lambda: subprocess.run(ranks, stdout=subprocess.DEVNULL).returncode == 1,
                   "the ranks to end with it", seconds=60)

    with started(output, *LAUNCH, *training) as process:
        wait_for_progress(folder)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(200) == 75, output.read_text()
    text = output.read_text()
    stopped = re.search(r"stopped at step (\d+)", text)
    assert "resuming after step" in text and stopped is not None, text

    with Hosts(2, prefix="e", subnet="10.78.7") as hosts:
        text = train_under_two_agents(folder, hosts)
    assert f"resuming after step {stopped[1]}" in text and text.count("resuming after step") > 1, text
    assert done_line(text) == whole


def test_losses_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """4, then 2, then 3 ranks, which stop in the middle of each of the two epochs of 48 steps."""
    def losses(folder: str, *runs: tuple[int, int]) -> dict[int, float]:
        output = run_ranks(tmp_path, SURVIVE[0], *(
            (ranks, [*SURVIVE[1:], "--no-dropout", "--folder", str(tmp_path / folder), "--stop-after", str(steps)])
            for ranks, steps in runs))
        (tmp_path / "output").unlink()
        assert "done after 96 steps" in output and output.count("resuming") == len(runs) - 1, output
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/96: loss ([\d.]+)", output)}

    expected = losses("whole", (2, 0))
    assert list(expected) == list(range(10, 97, 10))
    assert losses("elastic", (4, 15), (2, 50), (3, 0)) == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.fixture
def small_disk(tmp_path: Path, need: Callable[[str], Path]) -> Iterator[Path]:
    """A file system of 32 MiB."""
    need("hosts")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_a_save_and_a_stop_waits_for_space(small_disk: Path, tmp_path: Path) -> None:
    output, ballast = tmp_path / "output", small_disk / "ballast"
    training = [str(ROOT / "examples" / "03_text_lm.py"), "--backend", "gloo", "--steps", "100000", "--layers", "1",
                "--save-every", "5", "--checkpoints", str(small_disk)]

    def wait_for_failure() -> None:
        def has_failed() -> bool:
            with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
                file.write(bytes(shutil.disk_usage(small_disk).free))
            return output.read_text().count("No space left") > before or process.poll() is not None

        before = output.read_text().count("No space left")
        wait_until(has_failed, "a failed save", seconds=200)

    with started(output, *LAUNCH, *training) as process:
        wait_until(lambda: any(small_disk.glob("step-*")) or process.poll() is not None, "a save", seconds=100)
        wait_for_failure()
        process.send_signal(signal.SIGUSR1)
        wait_for_failure()
        ballast.unlink()
        process.wait(200)
    text = output.read_text()
    stopped = re.search(r"stopped after step (\d+)", text)
    assert process.returncode == 75 and stopped is not None, text
    assert max(path.name for path in small_disk.glob("step-*")) == f"step-{int(stopped[1]):09d}"
    assert not list(small_disk.glob(".saving-*"))

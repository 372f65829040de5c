"""examples/05_survive.py ends with the same bits, however it was interrupted."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until

ROOT = Path(__file__).resolve().parents[2]
SURVIVE = str(ROOT / "examples" / "05_survive.py")
SHORT = ["--epochs", "2", "--save-every", "5"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of the run that was never touched, on two ranks."""
    return done(torchrun(tmp_path_factory.mktemp("whole")))


def torchrun(folder: Path, *options: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), SURVIVE,
               "--folder", str(folder), *SHORT, *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                           timeout=200)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def done(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("done"))


def test_killed_at_random_moments_it_ends_with_the_same_bits() -> None:
    """Three ranks: the sum of two is the same in either order."""
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", "5", "--ranks", "3", SURVIVE,
               *SHORT, "--epochs", "1"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                           timeout=280)
    assert ended.returncode == 0, ended.stdout
    assert "all the same" in ended.stdout


def test_a_rank_that_torchrun_starts_again_goes_on_with_the_same_bits(tmp_path: Path, whole: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "2", SURVIVE, "--folder", str(tmp_path), *SHORT, "--step-seconds", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                               start_new_session=True)
    with killed_at_end(process):
        wait_until(lambda: len(list(tmp_path.glob("step-*"))) > 1, "two checkpoints", seconds=100)
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "resuming after step" in output
    assert done(output) == whole


def test_a_killed_mpiexec_is_resumed_under_torchrun_with_the_same_bits(tmp_path: Path, whole: str,
                                                                        need: Callable[[str], Path]) -> None:
    command = [str(need("mpich")), "-n", "2", sys.executable, SURVIVE, "--folder", str(tmp_path), *SHORT,
               "--step-seconds", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=ENVIRONMENT, text=True,
                               start_new_session=True)
    with killed_at_end(process):
        wait_until(lambda: len(list(tmp_path.glob("step-*"))) > 1, "two checkpoints", seconds=100)
        process.kill()
        wait_until(lambda: subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.DEVNULL).returncode == 1,
                   "the ranks to end with it", seconds=60)
    resumed = torchrun(tmp_path)
    assert "resuming after step" in resumed
    assert done(resumed) == whole


def test_after_a_stop_signal_it_has_saved_says_so_by_its_status_and_goes_on(tmp_path: Path, whole: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--by", "local", "--ranks-per-node", "2", SURVIVE,
               "--folder", str(tmp_path), *SHORT, "--step-seconds", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                               start_new_session=True)
    with killed_at_end(process):
        wait_until(lambda: bool(list(tmp_path.glob("step-*"))), "a checkpoint", seconds=100)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 75, output
    stopped = re.search(r"stopped at step (\d+)", output)
    assert stopped is not None, output
    resumed = torchrun(tmp_path)
    assert f"resuming after step {stopped[1]}" in resumed
    assert done(resumed) == whole


def test_another_number_of_ranks_goes_on_with_the_same_global_batch(tmp_path: Path) -> None:
    for ranks, epochs in ((4, "1"), (3, "2")):
        output = torchrun(tmp_path, "--epochs", epochs, ranks=ranks)
        assert "96 samples per step" in output
    assert "resuming after step 48" in output and "done after 96 steps" in output

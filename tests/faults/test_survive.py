"""examples/05_survive.py ends with the same bits, however it was interrupted."""
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "faults"
SURVIVE = [str(FAULTS / "survive.py"), "--epochs", "2", "--save-every", "5"]
SLOWLY = ["--step-seconds", "0.1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--launcher", "local",
          "--ntasks-per-node", "2"]


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    with killed_at_end(process):
        yield process


def output_of(process: subprocess.Popen[str], status: int = 0) -> str:
    output = process.communicate(timeout=280)[0]
    assert process.returncode == status, output
    return output


def torchrun(folder: Path, *options: str, ranks: int = 2) -> str:
    with started(*TORCHRUN, str(ranks), *SURVIVE, "--folder", str(folder), *options) as process:
        return output_of(process)


def last_line(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("done"))


def wait_for_checkpoints(folder: Path, count: int) -> None:
    wait_until(lambda: len(list(folder.glob("step-*"))) >= count, "checkpoints", seconds=100)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of an uninterrupted run on two ranks."""
    return last_line(torchrun(tmp_path_factory.mktemp("whole")))


def test_ranks_killed_at_random_moments() -> None:
    """Three ranks: the sum of two is the same in either order."""
    kills = [str(FAULTS / "kills.py"), "--kills", "5", "--ranks", "3"]
    with started(sys.executable, *kills, *SURVIVE, "--epochs", "1") as process:
        assert "all the same" in output_of(process)


def test_a_rank_restarted_by_torchrun(tmp_path: Path, expected: str) -> None:
    with started(*TORCHRUN, "2", "--max-restarts", "2", *SURVIVE, "--folder", str(tmp_path),
                 *SLOWLY) as process:
        wait_for_checkpoints(tmp_path, 2)
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
        output = output_of(process)
    assert "resuming after step" in output
    assert last_line(output) == expected


def test_a_killed_mpiexec_resumed_under_torchrun(
        tmp_path: Path, expected: str, need: Callable[[str], Path]) -> None:
    with started(str(need("mpich")), "-n", "2", sys.executable, *SURVIVE, "--folder", str(tmp_path),
                 *SLOWLY) as process:
        wait_for_checkpoints(tmp_path, 2)
        process.kill()
        ranks = ["pgrep", "-f", str(tmp_path)]
        wait_until(lambda: subprocess.run(ranks, stdout=subprocess.DEVNULL).returncode == 1,
                   "the ranks to end with it", seconds=60)
    resumed = torchrun(tmp_path)
    assert "resuming after step" in resumed
    assert last_line(resumed) == expected


def test_a_stop_signal_under_launch_py(tmp_path: Path, expected: str) -> None:
    with started(*LAUNCH, *SURVIVE, "--folder", str(tmp_path), *SLOWLY) as process:
        wait_for_checkpoints(tmp_path, 1)
        process.send_signal(signal.SIGUSR1)
        output = output_of(process, status=75)
    stopped = re.search(r"stopped at step (\d+)", output)
    assert stopped is not None, output
    resumed = torchrun(tmp_path)
    assert f"resuming after step {stopped[1]}" in resumed
    assert last_line(resumed) == expected


def test_another_number_of_ranks_keeps_the_global_batch(tmp_path: Path) -> None:
    torchrun(tmp_path, "--epochs", "1", ranks=4)
    output = torchrun(tmp_path, ranks=3)
    assert "resuming after step 48" in output and "done after 96 steps" in output

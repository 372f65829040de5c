"""Trainings end with the same bits, however they were interrupted; a full disk costs a save, not the run."""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.faults.programs import ENVIRONMENT, FAULTS, LAUNCH, ROOT, SURVIVE, done_line, run_ranks

SLOWLY = [*SURVIVE, "--step-seconds", "0.1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@contextlib.contextmanager
def started(output: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
                                   start_new_session=True)
    with killed_at_end(process):
        yield process


@pytest.mark.parametrize("words", [
    ["--kills", "2", "--after-save", "habits.py"], ["--kills", "2", "survive.py", *SURVIVE[1:], "--epochs", "1"]],
    ids=["habits", "survive"])
def test_ranks_killed_at_random_moments(words: list[str], tmp_path: Path) -> None:
    """Three ranks: the sum of two is the same in either order. kills.py does it as often as it is asked to."""
    words = [str(FAULTS / word) if word.endswith(".py") else word for word in words]
    with started(tmp_path / "output", sys.executable, str(FAULTS / "kills.py"), "--ranks", "3", *words) as process:
        process.wait(400)
    assert process.returncode == 0 and "all the same" in (tmp_path / "output").read_text()


def test_each_launcher_resumes_what_another_one_began(
        tmp_path: Path, whole: str, need: Callable[[str], Path]) -> None:
    """mpiexec is killed, launch.py stops at a signal, and torchrun starts a killed rank again."""
    output, folder = tmp_path / "output", tmp_path / "checkpoints"

    def wait_for_progress() -> None:
        before = set(folder.glob("step-*"))
        wait_until(lambda: bool(set(folder.glob("step-*")) - before), "a checkpoint", seconds=100)

    training = [*SLOWLY, "--folder", str(folder)]
    with started(output, str(need("mpich")), "-n", "2", sys.executable, *training) as process:
        wait_for_progress()
        wait_for_progress()
        process.kill()
        ranks = ["pgrep", "-f", str(folder)]
        wait_until(lambda: subprocess.run(ranks, stdout=subprocess.DEVNULL).returncode == 1,
                   "the ranks to end with it", seconds=60)

    with started(output, *LAUNCH, *training) as process:
        wait_for_progress()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(200) == 75, output.read_text()
    text = output.read_text()
    stopped = re.search(r"stopped at step (\d+)", text)
    assert "resuming after step" in text and stopped is not None, text

    with started(output, *TORCHRUN, "--max-restarts", "2", *training) as process:
        wait_for_progress()
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
        assert process.wait(200) == 0, output.read_text()
    text = output.read_text()
    assert f"resuming after step {stopped[1]}" in text and text.count("resuming after step") == 2, text
    assert done_line(text) == whole


def test_another_number_of_ranks_keeps_the_global_batch(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path / "checkpoints"), "--epochs"]
    output = run_ranks(tmp_path, SURVIVE[0], (4, [*arguments, "1"]), (3, [*arguments, "2"]))
    assert "resuming after step 48" in output and "done after 96 steps" in output


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


@pytest.mark.parametrize("example, options, still_full", [
    ("tests/faults/survive.py", [*SLOWLY[1:], "--epochs", "20", "--folder"], True),
    ("examples/03_text_lm.py", ["--save-every", "5", "--steps", "100000", "--layers", "1", "--log-every", "5",
                                "--checkpoints"], False)], ids=["survive", "text_lm"])
def test_a_full_disk_costs_a_save_and_a_stop_waits_for_space(
        example: str, options: list[str], still_full: bool, small_disk: Path, tmp_path: Path) -> None:
    output, ballast = tmp_path / "output", small_disk / "ballast"

    def wait_for_failure() -> None:
        def has_failed() -> bool:
            with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
                file.write(bytes(shutil.disk_usage(small_disk).free))
            return output.read_text().count("no space is left") > before or process.poll() is not None

        before = output.read_text().count("no space is left")
        wait_until(has_failed, "a failed save", seconds=200)

    with started(output, *LAUNCH, str(ROOT / example), "--backend", "gloo", *options, str(small_disk)) as process:
        wait_until(lambda: any(small_disk.glob("step-*")) or process.poll() is not None, "a save", seconds=100)
        wait_for_failure()
        if still_full:
            process.send_signal(signal.SIGUSR1)
            wait_for_failure()
        ballast.unlink()
        if not still_full:
            process.send_signal(signal.SIGUSR1)
        process.wait(200)
    text = output.read_text()
    stopped = re.search(r"stopped (?:at|after) step (\d+)", text)
    assert process.returncode == 75 and stopped is not None, text
    assert max(path.name for path in small_disk.glob("step-*")) == f"step-{int(stopped[1]):09d}"
    assert not list(small_disk.glob(".saving-*"))

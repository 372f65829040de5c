"""Trainings with all kinds of state resume with the same bits; a full disk costs a save, not the run."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from utils.checkpoint import list_steps

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "faults"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--launcher", "local",
          "--ntasks-per-node", "2", str(FAULTS / "full_disk.py")]
EXAMPLES = {
    "tests/faults/survive.py": ["--save-every", "5", "--epochs", "20", "--step-seconds", "0.05",
                                "--folder"],
    "examples/03_text_lm.py": ["--save-every", "5", "--steps", "100000", "--layers", "1",
                               "--log-every", "5", "--checkpoints"]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_training_ends_with_the_same_bits_on_all_ranks(ranks: int) -> None:
    """tests/faults/habits.py has the command for more kills and a larger state."""
    command = [sys.executable, str(FAULTS / "kills.py"), "--kills", "2", "--ranks", str(ranks),
               "--seed", str(ranks), "--after-save", str(FAULTS / "habits.py")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env=ENVIRONMENT, timeout=400)
    assert ended.returncode == 0, ended.stdout
    assert "all the same" in ended.stdout


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("full", [("2", "2"), ("2", "4")], ids=["one save", "three saves"])
def test_a_stop_saves_after_the_disk_was_full(
        example: str, full: tuple[str, str], tmp_path: Path) -> None:
    command = [*LAUNCH, *full, str(ROOT / example), "--backend", "gloo",
               *EXAMPLES[example], str(tmp_path)]
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT,
                                   start_new_session=True)
    with killed_at_end(process):
        wait_until(lambda: "no space is left" in output.read_text() or process.poll() is not None,
                   "the failed save", seconds=200)
        process.send_signal(signal.SIGUSR1)
        process.wait(200)
    text = output.read_text()
    assert process.returncode == 75, text
    stopped = re.search(r"stopped (?:at|after) step (\d+)", text)
    assert stopped is not None, text
    assert list_steps(tmp_path)[-1] == int(stopped[1])
    assert not list(tmp_path.glob(".saving-*"))

"""utils/checkpoint.py under SIGKILL: at any moment of a save there is a whole checkpoint, and the run goes on from it.

This file is also the program that makes the runs: it forks each one, so that torch is imported once.
"""
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from utils.checkpoint import Checkpointer

ROOT = Path(__file__).resolve().parents[2]
KILLS = 50


def run(folder: str, told: int) -> None:
    """Go on from the newest checkpoint, saving at each step; tells each step that is safe."""
    state = {f"x{number}": torch.zeros(20_000) for number in range(20)}
    with Checkpointer(folder, keep=2) as checkpoints:
        found = checkpoints.load_latest(state)
        step = found.step if found else 0
        while True:
            step += 1
            for tensor in state.values():
                tensor.fill_(step)
            checkpoints.save(step, state)
            checkpoints.wait()
            os.write(told, step.to_bytes(8, "little"))


def main(folder: str) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    steps: list[tuple[int, int]] = []  # the last one that was told to be safe, the one that was found
    safe = 0
    for _ in range(KILLS):
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(folder, tell)
            finally:
                os._exit(1)
        os.close(tell)
        safe = int.from_bytes(os.read(hear, 8), "little")  # it is in its loop
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while told := os.read(hear, 8):
            safe = int.from_bytes(told, "little")
        os.close(hear)
        state = {f"x{number}": torch.zeros(20_000) for number in range(20)}
        with Checkpointer(folder, keep=2) as checkpoints:
            found = checkpoints.load_latest(state)
        assert found is not None
        assert all(bool((tensor == found.step).all()) for tensor in state.values())
        steps.append((safe, found.step))
    print(json.dumps({"steps": steps, "left": sorted(os.listdir(folder))}))


def test_the_newest_checkpoint_that_was_safe_survives_sigkill_at_50_random_moments(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", __name__, tmp_path], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["steps"]) == KILLS
    assert all(found in (safe, safe + 1) for safe, found in seen["steps"])
    assert all(before[1] < after[0] for before, after in zip(seen["steps"], seen["steps"][1:], strict=False))
    assert [name for name in seen["left"] if not name.startswith("step-") or name.endswith(".damaged")] == []
    assert "damaged" not in done.stderr


if __name__ == "__main__":
    main(sys.argv[1])

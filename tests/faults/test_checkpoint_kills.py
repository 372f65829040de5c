"""utils/checkpoint under SIGKILL: there is an intact checkpoint at any moment, and the run continues.

This file is also the program that makes the runs: it forks each one, so torch is imported once.
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


def make_state() -> dict[str, torch.Tensor]:
    return {f"x{number}": torch.zeros(20_000) for number in range(20)}


def run(folder: str, reports: int) -> None:
    """Continue from the newest checkpoint and save each step; write safe steps to `reports`."""
    state = make_state()
    with Checkpointer(folder, keep=2) as checkpoints:
        found = checkpoints.load_latest(state)
        step = found.step if found else 0
        while True:
            step += 1
            for tensor in state.values():
                tensor.fill_(step)
            checkpoints.save(step, state)
            checkpoints.wait()
            os.write(reports, step.to_bytes(8, "little"))


def main(folder: str) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    steps: list[tuple[int, int]] = []  # the last step that was reported as safe, the step found
    for _ in range(KILLS):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(folder, writer)
            finally:
                os._exit(1)
        os.close(writer)
        safe = int.from_bytes(os.read(reader, 8), "little")  # the run is in its loop
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while report := os.read(reader, 8):
            safe = int.from_bytes(report, "little")
        os.close(reader)

        state = make_state()
        with Checkpointer(folder, keep=2) as checkpoints:
            found = checkpoints.load_latest(state)
        assert found is not None
        assert all(bool((tensor == found.step).all()) for tensor in state.values())
        steps.append((safe, found.step))
    print(json.dumps({"steps": steps, "names": sorted(os.listdir(folder))}))


def test_a_safe_checkpoint_survives_sigkill_at_any_moment(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", __name__, tmp_path], cwd=ROOT, timeout=200,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    steps = result["steps"]
    assert len(steps) == KILLS and all(found in (safe, safe + 1) for safe, found in steps)
    assert all(before[1] < after[0] for before, after in zip(steps, steps[1:], strict=False))
    assert all(name.startswith("step-") for name in result["names"])
    assert "damaged" not in done.stderr + " ".join(result["names"])


if __name__ == "__main__":
    main(sys.argv[1])

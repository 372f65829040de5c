"""A training that spends most of its time in evaluations, which take longer on some ranks.

Its arguments and its output are those of survive.py, as far as it has them.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.checkpoint import Checkpointer
from utils.log import get_logger
from utils.preemption import StopSignal, requeue

# isort: split
import torch

STEPS, EVALUATE_EVERY = 48, 5
log = get_logger(__name__)


def evaluate(rank: int, stop: StopSignal) -> None:
    for _ in range(10 + 10 * rank):
        if stop.requested:
            break
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_known_args()[0].folder

    with (setup_distributed("gloo") as dist, StopSignal(dist) as stop,
          Checkpointer(folder) as checkpoints):
        weights = torch.zeros(1000)
        found = checkpoints.load_latest({"weights": weights})
        step = found.step if found else 0
        log.info(f"resuming after step {step}" if found else "starting")
        while step < STEPS:
            weights += 1
            step += 1
            if step % EVALUATE_EVERY == 0:
                log.info(f"evaluating after step {step}")
                evaluate(dist.rank, stop)
                dist.barrier()
            if stop.should_stop():
                with stop.saving():
                    checkpoints.save(step, {"weights": weights})
                    checkpoints.wait()
                log.info(f"stopped at step {step}: {stop.reason}")
                break
        else:
            checkpoints.save(step, {"weights": weights})
            log.info(f"done after {step} steps; the sum of the weights is {weights.sum():.0f}")
    if stop.stopped and dist.is_main:
        requeue()
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())

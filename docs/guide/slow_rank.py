"""Train on two ranks, one of which has a slow loader, and measure the steps of each rank.

ddpkit launch -n 2 docs/guide/slow_rank.py
ddpkit plot steps.csv
"""

import time
from collections.abc import Iterator

import torch
from ddpkit import setup_distributed
from ddpkit.training.step_timer import StepTimer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(rank: int) -> Iterator[torch.Tensor]:
    """Yield 200 batches; those of rank 1 come late in the second half."""
    for step in range(200):
        if rank == 1 and step >= 100:
            time.sleep(0.01)
        yield torch.ones(32, 256)


if __name__ == "__main__":
    with setup_distributed("gloo") as job:
        ddp = DDP(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)))
        timer = StepTimer(job, every=20, file="steps.csv")
        for batch in timer.batches(batches(job.rank)):
            loss = ddp(batch).mean()
            with timer.exchange():
                loss.backward()

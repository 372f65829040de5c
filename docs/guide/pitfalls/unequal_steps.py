"""A rank with fewer steps leaves, and the others wait for it in an all-reduce."""

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show


def wrong(job: Distributed) -> None:
    ddp = DDP(nn.Linear(1, 1))
    for _ in range(4 + job.rank):  # rank 0 has four batches, rank 1 has five
        ddp(torch.ones(2, 1)).sum().backward()


def right(job: Distributed) -> None:
    ddp = DDP(nn.Linear(1, 1))
    steps = 0
    with Join([ddp]):  # rank 0 takes part in the last all-reduce, with gradients of zero
        for _ in range(4 + job.rank):
            ddp(torch.ones(2, 1)).sum().backward()
            steps += 1
    show(job, f"{steps} steps")


run(wrong=wrong, right=right)

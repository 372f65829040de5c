"""With one seed on all ranks, all ranks draw the same augmentation and the same dropout."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show


def draw() -> list[float]:
    return [round(number, 2) for number in torch.rand(3).tolist()]


def wrong(job: Distributed) -> None:
    torch.manual_seed(0)
    DDP(nn.Linear(1, 1))
    show(job, f"noise of the first batch {draw()}")


def right(job: Distributed) -> None:
    torch.manual_seed(0)
    DDP(nn.Linear(1, 1))  # one seed for the model: what DDP does not wrap is also the same
    torch.manual_seed(1000 + job.rank)  # then one for each rank
    show(job, f"noise of the first batch {draw()}")


run(wrong=wrong, right=right)

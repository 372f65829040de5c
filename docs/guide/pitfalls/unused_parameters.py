"""DDP waits for the gradient of every parameter. One that the loss does not use has none."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show


class TwoHeads(nn.Module):
    """A model with two heads, of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x))


def train(job: Distributed, ddp: DDP) -> None:
    try:
        for step in range(2):
            ddp(torch.ones(1, 2), head=step % 2).sum().backward()
        show(job, "2 steps")
    except RuntimeError as error:
        show(job, f"RuntimeError in step {step}: {str(error).split('. ')[0]}")


def wrong(job: Distributed) -> None:
    train(job, DDP(TwoHeads()))


def right(job: Distributed) -> None:
    train(job, DDP(TwoHeads(), find_unused_parameters=True))  # it costs time: only where needed


run(wrong=wrong, right=right)

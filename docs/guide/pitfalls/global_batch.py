"""batch_size of a DataLoader is for one rank; the global batch is world_size times as large."""

import torch
from ddpkit.training import split_batch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from two_ranks import Distributed, run, show

INPUTS = torch.linspace(-1, 1, 256)[:, None]
DATA = TensorDataset(INPUTS, INPUTS.sin())


def train(job: Distributed, world_size: int, rank: int, batch_size: int) -> tuple[int, float]:
    """Return the number of steps of an epoch, and the loss after it."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    ddp = DDP(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sampler = DistributedSampler(DATA, world_size, rank, shuffle=False)
    loader = DataLoader(DATA, batch_size=batch_size, sampler=sampler)
    for x, y in loader:
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()
    return len(loader), mse_loss(model(INPUTS), INPUTS.sin()).item()


def compare(job: Distributed, batch_size: int) -> None:
    steps, loss = train(job, job.world_size, job.rank, batch_size)
    alone_steps, alone_loss = train(job, 1, 0, 32)
    alone = f"one rank with 32: {alone_steps} steps, loss {alone_loss:.4f}"
    show(job, f"{steps} steps, loss {loss:.4f}; {alone}")


def wrong(job: Distributed) -> None:
    compare(job, batch_size=32)


def right(job: Distributed) -> None:
    split = split_batch(global_batch=32, world_size=job.world_size, max_micro_batch=32)
    compare(job, split.micro_batch)


run(wrong=wrong, right=right)

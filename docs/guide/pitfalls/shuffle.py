"""shuffle=True does not divide the data: every rank trains on all of it."""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from two_ranks import Distributed, run, show

DATA = range(8)


def show_samples(job: Distributed, loader: DataLoader) -> None:
    samples = sorted(sample for batch in loader for sample in batch.tolist())
    show(job, f"{len(loader)} steps, samples {samples}")


def wrong(job: Distributed) -> None:
    torch.manual_seed(job.rank)
    show_samples(job, DataLoader(DATA, batch_size=2, shuffle=True))


def refused(job: Distributed) -> None:
    sampler = DistributedSampler(DATA, job.world_size, job.rank)
    try:
        DataLoader(DATA, batch_size=2, shuffle=True, sampler=sampler)
    except ValueError as error:
        show(job, f"ValueError: {error}")


def right(job: Distributed) -> None:
    sampler = DistributedSampler(DATA, job.world_size, job.rank)  # it shuffles, too
    show_samples(job, DataLoader(DATA, batch_size=2, sampler=sampler))


run(wrong=wrong, refused=refused, right=right)

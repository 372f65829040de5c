"""shuffle=True does not divide the data: every rank trains on all of it."""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from two_ranks import Distributed, run, show

DATA = range(8)


def show_samples(dist: Distributed, loader: DataLoader) -> None:
    samples = sorted(sample for batch in loader for sample in batch.tolist())
    show(dist, f"{len(loader)} steps, samples {samples}")


def wrong(dist: Distributed) -> None:
    torch.manual_seed(dist.rank)
    show_samples(dist, DataLoader(DATA, batch_size=2, shuffle=True))


def refused(dist: Distributed) -> None:
    sampler = DistributedSampler(DATA, dist.world_size, dist.rank)
    try:
        DataLoader(DATA, batch_size=2, shuffle=True, sampler=sampler)
    except ValueError as error:
        show(dist, f"ValueError: {error}")


def right(dist: Distributed) -> None:
    sampler = DistributedSampler(DATA, dist.world_size, dist.rank)  # it shuffles, too
    show_samples(dist, DataLoader(DATA, batch_size=2, sampler=sampler))


run(wrong=wrong, refused=refused, right=right)

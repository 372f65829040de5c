"""Without set_epoch(), every epoch has the order of the first."""

from torch.utils.data import DistributedSampler
from two_ranks import Distributed, run, show

DATA = range(8)


def wrong(dist: Distributed) -> None:
    sampler = DistributedSampler(DATA, dist.world_size, dist.rank)
    show(dist, [list(sampler) for epoch in range(2)])


def right(dist: Distributed) -> None:
    sampler = DistributedSampler(DATA, dist.world_size, dist.rank)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    show(dist, epochs)


run(wrong=wrong, right=right)

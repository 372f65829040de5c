"""Without set_epoch(), every epoch has the order of the first."""

from torch.utils.data import DistributedSampler
from two_ranks import Distributed, run, show

DATA = range(8)


def wrong(job: Distributed) -> None:
    sampler = DistributedSampler(DATA, job.world_size, job.rank)
    show(job, [list(sampler) for epoch in range(2)])


def right(job: Distributed) -> None:
    sampler = DistributedSampler(DATA, job.world_size, job.rank)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    show(job, epochs)


run(wrong=wrong, right=right)

"""A collective that only rank 0 calls: rank 0 waits for ever, or meets another collective."""

import torch
from two_ranks import Distributed, run, show


def wrong(dist: Distributed) -> None:
    if dist.is_main:
        dist.barrier()
    dist.all_reduce_mean(torch.ones(2))


def right(dist: Distributed) -> None:
    if dist.is_main:
        pass  # save, print, download: whatever no other rank takes part in
    dist.barrier()
    show(dist, dist.all_reduce_mean(torch.ones(2)).tolist())


run(wrong=wrong, right=right)

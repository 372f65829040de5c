"""A collective that only rank 0 calls: rank 0 waits for ever, or meets another collective."""

import torch
from two_ranks import Distributed, run, show


def wrong(job: Distributed) -> None:
    if job.is_main:
        job.barrier()
    job.all_reduce_mean(torch.ones(2))


def right(job: Distributed) -> None:
    if job.is_main:
        pass  # save, print, download: whatever no other rank takes part in
    job.barrier()
    show(job, job.all_reduce_mean(torch.ones(2)).tolist())


run(wrong=wrong, right=right)

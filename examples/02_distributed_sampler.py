"""Which rank trains on which sample: the usual patterns, shown rank by rank.

one process      python examples/02_distributed_sampler.py
three processes  torchrun --standalone --nproc-per-node 3 examples/02_distributed_sampler.py
any launcher     as 01_ddp_minimal.py; it needs no GPU
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed
from ddpkit import Distributed, setup_distributed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

WORKERS = 2  # processes that load data, on each rank


def show(title: str, samples: Iterable[int], job: Distributed) -> None:
    """Print the samples of every rank, on rank 0."""
    gathered: list[list[int]] = [[] for _ in range(job.world_size)]
    torch.distributed.all_gather_object(gathered, [int(sample) for sample in samples])
    if job.is_main:
        print(f"\n{title}")
        for rank, mine in enumerate(gathered):
            print(f"  rank {rank}: {' '.join(map(str, mine))}", flush=True)


def padding(job: Distributed) -> None:
    """All ranks must take the same number of steps, or the last all-reduce waits for ever."""
    data = range(10 * job.world_size + 1)  # one sample too many to be divided evenly
    sampler = DistributedSampler(data, job.world_size, job.rank, shuffle=False)
    show("padded, the default: some samples are repeated", sampler, job)
    sampler = DistributedSampler(data, job.world_size, job.rank, shuffle=False, drop_last=True)
    show("drop_last=True: some samples are left out", sampler, job)


def shuffling(job: Distributed) -> None:
    """The order depends on the seed and the epoch, and only the script knows the epoch."""
    sampler = DistributedSampler(range(10 * job.world_size), job.world_size, job.rank, seed=0)
    show("epoch 0", sampler, job)
    show("without set_epoch() the next epoch has the same order", sampler, job)
    sampler.set_epoch(1)
    show("after set_epoch(1)", sampler, job)


def uneven_inputs(job: Distributed) -> None:
    """Join takes part in the all-reduces for the ranks that have no batch left."""
    model = nn.Linear(1, 1, bias=False).to(job.device)
    ddp = DDP(model, device_ids=job.device_ids)
    batches = range(job.rank + 1)  # rank 0 has one batch, rank 1 has two, ...
    with Join([ddp]):
        for batch in batches:
            ddp(torch.full((1, 1), float(batch), device=job.device)).sum().backward()
    show("uneven inputs under Join", batches, job)


class Stream(IterableDataset[int]):
    """A stream has no sampler. Every worker of every rank runs a copy of it, and takes its part.

    Rank and world size are arguments: a worker started by `spawn` has no process group to query.
    """

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = self.rank * workers + worker
        yield from range(first, self.length, self.world_size * workers)


def stream(job: Distributed) -> None:
    """The parts differ in length by up to one sample per worker: train on them under Join."""
    data = Stream(12 * job.world_size + 1, job.rank, job.world_size)
    batches = DataLoader(data, batch_size=2, num_workers=WORKERS)
    show("a stream, divided by rank and worker", (s for batch in batches for s in batch), job)


if __name__ == "__main__":
    with setup_distributed("gloo") as job:
        for pattern in (padding, shuffling, uneven_inputs, stream):
            pattern(job)

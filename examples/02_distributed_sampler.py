"""Who trains on which sample: sharding shown rank by rank, and every claim about it checked.

laptop, one process     python examples/02_distributed_sampler.py
laptop, three processes torchrun --standalone --nproc-per-node 3 examples/02_distributed_sampler.py
any MPI                 mpiexec -n 3 python examples/02_distributed_sampler.py
Slurm, at once          srun --nodes 2 --ntasks-per-node 2 python examples/02_distributed_sampler.py
Slurm, as a job         sbatch --nodes 2 --ntasks-per-node 2 --wrap 'srun python examples/02_distributed_sampler.py'
PBS, as a job           echo "cd '$PWD' && mpiexec -n 4 '$(command -v python)' examples/02_distributed_sampler.py" |
                            qsub -l select=2:ncpus=2:mpiprocs=2 -l place=scatter

It needs no GPU and leaves them alone. A claim that does not hold ends the run with a non-zero exit status.
"""
from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils import Distributed, setup_distributed
from utils.logging import get_logger
from utils.shards import ResumableShardLoader

log = get_logger(__name__)  # log.info prints on rank 0 alone


def gather(mine: list[int], dist: Distributed) -> list[list[int]]:
    """Every rank's list, in rank order, on every rank: so all ranks check the same claims and fail together."""
    shards: list[list[int]] = [[] for _ in range(dist.world_size)]
    torch.distributed.all_gather_object(shards, mine)
    return shards


def show(title: str, shards: list[list[int]]) -> None:
    log.info(f"\n{title}")
    for rank, shard in enumerate(shards):
        log.info(f"  rank {rank}: {' '.join(map(str, shard))}")


def check(claim: str, holds: bool) -> None:
    """Not `assert`, which `python -O` leaves out."""
    if not holds:
        raise RuntimeError(f"this does not hold: {claim}")
    log.info(f"  ok: {claim}")


def count(shards: list[list[int]]) -> Counter[int]:
    return Counter(index for shard in shards for index in shard)


def padding_or_drop_last(dist: Distributed, seed: int) -> None:
    """All ranks must take the same number of steps, or the last all-reduce waits for a rank that has gone."""
    samples = TensorDataset(torch.arange(10 * dist.world_size + 1))  # one too many to be divided evenly
    padded_length = math.ceil(len(samples) / dist.world_size)

    sampler: DistributedSampler[Any] = DistributedSampler(samples, dist.world_size, dist.rank, shuffle=False)
    shards = gather(list(sampler), dist)
    show(f"{len(samples)} samples, not shuffled, padded (the default)", shards)
    repeated = dist.world_size * padded_length - len(samples)
    check("every rank has the same number of samples", {len(shard) for shard in shards} == {padded_length})
    check(f"every sample is there, {repeated} of them twice",
          sorted(count(shards)) == list(range(len(samples))) and count(shards).total() == len(samples) + repeated)

    sampler = DistributedSampler(samples, dist.world_size, dist.rank, shuffle=True, seed=seed, drop_last=True)
    shards = gather(list(sampler), dist)
    show(f"{len(samples)} samples, shuffled, drop_last=True", shards)
    left_out = len(samples) % dist.world_size
    check("every rank has the same number of samples", len({len(shard) for shard in shards}) == 1)
    check(f"no sample comes twice, {left_out} left out in this epoch",
          max(count(shards).values()) == 1 and len(count(shards)) == len(samples) - left_out)


def reshuffling(dist: Distributed, seed: int) -> None:
    """The order depends on (seed, epoch) alone. Nobody counts the epochs for you."""
    samples = TensorDataset(torch.arange(10 * dist.world_size))
    sampler: DistributedSampler[Any] = DistributedSampler(samples, dist.world_size, dist.rank, shuffle=True, seed=seed)
    first, again = gather(list(sampler), dist), gather(list(sampler), dist)
    show("epoch 0", first)
    check("without set_epoch the next epoch has the very same order", again == first)
    sampler.set_epoch(1)
    second = gather(list(sampler), dist)
    show("epoch 1, after set_epoch(1)", second)
    check("the order is another one", second != first)
    check("every sample exactly once in either epoch", count(first) == count(second) == Counter(range(len(samples))))
    sampler.set_epoch(0)
    check("set_epoch(0) brings the first order back, which is what a resumed job needs",
          gather(list(sampler), dist) == first)


def uneven_inputs(dist: Distributed) -> None:
    """Ranks with fewer batches than others: Join answers the all-reduces of those that still train.

    The model is one weight w, and the loss w * x has the gradient x. With plain gradient descent from w = 0 and
    learning rate 1, w must end at minus the sum of all x of all ranks, divided by the number of ranks.
    """
    mine = [10 * dist.rank + batch for batch in range(dist.rank + 1)]  # rank r has r + 1 batches
    shards = gather(mine, dist)
    show("uneven inputs, one number per batch", shards)
    model = nn.Linear(1, 1, bias=False).to(dist.device)
    nn.init.zeros_(model.weight)
    ddp = DDP(model, device_ids=dist.device_ids)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with Join([ddp]):
        for x in mine:
            optimizer.zero_grad()
            ddp(torch.full((1, 1), float(x), device=dist.device)).sum().backward()
            optimizer.step()
    weight = model.weight.item()
    expected = -sum(count(shards).elements()) / dist.world_size
    check("no rank waited for ever, and every gradient counts once", math.isclose(weight, expected, rel_tol=1e-4))
    weights: list[float] = [0.0] * dist.world_size
    torch.distributed.all_gather_object(weights, weight)
    check("all ranks hold the same model afterwards", len(set(weights)) == 1)


class ShardedStream(IterableDataset[int]):
    """A stream has no sampler: each DataLoader worker of each rank runs a copy of it and must pick its own part.

    Rank and world size are arguments, since a worker started by `spawn` or `forkserver` has no process group to ask.
    """

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from range(self.rank * workers + worker, self.length, self.world_size * workers)


def iterable_data_set(dist: Distributed, num_workers: int) -> None:
    length = 12 * dist.world_size + 1
    loader = DataLoader(ShardedStream(length, dist.rank, dist.world_size), batch_size=2, num_workers=num_workers)
    shards = gather([int(index) for batch in loader for index in batch], dist)
    show(f"a stream of {length}, {num_workers} DataLoader worker(s) on each rank", shards)
    check("every sample exactly once", count(shards) == Counter(range(length)))
    # Its parts are not of equal length: train on them inside Join, as above.


def read(shard: range, first: int) -> range:
    """The samples of a shard from number `first` on. Shards stand for files of unknown length here."""
    return shard[first:]


def resumed_stream(dist: Distributed, num_workers: int) -> None:
    """Whole shards to each worker, and a state that tells in which sample of which shard the training loop is."""
    shards = [range(10 * shard, 10 * shard + 1 + shard % 9) for shard in range(5 * dist.world_size)]
    loader = ResumableShardLoader(shards, read, batch_size=2, num_workers=num_workers)
    got = [index for batch in islice(loader, 3) for index in batch.tolist()]
    state = loader.state_dict()  # what workers read ahead does not count
    again = ResumableShardLoader(shards, read, batch_size=2)  # another number of workers; also of ranks
    again.load_state_dict(state)
    got += [index for batch in again for index in batch.tolist()]
    parts = gather(got, dist)
    show(f"{len(shards)} shards, interrupted after 3 batches and resumed without workers", parts)
    check("every sample exactly once", count(parts) == Counter(index for shard in shards for index in shard))


def main() -> None:
    parser = argparse.ArgumentParser(description="Show and check how data are shared out among the ranks.")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffling")
    parser.add_argument("--num-workers", type=int, default=2, help="DataLoader workers per rank, for the streams")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # python -m torch.distributed.launch adds it
    args = parser.parse_args()
    for option, value in (("--seed", args.seed), ("--num-workers", args.num_workers)):
        if value < 0:
            parser.error(f"{option} must not be negative, got {value}")
    with setup_distributed("gloo") as dist:
        padding_or_drop_last(dist, args.seed)
        reshuffling(dist, args.seed)
        uneven_inputs(dist)
        iterable_data_set(dist, args.num_workers)
        resumed_stream(dist, args.num_workers)
        log.info(f"\nall claims hold on {dist.world_size} rank(s)")


if __name__ == "__main__":
    main()

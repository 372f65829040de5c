"""Compare `bench.py collectives` with a loop over torch alone, in pairs in one run.

torchrun --standalone --nproc-per-node 2 tests/bench/raw_loop.py

Each pair is one run of each, in random order. The ranks are not bound: on a core of its own, a rank would wait for the
threads of gloo. Exit status 0: the median ratio of each size is within 3 % of 1.
"""
from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.tools.bench import collective_bench as collectives
from utils.tools.bench import collective_operations as operations

ITERATIONS = 20
PAIRS = {1 << 12: 2000, 1 << 16: 2000, 1 << 20: 1200, 1 << 23: 200}  # by size; two cores are noisy


def raw_loop(size: int, ranks: operations.Participants) -> float:
    tensor = torch.ones(size // 4, device=ranks.device)
    torch.distributed.all_reduce(tensor)
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(ITERATIONS):
        torch.distributed.all_reduce(tensor)
    seconds = torch.tensor((time.perf_counter() - start) / ITERATIONS, dtype=torch.float64)
    torch.distributed.all_reduce(seconds)
    return seconds.item() / ranks.size


def kit(size: int, ranks: operations.Participants) -> float:
    sweep = collectives.Sweep(size, size, ITERATIONS)
    return collectives.measure(operations.AllReduce, size, sweep, ranks).seconds


def compare(size: int, ranks: operations.Participants) -> float:
    """Print and return the median of kit / raw."""
    order = random.Random(size)  # the same on all ranks
    raw: list[float] = []
    own: list[float] = []
    for _ in range(PAIRS[size]):
        for loop, times in order.sample([(raw_loop, raw), (kit, own)], 2):
            times.append(loop(size, ranks))
    ratio = statistics.median(b / a for a, b in zip(raw, own, strict=True))
    if ranks.rank == 0:
        print(f"all_reduce {size:>9} bytes: raw {statistics.median(raw) * 1e6:9.1f} us, kit "
              f"{statistics.median(own) * 1e6:9.1f} us, median ratio {ratio:.3f}", flush=True)
    return ratio


with setup_distributed("gloo", bind=False) as dist:
    ratios = [compare(size, operations.Participants(dist.rank, dist.world_size, dist.device)) for size in PAIRS]
sys.exit(any(abs(ratio - 1) > 0.03 for ratio in ratios))

"""Compare `bench.py collectives` with a loop over torch alone, in pairs in one run.

torchrun --standalone --nproc-per-node 2 tests/bench/raw_loop.py

Each pair is one run of each, in random order. A size is done when the whole 95 % confidence interval of the median
ratio is within 3 % of 1, or none of it is; that takes more pairs on a busy machine. Exit status 0: all are within 3 %.
"""
from __future__ import annotations

import math
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.bench import collectives, operations

SIZES = [1 << 12, 1 << 16, 1 << 20, 1 << 23]
ITERATIONS = 20
BOUND = 0.03
FEWEST, LIMIT = 100, 300  # pairs, seconds, for each size


def raw_loop(size: int, ranks: operations.Ranks) -> float:
    tensor = torch.ones(size // 4, device=ranks.device)
    torch.distributed.all_reduce(tensor)
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(ITERATIONS):
        torch.distributed.all_reduce(tensor)
    seconds = torch.tensor((time.perf_counter() - start) / ITERATIONS, dtype=torch.float64)
    torch.distributed.all_reduce(seconds)
    return seconds.item() / ranks.size


def kit(size: int, ranks: operations.Ranks) -> float:
    sweep = collectives.Sweep(size, size, 2, ITERATIONS, 1, 1, "float")
    return collectives.measure(operations.AllReduce, size, sweep, ranks).seconds


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by the order statistics of the sign test."""
    ordered, count = sorted(ratios), len(ratios)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[low], ordered[count - 1 - low]


def compare(size: int, ranks: operations.Ranks) -> bool:
    """Print the median of kit / raw with its interval; return whether this is within BOUND of 1."""
    order = random.Random(size)  # the same on all ranks
    raw: list[float] = []
    own: list[float] = []
    start, low, high = time.monotonic(), 0.0, math.inf
    more = torch.ones(1)
    while more:
        for loop, times in order.sample([(raw_loop, raw), (kit, own)], 2):
            times.append(loop(size, ranks))
        low, high = interval([b / a for a, b in zip(raw, own, strict=True)])
        is_decided = abs(low - 1) < BOUND > abs(high - 1) or low > 1 + BOUND or high < 1 - BOUND
        more[0] = len(raw) < FEWEST or (not is_decided and time.monotonic() - start < LIMIT)
        torch.distributed.broadcast(more, 0)
    ratio = statistics.median(b / a for a, b in zip(raw, own, strict=True))
    if ranks.rank == 0:
        print(f"all_reduce {size:>9} bytes, {len(raw):>5} pairs: raw {statistics.median(raw) * 1e6:9.1f} us, kit "
              f"{statistics.median(own) * 1e6:9.1f} us, median ratio {ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)
    return abs(low - 1) < BOUND > abs(high - 1)


with setup_distributed("gloo") as dist:
    results = [compare(size, operations.Ranks(dist.rank, dist.world_size, dist.device)) for size in SIZES]
sys.exit(not all(results))

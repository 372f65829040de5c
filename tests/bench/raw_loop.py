"""Compare `bench.py collectives` with a loop over torch alone, in turns in one run. Fails beyond 3 %."""
from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.bench import collectives, operations

ITERATIONS = 20
RUNS = {1 << 12: 301, 1 << 16: 301, 1 << 20: 151, 1 << 23: 41}  # of each size


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


def compare(size: int, ranks: operations.Ranks) -> float:
    """Print and return the median of kit / raw; each run of the kit is between two of the raw loop."""
    before, own, after = zip(*([loop(size, ranks) for loop in (raw_loop, kit, raw_loop)] for _ in range(RUNS[size])),
                             strict=True)
    ratio = statistics.median(2 * b / (a + c) for a, b, c in zip(before, own, after, strict=True))
    same = statistics.median(c / a for a, c in zip(before, after, strict=True))
    if ranks.rank == 0:
        raw, seconds = statistics.median(before + after), statistics.median(own)
        print(f"all_reduce {size:>9} bytes: raw {raw * 1e6:9.1f} us, kit {seconds * 1e6:9.1f} us, median ratio "
              f"{ratio:.3f} (raw to raw {same:.3f})", flush=True)
    return ratio


with setup_distributed("gloo") as dist:
    ratios = [compare(size, operations.Ranks(dist.rank, dist.world_size, dist.device)) for size in RUNS]
sys.exit(any(abs(ratio - 1) > 0.03 for ratio in ratios))

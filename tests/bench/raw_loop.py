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
RUNS = {1 << 12: 401, 1 << 16: 401, 1 << 20: 201, 1 << 23: 61}  # of each size


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
    """Print and return the median of kit / raw over pairs of runs next to each other."""
    pairs = []
    for run in range(RUNS[size]):
        loops = (raw_loop, kit) if run % 2 else (kit, raw_loop)
        times = {loop: loop(size, ranks) for loop in loops}
        pairs.append((times[raw_loop], times[kit]))
    ratio = statistics.median(own / raw for raw, own in pairs)
    raw, own = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    if ranks.rank == 0:
        print(f"all_reduce {size:>9} bytes: raw {raw:9.1f} us, kit {own:9.1f} us, median ratio {ratio:.3f}", flush=True)
    return ratio


with setup_distributed("gloo") as dist:
    ratios = [compare(size, operations.Ranks(dist.rank, dist.world_size, dist.device)) for size in RUNS]
sys.exit(any(abs(ratio - 1) > 0.03 for ratio in ratios))

"""Compare `bench.py collectives` with a loop over torch alone, in turns in one run; prints ratios of medians."""
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

RUNS, ITERATIONS = 61, 20


def raw_loop(size: int, device: torch.device) -> float:
    tensor = torch.ones(size // 4, device=device)
    torch.distributed.all_reduce(tensor)
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(ITERATIONS):
        torch.distributed.all_reduce(tensor)
    seconds = torch.tensor((time.perf_counter() - start) / ITERATIONS, dtype=torch.float64)
    torch.distributed.all_reduce(seconds)
    return seconds.item() / torch.distributed.get_world_size()


def compare(size: int, ranks: operations.Ranks) -> list[tuple[float, float]]:
    """Return the seconds of an all-reduce in both loops, for each run."""
    sweep, pairs = collectives.Sweep(size, size, 2, ITERATIONS, 1, 1, "float"), []
    for run in range(RUNS):
        kit = collectives.measure(operations.AllReduce, size, sweep, ranks).seconds if run % 2 else 0
        raw = raw_loop(size, ranks.device)
        pairs.append((raw, kit or collectives.measure(operations.AllReduce, size, sweep, ranks).seconds))
    return pairs


with setup_distributed("gloo") as dist:
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23):
        pairs = compare(size, operations.Ranks(dist.rank, dist.world_size, dist.device))
        if dist.is_main:
            raw, kit = (statistics.median(times) for times in zip(*pairs, strict=True))
            each = statistics.median(b / a for a, b in pairs)
            fastest = min(b for _, b in pairs) / min(a for a, _ in pairs)
            print(f"all_reduce {size:>9} bytes: raw {raw * 1e6:9.1f} us, kit {kit * 1e6:9.1f} us, ratio of medians "
                  f"{kit / raw:.3f}, median of ratios {each:.3f}, of the fastest {fastest:.3f}", flush=True)

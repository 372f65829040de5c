#!/usr/bin/env python3
"""Measure the overhead of utils.training.noise_scale per optimizer step.

python tests/bench/bench_noise_scale.py                     a transformer of width 128
torchrun --standalone --nproc-per-node 2 tests/bench/bench_noise_scale.py 256

Blocks of 10 steps with and without the measurement take turns in one run. Each ratio is the median
of those of the pairs; that of CPU seconds is steadier where the CPUs are shared.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.training import accumulate
from utils.training.noise_scale import GradientNoiseScale

# isort: split
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EVERY = 10  # steps per block, one of them measured
PAIRS = 10


def main(width: int) -> None:
    with setup_distributed() as dist:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(dist.device)
        ddp = DDP(model, device_ids=dist.device_ids)
        optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
        micro_batches = list(torch.randn(2, 8, 64, width, device=dist.device))

        def run_block(noise: GradientNoiseScale | None) -> tuple[float, float]:
            """Return the wall and CPU seconds of EVERY optimizer steps."""
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(EVERY):
                for batch, weight in accumulate(ddp, micro_batches):
                    (weight * ddp(batch).square().mean()).backward()
                if noise is not None:
                    noise.update()
                optimizer.step()
                optimizer.zero_grad()
            if dist.device.type != "cpu":
                torch.accelerator.synchronize()
            return time.perf_counter() - start, time.process_time() - cpu_start

        noise = GradientNoiseScale(ddp, micro_batch=8, every=EVERY)
        run_block(noise)  # not counted: the optimizer allocates its state
        pairs = [(run_block(noise), run_block(None)) for _ in range(PAIRS)]
        for clock, name in enumerate(("wall", "CPU")):
            bare = statistics.median(block[clock] for _, block in pairs) / EVERY * 1000
            ratio = statistics.median(block[clock] / other[clock] for block, other in pairs)
            if dist.is_main:
                print(f"{name:4} {bare:9.2f} ms per step, ratio {ratio:.4f}")


if __name__ == "__main__":
    main(width=int(sys.argv[1]) if len(sys.argv) > 1 else 128)

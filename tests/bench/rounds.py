"""A rank that measures all pairs of hosts once for each line that rank 0 reads: rounds.py BYTES."""
from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.tools.bench import collective_operations as operations
from utils.tools.bench import host_pairs, links

with setup_distributed("gloo", bind=False) as dist:
    ranks = operations.Participants(dist.rank, dist.world_size, dist.device)
    names = [f"h{i + 1}" for i in range(dist.world_size)]
    while True:
        more = [bool(sys.stdin.readline()) if dist.is_main else None]
        torch.distributed.broadcast_object_list(more, 0)
        if not more[0]:
            break
        measured = links.measure_pairs(range(dist.world_size), ranks, int(sys.argv[1]), 3)
        if dist.is_main:
            bandwidths = {pair: one.bandwidth for pair, one in measured.items()}
            print("FOUND", host_pairs.describe(bandwidths, names), flush=True)

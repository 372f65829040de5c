"""A rank that says who it is, for the launch tests."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed

parser = argparse.ArgumentParser()
parser.add_argument("--mpi4py", choices=["before", "after"])
parser.add_argument("--timeout", type=float, default=40)
args = parser.parse_args()
if args.mpi4py == "before":
    from mpi4py import MPI
with setup_distributed(timeout=args.timeout) as dist:
    said = f"rank {dist.rank} of {dist.world_size}"
    assert dist.all_reduce_mean(float(dist.rank)) == (dist.world_size - 1) / 2
    if args.mpi4py == "after":
        from mpi4py import MPI
    if args.mpi4py:
        world = MPI.COMM_WORLD
        said += f", MPI says rank {world.Get_rank()} of {world.Get_size()}, sum {world.allreduce(1)}"
    sys.stdout.write(said + "\n")

"""A rank that does what libraries do after setup_distributed(): they read RANK and its like, and use env://.

Prints one line with what it and the programs that it starts have found.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist

from utils import setup_distributed

ROOT = Path(__file__).resolve().parents[2]
SHOW = "from utils.launchers import detect; one = detect(); print(f'{one.launcher} {one.rank} of {one.world_size}')"
PYTHON = [sys.executable, "-c", SHOW]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]


def reduced() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def output(command: list[str]) -> list[str]:
    return sorted(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


def spawned(local_rank: int, port: int) -> None:
    """A process of torch.multiprocessing.spawn(), which sets its variables itself."""
    os.environ.update(RANK=str(local_rank), WORLD_SIZE="2", LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with setup_distributed("gloo", timeout=60):
        assert reduced() == 2


if __name__ == "__main__":
    job = setup_distributed("gloo", timeout=60)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    assert [int(os.environ[name]) for name in names] == [
        job.rank, job.world_size, job.local_rank, job.local_world_size, job.node_rank, job.node_rank]
    found = [f"rank {job.rank}", f"sum {reduced():.0f}"]
    dist.destroy_process_group()
    dist.init_process_group("gloo")  # by env://
    found += [f"sum by env:// {reduced():.0f}", *output(PYTHON)]
    if job.rank == 0:
        found += output([*TORCHRUN, *PYTHON])
        torch.multiprocessing.spawn(spawned, (int(os.environ["MASTER_PORT"]) + 1,), nprocs=2)
        found.append("spawned")
    dist.barrier()
    sys.stdout.write(", ".join(found) + "\n")
    job.close()

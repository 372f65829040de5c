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
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
SHOW = "from utils.launchers import detect; one = detect(); print(f'{one.launcher} {one.rank} of {one.world_size}')"


def reduced() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def spawned(local_rank: int, port: int) -> None:
    """A process of torch.multiprocessing.spawn(), which sets its variables itself."""
    os.environ.update(RANK=str(local_rank), WORLD_SIZE="2", LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with setup_distributed("gloo", timeout=60):
        assert reduced() == 2


def main() -> None:
    job = setup_distributed("gloo", timeout=60)
    assert {name: int(os.environ[name]) for name in NAMES} == {
        "RANK": job.rank, "WORLD_SIZE": job.world_size, "LOCAL_RANK": job.local_rank,
        "LOCAL_WORLD_SIZE": job.local_world_size, "NODE_RANK": job.node_rank, "GROUP_RANK": job.node_rank}
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
    if not dist.is_initialized():
        dist.init_process_group()
    found = [f"rank {job.rank}", f"sum {reduced():.0f}"]
    dist.destroy_process_group()
    dist.init_process_group("gloo")  # by env://
    found.append(f"sum by env:// {reduced():.0f}")
    python = [sys.executable, "-c", SHOW]
    found.append(subprocess.run(python, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip())
    if job.rank == 0:
        nested = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        lines = subprocess.run([*nested, *python], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found += sorted(lines.splitlines())
        torch.multiprocessing.spawn(spawned, (int(os.environ["MASTER_PORT"]) + 1,), nprocs=2)
        found.append("spawned")
    dist.barrier()
    sys.stdout.write(", ".join(found) + "\n")
    job.close()


if __name__ == "__main__":
    main()

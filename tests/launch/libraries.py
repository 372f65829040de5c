"""A rank that does what libraries do after setup_distributed(): they read RANK and its like, and use env://.

Prints the line of public_code.py, and one with what the programs have found that it starts.
"""
from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.faults import quick_imports

# isort: split
import torch
import torch.distributed as dist

from utils import setup_distributed

quick_imports.done()

ROOT = Path(__file__).resolve().parents[2]
SHOW = "from utils.launchers import detect; one = detect(); print(f'{one.launcher} {one.rank} of {one.world_size}')"
PYTHON = [sys.executable, "-c", SHOW]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]


def output(command: list[str]) -> list[str]:
    return sorted(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


def spawned(local_rank: int, port: int) -> None:
    """A process of torch.multiprocessing.spawn(), which sets its variables itself."""
    os.environ.update(RANK=str(local_rank), WORLD_SIZE="2", LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with setup_distributed("gloo", timeout=60, launcher="env") as job:
        assert job.all_reduce_mean(1.0 + local_rank) == 1.5


if __name__ == "__main__":
    job = setup_distributed("gloo", timeout=60)
    job.barrier()  # without it this rank may close its connections while another still opens them
    dist.destroy_process_group()
    runpy.run_path(str(Path(__file__).with_name("public_code.py")))
    found = output(PYTHON)
    if job.is_main:
        found += output([*TORCHRUN, *PYTHON])
        torch.multiprocessing.spawn(spawned, (int(os.environ["MASTER_PORT"]) + 1,), nprocs=2)
        found.append("spawned")
    sys.stdout.write(f"programs of rank {job.rank}: {', '.join(found)}\n")
    job.close()

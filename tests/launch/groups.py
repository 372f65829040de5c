"""A rank with torch alone, which forms the process group that its first argument names, and holds it for a while.

With --hold it holds the group until launch.py ends it.
"""
import gc
import os
import subprocess
import sys
import time

SELF = os.path.abspath(__file__)
if sys.argv[1] == "torchrun":  # as a program that hides it from launch.py; without importing torch itself
    words = ["--standalone", f"--nproc-per-node={sys.argv[2]}", SELF, "env", *sys.argv[3:]]
    sys.exit(subprocess.run([sys.executable, "-m", "torch.distributed.run", *words]).returncode)

gc.disable()  # as in tests/faults/quick_imports.py
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

gc.freeze()
gc.enable()


def hold() -> None:
    """Print the size of the group and use it."""
    sys.stdout.write(f"group of {dist.get_world_size()}\n")
    sys.stdout.flush()
    limit = torch.tensor(float(time.monotonic()) + (120 if "--hold" in sys.argv else 4))
    dist.broadcast(limit, 0)  # the same number of rounds everywhere: rank 0's clock counts
    going = torch.ones(1)
    while going:
        going[0] = time.monotonic() < limit
        dist.broadcast(going, 0)
        time.sleep(0.02)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process while its interpreter ends (pytorch issue 190489)


def spawned(index: int, address: str, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank + index, world_size=world_size)
    hold()


def start_two() -> None:
    """Start two processes, which form a group with those of the other ranks."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", 2 * rank, 2 * world_size
    torch.multiprocessing.start_processes(spawned, place, nprocs=2, start_method="spawn")


def work_without_group() -> None:
    """Run what looks like ranks and is none: worker processes, and programs with variables of their own."""
    loader = torch.utils.data.DataLoader(list(range(64)), num_workers=2, persistent_workers=True)
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1] and len(list(loader)) == 64
        subprocess.run(["sleep", "2"], env=environ, check=True)
    sys.stdout.write("group of 0\n")


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "spawn-all":
        start_two()
    elif kind == "none":
        work_without_group()
    else:
        dist.init_process_group("gloo")
        hold()

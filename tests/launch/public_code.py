"""A training script with the habits of public code: it reads torchrun's variables, and knows nothing of the kit.

With --sockets it meets the other ranks at MASTER_ADDR and MASTER_PORT without torch.
"""
import os
import socket
import sys
import time

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["NODE_RANK"] == os.environ["GROUP_RANK"]


def meet() -> None:
    """Connect to rank 0, or to torchrun's agent, as the rendezvous of env:// does."""
    port = int(os.environ["MASTER_PORT"])
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with socket.create_server(("", port)) as server:
            for _ in range(world_size - 1):
                server.accept()[0].close()
        return
    limit = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=10).close()
        except ConnectionRefusedError:
            assert time.monotonic() < limit
            time.sleep(0.05)


def reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert int(total) == world_size * (world_size - 1) // 2
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    dist.destroy_process_group()


meet() if "--sockets" in sys.argv else reduce()
sys.stdout.write(f"public rank {rank} of {world_size}, {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']} "
                 f"on {socket.gethostname()}, node {os.environ['GROUP_RANK']}\n")

"""A training script with the habits of public code: env://, LOCAL_RANK, nothing of the kit. For the launch tests."""
import os
import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
total = torch.tensor([float(rank)])
dist.all_reduce(total)
assert int(total) == world_size * (world_size - 1) // 2 and (dist.get_rank(), dist.get_world_size()) == (
    rank, world_size)
assert os.environ["NODE_RANK"] == os.environ["GROUP_RANK"]
sys.stdout.write(f"public rank {rank} of {world_size}, {local_rank} of {local_world_size} on {socket.gethostname()}, "
                 f"node {os.environ['GROUP_RANK']}\n")
sys.stdout.flush()
dist.destroy_process_group()

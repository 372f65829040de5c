"""Train a small model under HSDP, and print a digest of parameters and optimizer state: sharded.py --folder FOLDER"""
from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from utils import setup_distributed
from utils.checkpoint import Checkpointer

STEPS = 40


def main() -> None:
    with setup_distributed("gloo") as job, Checkpointer(sys.argv[sys.argv.index("--folder") + 1]) as checkpoints:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(13, 7), nn.Linear(7, 5), nn.Dropout(0.1), nn.Linear(5, 3))
        mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "shard"))
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=mesh)
            assert isinstance(module, FSDPModule)
            module.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = {"model": model, "optimizer": optimizer}
        found = checkpoints.load_latest(state)
        for step in range(found.step + 1 if found else 1, STEPS + 1):
            inputs = torch.randint(0, 13, (8,), generator=torch.Generator().manual_seed(100 * step + job.rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, state)
        digest = hashlib.sha256()
        for one in [*model.parameters(), *(one for values in optimizer.state.values() for one in values.values())]:
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            digest.update(whole.detach().numpy().tobytes())
    print(f"done rank {job.rank}: {digest.hexdigest()}")


if __name__ == "__main__":
    main()

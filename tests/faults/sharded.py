"""Train a small model under HSDP, or with ZeRO, and print a digest: sharded.py [--zero] --folder FOLDER"""
from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from utils import setup_distributed
from utils.checkpoint import Checkpointer, PerRank
from utils.training import prime_ddp_buckets

STEPS = 40


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    states = getattr(optimizer, "optim", optimizer).state.values()
    return [one for values in states for one in values.values()]


def main() -> None:
    with setup_distributed("gloo") as job, Checkpointer(sys.argv[sys.argv.index("--folder") + 1]) as checkpoints:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(13, 7), nn.Linear(7, 5), nn.Dropout(0.1), nn.Linear(5, 3))
        call: nn.Module = model
        if "--zero" in sys.argv:
            call = DistributedDataParallel(model)
            prime_ddp_buckets(call, lambda: call(torch.zeros(8, dtype=torch.long)).sum())
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
            state = {"model": call, "optimizer": PerRank(optimizer.optim)}
        else:
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
            call(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, state)
        digest = hashlib.sha256()
        for one in [*model.parameters(), *optimizer_tensors(optimizer)]:
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            digest.update(whole.detach().numpy().tobytes())
    print(f"done rank {job.rank}: {digest.hexdigest()}\n", end="")  # one write: ranks share the file


if __name__ == "__main__":
    main()

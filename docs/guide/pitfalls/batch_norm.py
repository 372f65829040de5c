"""BatchNorm normalises with the samples of its rank, not with those of the global batch."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show

BATCH = torch.arange(8.0)[:, None] ** 2  # the global batch, four samples for each rank


def compare(dist: Distributed, model: nn.Module) -> None:
    alone = model(BATCH)[dist.rank * 4]  # the first sample of this rank, in the global batch
    mine = DDP(model)(BATCH[dist.rank * 4 :][:4])[0]
    show(dist, f"difference to one rank with the global batch {(mine - alone).abs().max():.3f}")


def wrong(dist: Distributed) -> None:
    compare(dist, nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)))


def right(dist: Distributed) -> None:
    # On GPUs also: nn.SyncBatchNorm.convert_sync_batchnorm(model), which communicates.
    compare(dist, nn.Sequential(nn.Linear(1, 4), nn.LayerNorm(4)))


run(wrong=wrong, right=right)

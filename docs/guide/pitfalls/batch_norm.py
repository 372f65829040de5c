"""BatchNorm normalises with the samples of its rank, not with those of the global batch."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show

BATCH = torch.arange(8.0)[:, None] ** 2  # the global batch, four samples for each rank


def compare(job: Distributed, model: nn.Module) -> None:
    alone = model(BATCH)[job.rank * 4]  # the first sample of this rank, in the global batch
    mine = DDP(model)(BATCH[job.rank * 4 :][:4])[0]
    show(job, f"difference to one rank with the global batch {(mine - alone).abs().max():.3f}")


def wrong(job: Distributed) -> None:
    compare(job, nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)))


def right(job: Distributed) -> None:
    # On GPUs also: nn.SyncBatchNorm.convert_sync_batchnorm(model), which communicates.
    compare(job, nn.Sequential(nn.Linear(1, 4), nn.LayerNorm(4)))


run(wrong=wrong, right=right)

"""A training with a planted cause of low efficiency, for `bench.py ddp`."""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed


class Data(Dataset[torch.Tensor]):
    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds = seconds
        self._samples = torch.randn(1024, 256, generator=torch.Generator().manual_seed(rank))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._samples[index % len(self._samples)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", default="")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    with setup_distributed(bind=False) as dist:
        torch.manual_seed(0)
        sizes = [256, *[args.width] * args.layers]
        model = nn.Sequential(*(layer for a, b in zip(sizes, sizes[1:], strict=False)
                                for layer in (nn.Linear(a, b), nn.Tanh())), nn.Linear(args.width, 16))
        target = torch.randn(256, 16)
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        slow = args.plant == "rank" and dist.rank == dist.world_size - 1
        loader = DataLoader(Data(0.02 / args.batch if args.plant == "data" else 0, dist.rank), args.batch)
        batches = iter(loader)
        while True:
            inputs = next(batches)
            for _ in range(4 if slow else 1):
                loss = nn.functional.mse_loss(ddp(inputs), torch.tanh(inputs @ target / 16))
            loss.backward()
            if slow:
                time.sleep(0.03)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

"""A small training with everything that makes a resume hard; for tests/faults/kills.py.

BatchNorm, static_graph, auxiliary outputs in training mode, dropout, a moving average of the
weights that rank 0 alone keeps and that is large enough to be shared out over the ranks, a numpy
array, and PerRank data. The last line has a digest of what every rank has.

python tests/faults/kills.py --kills 60 --ranks 3 tests/faults/habits.py --numpy-megabytes 200
"""
from __future__ import annotations

import argparse
import copy
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import setup_distributed
from utils.checkpoint import Checkpointer, PerRank
from utils.training import prime_ddp_buckets

STEPS, SAVE_EVERY, EMA_FLOATS = 10, 2, 18_000_000  # 72 MB


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
            for _ in range(4))
        self.output, self.auxiliary = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                middle = x
        return (self.output(x), self.auxiliary(middle)) if self.training else self.output(x)


class Average(nn.Module):
    """A copy of the model with a large parameter; only rank 0 changes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.large = nn.Parameter(torch.zeros(EMA_FLOATS))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 0.1)
        self.large.add_(next(model.parameters())[0, 0])


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--numpy-megabytes", type=int, default=8)
    args = parser.parse_args()
    with setup_distributed("gloo") as dist, Checkpointer(args.folder, keep=2) as checkpoints:
        torch.set_num_threads(1)
        torch.manual_seed(dist.rank)  # dropout and data differ between the ranks
        model = Model()
        ddp = DDP(model, static_graph=True)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        average = Average(model)
        history = numpy.zeros(args.numpy_megabytes * 125_000)
        seen = torch.zeros(4)

        def loss_of(x: Tensor) -> Tensor:
            out, auxiliary = ddp(x)
            loss: Tensor = (out - x.sum(1, keepdim=True)).square().mean()
            return loss + 0.3 * auxiliary.square().mean()

        prime_ddp_buckets(ddp, lambda: loss_of(torch.rand(8, 32)))
        # The module inside DDP, as many save it.
        state = {"model": model, "optimizer": optimizer, "average": average, "history": history,
                 "mine": PerRank({"seen": seen})}
        found = checkpoints.load_latest(state)
        for step in range(found.step if found else 0, STEPS):
            x = torch.rand(8, 32) * (1 + dist.rank)
            loss = loss_of(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.is_main:
                average.update(model)
            history[step::STEPS] += step
            seen[step % 4] += x.sum()
            if (step + 1) % SAVE_EVERY == 0:
                checkpoints.save(step + 1, state)
        checkpoints.wait()
        # Only rank 0's average counts: the other ranks get it when they resume.
        parts = [*model.state_dict().values(), seen, torch.from_numpy(history), torch.rand(1),
                 *[one["exp_avg_sq"] for one in optimizer.state_dict()["state"].values()],
                 *(average.state_dict().values() if dist.is_main else [])]
        digests: list[Any] = [None] * dist.world_size
        torch.distributed.all_gather_object(digests, digest(*parts))
        if dist.is_main:
            print(f"done after {STEPS} steps: {' '.join(digests)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

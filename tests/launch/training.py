"""A training whose loss is that of one process with all the data, wherever the ranks are: each has its share of them.

Without a DDP and an optimizer, whose import of torch._dynamo takes as long as that of torch; with these, the examples
train under launchers in test_copied_examples.py and test_copied_library.py.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def train(rank: int, ranks: int, mean: Callable[[Tensor], Tensor]) -> float:
    """Return the final loss. In float64, the order in which `mean` adds does not show in its first digits."""
    inputs = torch.randn(192, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = inputs.sin().sum(dim=1)
    own_inputs, own_targets = inputs[rank::ranks], targets[rank::ranks]
    weights = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    for _ in range(30):
        loss = (own_inputs @ weights - own_targets).square().mean()
        [gradient] = torch.autograd.grad(loss, weights)
        weights = (weights - 0.1 * mean(gradient)).detach().requires_grad_()
    return mean(loss.detach()).item()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from utils import setup_distributed

    with setup_distributed() as job:
        loss = train(job.rank, job.world_size, job.all_reduce_mean)
        final = f"final loss: {loss:.10f}\n" if job.is_main else ""
        sys.stdout.write(f"{final}rank {job.rank} loss {loss.hex()}\n")

"""What ends a rank in DistributedDataParallel: the parameter and the rank are named."""
from __future__ import annotations

import re

import pytest

from tests.unit.programs import python

BEGIN = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from utils import setup_distributed
class Parts(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.vision, self.out = nn.Linear(6, 8), nn.Linear(8, classes)
    def forward(self, words, image=None):
        return self.out(words if image is None else words + self.vision(image))
with setup_distributed("gloo") as job:
"""
PROGRAMS = {
    "a skipped layer": ("""
    model = DDP(Parts())
    for step in range(3):
        image = None if step == 1 and job.rank == 1 else torch.randn(2, 6)
        model(torch.randn(2, 8), image).sum().backward()
""", "rank 1 on .* failed: RuntimeError: no gradient in the step before for vision.weight, vision.bias: this rank's"),
    "another shape": ("""
    DDP(Parts(10 - job.rank))
""", r"rank 1 on .* failed: RuntimeError: the ranks build different models: out.weight has the shape \[9, 8\] on "
     "rank 1"),
    "a frozen layer": ("""
    model = Parts()
    if job.rank == 1:
        model.vision.requires_grad_(False)
    DDP(model)
""", r"different models: the first trainable parameter that differs is vision.weight \[8, 6\] on rank 0 and out.weight"
     r" \[10, 8\] on rank 1|is out.weight \[10, 8\] on rank 1 and vision.weight \[8, 6\] on rank 0"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_parameter_and_the_rank_are_named(program: str) -> None:
    text, cause = PROGRAMS[program]
    done = python("-c", BEGIN + text, ranks=2, warm=True)
    assert done.returncode != 0 and re.search(cause, done.stderr), done.stderr

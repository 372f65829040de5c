"""utils/training/noise_scale.py: estimates against exact noise scales; ranks and accumulation give the same.

This file is also the program of the ranks.
"""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.faults.programs import run_ranks
from utils import Distributed, setup_distributed
from utils.training import accumulate, prime_ddp_buckets
from utils.training.noise_scale import GradientNoiseScale, recommend

STEPS, MICRO_BATCH, SAMPLES = 100, 16, 512


class Quadratic(nn.Module):
    """The loss |H (w - x)|^2 / 2 of a sample x, with a diagonal H."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.linspace(0.5, 2, 24)
        self.first, self.second = nn.Parameter(torch.full((9,), 0.5)), nn.Parameter(torch.full((15,), -0.4))

    def forward(self, samples: Tensor) -> Tensor:
        apart = (torch.cat([self.first, self.second]) - samples) * self.scales.to(self.first.dtype)
        return apart.square().sum(1).mean() / 2


class Logistic(nn.Module):
    """Logistic regression: the last column of a sample is its class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)
        nn.init.constant_(self.linear.weight, -0.3)
        nn.init.zeros_(self.linear.bias)

    def forward(self, samples: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self.linear(samples[:, :-1]), samples[:, -1:])


def population(model: nn.Module) -> Tensor:
    """All samples: the batches are drawn from them, with replacement."""
    samples = torch.randn(SAMPLES, 24, generator=torch.Generator().manual_seed(1))
    if isinstance(model, Logistic):
        inputs, noise = samples[:, :12], samples[:, 12:13]
        samples = torch.cat([inputs, (inputs.sum(1, keepdim=True) + noise > 0).float()], 1)
    return samples


def exact(model: nn.Module) -> float:
    """trace(C) / |G|^2 over the population, from the gradient of each sample."""
    parameters = list(model.parameters())
    gradients = torch.stack([torch.cat([part.flatten() for part in torch.autograd.grad(model(sample), parameters)])
                             for sample in population(model).split(1)])
    mean = gradients.mean(0).square().sum()
    return float((gradients.square().sum(1).mean() - mean) / mean)


def draws(model: nn.Module, sizes: list[int], ranks: int, steps: int = STEPS) -> Iterator[list[list[Tensor]]]:
    """In each step, the micro-batches of each rank."""
    generator, samples = torch.Generator().manual_seed(2), population(model)
    for _ in range(steps):
        chosen = samples[torch.randint(SAMPLES, (sum(sizes) * ranks,), generator=generator)]
        yield [list(share.split(sizes)) for share in chosen.split(sum(sizes))]


def measure(model: nn.Module, steps: Iterator[list[Tensor]], noise: GradientNoiseScale, uneven: bool = False) -> float:
    dtype = next(model.parameters()).dtype
    for micro_batches in steps:
        for batch, weight in accumulate(model, micro_batches):
            (weight * model(batch.to(dtype))).backward()
        noise.update([len(batch) for batch in micro_batches] if uneven else None)
        model.zero_grad()
    return noise.value


def compare(name: str, found: float, expected: float, tolerance: float) -> None:
    assert math.isclose(found, expected, rel_tol=tolerance), f"{name}: {found}, expected {expected}"
    sys.stdout.write(f"{name}: {found:.2f}, expected {expected:.2f}\n")  # at once: the ranks share the output


def on_ranks(dist: Distributed) -> None:
    models: tuple[Callable[[], nn.Module], ...] = (Quadratic, Logistic)
    for make in models:
        ddp = DDP(make())
        shares = (ranks[dist.rank] for ranks in draws(make(), [MICRO_BATCH], dist.world_size))
        found = measure(ddp, shares, GradientNoiseScale(ddp, MICRO_BATCH, every=1))
        compare(f"{make.__name__} on {dist.world_size} ranks", found, exact(make()), 0.15)

        if dist.rank:
            continue
        one = make()
        whole = (sum(ranks, []) for ranks in draws(one, [MICRO_BATCH], dist.world_size))
        accumulated = measure(one, whole, GradientNoiseScale(one, MICRO_BATCH, every=1))
        compare(f"{make.__name__} accumulated", accumulated, found, 1e-3)


def with_options(dist: Distributed) -> None:
    """DDP's options, a communication hook, bfloat16, a short last micro-batch."""
    cases: list[tuple[dict[str, Any], torch.dtype, bool]] = [
        ({"gradient_as_bucket_view": True}, torch.float32, True), ({"static_graph": True}, torch.bfloat16, False),
        ({"gradient_as_bucket_view": True, "static_graph": True}, torch.float32, False)]
    for options, dtype, hook in cases:
        ddp = DDP(Quadratic().to(dtype), **options)
        if hook:
            ddp.register_comm_hook(None, fp16_compress_hook)
        prime_ddp_buckets(ddp, lambda: ddp(population(ddp)[:16].to(dtype)))  # noqa: B023 - called at once
        shares = (ranks[dist.rank] for ranks in draws(Quadratic(), [16, 16, 5], dist.world_size))
        found = measure(ddp, shares, GradientNoiseScale(ddp, MICRO_BATCH, every=1), uneven=True)
        compare(f"{options} {dtype}", found, exact(Quadratic()), 0.15)


def main() -> None:
    torch.set_num_threads(1)
    with setup_distributed("gloo", timeout=60) as dist:
        on_ranks(dist)
        if dist.world_size == 2:
            with_options(dist)


def test_estimates_on_ranks_are_exact(tmp_path: Path) -> None:
    output = run_ranks(tmp_path, __file__, (2, []), (3, []), (4, []))
    assert output.count("expected") == (2 + 3 + 4 + 3) * 2 + 2 * 3, output


def test_measured_steps_and_resume() -> None:
    model = Logistic()
    batches = [step[0] for step in draws(model, [8, 8], 1, steps=23)]
    whole = GradientNoiseScale(model, 8, every=5)
    assert math.isnan(whole.value)
    expected = measure(model, iter(batches), whole)
    assert expected > 0 and whole.state_dict()["steps"] == 23

    first = GradientNoiseScale(model, 8, every=5)
    measure(model, iter(batches[:9]), first)
    state = first.state_dict()
    measure(model, iter(batches[9:11]), first)  # after the checkpoint, and lost
    second = GradientNoiseScale(model, 8, every=5)
    second.load_state_dict(state)
    assert measure(model, iter(batches[9:]), second) == expected
    skipped = GradientNoiseScale(model, 8, every=1)
    assert math.isnan(measure(model, iter([[batches[0][0]]]), skipped))  # a single micro-batch


def test_wrong_calls_are_refused() -> None:
    model = Logistic()
    with pytest.raises(ValueError, match="micro_batch=0"):
        GradientNoiseScale(model, 0)
    noise = GradientNoiseScale(model, 8, every=1)
    with pytest.raises(RuntimeError, match="before zero_grad"):
        noise.update()
    for _ in range(2):
        model(torch.ones(3, 13)).backward()
    with pytest.raises(ValueError, match="expected 2 numbers"):
        noise.update([3])
    with pytest.raises(ValueError, match="measure more steps"):
        recommend(math.inf, batch=8)


def test_recommendation() -> None:
    words = recommend(8192, batch=512)
    assert "Up to about 2,048 samples per step" in words and "Beyond 8,192" in words
    assert "17 times the fewest steps" in words and "SGD by 3.4 (" in words and "Adam by 1.84 (" in words


if __name__ == "__main__":
    main()

"""utils/training/batch.py: every split is exact; accumulated gradients are those of the global batch.

This file is also a program of three ranks: `python -m tests.unit.test_training FOLDER`.
"""
from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.multiprocessing import start_processes
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.unit.programs import python
from utils.training import accumulate, linear_warmup, prime_ddp_buckets, scale_lr, split_batch


def test_every_split_is_exact_and_none_has_fewer_passes() -> None:
    sizes = itertools.product(range(1, 61), (1, 2, 3, 4, 6), (1, 5, 8, 64))
    for global_batch, world_size, most in sizes:
        if global_batch % world_size:
            with pytest.raises(ValueError):
                split_batch(global_batch, world_size, most)
            continue
        split = split_batch(global_batch, world_size, most)
        assert split.micro_batch * split.world_size * split.accumulation == global_batch
        share = global_batch // world_size
        assert split.micro_batch == max(d for d in range(1, min(most, share) + 1) if share % d == 0)


@pytest.mark.parametrize(("global_batch", "world_size", "least"), [(1000, 3, 1), (2, 3, 1), (254, 2, 8), (100, 7, 1)])
def test_an_impossible_split_is_refused(global_batch: int, world_size: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"{global_batch} cannot be split .* {least} to 64 samples on {world_size}"):
        split_batch(global_batch, world_size, 64, min_micro_batch=least)


def test_rules_of_the_learning_rate() -> None:
    assert scale_lr(0.1, 32, "linear") == pytest.approx(3.2)  # Goyal et al.: batches 256, 8192
    assert scale_lr(0.1, 16, "sqrt") == pytest.approx(0.4)
    assert scale_lr(0.1, 16, "none") == 0.1

    assert [linear_warmup(step, 4) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert [linear_warmup(step, 4, start=0.2) for step in range(5)] == pytest.approx([0.4, 0.6, 0.8, 1, 1])
    assert linear_warmup(0, 0) == 1


@pytest.mark.parametrize(("call", "words"), [
    (lambda: split_batch(0, 1, 1), "expected at least 1"), (lambda: split_batch(8, 0, 1), "world_size"),
    (lambda: split_batch(8, 1, 0), "max_micro_batch"), (lambda: scale_lr(0.1, 2, "cubic"), "linear, sqrt, none"),
    (lambda: scale_lr(0.1, 0, "linear"), "factor=0"),
    (lambda: list(accumulate(model(), [torch.empty(0, 5)])), "0 samples"),
    (lambda: list(accumulate(model(), ["text"])), "Give size=")])
def test_bad_arguments_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, which DistributedDataParallel asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def gradients(of: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])


@pytest.mark.parametrize("shares", [[12], [3, 9]])
def test_accumulated_gradients_are_those_of_the_whole_batch(shares: list[int], alone: None) -> None:
    """Of one rank, or of two simulated ones with unequal shares: DDP takes the mean of their gradients."""
    whole, ranks = model(), [DDP(model()) for _ in shares]
    inputs, targets = torch.randn(12, 5).double(), torch.randn(12, 1).double()
    mse_loss(whole(inputs), targets).backward()
    for rank, *share in zip(ranks, inputs.split(shares), targets.split(shares), strict=True):
        micro_batches = list(zip(*(part.split(5) for part in share), strict=True))
        steps = accumulate(rank, micro_batches, samples=12 / len(shares))
        for number, ((x, y), weight) in enumerate(steps, 1):
            assert rank.require_backward_grad_sync == (number == len(micro_batches))
            (weight * mse_loss(rank(x), y)).backward()
    mean = torch.stack([gradients(rank) for rank in ranks]).mean(0)
    torch.testing.assert_close(mean, gradients(whole), rtol=1e-12, atol=1e-15)
    for _ in accumulate(ranks[0], [inputs, inputs]):
        break
    assert ranks[0].require_backward_grad_sync  # also after a loop that was abandoned


def test_accumulate_with_a_static_graph_needs_primed_buckets(alone: None) -> None:
    """In no_sync(), the first backward pass would end in an assert of torch."""
    ddp = DDP(model(), static_graph=True)
    batches = [torch.randn(4, 5).double() for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"static_graph=True.* Call prime_ddp_buckets\(model, loss\)"):
        list(accumulate(ddp, batches))
    assert len(list(accumulate(ddp, batches[:1]))) == 1
    prime_ddp_buckets(ddp, lambda: ddp(batches[0]).sum())
    for batch, weight in accumulate(ddp, batches):
        (weight * ddp(batch).square().mean()).backward()


def test_tokens_can_be_counted_instead_of_samples() -> None:
    lengths = [{"mask": torch.ones(2, 3)}, {"mask": torch.tensor([[1.0, 0.0]])}]
    counted = accumulate(model(), lengths, size=lambda batch: float(batch["mask"].sum()))
    assert [weight for _, weight in counted] == pytest.approx([6 / 7, 1 / 7])
    assert [weight for _, weight in accumulate(model(), lengths)] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("options", [{}, {"static_graph": True, "gradient_as_bucket_view": True}])
def test_priming_leaves_no_trace_in_the_model(options: dict[str, bool], alone: None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5),
                          nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4).eval())
    ddp = DDP(model, **options)
    hook_state = PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(hook_state, powerSGD_hook)
    kept = torch.full((4,), 3.0)
    model[1].weight.grad = kept
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    generators = torch.get_rng_state(), random.getstate()
    modes = [module.training for module in ddp.modules()]
    passes = []

    def loss() -> torch.Tensor:
        passes.append((ddp.training, random.random()))
        return ddp(torch.rand(5, 3)).sum()

    prime_ddp_buckets(ddp, loss)
    assert [training for training, _ in passes] == [True] * (2 if options.get("static_graph") else 1)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())
    assert torch.equal(generators[0], torch.get_rng_state()) and generators[1] == random.getstate()
    assert modes == [module.training for module in ddp.modules()] and modes[-1] is False
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["1.weight"]
    assert model[1].weight.grad is kept and torch.equal(kept, torch.full((4,), 3.0))
    assert hook_state.iter == 0 and not hook_state.error_dict
    with ddp.no_sync(), pytest.raises(RuntimeError, match="no_sync"):
        prime_ddp_buckets(ddp, loss)


def train(options: dict[str, bool], saved: Any = None) -> tuple[torch.Tensor, Any]:
    """Train for 6 steps, or from step 3 on; return the parameters, and what step 3 starts with."""
    torch.manual_seed(0)
    # uses its layers in another order than that of their definition, so that DDP reorders its buckets
    ddp = DDP(nn.TransformerEncoderLayer(24, 2, 24, dropout=0.0), bucket_cap_mb=0.004, **options)
    prime_ddp_buckets(ddp, lambda: ddp(torch.randn(4, 24)).square().mean())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if saved:
        ddp.load_state_dict(saved)
    for step in range(3 if saved else 0, 6):
        if step == 3:
            saved = copy.deepcopy(ddp.state_dict())
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        ddp(torch.randn(4, 24, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(ddp.parameters()).detach(), saved


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    for options in ({}, {"static_graph": True, "gradient_as_bucket_view": True}):
        whole, saved = train(options)
        assert torch.equal(train(options, saved)[0], whole), f"changed bits with {options}"
    dist.destroy_process_group()


def test_a_resumed_run_has_the_same_bits_on_three_ranks(tmp_path: Path) -> None:
    """Two ranks add up a gradient in one order only."""
    done = python("-m", __name__, str(tmp_path))
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    start_processes(run_rank, (sys.argv[1],), nprocs=3, start_method="fork")

"""utils/training.py: every split is exact; accumulated gradients are those of the global batch."""
from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

from utils.training import (
    BatchSplit,
    accumulate,
    batched,
    linear_warmup,
    prime_ddp_buckets,
    scale_adam,
    scale_lr,
    split_batch,
)


@pytest.mark.parametrize(("global_batch", "world_size", "most", "expected"), [
    (1024, 8, 64, (64, 2)), (1024, 4, 64, (64, 4)), (96, 3, 12, (8, 4)), (7, 7, 100, (1, 1)),
    (7, 1, 4, (1, 7)), (48, 2, 24, (24, 1)), (48, 2, 23, (12, 2)),
    (96, 4, 16, (12, 2)), (96, 2, 16, (16, 3)), (96, 3, 16, (16, 2))])
def test_a_split_takes_the_largest_micro_batch_that_fits(
        global_batch: int, world_size: int, most: int, expected: tuple[int, int]) -> None:
    split = split_batch(global_batch, world_size, most)
    assert split == BatchSplit(global_batch, world_size, *expected)


def test_every_split_is_exact_and_none_has_fewer_passes() -> None:
    for global_batch in range(1, 61):
        for world_size, most in itertools.product((1, 2, 3, 4, 6), (1, 5, 8, 64)):
            if global_batch % world_size:
                with pytest.raises(ValueError):
                    split_batch(global_batch, world_size, most)
                continue
            split = split_batch(global_batch, world_size, most)
            assert split.micro_batch * split.world_size * split.accumulation == global_batch
            share = global_batch // world_size
            divisors = [d for d in range(1, min(most, share) + 1) if share % d == 0]
            assert split.micro_batch == max(divisors)


@pytest.mark.parametrize(("global_batch", "world_size", "least", "batches", "ranks"), [
    (1000, 3, 1, "999 or 1002", "2 or 4"), (2, 3, 1, "3", "2"),
    (254, 2, 8, "252 or 256", "no other number of"), (100, 7, 1, "98 or 105", "5 or 10")])
def test_an_impossible_split_names_the_nearest_possible_ones(
        global_batch: int, world_size: int, least: int, batches: str, ranks: str) -> None:
    with pytest.raises(ValueError) as refused:
        split_batch(global_batch, world_size, 64, min_micro_batch=least)
    assert f"take a global batch of {batches}; with" in str(refused.value)
    assert str(refused.value).endswith(f"of {global_batch} take {ranks} rank(s)")
    for batch in map(int, batches.split(" or ")):
        split_batch(batch, world_size, 64, min_micro_batch=least)
    for count in map(int, re.findall(r"\d+", ranks)):
        split_batch(global_batch, count, 64, min_micro_batch=least)


def test_the_rules_of_the_learning_rate() -> None:
    assert scale_lr(0.1, 32, "linear") == pytest.approx(3.2)  # Goyal et al.: batches 256, 8192
    assert scale_lr(0.1, 16, "sqrt") == pytest.approx(0.4)
    assert scale_lr(0.1, 16, "none") == 0.1


def test_adam_is_scaled_as_a_whole() -> None:
    scaled = scale_adam(4, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    assert scaled["lr"] == pytest.approx(2e-3)
    assert scaled["betas"] == pytest.approx((0.6, 0.996))
    assert scaled["eps"] == pytest.approx(0.5e-8)
    torch.optim.Adam(nn.Linear(1, 1).parameters(), **scaled)  # type: ignore[arg-type]
    # The rule for the betas: 1 / (1 - beta) batches, each k times as large, are as many samples.
    beta = scale_adam(8, lr=1.0, betas=(0.99, 0.999))["betas"][0]  # type: ignore[index]
    assert 8 / (1 - beta) == pytest.approx(1 / (1 - 0.99))


def test_linear_warmup_rises_in_equal_parts_and_stays() -> None:
    rises = [linear_warmup(step, 4) for step in range(6)]
    assert rises == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    rises = [linear_warmup(step, 4, start=0.2) for step in range(5)]
    assert rises == pytest.approx([0.4, 0.6, 0.8, 1, 1])
    assert linear_warmup(0, 0) == 1


@pytest.mark.parametrize(("call", "words"), [
    (lambda: split_batch(0, 1, 1), "expected at least 1"),
    (lambda: split_batch(8, 0, 1), "world_size"), (lambda: split_batch(8, 1, 0), "max_micro_batch"),
    (lambda: scale_lr(0.1, 2, "cubic"), "linear, sqrt, none"),
    (lambda: scale_lr(0.1, 0, "linear"), "factor=0"),
    (lambda: scale_adam(16, lr=1e-3), "factors up to 10 "),
    (lambda: list(accumulate(model(), [torch.empty(0, 5)])), "0 samples")])
def test_bad_arguments_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, which DistributedDataParallel asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counting(module: nn.Module) -> tuple[DDP, list[int]]:
    """Return the module under DDP, and a list that grows with each exchange of gradients."""
    ddp, exchanges = DDP(module), list[int]()

    # torch compares annotations with types; these would be text.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        exchanges.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    return ddp, exchanges


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def gradients(of: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [5, 5, 2], [1, 11]])
def test_accumulated_gradients_are_those_of_the_whole_batch(
        sizes: list[int], alone: None) -> None:
    whole, (parts, exchanges) = model(), counting(model())
    inputs, targets = torch.randn(12, 5).double(), torch.randn(12, 1).double()
    mse_loss(whole(inputs), targets).backward()
    micro_batches = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    for (x, y), weight in accumulate(parts, micro_batches):
        assert exchanges == []
        (weight * mse_loss(parts(x), y)).backward()
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-12, atol=1e-15)
    assert exchanges == [0]


def test_unequal_shares_are_weighted_by_their_mean() -> None:
    """Two ranks, simulated: DDP takes the mean of their gradients."""
    whole, ranks = model(), [model(), model()]
    inputs, targets = torch.randn(10, 5).double(), torch.randn(10, 1).double()
    mse_loss(whole(inputs), targets).backward()
    for rank, share in zip(ranks, [slice(0, 7), slice(7, 10)], strict=True):
        batches = list(zip(inputs[share].split(4), targets[share].split(4), strict=True))
        for (x, y), weight in accumulate(rank, batches, samples=5.0):
            (weight * mse_loss(rank(x), y)).backward()
    mean = (gradients(ranks[0]) + gradients(ranks[1])) / 2
    torch.testing.assert_close(mean, gradients(whole), rtol=1e-12, atol=1e-15)


def test_tokens_can_be_counted_instead_of_samples() -> None:
    lengths = [{"mask": torch.ones(2, 3)}, {"mask": torch.tensor([[1.0, 0.0]])}]
    counted = accumulate(model(), lengths, size=lambda batch: float(batch["mask"].sum()))
    assert [weight for _, weight in counted] == pytest.approx([6 / 7, 1 / 7])


def test_gradients_are_exchanged_again_after_an_abandoned_loop(alone: None) -> None:
    parts, exchanges = counting(model())
    for batch, _ in accumulate(parts, [torch.ones(1, 5).double()] * 2):
        parts(batch).sum().backward()
        break
    assert exchanges == []
    parts(torch.ones(1, 5).double()).sum().backward()
    assert exchanges == [0]


def test_a_batch_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="Give size="):
        list(accumulate(model(), ["text"]))


def test_batched_takes_nothing_ahead() -> None:
    taken = []

    def batches() -> Iterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    lists = batched(batches(), 2)
    assert next(lists) == [0, 1] and taken == [0, 1]
    assert list(lists) == [[2, 3], [4]]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True},
                                     {"find_unused_parameters": True}])
def test_priming_leaves_no_trace_in_the_model(options: dict[str, bool], alone: None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5),
                          nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4).eval())
    ddp = DDP(model, **options)
    hook_state = PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(hook_state, powerSGD_hook)
    kept = torch.full((4,), 3.0)
    model[1].weight.grad = kept
    tensors = model.state_dict(keep_vars=True)
    before = {name: (tensor, tensor.clone()) for name, tensor in tensors.items()}
    generators = torch.get_rng_state(), random.getstate()
    modes = [module.training for module in ddp.modules()]
    drawn, passes = [], []

    def loss() -> torch.Tensor:
        passes.append(ddp.training)
        drawn.append(random.random())
        return ddp(torch.rand(5, 3)).sum()

    prime_ddp_buckets(ddp, loss)
    assert passes == [True] * (2 if options.get("static_graph") else 1)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, value)
               for name, (tensor, value) in before.items())
    assert torch.equal(generators[0], torch.get_rng_state()) and generators[1] == random.getstate()
    assert modes == [module.training for module in ddp.modules()] and modes[-1] is False
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["1.weight"]
    assert model[1].weight.grad is kept and torch.equal(kept, torch.full((4,), 3.0))
    assert hook_state.iter == 0 and not hook_state.error_dict


def test_priming_inside_of_no_sync_is_refused(alone: None) -> None:
    ddp = DDP(model())
    with ddp.no_sync(), pytest.raises(RuntimeError, match="no_sync"):
        prime_ddp_buckets(ddp, lambda: ddp(torch.ones(1, 5).double()).sum())


# A run of 6 steps, and one that resumes in a new DistributedDataParallel after 3 of them. The
# layers are not used in the order of their definition, so that DDP reorders its buckets.
RESUME = """
import copy, hashlib, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from utils.training import accumulate, prime_ddp_buckets

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.auxiliary = nn.Linear(24, 5), nn.Linear(24, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Dropout(0.2)) for _ in range(6))
    def forward(self, x):
        for number in (3, 0, 5, 2, 4, 1):
            x = x + self.layers[number](x).tanh()
            middle = x if number == 5 else None if number == 3 else middle
        return (self.last(x), self.auxiliary(middle)) if self.training else self.last(x)

def loss(ddp, x):
    main, auxiliary = ddp(x)
    return main.square().mean() + 0.3 * auxiliary.square().mean()

def run(options, first, saved=None):
    torch.manual_seed(dist.get_rank())
    net = Net()
    ddp = DDP(net, bucket_cap_mb=0.004, **options)
    prime_ddp_buckets(ddp, lambda: loss(ddp, torch.randn(4, 24)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    if saved:
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
    digests = []
    for step in range(first, 6):
        if step == 3:
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batches = torch.randn(2, 4, 24, generator=generator).unbind() if step % 2 else [
            torch.randn(4, 24, generator=generator)]
        if options.get("static_graph"):
            batches = batches[:1]  # which allows no other number of passes
        for batch, weight in accumulate(ddp, batches):
            (weight * loss(ddp, batch)).backward()
        optimizer.step(); optimizer.zero_grad()
        parts = [tensor.numpy().tobytes() for tensor in net.state_dict().values()]
        digests.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return digests, saved

torch.set_num_threads(1)
dist.init_process_group("gloo")
for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True},
                {"find_unused_parameters": True},
                {"static_graph": True, "gradient_as_bucket_view": True}):
    whole, saved = run(options, 0)
    again, _ = run(options, 3, saved)
    print("same bits" if whole[3:] == again else "changed bits", options)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resumed_run_has_the_same_bits_on_every_rank(ranks: int, tmp_path: Path) -> None:
    """With auxiliary outputs, BatchNorm, dropout and accumulation."""
    program = tmp_path / "resume.py"
    program.write_text(RESUME)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *torchrun, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("same bits") == 5 * ranks, done.stdout

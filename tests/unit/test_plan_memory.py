"""Predicted memory is that of a real run, in which the storage of each tensor is counted.

Blocks are multiples of 512 bytes, as those of the allocator of GPUs.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.unit.plan_models import CASES, GPT, Case, adamw, next_word
from utils.plan.trace import trace_training


class CountedRun(TorchDispatchMode):
    """Count the bytes of all storages that operations read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.add(args, kwargs, output)
        return output

    def add(self, *trees: object) -> None:
        tensors = [tensor for tensor in tree_iter(trees) if isinstance(tensor, torch.Tensor)]
        for tensor in [part for tensor in tensors for part in self.parts(tensor)]:
            if (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                size = (storage.nbytes() + 511) // 512 * 512
                self.live += size
                weakref.finalize(storage, self.remove, size)
        self.peak = max(self.peak, self.live)

    @staticmethod
    def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)

    def remove(self, size: int) -> None:
        self.live -= size


def counted_peak(case: Case, ddp_options: dict[str, Any] | None = None) -> int:
    """Return the peak of the last of some real steps."""
    run = CountedRun()
    with run:
        model = case.build()
        run.add(list(model.parameters()), list(model.buffers()))
        if ddp_options is not None:
            model = DDP(model, **ddp_options)
        optimizer = case.optimizer(model.parameters())


        def passes() -> torch.Tensor:
            optimizer.zero_grad()
            for _ in range(case.accumulate):
                loss = case.step(model)
                loss.backward()
            return loss
        for _ in range(case.steps):
            run.peak = 0
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(passes)
            else:
                passes()
                optimizer.step()
    return run.peak


def traced(case: Case) -> Any:
    return trace_training(case.build, case.step, case.optimizer, accumulate_steps=case.accumulate, foreach=False)


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_a_counted_run(name: str) -> None:
    peak = traced(CASES[name]).peak()
    assert sum(peak.bytes.values()) == peak.total
    assert peak.total == pytest.approx(counted_peak(CASES[name]), rel=0.01)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("view", [False, True])
def test_buckets_of_ddp_are_those_of_a_counted_run(view: bool, process_group: None) -> None:
    case = Case(GPT, next_word(batch=1, length=8), adamw)
    trace = traced(case)
    peak = trace.peak(without_gradients=view)
    buckets = sum(size for _, size in trace.gradients)
    assert buckets == sum(parameter.nbytes for parameter in GPT().parameters())
    counted = counted_peak(case, {"gradient_as_bucket_view": view})
    assert peak.total + buckets == pytest.approx(counted, rel=0.01)


def test_peak_of_a_large_batch_is_in_the_backward_pass_and_of_a_small_one_in_the_optimizer() -> None:
    large = traced(Case(GPT, next_word(batch=64), adamw)).peak()
    small = traced(Case(lambda: nn.Sequential(nn.Linear(512, 512)), lambda m: m(torch.zeros(1, 512)).sum(),
                        CASES["MLP, AdamW foreach"].optimizer)).peak()
    assert large.where.startswith("backward") and small.where.startswith("optimizer")
    assert large.bytes["activations"] > large.total / 2

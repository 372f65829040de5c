"""Predicted memory is that of a real run, in which the storage of each tensor is counted.

Blocks are multiples of 512 bytes, as those of the allocator of GPUs.
"""
from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.matrix import with_all
from tests.unit.plan_models import (
    CASES,
    GPT,
    HELD_OUT,
    LARGEST,
    NEED_VALUES,
    Case,
    adamw,
    foreach_adamw,
    next_word,
    sgd,
)
from utils.tools.plan.hardware import PredictionError
from utils.tools.plan.trace import trace_training
from utils.tools.plan.traced import largest_batch, trace_factory


class CountedRun(TorchDispatchMode):
    """Count the bytes of all storages that operations read or write. FSDP resizes storages that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.add(args, kwargs, output)
        return output

    def add(self, *trees: object) -> None:
        tensors = [item for item in tree_iter(trees) if isinstance(item, torch.Tensor)]
        self.known.update(part.untyped_storage() for tensor in tensors for part in self.parts(tensor))
        self.peak = max(self.peak, sum((storage.nbytes() + 511) // 512 * 512 for storage in self.known))

    @staticmethod
    def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if isinstance(tensor, DTensor):
            return (tensor._local_tensor,)
        return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def counted_peak(case: Case, ddp_options: dict[str, Any] | None = None) -> int:
    """Return the peak of real steps after the first one, which makes the state of the optimizer."""
    run = CountedRun()
    with run:
        model = case.build()
        run.add(list(model.parameters()), list(model.buffers()))
        if ddp_options is not None:
            model = DDP(model, **ddp_options)
        optimizer = case.optimizer(model.parameters())

        for number in range(3):
            run.peak = run.peak if number > 1 else 0
            optimizer.zero_grad()
            for _ in range(case.accumulate):
                case.step(model).backward()
            optimizer.step()
    return run.peak


def traced(case: Case) -> Any:
    return trace_training(case.build, case.step, case.optimizer, accumulate_steps=case.accumulate, gpu=False)


SLOW = ("GRU, bidirectional", "GRU of packed sequences")  # seconds each; the LSTM is in each run


@pytest.mark.parametrize("name", [*(name for name in (*CASES, *HELD_OUT) if name not in SLOW), *with_all(*SLOW)])
def test_peak_is_that_of_a_counted_run(
        name: str, record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    case = {**CASES, **HELD_OUT}[name]
    if name == "LSTM":  # that of oneDNN keeps more
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    peak = traced(case).peak()
    counted = counted_peak(case)
    assert sum(peak.bytes.values()) == peak.total
    assert peak.total == pytest.approx(counted, rel=0.01 if name in CASES else 0.05)
    record_property("error of the predicted memory, %", 100 * abs(peak.total / counted - 1))


@pytest.mark.parametrize("name", NEED_VALUES)
def test_a_trace_that_needs_values_names_the_line(name: str) -> None:
    with pytest.raises(PredictionError, match=r"^It needs values at \w+.py:\d+: measure a step"):
        traced(NEED_VALUES[name])


@pytest.mark.parametrize("select", [
    lambda y: y[y > 0], lambda y: y.masked_select(y > 0), lambda y: y.flatten()[(y.flatten() > 0).nonzero()[:, 0]]],
    ids=["index", "masked_select", "nonzero"])
def test_a_mask_needs_values(select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(PredictionError, match=r"needs values at test_plan_memory.py:\d+: measure a step"):
        trace_training(lambda: nn.Linear(64, 64), lambda m: select(m(torch.randn(9, 64))).square().mean(), sgd)


class Growing(torch.optim.SGD):
    """Keeps all gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept[len(kept)] = parameter.grad.clone()


def test_state_that_still_grows_is_reported() -> None:
    notes = traced(Case(CASES["MLP, SGD"].build, CASES["MLP, SGD"].step, Growing)).notes
    assert any(re.match("The optimizer's state still grew by [0-9,]+ bytes in the last traced step.", n) for n in notes)


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
    small = traced(Case(lambda: nn.Linear(512, 512), lambda m: m(torch.zeros(1, 512)).sum(), foreach_adamw)).peak()
    assert large.where.startswith("backward") and small.where.startswith("optimizer")
    assert large.bytes["activations"] > large.total / 2


@pytest.mark.parametrize("name", LARGEST)
def test_largest_micro_batch_is_that_of_a_counted_run_or_unconfirmed(name: str) -> None:
    capacity, (make, least, confirmed) = 10_000_000, LARGEST[name]

    def total(samples: int) -> float:
        return trace_factory(f"tests.unit.plan_models:{name}", samples, "adamw", "fp32", 1, gpu=False).peak().total

    def counted(samples: int) -> int:
        model, inputs = make(samples)
        named = inputs if isinstance(inputs, dict) else {}
        places = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
        return counted_peak(Case(lambda: model, lambda model: model(*places, **named).mean(), adamw))
    found = largest_batch(total, least, capacity)
    assert (not found.unconfirmed) == confirmed, found
    if confirmed:
        more = found.samples + 2 + found.samples // 50
        assert counted(found.samples) < 1.005 * capacity < 1.01 * counted(more // 2 * 2), found

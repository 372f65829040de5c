"""A rank of example 07, for test_example_fsdp.py: python -m tests.unit.fsdp_ranks FOLDER COMMAND..."""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.unit.programs import load_example
from tests.unit.test_example_fsdp import LARGE, MODEL, words_of
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer

BATCH = 8
example: Any = load_example("07_fsdp")


def loss_of(model: nn.Module, step: int, job: Distributed | None) -> torch.Tensor:
    """Return the loss of this rank's share of a batch, or of the whole batch without a job."""
    place = argparse.Namespace(rank=0, world_size=1, device=torch.device("cpu")) if job is None else job
    text = torch.arange(1000).mul(37).to(torch.uint8)
    tokens = example.draw_batch(text, step, argparse.Namespace(context=MODEL["context"], batch_size=BATCH), place)
    scores = model(tokens[:, :-1])
    return cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return checksums of the whole parameters and of the whole state of the optimizer."""
    options = StateDictOptions(full_state_dict=True)
    parts = zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True)
    return {name: hashlib.sha256(repr(plain(state)).encode()).hexdigest() for name, state in parts}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items())}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def make_sharded(job: Distributed, size: dict[str, int] = MODEL, groups: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    model = example.GPT(**size)
    example.shard(model, example.make_mesh(job, groups))
    return model, example.make_optimizer(model, 1e-2, job.device)


def save(job: Distributed, folder: Path) -> dict[str, Any]:
    """Train, compare the gradients with those of a model that is whole, and save."""
    torch.manual_seed(0)
    whole = example.GPT(**MODEL)
    torch.manual_seed(0)
    model, optimizer = make_sharded(job)
    for step in (1, 2):
        loss_of(model, step, job).backward()
        if step == 1:
            loss_of(whole, step, None).backward()
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            errors = [(mine.grad.full_tensor() - one.grad).norm() / one.grad.norm() for mine, one in pairs]
        optimizer.step()
        optimizer.zero_grad()
    state = example.TrainingState(model, optimizer)
    state.step = 2
    dcp.save({"training": state}, checkpoint_id=folder / "step-000000002")
    return {"gradient error": max(errors).item(), **digest(model, optimizer)}


def load(job: Distributed, folder: Path) -> dict[str, Any]:
    """Four ranks have saved with one group and load with two."""
    model, optimizer = make_sharded(job, groups=2 if job.world_size == 4 else 1)
    state = example.TrainingState(model, optimizer)
    example.load_latest(folder, state)
    return {"step": state.step, **digest(model, optimizer)}


def refuse(job: Distributed, folder: Path) -> dict[str, Any]:
    """Return what Checkpointer says to sharded states."""
    model, optimizer = make_sharded(job)
    one = next(model.parameters()).detach()
    found: dict[str, Any] = {}
    with Checkpointer(folder / "refused") as checkpoints:
        for name, part in {"model": model, "optimizer": optimizer, "tensor": one}.items():
            for method in (checkpoints.load_latest, lambda state: checkpoints.save_and_wait(1, state)):
                try:
                    method({name: part})
                except (RuntimeError, ValueError) as error:
                    found.setdefault(name, []).append(f"{type(error).__name__}: {error}")
    return found | {"files": sorted(path.name for path in (folder / "refused").iterdir())}


class CountedRun(TorchDispatchMode):
    """Count the bytes of all storages, at each operation. FSDP resizes storages that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.add(args, kwargs, output)
        return output

    def add(self, *trees: object) -> None:
        for tensor in tree_iter(trees):
            if isinstance(tensor, torch.Tensor):
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self.known.add(local.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.known))


def memory(job: Distributed, folder: Path) -> dict[str, Any]:
    """Return the peak bytes of the third step on the rank that has most."""
    model, optimizer = make_sharded(job, LARGE)
    for group in optimizer.param_groups:
        group["foreach"] = True  # as on a GPU
    run = CountedRun()
    for step in (1, 2, 3):
        with run:
            run.peak = 0
            run.add(list(model.parameters()), [list(values.values()) for values in optimizer.state.values()])
            loss_of(model, step, job).backward()
            in_backward = run.peak
            optimizer.step()
            optimizer.zero_grad()
    peak = torch.tensor([run.peak, in_backward])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return dict(zip(("peak", "in backward"), peak.tolist(), strict=True))


def train(job: Distributed, folder: Path) -> None:
    """Run the example itself: four steps with HSDP, or resume and end after six."""
    example.setup_distributed = lambda backend: contextlib.nullcontext(job)
    groups, steps = (2, 4) if job.world_size == 4 else (1, 6)
    sys.argv[1:] = [*words_of(MODEL), "--batch-size", "8", "--replicate", str(groups), "--steps", str(steps),
                    "--checkpoints", str(folder / "trained"), "--save-every", "2"]
    example.main()


if __name__ == "__main__":
    folder, *commands = sys.argv[1:]
    with setup_distributed("gloo") as job:
        results = {command: globals()[command](job, Path(folder)) for command in commands}
        if job.is_main:
            print("\n" + json.dumps(results))

"""Example 07: gradients as without FSDP, checkpoints for any number of ranks.

This file is also the program of the ranks: python -m tests.unit.test_example_fsdp FOLDER COMMAND...
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.functional import cross_entropy

from tests.unit.programs import load_example, python
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer

MODEL = {"layers": 2, "heads": 2, "width": 32, "context": 16}
COMMANDS = {4: ["save", "load", "train"], 2: ["load"], 1: ["load", "train", "read_alone"],
            3: ["load", "shard_again"]}
BATCH = 8
example: Any = load_example("07_fsdp")


def words_of(model: dict[str, int]) -> list[str]:
    return [word for name, value in model.items() for word in (f"--{name}", str(value))]


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


def make_sharded(job: Distributed, groups: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    model = example.GPT(**MODEL)
    if groups:
        example.shard(model, job, groups)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


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
    with Checkpointer(folder / "saved") as checkpoints:
        checkpoints.save_and_wait(2, {"model": model, "optimizer": optimizer})
    return {"gradient error": max(errors).item(), **digest(model, optimizer)}


def load(job: Distributed, folder: Path) -> dict[str, Any]:
    """Four ranks have saved with one group and load with two; one rank also loads without FSDP, and saves that."""
    found: dict[str, Any] = {}
    for groups in {4: [2, 4], 1: [0, 1]}.get(job.world_size, [1]):
        model, optimizer = make_sharded(job, groups=groups)
        with Checkpointer(folder / "saved") as checkpoints:
            step = checkpoints.load_latest({"model": model, "optimizer": optimizer}).step
        found[str(groups)] = {"step": step, **digest(model, optimizer)}
    if job.world_size == 1:
        with Checkpointer(folder / "whole") as checkpoints:
            model, optimizer = make_sharded(job, groups=0)
            Checkpointer(folder / "saved").load_latest({"model": model, "optimizer": optimizer})
            checkpoints.save_and_wait(3, {"model": model, "optimizer": optimizer})
    return found


def read_alone(job: Distributed, folder: Path) -> bool:
    """Return whether safetensors and json alone read what the kit has loaded."""
    from safetensors.torch import load_file

    model, optimizer = make_sharded(job, groups=0)
    with Checkpointer(folder / "saved") as checkpoints:
        checkpoints.load_latest({"model": model, "optimizer": optimizer})
    checkpoint = folder / "saved" / "step-000000002"
    whole = {f"model/{name}": torch.zeros_like(one) for name, one in model.state_dict().items()}
    for entry in json.loads((checkpoint / "manifest.json").read_text())["manifest"]["files"]:
        tensors = load_file(checkpoint / entry["name"])
        for key, tensor in tensors.items():
            name, _, offsets = key.rpartition("@")
            if name in whole:
                starts = map(int, offsets.split(","))
                place = tuple(slice(start, start + size) for start, size in zip(starts, tensor.shape, strict=True))
                whole[name][place] = tensor
    return all(torch.equal(whole[f"model/{name}"], one) for name, one in model.state_dict().items())


def shard_again(job: Distributed, folder: Path) -> dict[str, Any]:
    """What one rank has saved whole is loaded in slices, by an optimizer that has made no step."""
    model, optimizer = make_sharded(job)
    with Checkpointer(folder / "whole") as checkpoints:
        checkpoints.load_latest({"model": model, "optimizer": optimizer})
    return digest(model, optimizer)


def train(job: Distributed, folder: Path) -> None:
    """Run the example itself: four steps with HSDP, or resume and end after six."""
    example.setup_distributed = lambda: contextlib.nullcontext(job)
    groups, steps = (2, 4) if job.world_size == 4 else (1, 6)
    sys.argv[1:] = [*words_of(MODEL), "--batch-size", "8", "--replicate", str(groups), "--steps", str(steps),
                    "--checkpoints", str(folder / "trained"), "--save-every", "2"]
    example.main()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The output and results of COMMANDS, functions of this file, by the number of ranks."""
    folder, results = tmp_path_factory.mktemp("fsdp"), {}
    for number, commands in COMMANDS.items():
        done = python("-m", __name__, str(folder), *commands, ranks=number, warm=True)
        assert done.returncode == 0, done.stderr
        results[number] = {"output": done.stdout, **json.loads(done.stdout.splitlines()[-1])}
    return results


def test_checkpoint_of_4_ranks_loads_bit_for_bit_on_any_number(found: dict[int, dict[str, Any]]) -> None:
    saved = dict(found[4]["save"])
    assert saved.pop("gradient error") < 1e-5
    loaded = [one for number in COMMANDS for one in found[number]["load"].values()]
    assert loaded == [{**saved, "step": 2}] * 6
    assert found[3]["shard_again"] == saved and found[1]["read_alone"]


def test_training_resumes_with_hsdp_on_other_ranks(found: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    whole = python("examples/07_fsdp.py", *words_of(MODEL), "--batch-size", "8", "--steps", "6",
                   "--checkpoints", str(tmp_path), warm=True)
    assert whole.returncode == 0, whole.stderr
    assert "resuming after step 4" in found[1]["output"]
    losses = [re.findall(r"step 6/6: loss ([0-9.]+)", output) for output in (found[1]["output"], whole.stdout)]
    assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), abs=2e-4)


if __name__ == "__main__":
    folder, *commands = sys.argv[1:]
    with setup_distributed("gloo") as job:
        results = {command: globals()[command](job, Path(folder)) for command in commands}
        if job.is_main:
            print("\n" + json.dumps(results))

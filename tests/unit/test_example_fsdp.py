"""Example 07: gradients as without FSDP, checkpoints for any number of ranks, memory as predicted.

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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.functional import cross_entropy

from tests.unit.programs import ROOT, load_example, python
from tests.unit.test_plan_memory import CountedRun
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer
from utils.tools.plan import plan_cli as cli

MODEL = {"layers": 2, "heads": 2, "width": 32, "context": 16}
LARGE = {"layers": 6, "heads": 4, "width": 128, "context": 16}
COMMANDS = {4: ["save", "load", "refuse", "memory", "train"], 2: ["load", "memory"], 1: ["load", "train"]}
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The output and results of COMMANDS, functions of this file, by the number of ranks."""
    folder, results = tmp_path_factory.mktemp("fsdp"), {}
    (folder / "trained" / "step-000000005").mkdir(parents=True)  # of a save that was killed
    for number, commands in COMMANDS.items():
        done = python("-m", __name__, str(folder), *commands, ranks=number)
        assert done.returncode == 0, done.stderr
        results[number] = {"output": done.stdout, **json.loads(done.stdout.splitlines()[-1])}
    return results


def test_checkpoint_of_4_ranks_loads_bit_for_bit_on_4_2_and_1(found: dict[int, dict[str, Any]]) -> None:
    saved = dict(found[4]["save"])
    assert saved.pop("gradient error") < 1e-5
    assert [found[number]["load"] for number in (4, 2, 1)] == [{**saved, "step": 2}] * 3


def test_training_resumes_with_hsdp_on_other_ranks(found: dict[int, dict[str, Any]]) -> None:
    whole = python("examples/07_fsdp.py", *words_of(MODEL), "--batch-size", "8", "--steps", "6")
    assert whole.returncode == 0, whole.stderr
    assert "parameters on 2 shards" in found[4]["output"] and "resuming after step 4" in found[1]["output"]
    losses = [re.findall(r"step 6/6: loss ([0-9.]+)", output) for output in (found[1]["output"], whole.stdout)]
    assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), abs=2e-4)


def test_checkpointer_refuses_sharded_states_in_one_sentence(found: dict[int, dict[str, Any]]) -> None:
    refused = dict(found[4]["refuse"])
    assert refused.pop("files") == []
    assert set(refused) == {"model", "optimizer", "tensor"}
    for name, messages in refused.items():
        assert [message.split(":")[0] for message in messages] == ["CheckpointError", "StateError"]
        for message in messages:
            assert re.search(f"{name}.* sharded over the ranks.*; expected .* whole on every rank. Save sharded "
                             "states with torch.distributed.checkpoint, as examples/07_fsdp.py does", message), message


@pytest.mark.parametrize("number", [2, 4])
def test_peak_memory_of_a_rank_is_as_planned(found: dict[int, dict[str, Any]], number: int,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "07_fsdp.py")
    assert cli.main(["--json", "--gpus", str(number), example, *words_of(LARGE), "--batch-size", str(8 // number)]) == 0
    planned = sum(json.loads(capfd.readouterr().out)["memory"].values())
    assert found[number]["memory"]["peak"] == pytest.approx(planned, rel=0.1)


if __name__ == "__main__":
    folder, *commands = sys.argv[1:]
    with setup_distributed("gloo") as job:
        results = {command: globals()[command](job, Path(folder)) for command in commands}
        if job.is_main:
            print("\n" + json.dumps(results))

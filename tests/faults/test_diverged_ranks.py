"""Ranks that have diverged are no checkpoint: the save names the rank and the first entry that differs.

This file is also the program of the two ranks, which run all cases in one process group.
"""
from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.faults.programs import run_ranks
from utils import setup_distributed
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, list_steps
from utils.checkpoint import snapshot as checkpoint_snapshot

State = dict[str, Any]
Case = Callable[[int], State]


class Model(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.base = nn.Linear(6, 6).requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.head(self.base(x)))
        return out


def make(rank: int, model: Model | None = None, **settings: Any) -> State:
    """A model that each rank makes with the same weights, and its optimizer."""
    torch.manual_seed(0)
    ddp = DDP(model or Model())
    return {"model": ddp, "optimizer": torch.optim.AdamW(ddp.parameters(), lr=settings.pop("lr", 0.1), **settings)}


def train(rank: int, state: State, *, through_ddp: bool = True, steps: bool = True) -> State:
    for step in range(2):
        x = torch.rand(8, 6) + rank + step
        (state["model"] if through_ddp else state["model"].module)(x).square().sum().backward()
        if steps:
            state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def another_seed(rank: int) -> State:
    torch.manual_seed(rank)
    ddp = DDP(Model(), init_sync=False)
    return {"model": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), lr=0.1)}


def unfrozen_after_wrapping(rank: int) -> State:
    state = make(rank, Model(frozen=True))
    state["model"].module.base.requires_grad_(rank == 1)
    return train(rank, state)


def changed(change: Callable[[State], object]) -> Case:
    """Trained ranks, of which rank 1 changes its state."""
    def case(rank: int) -> State:
        state = train(rank, make(rank))
        _ = rank == 1 and change(state)
        return state
    return case


def base(state: State) -> torch.Tensor:
    weight: torch.Tensor = state["model"].module.base.weight.data
    return weight


# each way to diverge, and the entry that is named
DIVERGED: dict[str, tuple[Case, str]] = {
    "model for DDP": (lambda rank: train(rank, make(rank), through_ddp=False), "model/head.weight of rank 1"),
    "learning rate": (lambda rank: train(rank, make(rank, lr=0.1 + 0.1 * rank)),
                      "optimizer/param_groups/0/lr of rank 1"),
    "weight decay": (lambda rank: train(rank, make(rank, weight_decay=0.1 + 0.1 * rank)),
                     "optimizer/param_groups/0/weight_decay of rank 1"),
    "seed": (another_seed, "model/head.weight of rank 1"),
    "unfrozen after wrapping": (unfrozen_after_wrapping,
                                "does not average the same parameters on rank 1 as on rank 0"),
    "step skipped": (lambda rank: train(rank, train(rank, make(rank)), steps=rank == 0), "model/head.weight of rank 1"),
    "scheduler on one rank": (changed(lambda state: torch.optim.lr_scheduler.StepLR(state["optimizer"], 1).step()),
                              "optimizer/param_groups/0/lr of rank 1"),
    "overwritten": (changed(lambda state: base(state).zero_()), "model/base.weight of rank 1"),
    "not a number": (changed(lambda state: base(state).fill_(float("nan"))), "model/base.weight of rank 1"),
    "optimizer state lost": (changed(lambda state: state["optimizer"].state.clear()),
                             "optimizer/state/0/step of rank 1"),
    "momentum reset": (changed(lambda state: [values["exp_avg"].zero_()
                                              for values in state["optimizer"].state.values()]),
                       "optimizer/state/0/exp_avg of rank 1"),
}


def ordinary(rank: int) -> State:
    """BatchNorm, whose statistics differ, an average of the weights, and what each rank has of its own."""
    state = make(rank)
    average = torch.optim.swa_utils.AveragedModel(state["model"].module)
    train(rank, state)
    average.update_parameters(state["model"].module)
    return {**state, "average": average, "seen": PerRank(rank), "scaler": torch.amp.GradScaler("cpu"),
            "scheduler": torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)}


def average_of_rank_0(rank: int) -> State:
    state = train(rank, make(rank))
    average = copy.deepcopy(state["model"].module)
    if rank == 0:
        nn.init.zeros_(average.head.weight)
    return {**state, "average": average}


def two_optimizers(rank: int) -> State:
    state = make(rank)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
                  for part in (state["model"].module.base, state["model"].module.head)]
    state["model"](torch.rand(8, 6) + rank).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return {"model": state["model"], "optimizers": optimizers}


def no_number_on_any_rank(rank: int) -> State:
    """NaNs of other bits."""
    state = train(rank, make(rank))
    base(state).view(torch.int32).fill_(0x7FC00000 + rank)
    assert base(state).isnan().all()
    return state


def other_types_and_layouts(rank: int) -> State:
    model = nn.ModuleList([nn.Conv2d(3, 64, 7).to(memory_format=torch.channels_last),
                           nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(40, 40, dtype=torch.complex64)])
    ddp = DDP(model)
    return {"model": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), lr=torch.tensor(0.1))}


HEALTHY: list[Case] = [ordinary, average_of_rank_0, two_optimizers, no_number_on_any_rank, other_types_and_layouts]
CASES = {**DIVERGED, **{case.__name__: (case, "") for case in HEALTHY}}


def main(folder: Path) -> None:
    checkpoint_snapshot.MIN_SHARE_BYTES = 1  # both ranks write parts of these small states
    with setup_distributed("gloo", timeout=60) as dist:
        for name, (case, entry) in CASES.items():
            with Checkpointer(folder / name, timeout=60) as checkpoints:
                checkpoints.save(1, case(dist.rank))
                if entry:
                    with pytest.raises(CheckpointError) as caught:
                        checkpoints.wait()
                    assert "cannot save step 1" in str(caught.value) and entry in str(caught.value), (name, caught)
            assert list_steps(checkpoints.folder) == ([] if entry else [1]), name
            sys.stdout.write(f"rank {dist.rank}: {name}\n")  # at once, unlike print()
            sys.stdout.flush()


def test_diverged_ranks_save_no_checkpoint(tmp_path: Path) -> None:
    output = run_ranks(tmp_path, __file__, (2, [str(tmp_path / "checkpoints")]))
    printed = [line for line in output.splitlines() if line.startswith("rank ")]
    assert sorted(printed) == sorted(f"rank {rank}: {name}" for name in CASES for rank in range(2)), output


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A training that goes on with other numbers of ranks: 4, then 2, then 3, stopped in the middle of its epochs.

This file is also the program that each rank runs.
"""
from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import pytest

from tests.faults.programs import run_ranks

SAMPLES, GLOBAL_BATCH, MAX_MICRO_BATCH, EPOCHS = 1440, 24, 4, 2
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH
# Longer than a millisecond, so that the ranks, who look for a stop a few times a second, find it within the epoch.
STEP_SECONDS = 0.02


def train(folder: Path, stop_after: int) -> None:
    """One rank: writes a line for each of its steps, and touches the stop file after one of them."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import TensorDataset

    from utils import setup_distributed
    from utils.checkpoint import Checkpointer
    from utils.data import ResumableDataLoader, ResumableDistributedSampler
    from utils.preemption import StopSignal
    from utils.training import accumulate, batched, split_batch

    file = folder / "stop"
    with setup_distributed("gloo", launcher="env") as dist, StopSignal(
            dist, file=file, poll_seconds=0.02) as stop, Checkpointer(folder) as checkpoints:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        classes = torch.randint(4, (SAMPLES,))
        images = 0.8 * torch.randn(4, 64)[classes] + 2 * torch.randn(SAMPLES, 64)
        data = TensorDataset(images, classes, torch.arange(SAMPLES))
        split = split_batch(GLOBAL_BATCH, dist.world_size, MAX_MICRO_BATCH)
        sampler = ResumableDistributedSampler(data, dist.world_size, dist.rank)
        loader = ResumableDataLoader(data, split.micro_batch, sampler=sampler)
        ddp = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
        state = {"model": ddp, "optimizer": optimizer, "loader": loader}
        found = checkpoints.load_latest(state)
        step = found.step if found else 0
        with (folder / f"steps.{dist.world_size}.{dist.rank}").open("a") as lines:
            for epoch in range(sampler.epoch, EPOCHS):
                sampler.set_epoch(epoch)
                for micro_batches in batched(loader, split.accumulation):
                    total = 0.0
                    for (inputs, targets, _), weight in accumulate(ddp, micro_batches):
                        loss = weight * cross_entropy(ddp(inputs), targets)
                        loss.backward()  # type: ignore[no-untyped-call]
                        total += loss.item()
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    indices = [index for *_, one in micro_batches for index in one.tolist()]
                    lines.write(json.dumps([step, epoch, dist.all_reduce_mean(total), indices]) + "\n")
                    if stop_after:
                        time.sleep(STEP_SECONDS)
                        if step == stop_after and dist.rank == dist.world_size - 1:
                            file.touch()
                    if stop.should_stop():
                        checkpoints.save(step, state)
                        return


def steps_of(folder: Path, ranks: int) -> dict[int, tuple[int, float, list[int]]]:
    """Epoch, mean loss and sorted indices of all ranks, by step."""
    files = [(folder / f"steps.{ranks}.{rank}").read_text().splitlines() for rank in range(ranks)]
    steps = {}
    for lines in zip(*files, strict=True):
        parts = [json.loads(line) for line in lines]
        step, epoch, loss, _ = parts[0]
        assert all(part[:3] == [step, epoch, loss] for part in parts) and step not in steps
        steps[step] = epoch, loss, sorted(itertools.chain(*(part[3] for part in parts)))
    return steps


def test_a_training_is_the_same_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    for folder in (whole, elastic):
        folder.mkdir()
    # one stop in each epoch
    run_ranks(tmp_path, __file__, (2, [str(whole), "0"]), (4, [str(elastic), "20"]), (2, [str(elastic), "75"]),
              (3, [str(elastic), "0"]))
    expected = steps_of(whole, 2)
    parts = [steps_of(elastic, ranks) for ranks in (4, 2, 3)]
    assert [step for part in parts for step in part] == list(expected) == list(range(1, STEPS + 1))
    assert [min(part.values())[0] for part in parts] == [0, 0, 1] and max(parts[1].values())[0] == 1

    steps = {step: values for part in parts for step, values in part.items()}
    for epoch in range(EPOCHS):
        seen = [index for number, _, indices in steps.values() if number == epoch for index in indices]
        assert sorted(seen) == list(range(SAMPLES))
    for step, (_, loss, indices) in steps.items():
        assert indices == expected[step][2] and len(indices) == GLOBAL_BATCH
        assert loss == pytest.approx(expected[step][1], rel=1e-4)
    losses = [loss for _, loss, _ in steps.values()]
    assert sum(losses[-30:]) < 0.8 * sum(losses[:30]), "the run does not learn, and proves nothing"


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))

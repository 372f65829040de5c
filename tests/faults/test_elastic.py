"""A training that goes on with other numbers of ranks: 4, then 2, then 3, stopped in the middle of its epochs.

This file is also the program that each rank runs: `python -m tests.faults.test_elastic FOLDER`, which forks them all.
"""
from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, GLOBAL_BATCH, MAX_MICRO_BATCH, EPOCHS = 1440, 24, 4, 2
STEPS_PER_EPOCH = SAMPLES // GLOBAL_BATCH
STOPPED = ((4, 20), (2, 75))  # number of ranks, step after which the stop is asked for; one in each epoch
LAST = 3  # ranks of the rest
# Longer than a millisecond, so that the ranks, who look for a stop a few times a second, find it within the epoch.
STEP_SECONDS = 0.02


# The program ----------------------------------------------------------------------------------------------------------

def train(folder: Path, log: Path, seed: int, stop_after: int) -> None:
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
        fixed = torch.Generator().manual_seed(0)  # the data are the same for every seed
        classes = torch.randint(4, (SAMPLES,), generator=fixed)
        images = 0.8 * torch.randn(4, 64, generator=fixed)[classes] + 2 * torch.randn(SAMPLES, 64, generator=fixed)
        data = TensorDataset(images, classes, torch.arange(SAMPLES))
        split = split_batch(GLOBAL_BATCH, dist.world_size, MAX_MICRO_BATCH)
        sampler = ResumableDistributedSampler(data, dist.world_size, dist.rank, seed=seed)
        loader = ResumableDataLoader(data, split.micro_batch, sampler=sampler)
        torch.manual_seed(seed)
        ddp = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)))
        torch.manual_seed(1000 * seed + dist.rank)  # each rank drops other units
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        state = {"model": ddp, "optimizer": optimizer, "loader": loader}
        found = checkpoints.load_latest(state)
        step = found.step if found else 0
        with log.open("a") as lines:
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
                    lines.write(json.dumps([epoch, step, indices, dist.all_reduce_mean(total)]) + "\n")
                    if stop_after:
                        time.sleep(STEP_SECONDS)
                        if step == stop_after and dist.rank == dist.world_size - 1:
                            file.touch()
                    if stop.should_stop():
                        checkpoints.save(step, state)
                        return


def main(folder: Path) -> None:
    """Fork the ranks of all runs: one on 4, 2 and 3 ranks, and two that are not interrupted, of other seeds."""
    from tests.faults import kills

    def run(name: str, ranks: int, seed: int, stop_after: int = 0) -> None:
        program = folder / f"{name}.py"
        log = str(folder / f"{name}.%s.%s")
        program.write_text(
            "import os\nfrom pathlib import Path\nfrom tests.faults.test_elastic import train\n"
            f"log = Path({log!r} % ({ranks}, os.environ['RANK']))\n"
            f"train(Path({str(folder / name)!r}), log, {seed}, {stop_after})\n")
        kills.run(ranks, str(program), [], folder / f"{name}.out")

    for ranks, stop_after in STOPPED:
        run("elastic", ranks, 0, stop_after)
    run("elastic", LAST, 0)
    run("same", 2, 0)
    run("other", 2, 1)


# The tests ------------------------------------------------------------------------------------------------------------

class Step(NamedTuple):
    """One optimizer step of all ranks."""

    epoch: int
    indices: tuple[int, ...]  # of all ranks, sorted
    loss: float  # mean over the global batch
    ranks: int


Run = dict[int, Step]


def read(folder: Path, name: str) -> Run:
    steps: Run = {}
    for log in folder.glob(f"{name}.*.0"):
        ranks = int(log.name.split(".")[1])
        files = [folder / f"{name}.{ranks}.{rank}" for rank in range(ranks)]
        for lines in zip(*(file.read_text().splitlines() for file in files), strict=True):
            parts = [json.loads(line) for line in lines]
            epoch, step, _, loss = parts[0]
            assert all((one[0], one[1], one[3]) == (epoch, step, loss) for one in parts)
            assert step not in steps, f"step {step} was made twice"
            steps[step] = Step(epoch, tuple(sorted(itertools.chain(*(one[2] for one in parts)))), loss, ranks)
    return steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("elastic")
    ended = subprocess.run([sys.executable, "-m", __name__, str(folder)], cwd=ROOT, capture_output=True, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {name: read(folder, name) for name in ("elastic", "same", "other")}


def test_the_number_of_ranks_changes_in_the_middle_of_each_epoch(runs: dict[str, Run]) -> None:
    run = runs["elastic"]
    assert sorted(run) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    changes = [step for step in list(run)[1:] if run[step].ranks != run[step - 1].ranks]
    assert [run[1].ranks, *(run[step].ranks for step in sorted(changes))] == [4, 2, 3]
    assert [(run[step - 1].epoch, run[step].epoch) for step in sorted(changes)] == [(0, 0), (1, 1)]


def test_each_epoch_has_every_sample_once(runs: dict[str, Run]) -> None:
    for epoch in range(EPOCHS):
        seen = [index for step in runs["elastic"].values() if step.epoch == epoch for index in step.indices]
        assert sorted(seen) == list(range(SAMPLES))


def test_each_global_batch_is_that_of_the_run_without_interruption(runs: dict[str, Run]) -> None:
    """Of the same samples, not only of the same size."""
    for number, step in runs["elastic"].items():
        assert len(step.indices) == GLOBAL_BATCH
        assert step.indices == runs["same"][number].indices
        assert step.indices != runs["other"][number].indices


def test_the_loss_stays_closer_to_that_of_its_own_seed_than_two_seeds_are(runs: dict[str, Run]) -> None:
    """Dropout differs as soon as the number of ranks does: the distance is not zero."""
    curves = {name: [run[step].loss for step in sorted(run)] for name, run in runs.items()}

    def distance(one: str, other: str, window: int) -> float:
        """Root mean square of the difference of the two curves, each smoothed by the mean of `window` steps."""
        means = [[sum(curve[start:start + window]) / window for start in range(0, len(curve), window)]
                 for curve in (curves[one], curves[other])]
        return float((sum((a - b) ** 2 for a, b in zip(*means, strict=True)) / len(means[0])) ** 0.5)

    last = len(curves["same"]) - 30
    assert sum(curves["same"][last:]) < 0.8 * sum(curves["same"][:30]), "the run does not learn, and proves nothing"
    for window in (1, 10):
        assert 0 < distance("elastic", "same", window) < distance("same", "other", window)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

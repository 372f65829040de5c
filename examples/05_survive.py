"""A training that can be killed at any point; its result is bit-identical to an uninterrupted run.

two processes     torchrun --standalone --nproc-per-node 2 examples/05_survive.py
                  Stop it (Ctrl-C, kill -9) and give the same command again: it resumes.
restarts itself   torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/05_survive.py
any MPI           mpiexec -n 4 python examples/05_survive.py
Slurm job         sbatch -A ACCOUNT -N 2 --requeue --signal=B:USR1@120 jobs/slurm.sh \\
                      examples/05_survive.py
PBS job           ARGS=examples/05_survive.py qsub -A ACCOUNT jobs/pbs.sh

This example adds a loader that resumes within an epoch, random augmentation that belongs to the
sample, a global batch that is the same on any number of ranks, checkpoints in the background, and a
stop before the job's time limit. Bit-identical needs the same number of ranks and threads.
"""

import argparse
import sys
from pathlib import Path

# Before torch: a stop signal that arrives while torch loads is then held, not lost.
from ddpkit import setup_distributed
from ddpkit.checkpoint import Checkpointer
from ddpkit.data import resumable_loader, sample_seed
from ddpkit.log import get_logger
from ddpkit.preemption import StopSignal, requeue
from ddpkit.training import accumulate, batched, linear_warmup, prime_ddp_buckets, split_batch

# isort: split
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

GLOBAL_BATCH = 96  # samples per optimizer step, over all ranks
MAX_MICRO_BATCH = 16  # samples for which a rank has memory
SEED = 0

log = get_logger(__name__)  # log.info prints on rank 0 alone


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Patterns of 8 x 8 points in 4 classes, shifted and with noise that differs in each epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.patterns = torch.randn(4, 8, 8, generator=generator)
        self.classes = torch.randint(4, (48 * GLOBAL_BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = key  # a pair, as the sampler has with_epoch=True
        # A generator for this sample: a worker's would depend on what the worker did before.
        generator = torch.Generator().manual_seed(sample_seed(SEED, epoch, index))
        shift = int(torch.randint(8, (), generator=generator))
        image = self.patterns[self.classes[index]].roll(shift, dims=1)
        return image + 1.5 * torch.randn(8, 8, generator=generator), self.classes[index]


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4)
    )


def global_batches(loader, epochs, accumulation):
    """Iterate over the rest of the training, as lists of `accumulation` micro-batches."""
    for epoch in range(loader.sampler.epoch, epochs):
        loader.sampler.set_epoch(epoch)
        yield from batched(loader, accumulation)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on synthetic images and survive kills.")
    parser.add_argument("--folder", type=Path, default=Path("runs/survive"), help="of checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--backend", help="gloo, nccl or xccl (default: the device's)")
    args = parser.parse_args()

    with (
        setup_distributed(args.backend) as job,
        StopSignal(job, save_seconds=5) as stop,
        Checkpointer(args.folder) as checkpoints,
    ):
        split = split_batch(GLOBAL_BATCH, job.world_size, MAX_MICRO_BATCH)
        data = Images()
        loader = resumable_loader(
            data,
            job,
            split.micro_batch,
            with_epoch=True,
            num_workers=2,
        )
        ddp = DDP(make_model().to(job.device), device_ids=job.device_ids)
        prime_ddp_buckets(ddp, lambda: ddp(torch.zeros(1, 8, 8, device=job.device)).sum())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: linear_warmup(n, 20))

        state = {"model": ddp, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        found = checkpoints.load_latest(state)
        step, last_step = found.step if found else 0, args.epochs * len(data) // GLOBAL_BATCH
        log.info(f"resuming after step {step}" if found else f"starting in {args.folder}")

        for micro_batches in global_batches(loader, args.epochs, split.accumulation):
            total = torch.zeros((), device=job.device)
            for (images, classes), weight in accumulate(ddp, micro_batches):
                scores = ddp(images.to(job.device))
                loss = weight * cross_entropy(scores, classes.to(job.device))
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            step += 1
            if step % 10 == 0:
                log.info(f"step {step}/{last_step}: loss {job.all_reduce_mean(total).item():.4f}")
            if stop.should_stop():  # the same result on every rank
                break
            if step % args.save_every == 0:
                checkpoints.save(step, state)  # written in the background

        checkpoints.save_and_wait(step, state)
        if stop.stopped:
            summary = f"stopped at step {step}: {stop.reason}"
        else:
            summary = f"finished step {step}"
        log.info(summary)

    if stop.stopped and job.is_main:
        requeue()  # under Slurm; under PBS the next job of a chain resumes
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())

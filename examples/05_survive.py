"""Training that survives: killed at any moment, any number of times, it ends with the same bits as if it never was.

laptop, two processes   torchrun --standalone --nproc-per-node 2 examples/05_survive.py --folder runs/survive
                        stop it (Ctrl-C, kill -9) and give the same command again: it goes on where it was
torchrun, by itself     torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/05_survive.py
any MPI                 mpiexec -n 4 python examples/05_survive.py
Slurm, as a job         sbatch -A ACCOUNT --requeue --signal=B:USR1@120 jobs/slurm_srun.sh examples/05_survive.py
PBS, as a chain         scripts/submit.py run --nodes 2 --time 1:00:00 --chain 5 examples/05_survive.py

What is new here: a sampler that resumes within an epoch, augmentation that follows the sample, a global batch that
stays the same with any number of ranks, checkpoints in the background, and a stop in good time before the job is ended.
"""
from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils import setup_distributed
from utils.checkpoint import Checkpointer
from utils.data import ResumableDistributedSampler, sample_seed
from utils.logging import get_logger
from utils.preemption import StopSignal, requeue, shield_worker
from utils.training import accumulate, grouped, prime_ddp_buckets, split_batch, warm_up

log = get_logger(__name__)  # log.info prints on rank 0 alone


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on synthetic images, surviving kills and time limits.")
    parser.add_argument("--folder", type=Path, default=Path("runs/survive"), help="of the checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=96, help="samples per optimizer step over all ranks")
    parser.add_argument("--max-micro-batch", type=int, default=16, help="samples that a rank has memory for at once")
    parser.add_argument("--save-every", type=int, default=20, help="optimizer steps between checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data, for each rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep so long in each step, to watch it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", help="gloo, nccl, xccl (default: whatever goes with the device that was found)")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # python -m torch.distributed.launch adds it
    args = parser.parse_args()
    for option in ("epochs", "global_batch", "max_micro_batch", "save_every"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    return args


class Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Patterns of 8 x 8 points in 4 classes, shifted and with noise drawn anew in each epoch."""

    def __init__(self, seed: int, samples: int = 4608) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(4, 8, 8, generator=generator)
        self.classes = torch.randint(4, (samples,), generator=generator)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        epoch, index = key  # with_epoch=True below: an attribute set in the loop may not reach the workers
        # By the sample's own generator: a worker's would depend on what that worker did before.
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch, index))
        shift = int(torch.randint(8, (), generator=generator))
        image = self.patterns[self.classes[index]].roll(shift, dims=1)
        return image + 1.5 * torch.randn(8, 8, generator=generator), self.classes[index], torch.tensor(index)


def digest(*things: Any) -> str:
    """A short name for the exact bits of tensors, nested in state dicts."""
    found = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found.update(thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                add(key)
                add(thing[key])
        elif isinstance(thing, list | tuple):
            for one in thing:
                add(one)
        else:
            found.update(repr(thing).encode())

    for thing in things:
        add(thing)
    return found.hexdigest()[:16]


def main() -> int:
    args = parse_arguments()
    with setup_distributed(args.backend) as dist, StopSignal(
            dist, save_seconds=5, file=args.folder / "stop") as stop, Checkpointer(args.folder) as checkpoints:
        torch.set_num_threads(1)  # sums in the same order wherever it runs; see 01_ddp_minimal.py
        split = split_batch(args.global_batch, dist.world_size, args.max_micro_batch)
        data = Images(args.seed)
        steps_per_epoch = len(data) // args.global_batch
        total_steps = args.epochs * steps_per_epoch
        sampler = ResumableDistributedSampler(data, dist.world_size, dist.rank, seed=args.seed, drop_last=True,
                                              with_epoch=True)
        # Its own generator: making an iterator draws from it, which would change the dropout of a run that resumed.
        loader = DataLoader(data, split.micro_batch, sampler=sampler, num_workers=args.workers, drop_last=True,
                            generator=torch.Generator(), worker_init_fn=shield_worker)

        torch.manual_seed(args.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4))
        ddp = DDP(model.to(dist.device), device_ids=dist.device_ids)
        prime_ddp_buckets(ddp, lambda: ddp(torch.zeros(1, 8, 8, device=dist.device)).sum())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up(step, 20) * (
            0.5 + 0.5 * math.cos(math.pi * min(1, step / total_steps))))

        # `order` stands for all sample indices so far, in their order: the proof that none was lost or came twice.
        state: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "schedule": schedule, "sampler": sampler,
                                 "order": ""}
        found = checkpoints.load_latest(state)
        step, order = (found.step, found.state["order"]) if found else (0, "")
        saved = step
        log.info(f"{'resuming after' if found else 'starting; checkpoints at'} "
                 f"{f'step {step}' if found else args.folder}: {split.global_batch} samples per step = "
                 f"{split.micro_batch} x {dist.world_size} rank(s) x {split.accumulation} micro-steps")

        for epoch in range(sampler.epoch, args.epochs):
            sampler.set_epoch(epoch)
            for micro_batches in grouped(loader, split.accumulation):
                if len(micro_batches) < split.accumulation:
                    break  # the rest of the epoch is no global batch
                total = torch.zeros((), device=dist.device)
                for (images, classes, _), weight in accumulate(ddp, micro_batches):
                    loss = weight * cross_entropy(ddp(images.to(dist.device)), classes.to(dist.device))
                    loss.backward()
                    total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                order = digest(order, [indices for _, _, indices in micro_batches])
                time.sleep(args.step_seconds)
                if step % 10 == 0:
                    log.info(f"step {step}/{total_steps}  loss {dist.all_reduce_mean(total).item():.4f}")
                stopping = stop.should_stop()
                if stopping or step % args.save_every == 0:
                    # The last one has to succeed; if another fails, the training goes on and the next one is tried.
                    save = checkpoints.save_and_wait if stopping else checkpoints.save
                    save(step, {**state, "order": order})
                    saved = step
                    # So long before the time limit the next stop has to come: until a save is on disk.
                    stop.save_seconds = max(stop.save_seconds, checkpoints.seconds or 0)
                if stopping:
                    log.info(f"stopped at step {step}: {stop.reason}")
                    break
            if stop.stopped:
                break
        else:
            if saved < step:
                checkpoints.save_and_wait(step, {**state, "order": order})
            log.info(f"done after {step} steps; digest of model and optimizer "
                     f"{digest(model.state_dict(), optimizer.state_dict())}, of the sample order {order}")
    if stop.stopped and dist.is_main:
        requeue()  # under Slurm; under PBS the next job of the chain goes on
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())

"""The smallest complete DDP training script. It runs unchanged with 1 or N ranks, on CPUs or GPUs, under any launcher:

laptop, one process     python examples/01_ddp_minimal.py
laptop, two processes   torchrun --standalone --nproc-per-node 2 examples/01_ddp_minimal.py
any MPI                 mpiexec -n 4 python examples/01_ddp_minimal.py
Slurm, at once          srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 python examples/01_ddp_minimal.py
Slurm, as a job         sbatch --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 \\
                            --wrap 'srun python examples/01_ddp_minimal.py'
PBS, as a job           echo "cd '$PWD' && mpiexec -n 8 '$(command -v python)' examples/01_ddp_minimal.py" |
                            qsub -l select=2:ncpus=4:mpiprocs=4:ngpus=4 -l place=scatter

On a machine whose GPUs are fewer than the ranks, or in use, add `--backend gloo`: the ranks then run on CPUs.
"""
from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils import setup_distributed
from utils.logging import get_logger

log = get_logger(__name__)  # log.info prints on rank 0 alone


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Minimal DDP training on synthetic data.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the model and the shuffling")
    parser.add_argument("--save", type=Path, metavar="FILE", help="rank 0 writes the trained model there")
    parser.add_argument("--backend", help="gloo, nccl, xccl (default: whatever goes with the device that was found)")
    parser.add_argument("--timeout", type=float, default=100, help="seconds that starting may take")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # python -m torch.distributed.launch adds it
    args = parser.parse_args()
    for option, value in (("--epochs", args.epochs), ("--batch-size", args.batch_size)):
        if value < 1:
            parser.error(f"{option} must be at least 1, got {value}")
    for option, value in (("--lr", args.lr), ("--timeout", args.timeout)):
        if not 0 < value < math.inf:
            parser.error(f"{option} must be a positive number, got {value}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    if args.save and args.save.is_dir():
        parser.error(f"--save must name a file, but {args.save} is a folder")
    return args


def synthetic_data(seed: int, samples: int = 4096, features: int = 32) -> TensorDataset:
    """A smooth function of a few random projections, and a little noise.

    It has a generator of its own, so that every rank builds the very same data set: with different data on each
    rank, sharding would mean nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    projections = torch.randn(features, 4, generator=generator) / math.sqrt(features)
    noise = torch.randn(samples, 1, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs @ projections).sum(1, keepdim=True) + 0.05 * noise)


def save_model(state: dict[str, Tensor], path: Path) -> None:
    """Write under a temporary name, then rename: a killed job leaves the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    args = parse_arguments()
    with setup_distributed(args.backend, timeout=args.timeout) as dist:
        # A model this small gains nothing from more threads, and how many cores a rank gets depends on the launcher:
        # with one thread, sums are made in the same order everywhere and the final loss is the same to the last bit.
        torch.set_num_threads(1)
        if dist.is_main and args.save:
            args.save.parent.mkdir(parents=True, exist_ok=True)  # now: a wrong path should fail before the training

        data = synthetic_data(args.seed)
        sampler: DistributedSampler[Any] = DistributedSampler(data, dist.world_size, dist.rank, seed=args.seed)
        loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, pin_memory=dist.device.type == "cuda")

        torch.manual_seed(args.seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(dist.device)
        ddp = DDP(model, device_ids=dist.device_ids)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)

        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # without it every epoch has the order of the first
            total = torch.zeros((), device=dist.device)
            for inputs, targets in loader:
                loss = mse_loss(ddp(inputs.to(dist.device)), targets.to(dist.device))
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients over all ranks here
                optimizer.step()
                total += loss.detach()  # a tensor: reading its value at each step would make the GPU wait
            mean_loss = dist.all_reduce_mean(total / len(loader)).item()  # called by every rank, not by rank 0 alone
            log.info(f"epoch {epoch + 1}/{args.epochs}: loss {mean_loss:.6f}, mean of {dist.world_size} rank(s)")

        # All ranks hold the same model now, so one can speak for all. It uses `model`, not `ddp`, whose calls may
        # communicate and would wait for the other ranks.
        if dist.is_main:
            with torch.no_grad():
                inputs, targets = (tensor.to(dist.device) for tensor in data.tensors)
                final_loss = mse_loss(model(inputs), targets).item()
            if args.save:
                save_model({name: tensor.cpu() for name, tensor in model.state_dict().items()}, args.save)
                log.info(f"saved the model to {args.save}")
            log.info(f"final loss: {final_loss:.10f}")


if __name__ == "__main__":
    main()

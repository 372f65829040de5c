"""The smallest DDP training script. It differs from a single-GPU script in seven lines:

    + with setup_distributed() as job:
    -     device = torch.device("cuda")
    +     device = job.device
    -     loader = DataLoader(data, batch_size=64, shuffle=True)
    +     sampler = DistributedSampler(data, job.world_size, job.rank)
    +     loader = DataLoader(data, batch_size=64, sampler=sampler)
    +     ddp = DDP(model, device_ids=job.device_ids)
          for epoch in range(epochs):
    +         sampler.set_epoch(epoch)
    +         mean_loss = job.all_reduce_mean(total / len(loader)).item()

one process     python examples/01_ddp_minimal.py
two processes   torchrun --standalone --nproc-per-node 2 examples/01_ddp_minimal.py
any MPI         mpiexec -n 4 python examples/01_ddp_minimal.py
Slurm           srun -N 2 --ntasks-per-node 4 --gpus-per-node 4 python examples/01_ddp_minimal.py
Slurm job       sbatch -A ACCOUNT -N 2 jobs/slurm.sh examples/01_ddp_minimal.py
PBS job         ARGS=examples/01_ddp_minimal.py qsub -A ACCOUNT jobs/pbs.sh

Add `--backend gloo` to train on CPUs, for example where a host has fewer GPUs than ranks.
"""

import argparse

import torch
from ddpkit import setup_distributed
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description="Minimal DDP training on synthetic data.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backend", help="gloo, nccl or xccl (default: the device's)")
    args = parser.parse_args()

    with setup_distributed(args.backend) as job:
        torch.manual_seed(0)  # the same data and the same model on every rank
        inputs = torch.randn(4096, 32)
        data = TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
        sampler = DistributedSampler(data, job.world_size, job.rank)
        loader = DataLoader(data, batch_size=64, sampler=sampler)

        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(job.device)
        ddp = DDP(model, device_ids=job.device_ids)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # otherwise every epoch has the order of the first
            total = torch.zeros((), device=job.device)
            for x, y in loader:
                loss = mse_loss(ddp(x.to(job.device)), y.to(job.device))
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients over all ranks here
                optimizer.step()
                total += loss.detach()  # a tensor: reading its value would wait for the GPU

            mean_loss = job.all_reduce_mean(total / len(loader)).item()  # called by every rank
            if job.is_main:
                print(f"epoch {epoch + 1}/{args.epochs}: loss {mean_loss:.6f}", flush=True)

        if job.is_main:  # all ranks hold the same model; rank 0 prints, and would save it
            print(f"final loss: {mean_loss:.10f}", flush=True)


if __name__ == "__main__":
    main()

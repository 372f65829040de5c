"""The training of 01_ddp_minimal.py as a Python object that submitit submits, awaits and requeues.

this machine    python examples/04_submitit.py --cluster local --tasks-per-node 2
Slurm           python examples/04_submitit.py --nodes 2 --tasks-per-node 4 --gpus-per-node 4

sbatch takes account and partition from SBATCH_ACCOUNT and SBATCH_PARTITION. Before the time limit,
or when the job is preempted, Slurm sends USR2. submitit then calls checkpoint() on rank 0 and puts
the job back into the queue, where it resumes after the last epoch that was saved.
"""

import argparse
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import submitit
import torch
from ddpkit import setup_distributed
from ddpkit.checkpoint import Checkpointer
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Training:
    """What submitit pickles and calls in every process of the job."""

    epochs: int
    folder: Path  # for the checkpoints of this job

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return what the requeued job calls. Runs in a signal handler of rank 0."""
        # Slurm may otherwise end this process before submitit's `scontrol requeue` is done.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return submitit.helpers.DelayedSubmission(self)

    def __call__(self) -> float:
        """Train, and return the final loss."""
        environment = submitit.JobEnvironment()
        # A rank that lost rank 0 when the job was requeued has left an error as its result.
        environment.paths.result_pickle.unlink(missing_ok=True)
        if environment.cluster == "local":  # where no launcher started the processes
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)

        with setup_distributed() as job, Checkpointer(self.folder) as checkpoints:
            torch.manual_seed(0)
            inputs = torch.randn(4096, 32)
            data = TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
            sampler = DistributedSampler(data, job.world_size, job.rank)
            loader = DataLoader(data, batch_size=64, sampler=sampler)
            model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(job.device)
            ddp = DDP(model, device_ids=job.device_ids)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

            state = {"model": ddp, "optimizer": optimizer, "loss": float("nan")}
            found = checkpoints.load_latest(state)
            first = found.step if found else 0
            if found and job.is_main:
                print(f"resuming after epoch {first}", flush=True)
            for epoch in range(first, self.epochs):
                sampler.set_epoch(epoch)
                total = torch.zeros((), device=job.device)
                for x, y in loader:
                    loss = mse_loss(ddp(x.to(job.device)), y.to(job.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total += loss.detach()
                state["loss"] = job.all_reduce_mean(total / len(loader)).item()
                if job.is_main:
                    print(f"epoch {epoch + 1}/{self.epochs}: loss {state['loss']:.6f}", flush=True)
                checkpoints.save_and_wait(epoch + 1, state)
            return state["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Minimal DDP training, submitted by submitit.")
    add = parser.add_argument
    add("--cluster", choices=["slurm", "local"], help="default: slurm if it exists")
    add("--folder", type=Path, default=Path("submitit"), help="all nodes see it")
    add("--epochs", type=int, default=5)
    add("--nodes", type=int, default=1)
    add("--tasks-per-node", type=int, default=1, help="ranks: one per GPU")
    add("--gpus-per-node", type=int)
    add("--timeout-min", type=int, default=10, help="time limit in minutes")
    options = vars(parser.parse_args())
    cluster, folder, epochs = (options.pop(name) for name in ("cluster", "folder", "epochs"))

    executor = submitit.AutoExecutor(folder, cluster=cluster)
    executor.update_parameters(name="ddp", **options)
    checkpoints = folder.resolve() / f"checkpoints-{time.time_ns()}"
    job = executor.submit(Training(epochs, checkpoints))
    print(f"job {job.job_id}: the log of rank 0 is {job.task(0).paths.stdout}", flush=True)
    print(f"final loss: {job.results()[0]:.10f}")


if __name__ == "__main__":
    main()

"""The training of 01_ddp_minimal.py as a Python object that submitit runs: submitted, awaited and requeued from Python.

laptop                  python examples/04_submitit.py --cluster local --tasks-per-node 2
Slurm, login node       python examples/04_submitit.py --nodes 2 --tasks-per-node 4 --gpus-per-node 4 --account ACCOUNT
torchrun, mpiexec, PBS  not needed with submitit, which starts the processes itself; see 01_ddp_minimal.py

It needs `pip install submitit`, and on Slurm a --folder that all nodes see. When the time is nearly over, or the job is
preempted, Slurm sends USR2. Then submitit calls checkpoint() on rank 0 and requeues the job, which goes on after the
last epoch that rank 0 wrote. The result is the same to the last bit as without an interruption.
"""
from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import broadcast_object_list
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

try:
    import submitit
except ImportError:
    sys.exit("submitit is not installed. This example needs it: pip install submitit")

ROOT = Path(__file__).resolve().parents[1]  # the repository


def synthetic_data(seed: int, samples: int = 4096, features: int = 32) -> TensorDataset:
    """The data of 01_ddp_minimal.py: the very same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    projections = torch.randn(features, 4, generator=generator) / math.sqrt(features)
    noise = torch.randn(samples, 1, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs @ projections).sum(1, keepdim=True) + 0.05 * noise)


@dataclass
class Training:
    """What submitit pickles and calls in every process of the job."""

    epochs: int
    batch_size: int
    lr: float
    seed: int
    file: Path  # the checkpoint; of this submission alone, whatever its job id was used for before

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What the requeued job shall call; submitit asks rank 0 alone, inside a signal handler.

        Nothing is saved here: the other ranks are not asked, and the step that was interrupted is half done.
        """
        # submitit's next act is `scontrol requeue`, and Slurm may end all processes of the job before scontrol is done.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return submitit.helpers.DelayedSubmission(self)

    def __call__(self) -> float:
        """The final loss, on every rank."""
        sys.path.insert(0, str(ROOT))  # only now: the job unpickles this object before it knows where `utils` is
        from utils import setup_distributed
        from utils.logging import get_logger

        log = get_logger("submitit")
        job = submitit.JobEnvironment()
        # A result that is there already is the error of a rank that lost rank 0 when the job was requeued.
        job.paths.result_pickle.unlink(missing_ok=True)
        local = job.cluster == "local"
        if local:  # submitit started the processes, and its variables are no launcher's
            port = 20000 + int(job.job_id) % 10000  # here the job id is a process id: no two at once on one host
            os.environ.update(RANK=str(job.global_rank), WORLD_SIZE=str(job.num_tasks), LOCAL_RANK=str(job.local_rank),
                              LOCAL_WORLD_SIZE=str(job.num_tasks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

        with setup_distributed(launcher="env" if local else None) as dist:
            torch.set_num_threads(1)  # for the same loss everywhere, see 01_ddp_minimal.py
            data = synthetic_data(self.seed)
            sampler: DistributedSampler[Any] = DistributedSampler(data, dist.world_size, dist.rank, seed=self.seed)
            loader = DataLoader(data, self.batch_size, sampler=sampler, pin_memory=dist.device.type == "cuda")
            torch.manual_seed(self.seed)
            model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(dist.device)
            ddp = DDP(model, device_ids=dist.device_ids)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=self.lr)

            # Rank 0 reads the file and tells the others: another host may still see the one before.
            saved = [torch.load(self.file, map_location="cpu") if dist.is_main and self.file.exists() else None]
            broadcast_object_list(saved, device=dist.device)
            first = 0
            if saved[0] is not None:
                first = saved[0]["epochs"]
                model.load_state_dict(saved[0]["model"])
                optimizer.load_state_dict(saved[0]["optimizer"])
                log.info(f"going on after epoch {first} of {self.file.name}")

            for epoch in range(first, self.epochs):
                sampler.set_epoch(epoch)
                total = torch.zeros((), device=dist.device)
                for inputs, targets in loader:
                    loss = mse_loss(ddp(inputs.to(dist.device)), targets.to(dist.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total += loss.detach()
                mean_loss = dist.all_reduce_mean(total / len(loader)).item()
                if dist.is_main:
                    state = {"epochs": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    save(state, self.file)
                log.info(f"epoch {epoch + 1}/{self.epochs}: loss {mean_loss:.6f}, mean of {dist.world_size} rank(s)")

            with torch.no_grad():
                inputs, targets = (tensor.to(dist.device) for tensor in data.tensors)
                return float(mse_loss(model(inputs), targets))


def save(state: dict[str, Any], path: Path) -> None:
    """Write under a temporary name, then rename: a killed job leaves the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Minimal DDP training, submitted by submitit.")
    parser.add_argument("--cluster", choices=["slurm", "local"], help="default: slurm where srun is found, else local")
    parser.add_argument("--folder", type=Path, default=Path("submitit"),
                        help="for pickles, logs and checkpoints; all nodes must see it (default: ./submitit)")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks-per-node", type=int, default=1, help="ranks on each node: one per GPU")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--minutes", type=int, default=10, help="time limit")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the model and the shuffling")
    args = parser.parse_args()
    for option in ("nodes", "tasks_per_node", "minutes", "epochs", "batch_size"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    for option in ("gpus_per_node", "seed"):
        if getattr(args, option) < 0:
            parser.error(f"--{option.replace('_', '-')} must not be negative, got {getattr(args, option)}")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr must be a positive number, got {args.lr}")
    if args.cluster == "local" and args.nodes > 1:
        parser.error(f"--cluster local has one node, got --nodes {args.nodes}")
    return args


def main() -> None:
    args = parse_arguments()
    checkpoint = args.folder.resolve() / f"checkpoint-{uuid.uuid4().hex[:8]}.pt"
    training = Training(args.epochs, args.batch_size, args.lr, args.seed, checkpoint)
    try:
        executor = submitit.AutoExecutor(args.folder, cluster=args.cluster)
        # None stands for "not said": submitit leaves it out of the job's script.
        executor.update_parameters(
            name="ddp", nodes=args.nodes, tasks_per_node=args.tasks_per_node, timeout_min=args.minutes,
            gpus_per_node=args.gpus_per_node or None, slurm_partition=args.partition, slurm_account=args.account)
        job = executor.submit(training)
        print(f"job {job.job_id}: the log of rank 0 is {job.task(0).paths.stdout}", flush=True)
        losses = job.results()
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
        sys.exit(f"the job failed: {error}")
    except RuntimeError as error:  # no srun
        sys.exit(f"{error} Use --cluster local to run on this machine")
    print(f"final loss: {losses[0]:.10f}")


if __name__ == "__main__":
    main()

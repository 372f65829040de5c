"""A training with checkpoints, for launches with spare hosts; a rank that is told so fails in its first life.

spare_program.py FOLDER [FAULT RANK [always]]: 30 steps of 0.1 s, a checkpoint after every fifth. After step 12 the
rank (with "two", the next one, too) does FAULT, unless a file says that it has done so before. Prints the final loss
with all digits.
"""
from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.faults import quick_imports

# isort: split
import torch
from ddpkit import setup_distributed
from ddpkit.checkpoint import Checkpointer
from ddpkit.host import process
from ddpkit.metrics import Metrics

quick_imports.done()

STEPS, FAULT_STEP = 30, 12


def starter() -> int:
    """The agent that has started this rank, or the launcher's process, whose child is the parent of this rank."""
    parent = os.getppid()
    if b"rank_start" in Path(f"/proc/{parent}/cmdline").read_bytes():
        return process.parent(parent) or parent
    return parent


def fail(fault: str) -> None:
    if fault in ("kill", "two"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "agent":
        os.kill(starter(), signal.SIGKILL)
    elif fault == "gpu":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    elif fault == "disk":
        raise OSError(28, "No space left on device", "/local/scratch/cache")
    elif fault == "outside":
        time.sleep(3600)


@torch.no_grad()
def update(model: torch.nn.Module, momentum: list[torch.Tensor], world_size: int) -> None:
    """A step of stochastic gradient descent with the mean of all ranks' gradients."""
    for parameter, velocity in zip(model.parameters(), momentum, strict=True):
        torch.distributed.all_reduce(parameter.grad)
        velocity.mul_(0.9).add_(parameter.grad, alpha=1 / world_size)
        parameter.sub_(velocity, alpha=0.1)


def main() -> None:
    folder = Path(sys.argv[1])
    fault, bad_rank = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else ("", -1)
    with setup_distributed("gloo") as dist:
        torch.manual_seed(7)
        model = torch.nn.Linear(64, 64)  # without a DDP, whose import of torch._dynamo takes as long as that of torch
        momentum = [torch.zeros_like(parameter) for parameter in model.parameters()]
        metrics = Metrics(dist, folder)
        state = {"model": model, "momentum": momentum, "metrics": metrics, "step": 0}
        with Checkpointer(folder / "checkpoints", every=5) as checkpoints, metrics:
            found = checkpoints.load_latest(state)
            first = found.step if found else 0
            for step in range(first + 1, STEPS + 1):
                torch.manual_seed(100 * step + dist.rank)
                loss = (model(torch.rand(16, 64)) - 1).square().mean()
                model.zero_grad()
                loss.backward()
                update(model, momentum, dist.world_size)
                loss = dist.all_reduce_mean(loss.detach())
                metrics.log(step, loss=loss)
                time.sleep(0.1)
                bad_ranks = (bad_rank, (bad_rank + 1) % dist.world_size) if fault == "two" else (bad_rank,)
                if step == FAULT_STEP and dist.rank in bad_ranks:
                    once = folder / ("failed" if dist.rank == bad_rank else "failed, too")
                    if not once.exists() or "always" in sys.argv:
                        once.write_text(str(os.getpid()))
                        fail(fault)
                if checkpoints.is_due(step):
                    checkpoints.save_and_wait(step, state)
        if dist.rank == 0:
            print(f"final loss {loss.item().hex()}", flush=True)


if __name__ == "__main__":
    main()

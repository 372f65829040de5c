"""What the ranks of the GPU tests run: programs by name, one after the other in one launch.

python tests/gpu/programs.py [--backend B] [--folder F] [--small] [--hang-timeout S --kind KIND] NAME...

Rank 0 prints a line "result: {...}" with the figures of each program. With --backend gloo they run on CPUs.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from tests.unit.plan_models import GPT
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer, PerRank
from utils.host.device import device_nodes

Figures = dict[str, Any]
MEGABYTE = 1e6


def placement(job: Distributed, _: argparse.Namespace) -> Figures:
    """Where each rank is: its device, CPUs, and the NUMA node of its GPU."""
    on_gpu = job.device.type == "cuda"
    mine = {
        "pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0)),
        "uuid": str(torch.cuda.get_device_properties(job.device).uuid) if on_gpu else "",
        "current": torch.cuda.current_device() if on_gpu else None, "index": job.device.index,
        "node": device_nodes(job.backend)[job.device.index] if on_gpu else None,
    }
    ranks: list[Any] = [None] * job.world_size
    dist.all_gather_object(ranks, mine)
    return {"ranks": ranks}


def collectives(job: Distributed, args: argparse.Namespace) -> Figures:
    """All-reduces on the device; and beside them, all-reduces of CPU tensors by a gloo group."""
    gloo = dist.new_group(backend="gloo")
    device, cpu = torch.ones(1 << 20, device=job.device), torch.ones(1 << 16)
    for turn in range(5):
        on_device = dist.all_reduce(device, async_op=True)
        dist.all_reduce(cpu, group=gloo)
        assert on_device is not None
        on_device.wait()
        expected = float(job.world_size ** (turn + 1))
        assert device[0].item() == device[-1].item() == cpu[0].item() == cpu[-1].item() == expected
    assert job.all_reduce_mean(float(job.rank)) == (job.world_size - 1) / 2
    job.barrier()
    return {}


def train(job: Distributed, args: argparse.Namespace, *, compiled: bool = False) -> Figures:
    """The losses of a DDP training in single precision, and in bfloat16, of the same seed."""
    figures: Figures = {}
    tokens = tokens_to_learn().to(job.device)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        def loss(model: nn.Module, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast(job.device.type, dtype, enabled=dtype != torch.float32):
                return next_token_loss(model, tokens)

        torch.manual_seed(0)
        training = Training(job, GPT(), 1e-2, compiled)
        losses = [training.step(loss) for _ in range(10)]
        losses += [training.step(loss) for _ in range(20)]
        figures[name] = {"first": losses[0].item(), "last": losses[-1].item()}
        assert figures[name]["last"] < figures[name]["first"] - 1
    assert abs(figures["bf16"]["last"] - figures["fp32"]["last"]) < 0.05 * figures["fp32"]["first"]
    return figures


def compiled(job: Distributed, args: argparse.Namespace) -> Figures:
    """As train(), compiled."""
    return train(job, args, compiled=True)


def checkpoint(job: Distributed, args: argparse.Namespace, *, wrap: Callable[..., Any] = DDP) -> Figures:
    """Seconds that save() adds to ten steps, and torch.save(); a resumed run against an uninterrupted one."""
    width, layers = (64, 2) if args.small else (4096, 4)  # whose training has the same bits in each run

    def take_steps(training: Training, numbers: range) -> None:
        for number in numbers:
            inputs = torch.randn(32, width, generator=torch.Generator().manual_seed(number)).to(job.device)
            training.step(lambda model, inputs=inputs: model(inputs).square().mean())

    def start_training(seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        training = Training(job, model, wrap=wrap)
        take_steps(training, range(1))  # makes the optimizer's state, and fixes DDP's buckets
        return training

    one, checkpoints = start_training(0), Checkpointer(Path(args.folder) / wrap.__name__)
    state, seconds, start = {"model": one.ddp, "optimizer": one.optimizer}, [], now(job)
    checkpoints.save(0, state)
    first = time.perf_counter() - start  # it allocates its memory
    checkpoints.wait()
    for step in (0, 10):  # ten steps without a save, ten after one
        start = now(job)
        if step:
            checkpoints.save(step, state)
        take_steps(one, range(step, step + 10))
        seconds.append(now(job) - start)
    checkpoints.wait()
    start = now(job)
    if job.is_main:
        torch.save([one.model.state_dict(), one.optimizer.state_dict()], Path(args.folder) / "state.pt")
    plain = time.perf_counter() - start
    job.barrier()

    resumed = start_training(1)
    found = checkpoints.load_latest({"model": resumed.ddp, "optimizer": resumed.optimizer})
    assert found is not None
    take_steps(resumed, range(found.step, 20))
    for ours, uninterrupted in zip(resumed.tensors(), one.tensors(), strict=True):
        assert torch.equal(ours.view(torch.int32), uninterrupted.view(torch.int32)), "the resumed run has other bits"
    checkpoints.close()
    return {"bytes": sum(tensor.nbytes for tensor in one.tensors()), "first": first,
            "save": seconds[1] - seconds[0], "torch_save": plain}


def hold(job: Distributed, args: argparse.Namespace) -> Figures:
    """Use the device, also in the threads of a save, until a file says that the test has looked at the processes."""
    with Checkpointer(Path(args.folder) / "held") as checkpoints:
        checkpoints.save(1, {"x": PerRank(torch.ones(1000, device=job.device))})
    job.barrier()
    if job.is_main:
        (Path(args.folder) / "running").touch()
    while not (Path(args.folder) / "seen").exists():
        time.sleep(0.05)
    return {}


def sharded(job: Distributed, args: argparse.Namespace) -> Figures:
    """As checkpoint(), under FSDP2."""
    return checkpoint(job, args, wrap=fully_shard)


def hang(job: Distributed, args: argparse.Namespace) -> Figures:
    """Rank 1 goes wrong in the middle of a training, as --kind says; or the ranks pause, which is no hang."""
    pause, kind = 2.5 * (args.hang_timeout or 0.0), args.kind
    # NCCL sends little before it is received.
    values = torch.ones(1 << 22 if kind == "pipeline" else 16, device=job.device)
    model = fully_shard(nn.Linear(16, 16, device=job.device)) if kind == "fsdp" else None
    for step in range(20):
        bad = step == 10 and job.rank == 1
        if bad:
            go_wrong(kind)
        if step == 10 and (kind == "compute" or job.rank == 0 and kind in ("busy", "evaluate")):
            end = time.monotonic() + pause
            while time.monotonic() < end:
                _ = sum(range(10_000)) if kind != "evaluate" else time.sleep(0.2) or job.report_progress()
        if kind == "kernel" and bad:
            for _ in range(200):
                torch.cuda._sleep(2_000_000_000)
        if kind == "pipeline":
            _ = bad and threading.Event().wait()  # hang: pipeline
            _ = job.rank > 0 and dist.recv(values, job.rank - 1)
            _ = job.rank < job.world_size - 1 and dist.send(values, job.rank + 1)
        elif kind == "fsdp":
            assert model is not None
            _ = bad and threading.Event().wait()  # hang: fsdp
            model(values).sum().backward()
        elif kind == "operation" and step == 10 and not bad:
            dist.broadcast(values, 0)
        else:
            reduced = torch.ones(4000, device=job.device) if kind == "shape" and bad else values
            dist.all_reduce(reduced)  # hang: operation # hang: shape
        if kind != "ahead" or step == 19:
            now(job)
    return {}


def go_wrong(kind: str) -> None:
    if kind in ("skipped", "ahead"):
        threading.Event().wait()  # hang: skipped # hang: ahead
    if kind == "loop":
        while True: pass  # noqa: E701 # hang: loop
    if kind == "loader":
        for _ in DataLoader([0], num_workers=1, collate_fn=never_return):  # hang: loader
            pass
    if kind in ("stopped", "killed"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)  # hang: stopped
    if kind == "exited":
        sys.exit(0)  # hang: exited
    if kind == "raised":
        raise ValueError("a sample has no label")


def never_return(_: Any) -> None:
    threading.Event().wait()


PROGRAMS: dict[str, Callable[[Distributed, argparse.Namespace], Figures]] = {
    each.__name__: each for each in (placement, collectives, train, compiled, checkpoint, sharded, hold, hang)}


# Parts of the programs -----------------------------------------------------------------------------------------------

class Training:
    """A training with DDP or FSDP2, and AdamW."""

    def __init__(self, job: Distributed, model: nn.Module, learning_rate: float = 1e-3, compiled: bool = False,
                 wrap: Callable[..., Any] = DDP) -> None:
        self.model = model.to(job.device)
        ddp = DDP(self.model, device_ids=job.device_ids) if wrap is DDP else wrap(self.model)
        self.ddp: Any = torch.compile(ddp) if compiled else ddp
        self.optimizer = adamw(self.model.parameters(), learning_rate)

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> Tensor:
        loss = loss_of(self.ddp)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tensors(self) -> list[Tensor]:
        """All parameters, each followed by its state of the optimizer."""
        parameters = list(self.model.parameters())
        found = [tensor for one in parameters for tensor in (one.detach(), *self.optimizer.state[one].values())]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]


def adamw(parameters: Iterator[nn.Parameter], learning_rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, foreach=True)


def tokens_to_learn() -> Tensor:
    return torch.randint(300, (4, 64), generator=torch.Generator().manual_seed(0))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def now(job: Distributed) -> float:
    """Seconds, when the device has done what it was given."""
    if job.device.type != "cpu":
        torch.get_device_module(job.device).synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--hang-timeout", type=float)
    parser.add_argument("--kind")
    parser.add_argument("names", nargs="+", choices=PROGRAMS, metavar="NAME")
    args = parser.parse_args()
    start = time.perf_counter()
    with setup_distributed(args.backend, hang_timeout=args.hang_timeout) as job:
        figures: Figures = {"start_seconds": time.perf_counter() - start, "world_size": job.world_size}
        for name in args.names:
            figures[name] = PROGRAMS[name](job, args)
        if job.is_main:
            print(f"result: {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()

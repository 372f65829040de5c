"""What the ranks of the GPU tests run: programs by name, one after the other in one launch.

python tests/gpu/programs.py [--backend B] [--folder F] [--small] NAME...

Rank 0 prints a line "result: {...}" with the figures of each program. With --backend gloo they run on CPUs.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.unit.plan_models import GPT
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer, PerRank
from utils.host.device import device_nodes
from utils.tools.plan import traced
from utils.tools.plan.trace import trace_training

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
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model, tokens = gpt(job.device, args.small)
        ddp: nn.Module = DDP(model, device_ids=job.device_ids)
        if compiled:
            ddp = torch.compile(ddp)  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if args.small else 1e-3)
        losses, start = [], 0.0
        for step in range(30):
            if step == 10:
                wait_for_device(job)
                start = time.perf_counter()
            with torch.autocast(job.device.type, dtype, enabled=dtype != torch.float32):
                loss = next_token_loss(ddp, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        wait_for_device(job)
        figures[name] = {"first": losses[0].item(), "last": losses[-1].item(),
                         "tokens_per_second": 20 * tokens.numel() / (time.perf_counter() - start)}
        assert figures[name]["last"] < figures[name]["first"] - 1
    assert abs(figures["bf16"]["last"] - figures["fp32"]["last"]) < 0.05 * figures["fp32"]["first"]
    return figures


def compiled(job: Distributed, args: argparse.Namespace) -> Figures:
    """As train(), compiled."""
    return train(job, args, compiled=True)


def memory(job: Distributed, args: argparse.Namespace) -> Figures:
    """The peak of a DDP training, and the peak that plan.py predicts. Bytes; measured is 0 on a CPU."""
    def step(model: nn.Module) -> Tensor:
        return next_token_loss(model, tokens)

    tokens = torch.zeros(4, 64, dtype=torch.long) if args.small else torch.zeros(8, 512, dtype=torch.long)
    trace = trace_training(lambda: new_gpt(args.small), step, adamw)
    predicted = sum(traced.memory(trace).values())

    tokens = tokens.to(job.device)
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    ddp = DDP(new_gpt(args.small).to(job.device), device_ids=job.device_ids)
    optimizer = adamw(ddp.parameters())
    for _ in range(3):
        step(ddp).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before if job.device.type == "cuda" else 0
    return {"predicted": predicted, "measured": measured}


def checkpoint(job: Distributed, args: argparse.Namespace) -> Figures:
    """Seconds that torch.save() and save() stop the loop; and a resumed run against an uninterrupted one."""
    folder = Path(args.folder)
    steps = Steps(job, args.small)
    checkpoints = Checkpointer(folder / "checkpoints")
    for _ in range(3):
        steps.step()
    for _ in range(2):  # the first save() allocates its memory; the second would wait for it
        checkpoints.wait()
        wait_for_device(job)
        start = time.perf_counter()
        checkpoints.save(steps.number, steps.state())
        saving = time.perf_counter() - start
        steps.step()
    checkpoints.wait()
    wait_for_device(job)
    start = time.perf_counter()
    if job.is_main:
        torch.save({name: part.state_dict() for name, part in steps.state().items()}, folder / "state.pt")
    plain = time.perf_counter() - start
    job.barrier()
    for _ in range(3):
        steps.step()
    uninterrupted = steps.digest()

    resumed = Steps(job, args.small, seed=1)
    found = checkpoints.load_latest(resumed.state())
    assert found is not None
    resumed.number = found.step
    while resumed.number < steps.number:
        resumed.step()
    assert resumed.digest() == uninterrupted, "the resumed run has other bits"
    size = sum(tensor.nbytes for tensor in steps.model.state_dict().values()) * 3
    checkpoints.close()
    return {"bytes": size, "save": saving, "torch_save": plain}


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


def hang(job: Distributed, args: argparse.Namespace) -> Figures:
    """Rank 1 leaves one all-reduce out, and computes for ever."""
    values = torch.ones(16, device=job.device)
    for step in range(100):
        while step == 50 and job.rank == 1:
            time.sleep(0.1)
        dist.all_reduce(values)
        torch.get_device_module(job.device).synchronize()
    raise AssertionError("no rank was missed")


PROGRAMS: dict[str, Callable[[Distributed, argparse.Namespace], Figures]] = {
    each.__name__: each for each in (placement, collectives, train, compiled, memory, checkpoint, hold, hang)}


# Parts of the programs -----------------------------------------------------------------------------------------------

class Steps:
    """A training whose result is the same bits in each run on the same device."""

    def __init__(self, job: Distributed, small: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        width, layers = (64, 2) if small else (4096, 4)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(job.device)
        self.ddp = DDP(self.model, device_ids=job.device_ids)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.shape, self.device, self.number = (32, width), job.device, 0
        self.step(record=False)  # makes the optimizer's state, and fixes DDP's buckets

    def step(self, record: bool = True) -> None:
        generator = torch.Generator().manual_seed(self.number)
        loss = self.ddp(torch.randn(self.shape, generator=generator).to(self.device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.number += record

    def state(self) -> dict[str, Any]:
        return {"model": self.ddp, "optimizer": self.optimizer}

    def digest(self) -> str:
        digest = hashlib.sha256()
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        for tensor in (*self.model.state_dict().values(), *(one[key] for one in states for key in sorted(one))):
            digest.update(tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def new_gpt(small: bool) -> GPT:
    return GPT() if small else GPT(layers=12, width=768, heads=12, words=50257, context=512)


def gpt(device: torch.device, small: bool) -> tuple[nn.Module, Tensor]:
    """A model and tokens to learn by heart, the same in each call."""
    torch.manual_seed(0)
    shape = (4, 64) if small else (8, 512)
    tokens = torch.randint(300, shape, generator=torch.Generator().manual_seed(0))
    return new_gpt(small).to(device), tokens.to(device)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def wait_for_device(job: Distributed) -> None:
    if job.device.type != "cpu":
        torch.get_device_module(job.device).synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--hang-timeout", type=float)
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

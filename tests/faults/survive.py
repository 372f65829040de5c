"""Run examples/05_survive.py with slow steps and a slow disk, and print a digest of its last checkpoint.

tests/faults/survive.py [--step-seconds SECONDS] [--fsync-seconds SECONDS] [--stop-after STEP] [--no-dropout]
                        [--compile inside|outside] [--compiler aot_eager|eager|inductor] [options of the example]

--compile adds torch.compile inside or outside of DDP, BatchNorm, and an average of the weights and the buffers. Every
rank then prints a digest of its own state.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # sums in the same order under every launcher
from tests.faults import quick_imports

# isort: split
from ddpkit.checkpoint import Checkpointer, disk, load_part
from ddpkit.preemption import StopSignal

# isort: split
import torch
import torch._dynamo  # by the first optimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.checkpoint_states import ChangedDisk

quick_imports.done()

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_survive.py"


class NormedModel(torch.nn.Module):
    """A model of its own class: torch.compile outside of DDP compiles no forward pass of a class of torch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.model = torch.nn.BatchNorm1d(8), model

    def forward(self, images: torch.Tensor) -> Any:
        return self.model(self.norm(images))


class CompiledTraining:
    """Compiles the model of the example, and adds BatchNorm and an average of the weights to it."""

    def __init__(self, example: Any, where: str, compiler: str) -> None:
        self.state: dict[str, Any] = {}
        make_model, load_latest = example.make_model, Checkpointer.load_latest

        def wrap(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
            if where == "inside":
                return DistributedDataParallel(torch.compile(model, backend=compiler), **options)
            return torch.compile(DistributedDataParallel(model, **options), backend=compiler)

        def load_with_average(checkpoints: Checkpointer, state: dict[str, Any]) -> Any:
            average = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            state["average"] = average  # holds a copy of the model
            self.state = state
            return load_latest(checkpoints, state)

        example.DDP = wrap
        example.make_model = lambda: NormedModel(make_model())
        Checkpointer.load_latest = load_with_average  # type: ignore[method-assign]

    def update_average(self) -> None:
        self.state["average"].update_parameters(self.state["model"])


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--fsync-seconds", type=float, default=0.0)
    parser.add_argument("--stop-after", type=int, help="so many steps of this run, by the last rank")
    parser.add_argument("--no-dropout", action="store_true", help="for losses that do not depend on the ranks")
    parser.add_argument("--compile", choices=["inside", "outside"], help="of DDP")
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--folder", type=Path, required=True)
    args, others = parser.parse_known_args()
    sys.argv[1:] = ["--folder", str(args.folder), *others]

    should_stop, steps, stopped = StopSignal.should_stop, 0, False

    def slowly(stop: StopSignal) -> bool:
        nonlocal steps, stopped
        if compiled:
            compiled.update_average()
        time.sleep(args.step_seconds)
        steps += 1
        if steps == args.stop_after and os.environ["RANK"] == str(torch.distributed.get_world_size() - 1):
            stop.request("a test")
        stopped = should_stop(stop)
        return stopped

    def fsync(file: int) -> None:
        time.sleep(args.fsync_seconds)
        os.fsync(file)

    StopSignal.should_stop = slowly  # type: ignore[method-assign]
    disk.system = ChangedDisk(fsync=fsync)
    if args.no_dropout:
        torch.nn.Dropout = lambda probability: torch.nn.Identity()  # type: ignore[assignment, misc]
    multiprocessing.set_start_method("fork", force=True)  # that of Python 3.14 would import "survive" in workers
    spec = importlib.util.spec_from_file_location("survive", EXAMPLE)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    compiled = CompiledTraining(example, args.compile, args.compiler) if args.compile else None
    status = int(example.main())

    # Under launch.py the status is 0 after a stop, too.
    if status == 0 and not stopped and os.environ.get("RANK", "0") == "0":
        model = example.make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        found = load_part(args.folder, {"model": model, "optimizer": optimizer})
        assert found is not None
        averages = [value for one in optimizer.state.values() for value in one.values()]
        found_digest = digest([*model.state_dict().values(), *averages])
        print(f"done after {found.step} steps; digest of model and optimizer {found_digest}", flush=True)
    if status == 0 and not stopped and compiled:
        average, state = compiled.state["average"], compiled.state
        tensors = [*state["model"].state_dict().values(), *average.state_dict().values(),
                   *(value for one in state["optimizer"].state.values() for value in one.values())]
        print(f"done on rank {os.environ['RANK']}; digest of its state {digest(tensors)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Run examples/05_survive.py; sleep in each step, and print a digest of its last checkpoint.

tests/faults/survive.py [--step-seconds SECONDS] [options of the example]
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # sums in the same order under every launcher
from utils.checkpoint import load_part
from utils.preemption import StopSignal

# isort: split
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_survive.py"


def digest(value: Any) -> str:
    """A short name for the exact bits of tensors, nested in state dicts."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add([key, value[key]])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, required=True)
    args, others = parser.parse_known_args()
    sys.argv[1:] = ["--folder", str(args.folder), *others]

    should_stop = StopSignal.should_stop

    stopped = False

    def slowly(stop: StopSignal) -> bool:
        nonlocal stopped
        time.sleep(args.step_seconds)
        stopped = should_stop(stop)
        return stopped

    StopSignal.should_stop = slowly  # type: ignore[method-assign]
    spec = importlib.util.spec_from_file_location("survive", EXAMPLE)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    status = int(example.main())

    # Under launch.py the status is 0 after a stop, too.
    if status == 0 and not stopped and os.environ.get("RANK", "0") == "0":
        model = example.make_model()
        state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        found = load_part(args.folder, state)
        assert found is not None
        bits = digest([part.state_dict() for part in state.values()])
        print(f"done after {found.step} steps; digest of model and optimizer {bits}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

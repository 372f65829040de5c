"""Run examples/05_survive.py with slow steps and a slow disk, and print a digest of its last checkpoint.

tests/faults/survive.py [--step-seconds SECONDS] [--fsync-seconds SECONDS] [--stop-after STEP] [--no-dropout]
                        [options of the example]
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # sums in the same order under every launcher
from utils.checkpoint import disk, load_part
from utils.preemption import StopSignal

# isort: split
import torch

from tests.unit.checkpoint_states import ChangedDisk

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_survive.py"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--fsync-seconds", type=float, default=0.0)
    parser.add_argument("--stop-after", type=int, help="so many steps of this run, by the last rank")
    parser.add_argument("--no-dropout", action="store_true", help="for losses that do not depend on the ranks")
    parser.add_argument("--folder", type=Path, required=True)
    args, others = parser.parse_known_args()
    sys.argv[1:] = ["--folder", str(args.folder), *others]

    should_stop, steps, stopped = StopSignal.should_stop, 0, False

    def slowly(stop: StopSignal) -> bool:
        nonlocal steps, stopped
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
    spec = importlib.util.spec_from_file_location("survive", EXAMPLE)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    status = int(example.main())

    # Under launch.py the status is 0 after a stop, too.
    if status == 0 and not stopped and os.environ.get("RANK", "0") == "0":
        model = example.make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        found = load_part(args.folder, {"model": model, "optimizer": optimizer})
        assert found is not None
        averages = [value for one in optimizer.state.values() for value in one.values()]
        digest = hashlib.sha256()
        for tensor in [*model.state_dict().values(), *averages]:
            digest.update(tensor.detach().numpy().tobytes())
        print(f"done after {found.step} steps; digest of model and optimizer {digest.hexdigest()[:12]}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

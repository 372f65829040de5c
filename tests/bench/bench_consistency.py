#!/usr/bin/env python3
"""Measure what the comparison of the ranks' training costs a step of example 03.

python tests/bench/bench_consistency.py [--steps 300] [argument of the example ...]

Prints for each rank the seconds that the checks took in the training's thread and the CPU seconds of
their own thread, and both as a share of the time of the training. The bar is 0.3 %.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
import os, runpy, sys, time
from ddpkit.consistency import training_watch
hooks, start = [0.0], [0.0]

def timed(function):
    def call(*args):
        start[0] = start[0] or time.perf_counter()
        before = time.perf_counter()
        result = function(*args)
        hooks[0] += time.perf_counter() - before
        return result
    return call

watch = training_watch.TrainingWatch
for name in ("stepped", "begin_epoch", "first_batch"):
    setattr(watch, name, timed(getattr(watch, name)))
run = watch._run

def measured(self):
    run(self)
    thread = time.thread_time()
    whole = time.perf_counter() - start[0]
    print(f"rank {os.environ['RANK']}: {hooks[0]:.4f} s in the training's thread, {thread:.4f} s in their own, of "
          f"{whole:.1f} s: {100 * (hooks[0] + thread) / whole:.3f} %", flush=True)

watch._run = measured
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args, others = parser.parse_known_args()
    example = [str(ROOT / "examples" / "03_text_lm.py"), "--steps", str(args.steps), *others]
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "--", sys.executable, "-c", PROGRAM]
    return subprocess.run([*command, *example], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

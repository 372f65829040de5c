"""Measure example 03 on a GPU: tokens/s, share of the peak, memory; beside them plan's prediction, and nanoGPT.

    python -m tests.bench.speed [--nanogpt FOLDER] [--page docs/performance.md]
    python -m tests.bench.speed --small --modes eager      a small model, on the CPU

GPT-2 in bfloat16, eager and compiled, as the single rank of DDP, with 4,096, 32,768 and 65,536 tokens in each optimizer
step. nanoGPT is compared in turns of some steps; the other one waits meanwhile. Each row is written when it is
measured, so an interrupted run keeps those before. After --seconds, nothing more is started.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.bench import nanogpt
from tests.gpu.page import write_part

GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024}
SMALL = {"layers": 1, "heads": 2, "width": 32, "context": 32}
BATCHES = ((4, 1), (32, 1), (32, 2))  # sequences of a micro-batch, micro-batches of a step
SMALL_BATCHES = ((4, 1), (4, 2))
GPUS = {"GH200": "gh200", "H200": "h200", "A100-SXM4-40": "a100-40", "A100": "a100-80", "V100": "v100-32",
        "MI250X": "mi250x", "MI300A": "mi300a"}  # in the name of the GPU: its name in jobs/hardware.yaml
HEADER = """\
| tokens per step | mode | tokens/s | of the peak | step | predicted | memory | predicted | nanoGPT tokens/s | ratio |
|---|---|---|---|---|---|---|---|---|---|
"""


class Report:
    """The rows so far, printed and written to a page as they come."""

    def __init__(self, title: str, page: Path | None) -> None:
        self._text, self._page = f"{title}\n\n{HEADER}", page
        print(self._text, end="", flush=True)

    def add(self, row: str) -> None:
        print(row, flush=True)
        self._text += row + "\n"
        if self._page:
            write_part(self._page, "speed", self._text)


def predict(size: dict[str, int], folder: Path, gpu: str, precision: str) -> tuple[float, float]:
    """Return the seconds of a step and the bytes at its peak that ddpkit plan predicts."""
    words = [sys.executable, str(nanogpt.ROOT / "utils"), "plan", "--gpu", gpu, "--gpus", "1", "--json",
             str(nanogpt.EXAMPLE), "--tokens", str(folder / "data" / "tokens"), "--precision", precision]
    for name in ("layers", "heads", "width", "context", "accumulate"):
        words += [f"--{name}", str(size[name])]
    words += ["--batch-size", str(size["batch"])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    plan = json.loads(done.stdout)
    return plan["scaling"][0]["step_seconds"], sum(plan["memory"].values())


def measure(mode: str, size: dict[str, int], folder: Path, args: argparse.Namespace
            ) -> tuple[list[float], list[float], int]:
    """Return the seconds of the steps of 03 and of nanoGPT in each turn, and the peak memory of 03 in bytes."""
    args = argparse.Namespace(**{**vars(args), "compile": mode == "compiled"})
    threads = 1 if args.small else max(1, len(os.sched_getaffinity(0)) // 2)
    with contextlib.ExitStack() as at_end:
        sides = nanogpt.start(args.nanogpt, folder, size, 10_000, args, threads=threads, log_every=25, is_text=False)
        for side in sides:
            at_end.callback(side.end)
        with ThreadPoolExecutor() as pool:  # compile at the same time
            list(pool.map(lambda side: side.turn(5), sides))
        seconds: list[list[float]] = [[] for _ in sides]
        for number in range(args.turns):
            for which in range(len(sides))[::-1 if number % 2 else 1]:  # neither is always the first
                seconds[which].append(sides[which].turn(args.steps) / args.steps)
        return seconds[0], seconds[1] if len(sides) > 1 else [], sides[0].peak_bytes


def describe(mode: str, tokens: int, measured: tuple[list[float], list[float], int], predicted: tuple[float, float],
             flops_per_second: float) -> str:
    """Return a row. flops_per_second: at one token per second, as a share of the GPU's peak."""
    ours, theirs, memory = measured
    step = statistics.median(ours)
    words = [f"{tokens:,}", mode, f"{tokens / step:,.0f}"]
    words += [f"{flops_per_second * tokens / step:.3f}" if flops_per_second else "", f"{1e3 * step:.1f} ms"]
    words.append(f"{1e3 * predicted[0]:.1f} ms ({predicted[0] / step - 1:+.0%})" if flops_per_second else "")
    words.append(f"{memory / 1e9:.2f} GB" if memory else "")
    words.append(f"{predicted[1] / 1e9:.2f} GB" + (f" ({predicted[1] / memory - 1:+.1%})" if memory else ""))
    ratios = [other / one for one, other in zip(ours, theirs, strict=False)]
    words.append(f"{tokens / statistics.median(theirs):,.0f}" if theirs else "")
    words.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else "")
    return f"| {' | '.join(words)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a clone, to compare 03 with")
    parser.add_argument("--page", type=Path, help="write the table there, between its markers")
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--seconds", type=float, default=240, help="start nothing after this time")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    if not args.small and not torch.cuda.is_available():
        sys.exit("torch sees no GPU. Expected one; --small measures a small model on the CPU")
    args.device = "cpu" if args.small else "cuda"
    args.nanogpt = args.nanogpt and args.nanogpt.resolve()
    shape, batches = (SMALL, SMALL_BATCHES) if args.small else (GPT2, BATCHES)
    sizes = [{**shape, "batch": batch, "accumulate": count} for batch, count in batches]

    example: dict[str, Any] = runpy.run_path(str(nanogpt.EXAMPLE), run_name="example")
    with torch.device("meta"):
        model = example["GPT"](example["GPT2_VOCABULARY"], *shape.values())
    peak = example["peak_flops"](torch.device(args.device))
    device = "CPU" if args.small else torch.cuda.get_device_name()
    gpu = next((name for part, name in GPUS.items() if part in device), "h100")
    precision = "float32" if args.small else "bfloat16"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report = Report(
        f"`scripts/test.sh --gpu speed`, {datetime.date.today()}: {device}, {os.cpu_count()} CPUs, "
        f"torch {torch.__version__}.\nExample 03, {parameters:,} parameters, tied head, context {shape['context']:,}, "
        f"{precision}, fused AdamW,\none rank of DDP, medians of {args.turns} turns of "
        f"{args.steps} steps; `ddpkit plan --gpu {gpu}` predicts the eager one.", args.page)

    with tempfile.TemporaryDirectory(prefix="speed-") as name:
        folder = Path(name)
        nanogpt.write_data(folder)
        if args.nanogpt:
            (folder / "configurator.py").symlink_to(args.nanogpt / "configurator.py")
        with ThreadPoolExecutor(2 if args.small else 3) as pool:
            predicted = list(pool.map(lambda size: None if time.monotonic() > end else predict(
                size, folder, gpu, precision), sizes))
        for mode in args.modes:
            for size, prediction in zip(sizes, predicted, strict=True):
                tokens = size["batch"] * size["accumulate"] * size["context"]
                if prediction is None or time.monotonic() > end:
                    report.add(f"| {tokens:,} | {mode} | not measured: the time was over | | | | | | | |")
                    continue
                measured = measure(mode, size, folder, args)
                report.add(describe(mode, tokens, measured, prediction, model.flops_per_token() / peak if peak else 0))


if __name__ == "__main__":
    main()

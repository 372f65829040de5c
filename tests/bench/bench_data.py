#!/usr/bin/env python3
"""Compare the kit's sampler with torch's DistributedSampler: first index, resume, memory, speed.

python tests/bench/bench_data.py                         10^6, 10^8 and 10^10 samples
python tests/bench/bench_data.py --lengths 1000000       one size
python tests/bench/bench_data.py --stock-limit 10000000  torch's sampler up to this size only

Every measurement runs in a new process; the two samplers take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = """\
columns, each a median over the runs:
  samples       length of the data set; one rank takes all indices of the epoch
  first ms      from set_epoch() to the first index of the epoch
  resume ms     from resume() in the middle of the epoch to the next index; torch's sampler has to
                draw and drop the first half, which is not measured
  memory MB     growth of the largest resident set by the first index and the resume
  ns per index  of 2 million indices in a for loop, without the first. The preparation of torch's
                sampler is divided by the indices of the epoch, as every epoch needs it again
  ratio         ns per index of the kit / of torch's sampler in one run; the median over the runs
"""
MEASURE = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
kind, length = sys.argv[1], int(sys.argv[2])
class Data:
    def __len__(self): return length
    def __getitem__(self, index): return index
if kind == "kit":
    from utils.data import ResumableDistributedSampler as Kind
else:
    from torch.utils.data import DistributedSampler as Kind
list(Kind(Data.__new__(type("Few", (Data,), {"__len__": lambda self: 10})), 1, 0))
def memory(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = memory()
sampler = Kind(Data(), 1, 0)
start = time.perf_counter()
sampler.set_epoch(1)
indices = iter(sampler)
next(indices)
first = time.perf_counter() - start
resumed = None
if kind == "kit":
    other = Kind(Data(), 1, 0)
    state = other.state_at(1, length // 2)
    start = time.perf_counter()
    other.resume(state)
    next(iter(other))
    resumed = time.perf_counter() - start
grown = memory() - before
count, limit = 0, min(length - 1, 2_000_000)
start = time.perf_counter()
for index in indices:
    count += 1
    if count == limit:
        break
each = (time.perf_counter() - start) / count
if kind != "kit":
    each += first / length
print(json.dumps([first, resumed, grown, each]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[10**6, 10**8, 10**10],
        help="sizes of the data set",
    )
    parser.add_argument(
        "--stock-limit", type=int, default=10**8, help="largest size for torch's sampler"
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="processes of either side for each size (default: 5)"
    )
    args = parser.parse_args()
    if args.runs < 1 or min(args.lengths) < 2:
        parser.error("--runs is at least 1, --lengths at least 2")
    rows = [("samples", "sampler", "first ms", "resume ms", "memory MB", "ns per index", "ratio")]
    for length in args.lengths:
        kit, stock = [], []
        for run in range(args.runs if length <= 10**7 else min(3, args.runs)):
            kit.append(measure("kit", length))
            if length <= args.stock_limit:
                stock.append(measure("torch", length))
            print(f"{length:.0e} samples: run {run + 1}", file=sys.stderr, flush=True)
        ratio = (
            statistics.median(a[3] / b[3] for a, b in zip(kit, stock, strict=True))
            if stock
            else None
        )
        rows.append((f"{length:,}", "kit", *row(kit), f"{ratio:.2f}" if ratio else "-"))
        if stock:
            rows.append((f"{length:,}", "torch", *row(stock), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def measure(kind: str, length: int) -> list[float | None]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, str(length)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(
            f"{kind} with {length} samples ended with status {done.returncode}:\n{done.stderr}"
        )
    measured: list[float | None] = json.loads(done.stdout)
    return measured


def row(measured: Sequence[Sequence[float | None]]) -> list[str]:
    cells = []
    for values, scale, form in zip(
        zip(*measured, strict=True), (1e3, 1e3, 1, 1e9), (".2f", ".2f", ".1f", ".0f"), strict=True
    ):
        known = [value for value in values if value is not None]
        cells.append(f"{statistics.median(known) * scale:{form}}" if known else "-")
    return cells


if __name__ == "__main__":
    main()

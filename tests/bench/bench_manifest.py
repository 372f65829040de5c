#!/usr/bin/env python3
"""Measure the manifest of a checkpoint of many ranks, with made-up files.

python tests/bench/bench_manifest.py                    1,024 ranks, 2,700 slices on each
python tests/bench/bench_manifest.py --shapes 900       none of the model's tensors is as large as another

Each row is measured in a process of its own. The exit status is 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.checkpoint.format import parse_manifest, rank_file_name, render_manifest
from utils.checkpoint.load import slices_by_file
from utils.checkpoint.rank_file import BLOCK_BYTES
from utils.checkpoint.save import SaveJob, SaveReport, make_manifest
from utils.checkpoint.slices import Box

COLUMNS = """\
Rows. Seconds of CPU, and MB by which the peak of the process grows.
  rank 0 writes      reads the reports of all ranks, and makes the text of the manifest
  a rank reads       reads it, and finds the files and slices for as many ranks as have saved
  half as many       the same for half as many ranks
  one rank           the same for one rank, which reads all files
"""
WIDTH = 8192
COPIES = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


def shapes_of(tensors: int, shapes: int) -> dict[str, list[int]]:
    """Return a state: parameters in `shapes` sizes, and two moments of each."""
    return {
        f"{copy}/layers.{number // shapes}.weight.{number % shapes}": [WIDTH + 8 * (number % shapes), WIDTH]
        for copy in COPIES
        for number in range(tensors // len(COPIES))
    }


def part(shape: list[int], rank: int, ranks: int) -> Box:
    """Return the rows of a rank, as fully_shard() distributes them."""
    rows = -(-shape[0] // ranks)
    start = min(rank * rows, shape[0])
    return Box((start, 0), (min(rows, shape[0] - start), shape[1]))


def numbers_of(state: dict[str, list[int]]) -> dict[str, int]:
    """Return the number of each tensor's layout."""
    heights = list(dict.fromkeys(shape[0] for shape in state.values()))
    number_of = {height: number for number, height in enumerate(heights)}
    return {name: number_of[shape[0]] for name, shape in state.items()}


def reports_of(state: dict[str, list[int]], ranks: int) -> list[str]:
    """Return the reports of all ranks, as they arrive at rank 0."""
    heights = {shape[0]: shape for shape in state.values()}
    reports = []
    for rank in range(ranks):
        boxes = [part(shape, rank, ranks) for shape in heights.values()]
        size = sum(4 * shape[0] // ranks * shape[1] for shape in state.values())
        entry = {
            "name": rank_file_name(rank),
            "size": size + 300_000,
            "header_size": 300_000,
            "checksums": "0123abcd" * (1 + -(-size // BLOCK_BYTES)),
        }
        report = SaveReport(failure=None, entry=entry, whole=[], boxes=boxes, digest="0" * 32, replicas="")  # type: ignore[typeddict-item]
        reports.append(json.dumps(report))
    return reports


def write(state: dict[str, list[int]], reports: list[str]) -> bytes:
    """Do what rank 0 does with the reports."""
    found = [json.loads(report) for report in reports]
    numbers = numbers_of(state)
    job: Any = SaveJob(
        1, 0, 0.0, None, {}, "", None, [], numbers, found[0]["boxes"], None, 0.0  # type: ignore[arg-type]
    )
    return render_manifest(make_manifest(job, found))


def read(state: dict[str, list[int]], raw: bytes, ranks: int) -> None:
    """Do what a rank in the middle of `ranks` does with the manifest."""
    manifest = parse_manifest(raw)
    boxes = {name: part(shape, ranks // 2, ranks) for name, shape in state.items()}
    found = slices_by_file(manifest, boxes, ranks // 2)
    assert len({name for slices in found.values() for names, _ in slices for name in names}) == len(state)


def peak_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of CPU, and megabytes by which the peak has grown."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is used now
    before, start = peak_bytes(), time.process_time()
    action()
    return time.process_time() - start, (peak_bytes() - before) / 1e6


def row(kind: str, ranks: int, tensors: int, shapes: int) -> tuple[float, float, float]:
    """Return seconds, megabytes of memory, and megabytes of the manifest."""
    state = shapes_of(tensors, shapes)
    reports = reports_of(state, ranks)
    raw = write(state, reports)
    if kind == "rank 0 writes":
        seconds, memory = timed(lambda: write(state, reports))
    else:
        readers = {"a rank reads": ranks, "half as many": ranks // 2, "one rank": 1}[kind]
        del reports
        seconds, memory = timed(lambda: read(state, raw, readers))
    return seconds, memory, len(raw) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--tensors", type=int, default=2700, help="(default: 2700)")
    parser.add_argument("--shapes", type=int, default=9, help="of the tensors (default: 9)")
    args = parser.parse_args()

    print(f"{'':15}  {'seconds':>7}  {'MB':>6}")
    spawn = multiprocessing.get_context("spawn")
    for kind in ("rank 0 writes", "a rank reads", "half as many", "one rank"):
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
            job = process.submit(row, kind, args.ranks, args.tensors, args.shapes)
            seconds, memory, manifest = job.result()
        print(f"{kind:15}  {seconds:7.3f}  {memory:6.1f}")
    print(f"{'manifest':15}  {'':7}  {manifest:6.1f}")


if __name__ == "__main__":
    main()

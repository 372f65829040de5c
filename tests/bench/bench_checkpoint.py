#!/usr/bin/env python3
"""Measure a save of utils.checkpoint against torch.save and against plain files.

python tests/bench/bench_checkpoint.py                    a state of 1,000 MB, in the current folder
python tests/bench/bench_checkpoint.py --megabytes 200 --folder /scratch/me

All of them take turns in one process, five times. The exit status is 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.checkpoint import Checkpointer
from utils.checkpoint import folder as checkpoint_folder
from utils.checkpoint.pack import pack
from utils.checkpoint.rank_file import memory, read_tensors
from utils.checkpoint.snapshot import ReplicaSample

COLUMNS = """\
Rows. Seconds are medians over the runs; each ratio is the median of the ratios within one run, then
the smallest and the largest of them.
  torch.save     a synchronous torch.save() of the state and an fsync; no fsync: without it
  save(), first  how long the first save() of a Checkpointer keeps the loop waiting; it allocates
                 its memory. Ratio: to torch.save with fsync
  save()         how long each later one does
  plain write    the same number of bytes, from memory to one file, with fsync
  whole save     until the checkpoint is safe, with checksums, manifest and every fsync; ratio:
                 plain write / whole save, the share of the plain rate that is reached
  comparison     of all tensors between the ranks, as a part of a save with DistributedDataParallel;
                 ratio: to the whole save
  plain read     of the same file into fresh memory; cold: after its pages left the cache
  checked read   of the checkpoint's files into fresh memory, with checksums; ratio:
                 plain read / checked read
"""
# each row, and the row that its ratio refers to
ROWS = {
    "torch.save, no fsync": "",
    "torch.save": "",
    "save(), first": "torch.save",
    "save()": "torch.save",
    "plain write": "",
    "whole save": "plain write",
    "comparison": "whole save",
    "plain read, cold": "",
    "checked read, cold": "plain read, cold",
    "plain read": "",
    "checked read": "plain read",
}
LARGE_BYTES = 4 << 20  # of a large tensor, as of weights
SMALL_BYTES = 1 << 10  # of the small tensor that goes with each, as of biases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=1000, help="size of the state (default: 1000)"
    )
    parser.add_argument("--runs", type=int, default=5, help="(default: 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    args = parser.parse_args()
    if args.runs < 1 or args.megabytes < 8:
        parser.error("--runs is at least 1, --megabytes at least 8")

    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=args.folder) as folder:
        seconds = measure(Path(folder), args.megabytes * 1_000_000, args.runs)
    print(f"{'':20}  {'seconds':>7}  {'MB/s':>6}  {'ratio':>5}  {'from':>5}  {'to':>5}")
    for name, base in ROWS.items():
        median = statistics.median(seconds[name])
        rate = f"{args.megabytes / median:,.0f}"
        ratios = ratios_to(seconds[name], base, seconds[base]) if base else ""
        print(f"{name:20}  {median:7.3f}  {rate:>6}  {ratios}".rstrip())


def ratios_to(row: list[float], base: str, base_row: list[float]) -> str:
    """Return the ratios of the seconds to those of a save, or of the other rates."""
    ratios = [one / other for one, other in zip(row, base_row, strict=True)]
    if base.startswith("plain"):
        ratios = [1 / ratio for ratio in ratios]
    values = (statistics.median(ratios), min(ratios), max(ratios))
    return "  ".join(f"{value:5.3f}" for value in values)


def measure(folder: Path, size: int, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each row, in each run. size: of the state, in bytes."""
    seconds: dict[str, list[float]] = {}
    count = size // (LARGE_BYTES + SMALL_BYTES)
    state = {
        f"layer{index}": {
            "weight": torch.rand(LARGE_BYTES // 4),
            "bias": torch.rand(SMALL_BYTES // 4),
        }
        for index in range(count)
    }
    flat = torch.rand(count * (LARGE_BYTES + SMALL_BYTES) // 4)

    def timed(name: str, action: Callable[[], object]) -> None:
        os.sync()  # writes that the previous action left are not counted for this one
        start = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    with Checkpointer(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save_and_wait(0, state)
        for run in range(1, runs + 1):
            # A file of the same size is deleted before each write: the free memory is the same.
            timed("torch.save, no fsync", lambda: torch.save(state, folder / "torch"))
            (folder / "torch").unlink()
            timed("torch.save", lambda: save_and_sync(state, folder / "torch"))
            (folder / "torch").unlink()
            timed("plain write", lambda: write(folder / "plain", flat))
            drop_from_cache(folder / "plain")
            timed("plain read, cold", lambda: read(folder / "plain"))
            timed("plain read", lambda: read(folder / "plain"))
            (folder / "plain").unlink()
            with Checkpointer(folder / "first") as first:
                timed("save(), first", lambda first=first: first.save(0, state))  # type: ignore[misc]
            shutil.rmtree(folder / "first")
            timed("save()", lambda run=run: checkpoints.save(run, state))  # type: ignore[misc]
            checkpoints.wait()
            seconds.setdefault("whole save", []).append(checkpoints.seconds or 0.0)
            packed = pack(state)
            packed.kinds = dict.fromkeys(packed.kinds, "common")
            timed("comparison", lambda packed=packed: ReplicaSample(packed).digests())  # type: ignore[misc]
            whole = checkpoints.folder / checkpoint_folder.checkpoint_names(checkpoints.folder)[-1]
            drop_from_cache(whole)
            timed("checked read, cold", lambda whole=whole: read_checked(whole))  # type: ignore[misc]
            timed("checked read", lambda whole=whole: read_checked(whole))  # type: ignore[misc]
            print(f"run {run} of {runs}", file=sys.stderr, flush=True)
    return seconds


def save_and_sync(state: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, data: torch.Tensor) -> None:
    view, done = memory(data), 0
    with path.open("wb", buffering=0) as file:
        while done < len(view):
            done += file.write(view[done : done + (16 << 20)])
        os.fsync(file.fileno())


def read(path: Path) -> None:
    size, done = path.stat().st_size, 0
    view = memory(torch.empty(size, dtype=torch.uint8))
    with path.open("rb", buffering=0) as file:
        while done < size:
            done += file.readinto(view[done:])


def read_checked(folder: Path) -> None:
    for entry in checkpoint_folder.read_manifest(folder)["files"]:
        read_tensors(folder, entry)


def drop_from_cache(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a save of utils/checkpoint.py costs the training loop and the disk, against torch.save and against plain files.

python scripts/bench_checkpoint.py                     a state of 1,000 MB, in a folder made in the current one
python scripts/bench_checkpoint.py --megabytes 200 --folder /scratch/me

All sides take turns in one process, five times. Exit status 0 whatever the figures are.
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils import checkpoint_files
from utils.checkpoint import Checkpointer
from utils.checkpoint_sums import memory

COLUMNS = """\
rows; the seconds are medians over the runs, each ratio is the median of the ratios within one run:
  torch.save     a synchronous torch.save() of the state and an fsync; no fsync: when that is left out
  save(), first  how long the first save() keeps the loop waiting; its memory is still to be allocated
  save()         how long each later one does; ratio: to torch.save, with fsync
  plain write    the same number of bytes, from memory to one file, with fsync
  whole save     until the checkpoint is safe, with checksums, manifest and every fsync; ratio: plain write / this,
                 that is the share of the plain rate that is reached
  plain read     of the same file into fresh memory; cold: after its pages were dropped from the cache
  checked read   of the checkpoint's files into fresh memory, with checksums; ratio: plain read / this
"""
LAYER = 4 << 20  # bytes of a large tensor; every one comes with a small one, as weights do with biases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the state (default: 1000)")
    parser.add_argument("--runs", type=int, default=5, help="(default: 5)")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write (default: the current folder)")
    args = parser.parse_args()
    if args.runs < 1 or args.megabytes < 8:
        parser.error("--runs is at least 1, --megabytes at least 8")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=args.folder) as folder:
        measured = measure(Path(folder), args.megabytes * 1_000_000, args.runs)
    rows = [("", "seconds", "MB/s", "ratio")]
    for name, base in (("torch.save, no fsync", ""), ("torch.save", ""), ("save(), first", "torch.save"),
                       ("save()", "torch.save"), ("plain write", ""), ("whole save", "plain write"),
                       ("plain read, cold", ""), ("checked read, cold", "plain read, cold"),
                       ("plain read", ""), ("checked read", "plain read")):
        seconds = statistics.median(measured[name])
        ratio = ""
        if base:
            pairs = list(zip(measured[name], measured[base], strict=False))
            ratio = f"{statistics.median(a / b if base == 'torch.save' else b / a for a, b in pairs):.2f}"
        rows.append((name, f"{seconds:.3f}", f"{args.megabytes / seconds:,.0f}", ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        print("  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))]))


def measure(folder: Path, size: int, runs: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    count = size // (LAYER + 1024)
    state = {f"layer{index}": {"weight": torch.rand(LAYER // 4), "bias": torch.rand(256)} for index in range(count)}
    flat = torch.rand(count * (LAYER + 1024) // 4)

    def timed(name: str, action: Callable[[], object]) -> None:
        os.sync()  # what the side before left to be written is not this one's
        start = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    with Checkpointer(folder / "checkpoints", keep=1) as checkpoints:
        timed("save(), first", lambda: checkpoints.save(0, state))
        checkpoints.wait()
        for run in range(1, runs + 1):
            # A file as large is deleted before each write, so that all find as many free pages of memory.
            timed("torch.save, no fsync", lambda: torch.save(state, folder / "torch"))
            (folder / "torch").unlink()
            timed("torch.save", lambda: save_and_sync(state, folder / "torch"))
            (folder / "torch").unlink()
            timed("plain write", lambda: write(folder / "plain", flat))
            drop_from_cache(folder / "plain")
            timed("plain read, cold", lambda: read(folder / "plain"))
            timed("plain read", lambda: read(folder / "plain"))
            (folder / "plain").unlink()
            timed("save()", lambda run=run: checkpoints.save(run, state))  # type: ignore[misc]
            checkpoints.wait()
            seconds.setdefault("whole save", []).append(checkpoints.seconds or 0.0)
            whole = checkpoints.folder / checkpoint_files.names(checkpoints.folder)[-1]
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
            done += file.write(view[done:done + (16 << 20)])
        os.fsync(file.fileno())


def read(path: Path) -> None:
    size, done = path.stat().st_size, 0
    view = memory(torch.empty(size, dtype=torch.uint8))
    with path.open("rb", buffering=0) as file:
        while done < size:
            done += file.readinto(view[done:])


def read_checked(folder: Path) -> None:
    for entry in checkpoint_files.read_manifest(folder)["files"]:
        checkpoint_files.read_part(folder, entry)


def drop_from_cache(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()

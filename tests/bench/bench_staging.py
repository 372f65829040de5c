#!/usr/bin/env python3
"""Measure the start of ranks with and without --stage, on a file system that takes a while for each open.

python tests/bench/bench_staging.py                    two ranks, 2 ms for each open of a shared package
python tests/bench/bench_staging.py --delay 0          what --stage costs where the packages are local
python tests/bench/bench_staging.py --ranks 8 --pairs 5

A library that g++ compiles delays open() of files below the packages of this Python; those that the dynamic linker
opens are not delayed. A pair is a launch without and one with --stage, whose copy is kept from a launch before. Each
rank imports torch and takes part in one all-reduce. Exit status: 0 whatever the figures are; 1 when a launch failed.
"""
from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = """\
columns, in seconds, medians over the pairs:
  shared   from the start of ddpkit launch to its end, with the packages where they are
  staged   the same with --stage and a kept copy; packing, copying: of the first launch with --stage
  ratio    staged / shared of one pair; the median over the pairs. The bar is 0.3 at 2 ms and 8 ranks, 1.03 at 0 ms
  cpu      the same for the seconds of CPU of the launch and all its ranks, which other programs on the host change less
"""
DELAY = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(const char *path) {
    const char *prefix = getenv("SLOW_PREFIX");
    if (prefix && path && !strncmp(path, prefix, strlen(prefix))) usleep(atoi(getenv("SLOW_MICROSECONDS")));
}
#define OPEN(name) extern "C" int name(const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); wait_for(path); \
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(name) extern "C" int name(int folder, const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); wait_for(path); \
    return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(folder, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)
"""
PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of each launch (default 2)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="pairs of launches (default 3)")
    parser.add_argument("--delay", type=float, default=2.0, metavar="MS", help="of each open (default 2 ms)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="staging-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "disk").mkdir()
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if args.delay:
            (folder / "delay.cc").write_text(DELAY)
            library = str(folder / "delay.so")
            subprocess.run(["g++", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE", "-O1", "-shared", "-fPIC", "-o", library,
                            str(folder / "delay.cc"), "-ldl"], check=True)
            environ |= {"LD_PRELOAD": library, "SLOW_PREFIX": sysconfig.get_path("purelib"),
                        "SLOW_MICROSECONDS": str(int(1000 * args.delay))}
        stage = ["--stage", "--stage-dir", str(folder / "disk")]
        print(f"{args.ranks} ranks, {args.delay:g} ms for each open of a shared package")
        try:
            first = seconds(args.ranks, stage, folder, environ)
            pairs = []
            for number in range(args.pairs):
                sides: list[list[str]] = [[], stage] if number % 2 else [stage, []]
                times = [seconds(args.ranks, side, folder, environ) for side in sides]
                pairs.append(times if number % 2 else times[::-1])
        except subprocess.CalledProcessError as error:
            print(error.stdout, file=sys.stderr)
            return 1
    print(f"packing, copying {first[0]:8.2f}\n{'':18}{'shared':>8}{'staged':>8}{'ratio':>8}")
    for name, column in (("start to end", 0), ("cpu", 1)):
        values = [(without[column], with_copy[column]) for without, with_copy in pairs]
        shared, staged = (statistics.median(side) for side in zip(*values, strict=True))
        ratio = statistics.median(with_copy / without for without, with_copy in values)
        print(f"{name:18}{shared:8.2f}{staged:8.2f}{ratio:8.3f}")
    print("load average: " + " ".join(f"{load:.1f}" for load in os.getloadavg()))
    return 0


def seconds(ranks: int, options: Sequence[str], folder: Path, environ: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of a launch, and of its CPU; CalledProcessError where it fails or stages nothing."""
    words = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", str(ranks), *options]
    start, cpu = time.perf_counter(), cpu_of_children()
    done = subprocess.run([*words, str(folder / "program.py")], env=environ, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    taken = time.perf_counter() - start
    if done.returncode or "warning" in done.stdout:
        raise subprocess.CalledProcessError(done.returncode or 1, words, done.stdout)
    return taken, cpu_of_children() - cpu


def cpu_of_children() -> float:
    used = os.times()
    return used.children_user + used.children_system


if __name__ == "__main__":
    sys.exit(main())

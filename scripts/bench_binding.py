#!/usr/bin/env python3
"""Measure the cost of binding at the start, and the step time of ranks with and without it.

python scripts/bench_binding.py                two ranks on this host
python scripts/bench_binding.py --ranks 4      more ranks; at most one for each core
python scripts/bench_binding.py --pairs 500    more pairs

The training is a small network on the CPU over gloo, one thread per rank and core. Its ranks are
bound and freed in turn while it runs.

Exit status: 0 whatever the figures are; 1 when a rank failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# The repository: `utils` is found from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.binding import available_cpus, bind_process, mask_of_cpus
from utils.cores import HostMasks, choose_cores
from utils.topology import read_topology

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 50

COLUMNS = """\
lines of the costs, each a median in milliseconds. The bar for their sum is 2 ms:
  topology   local rank 0 of each host reads sysfs
  choose     rank 0 divides the cores of a host, once for all hosts that are alike
  bind       a rank binds its threads
columns of the steps:
  bound, free   milliseconds of a step with each rank on its own cores, and with all ranks on all
                cores; median over the pairs
  ratio         bound / free of one pair; the median over the pairs. The bar is 1.01
  IQR           first and third quartile of the pairs' ratios
"""

PROGRAM = """\
import json, os, statistics, sys, time
sys.path.insert(0, sys.argv[4])
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from utils import setup_distributed
from utils.binding import bind_process

pairs, steps = int(sys.argv[2]), int(sys.argv[3])
free = frozenset(os.sched_getaffinity(0))
with setup_distributed("gloo") as job:
    bound = frozenset(os.sched_getaffinity(0))
    layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    model = torch.nn.Sequential(*layers)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data, target = torch.randn(256, 256), torch.randint(10, (256,))

    def block(cpus):
        bind_process(cpus)
        seconds = []
        for step in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(data), target).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    measured = []
    for pair in range(pairs + 1):
        order = ("bound", "free") if pair % 2 else ("free", "bound")
        measured.append({side: block({"bound": bound, "free": free}[side]) for side in order})
    if job.is_main:
        with open(sys.argv[1], "w") as file:
            json.dump(measured[1:], file)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="on this host (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a side (default: %(default)s)")
    args = parser.parse_args(arguments)
    if min(args.ranks, args.pairs - 1, args.steps) < 1:
        parser.error("--ranks and --steps must be 1 or more, --pairs 2 or more")

    print(
        f"host {socket.gethostname()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}",
        flush=True,
    )
    bench_costs(args.ranks)
    bench_steps(args.ranks, args.pairs, args.steps)


def bench_costs(ranks: int) -> None:
    """Print the time of each part of the binding on this host."""
    topology = read_topology()
    if topology is None:
        sys.exit(
            "sysfs does not describe the CPUs of this host. Run this on a Linux host that does"
        )
    mask = available_cpus()
    host = HostMasks(
        bind=True,
        topology=topology.to_text(),
        binding="",
        masks=(mask_of_cpus(mask),) * ranks,
        local_ranks=tuple(range(ranks)),
        gpu_nodes=(None,) * ranks,
    )

    def choose() -> None:
        choose_cores.cache_clear()
        choose_cores(host)

    print(f"topology  {milliseconds(read_topology):.3f} ms, {len(topology.cores)} cores")
    print(f"choose    {milliseconds(choose):.3f} ms, {ranks} ranks")
    print(f"bind      {milliseconds(lambda: bind_process(mask)):.3f} ms", flush=True)


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median time of a call."""
    measured = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        measured.append(1e3 * (time.perf_counter() - start))
    return statistics.median(measured)


def bench_steps(ranks: int, pairs: int, steps: int) -> None:
    """Print the step times of bound and of free ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program, result = folder / "program.py", folder / "result.json"
        program.write_text(PROGRAM)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words = [f"--nproc-per-node={ranks}", str(program), str(result), str(pairs), str(steps)]
        done = subprocess.run(
            [*torchrun, *words, str(ROOT)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"the ranks failed:\n{done.stdout}{done.stderr}")
        measured = json.loads(result.read_text())

    ratios = [pair["bound"] / pair["free"] for pair in measured]
    low, _, high = statistics.quantiles(ratios, method="inclusive")
    bound, free = (
        1e3 * statistics.median(pair[side] for pair in measured) for side in ("bound", "free")
    )
    print(
        f"steps     {ranks} ranks, {pairs} pairs of {steps} steps on each side: "
        f"bound {bound:.3f} ms, free {free:.3f} ms, ratio {statistics.median(ratios):.3f}, "
        f"IQR {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()

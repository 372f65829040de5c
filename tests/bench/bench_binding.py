#!/usr/bin/env python3
"""Measure the step time with and without binding, or the watch for hangs, and what binding costs.

python tests/bench/bench_binding.py                two ranks on this host
python tests/bench/bench_binding.py --ranks 4      more ranks
DDPKIT_CPU_BIND=list:0:1 python tests/bench/bench_binding.py       one core for each rank
python tests/bench/bench_binding.py --pairs 500    more pairs
python tests/bench/bench_binding.py --hangs --steps 200 --pairs 60    hang_timeout in place of binding

The training is a small network on the CPU over gloo, one thread per rank and core. Its ranks are
bound and freed in turn while it runs. With fewer than two cores for each rank, the kit binds none
unless DDPKIT_CPU_BIND is set; both sides are then the same, and the ratio shows the noise.

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
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.host.cores import HostMasks, available_cpus, bind_process, choose_cores, mask_of_cpus, read_topology

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 50

COLUMNS = """\
lines of the costs, each a median in milliseconds. The bar for their sum is 2 ms:
  topology   local rank 0 of each host reads sysfs
  choose     rank 0 divides the cores of a host, once for all hosts that are alike
  bind       a rank binds its threads
columns of the steps:
  bound, free   milliseconds of a step with each rank on the cores that the kit gives it, and
                with all ranks on all cores; median over the pairs
  ratio         bound / free of one pair; the median over the pairs. The bar is 1.01
  IQR           first and third quartile of the pairs' ratios
  watched, unwatched   the same with --hangs, and eight times the usual heartbeats; means. The
                       bar is 1.005
"""

PROGRAM = """\
import json, os, statistics, sys, time
sys.path.insert(0, sys.argv[4])
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from utils import setup_distributed
from utils.host.cores import bind_process

pairs, steps, sides = int(sys.argv[2]), int(sys.argv[3]), sys.argv[5].split(",")
free = frozenset(os.sched_getaffinity(0))
hang_timeout = 1 if "watched" in sides else None  # a heartbeat each eighth of it
with setup_distributed("gloo", hang_timeout=hang_timeout) as job:
    bound = frozenset(os.sched_getaffinity(0))
    monitor = job._shutdown._monitor  # only this program stops the watch while the ranks run
    watch = monitor and monitor._watch
    layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    model = torch.nn.Sequential(*layers)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data, target = torch.randn(256, 256), torch.randint(10, (256,))

    def switch(side):
        if side in ("bound", "free"):
            bind_process(bound if side == "bound" else free)
        else:
            watch.__init__(1.0, job.world_size)
            monitor._watch = watch if side == "watched" else None
            monitor._wake()

    def block(side):
        switch(side)
        seconds = []
        for step in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(data), target).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) if side in ("bound", "free") else statistics.mean(seconds)

    measured = []
    for pair in range(pairs + 1):
        order = sides if pair % 2 else reversed(sides)
        measured.append({side: block(side) for side in order})
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
    parser.add_argument(
        "--hangs", action="store_true", help="compare with and without hang_timeout"
    )
    args = parser.parse_args(arguments)
    if min(args.ranks, args.pairs - 1, args.steps) < 1:
        parser.error("--ranks and --steps must be 1 or more, --pairs 2 or more")

    print(
        f"host {socket.gethostname()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}",
        flush=True,
    )
    if not args.hangs:
        bench_costs(args.ranks)
    sides = ("watched", "unwatched") if args.hangs else ("bound", "free")
    bench_steps(args.ranks, args.pairs, args.steps, sides)


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


def bench_steps(ranks: int, pairs: int, steps: int, sides: tuple[str, str]) -> None:
    """Print the step times of both sides, and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program, result = folder / "program.py", folder / "result.json"
        program.write_text(PROGRAM)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words = [f"--nproc-per-node={ranks}", str(program), str(result), str(pairs), str(steps)]
        done = subprocess.run(
            [*torchrun, *words, str(ROOT), ",".join(sides)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"the ranks failed:\n{done.stdout}{done.stderr}")
        measured = json.loads(result.read_text())

    ratios = [pair[sides[0]] / pair[sides[1]] for pair in measured]
    low, _, high = statistics.quantiles(ratios, method="inclusive")
    first, second = (1e3 * statistics.median(pair[side] for pair in measured) for side in sides)
    print(
        f"steps     {ranks} ranks, {pairs} pairs of {steps} steps on each side: "
        f"{sides[0]} {first:.3f} ms, {sides[1]} {second:.3f} ms, "
        f"ratio {statistics.median(ratios):.4f}, IQR {low:.4f} to {high:.4f}"
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the agreement on a stop costs per step, and how long it takes: utils/preemption.py on local ranks, by gloo.

bench_stop.py                              two ranks, steps of 5 ms
bench_stop.py --ranks 4 --step-ms 1

Both sides of each comparison are measured in one run and take turns.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository: `utils` is found from any directory

if TYPE_CHECKING:
    from utils import Distributed
    from utils.preemption import StopSignal

COLUMNS = """\
lines, each a median over the runs, of the slowest rank:
  should_stop()   time of one call at a step boundary, the loop around it taken off
  after a step    the same call after a copy of 32 MiB, which displaces its data from the caches as a step does
  idle thread     CPU time that an open StopSignal takes while nothing happens, per second
  both            call after a step and idle thread as a part of a step of --step-ms
  loop ratio      CPU time of a loop of such steps with StopSignal / without, all ranks together, taking turns: of
                  the lower quartiles of the turns, since a shared machine is slow at times; what is left of the
                  noise is how far from 1 the same ratio is of two loops without
  agreement       from the request on the last rank until should_stop() is True on all, in steps of --step-ms
"""
CALLS, STEPS = 50_000, 50
SIDES = ("without", "with", "again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=5.0, help="length of a step (default: 5)")
    parser.add_argument("--runs", type=int, default=9, help="of each measurement (default: 9)")
    args = parser.parse_args()
    if args.ranks < 1 or args.runs < 1 or args.step_ms <= 0:
        parser.error("--ranks and --runs are at least 1, --step-ms is above 0")
    if os.environ.get("DDPKIT_BENCH_STOP"):
        return measure(args.step_ms / 1e3, args.runs)
    results = launch(args.ranks)
    step = args.step_ms / 1e3
    call, cold, idle = (max(r[name] for r in results) for name in ("call", "cold", "idle"))
    stops = sorted(max(waits) for waits in zip(*(r["stops"] for r in results), strict=True))
    print(f"{args.ranks} ranks, steps of {args.step_ms:g} ms, {args.runs} runs")
    print(f"should_stop()  {call * 1e9:8.0f} ns     {call / step:.3%} of a step")
    print(f"after a step   {cold * 1e9:8.0f} ns     {cold / step:.3%} of a step")
    print(f"idle thread    {idle * 1e6:8.0f} us/s   {idle:.3%} of a core")
    print(f"both                          {cold / step + idle:.3%} of a step")
    fast = {side: statistics.quantiles(map(sum, zip(*(r[side] for r in results), strict=True)), method="inclusive")[0]
            for side in SIDES}
    print(f"loop ratio     {fast['with'] / fast['without']:8.4f}     of two loops without "
          f"{fast['again'] / fast['without']:.4f}")
    print(f"agreement      {statistics.median(stops) * 1e3:8.0f} ms     longest {stops[-1] * 1e3:.0f} ms")


def launch(ranks: int) -> list[dict[str, Any]]:
    """Run this file on so many local ranks; what each of them measured."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {**os.environ, "DDPKIT_BENCH_STOP": "1", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], stdout=subprocess.PIPE, text=True,
                                  env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                 for rank in range(ranks)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed; see its message above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(step: float, runs: int) -> None:
    """One rank: prints its medians as JSON."""
    from utils import setup_distributed
    from utils.preemption import StopSignal

    with setup_distributed("gloo", launcher="env") as dist:
        work = calibrated(step)
        with StopSignal(dist) as stop:
            calls = [one_call(stop) for _ in range(runs)]
            cold = statistics.median(call_after_a_step(stop) for _ in range(20 * runs))
            idle = idle_thread(stop._listener, 3.0)
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for run in range(8 * runs):
            for side in SIDES if run % 2 else reversed(SIDES):
                with StopSignal(dist) if side == "with" else contextlib.nullcontext() as maybe:
                    dist.barrier()
                    times[side].append(steps(work, maybe))
        stops = [one_stop(dist, step) for _ in range(runs)]
    print(json.dumps({"call": statistics.median(calls), "cold": cold, "idle": idle, "stops": stops, **times}))


def products(count: int) -> None:
    """Work that makes no objects: where these lie in memory may change the time of a loop in Python by a tenth."""
    import torch

    matrix = torch.full((128, 128), 1 / 128)
    result = torch.empty_like(matrix)
    for _ in range(count):
        torch.mm(matrix, matrix, out=result)


def calibrated(seconds: float) -> int:
    """How many products take so long on a quiet machine."""
    took = []
    for _ in range(20):
        start = time.perf_counter()
        products(20)
        took.append(time.perf_counter() - start)
    return max(1, round(20 * seconds / min(took)))


def steps(work: int, stop: StopSignal | None) -> float:
    """CPU time of all threads: unlike the clock, it leaves out what other programs take."""
    start = time.process_time()
    for _ in range(STEPS):
        products(work)
        if stop is not None and stop.should_stop():
            raise RuntimeError("nobody asked for a stop")
    return time.process_time() - start


def one_call(stop: StopSignal) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        stop.should_stop()
    middle = time.perf_counter()
    for _ in range(CALLS):
        pass
    return (2 * middle - start - time.perf_counter()) / CALLS


def call_after_a_step(stop: StopSignal) -> float:
    import torch

    torch.ones(1 << 22, dtype=torch.int64).clone()
    start = time.perf_counter()
    stop.should_stop()
    return time.perf_counter() - start


def idle_thread(thread: threading.Thread, seconds: float) -> float:
    """CPU time of the thread per second, while the main thread sleeps."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    start = time.clock_gettime(clock)
    time.sleep(seconds)
    return (time.clock_gettime(clock) - start) / seconds


def one_stop(dist: Distributed, step: float) -> float:
    """Seconds from the request until this rank stops. The ranks are on one host: one clock for all."""
    import torch

    from utils.preemption import StopSignal

    asked = torch.zeros(1, dtype=torch.float64)
    with StopSignal(dist) as stop:
        dist.barrier()
        for number in range(1 << 30):
            if number == 20 and dist.rank == dist.world_size - 1:
                asked[0] = time.monotonic()
                stop.request("benchmark")
            if stop.should_stop():
                break
            time.sleep(step)
            dist.barrier()
        stopped = time.monotonic()
    return stopped - float(dist.all_reduce_mean(asked)) * dist.world_size


if __name__ == "__main__":
    main()

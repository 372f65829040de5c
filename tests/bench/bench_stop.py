#!/usr/bin/env python3
"""Measure what StopSignal costs per step and how long an agreement takes, on local gloo ranks.

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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the repository: `utils` is found from any directory

if TYPE_CHECKING:
    from utils import Distributed
    from utils.preemption import StopSignal

COLUMNS = """\
Each line is the median over the runs, on the slowest rank:
  should_stop()   time of one call at a step boundary, without the loop around it
  after a step    the same call after a copy of 32 MiB, which displaces its data from the caches as
                  a step does
  idle thread     CPU time per second that an open StopSignal uses while nothing happens
  both            the call after a step and the idle thread, as a part of a step of --step-ms
  loop ratio      CPU time of a loop of such steps with StopSignal, divided by the time without it,
                  summed over the ranks. Lower quartiles, since a shared machine is slow at times.
                  The same ratio of two loops without StopSignal shows the remaining noise
  agreement       from the request on the last rank until should_stop() is True on all ranks
"""
CALLS = 50_000
STEPS = 50
SIDES = ("without", "with", "again")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="length of a step (default: 5)")
    parser.add_argument("--runs", type=int, default=9, help="of each measurement (default: 9)")
    args = parser.parse_args()
    if args.ranks < 1 or args.runs < 1 or args.step_ms <= 0:
        parser.error("--ranks and --runs are at least 1, --step-ms is above 0")

    step_seconds = args.step_ms / 1e3
    if os.environ.get("DDPKIT_BENCH_STOP"):
        return measure(step_seconds, args.runs)
    print(f"{args.ranks} ranks, steps of {args.step_ms:g} ms, {args.runs} runs")
    report(launch(args.ranks), step_seconds)


def report(results: list[dict[str, Any]], step: float) -> None:
    """Print the lines of COLUMNS. results: of each rank, from measure(). step: in seconds."""

    def slowest(name: str) -> float:
        return max(float(result[name]) for result in results)

    call, cold, idle = slowest("call"), slowest("cold"), slowest("idle")
    print(f"should_stop()  {call * 1e9:8.0f} ns     {call / step:.3%} of a step")
    print(f"after a step   {cold * 1e9:8.0f} ns     {cold / step:.3%} of a step")
    print(f"idle thread    {idle * 1e6:8.0f} us/s   {idle:.3%} of a core")
    print(f"both                          {cold / step + idle:.3%} of a step")

    quartile = {}
    for side in SIDES:
        all_ranks = map(sum, zip(*(result[side] for result in results), strict=True))
        quartile[side] = statistics.quantiles(all_ranks, method="inclusive")[0]
    ratio = quartile["with"] / quartile["without"]
    noise = quartile["again"] / quartile["without"]
    print(f"loop ratio     {ratio:8.4f}     of two loops without {noise:.4f}")

    stops = sorted(map(max, zip(*(result["stops"] for result in results), strict=True)))
    median = statistics.median(stops)
    print(f"agreement      {median * 1e3:8.0f} ms     longest {stops[-1] * 1e3:.0f} ms")


def launch(ranks: int) -> list[dict[str, Any]]:
    """Run this file on local ranks; return what each of them measured."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        **os.environ,
        "DDPKIT_BENCH_STOP": "1",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            text=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed. Look for its message above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(step: float, runs: int) -> None:
    """Measure as one rank, and print the results as JSON. step: in seconds."""
    from utils import setup_distributed
    from utils.preemption import StopSignal

    with setup_distributed("gloo", launcher="env") as dist:
        count = products_per_step(step)
        with StopSignal(dist) as stop:
            calls = [one_call(stop) for _ in range(runs)]
            cold = [call_after_a_step(stop) for _ in range(20 * runs)]
            idle = idle_thread(3.0)

        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for run in range(8 * runs):
            for side in SIDES if run % 2 else reversed(SIDES):
                with StopSignal(dist) if side == "with" else contextlib.nullcontext() as maybe:
                    dist.barrier()
                    times[side].append(loop(count, maybe))

        stops = [one_stop(dist, step) for _ in range(runs)]

    medians = {"call": statistics.median(calls), "cold": statistics.median(cold), "idle": idle}
    print(json.dumps({**medians, "stops": stops, **times}))


def multiply(count: int) -> None:
    """Work without new objects: their place in memory may change the loop's time by a tenth."""
    import torch

    matrix = torch.full((128, 128), 1 / 128)
    result = torch.empty_like(matrix)
    for _ in range(count):
        torch.mm(matrix, matrix, out=result)


def products_per_step(seconds: float) -> int:
    """Return how many products take that long on a quiet machine."""
    durations = []
    for _ in range(20):
        start = time.perf_counter()
        multiply(20)
        durations.append(time.perf_counter() - start)
    return max(1, round(20 * seconds / min(durations)))


def loop(count: int, stop: StopSignal | None) -> float:
    """Return the CPU time of some steps, all threads included and other programs left out."""
    start = time.process_time()
    for _ in range(STEPS):
        multiply(count)
        if stop is not None and stop.should_stop():
            raise RuntimeError("a stop without a request")
    return time.process_time() - start


def one_call(stop: StopSignal) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        stop.should_stop()
    with_calls = time.perf_counter() - start

    start = time.perf_counter()
    for _ in range(CALLS):
        pass
    return (with_calls - (time.perf_counter() - start)) / CALLS


def call_after_a_step(stop: StopSignal) -> float:
    import torch

    torch.ones(1 << 22, dtype=torch.int64).clone()
    start = time.perf_counter()
    stop.should_stop()
    return time.perf_counter() - start


def idle_thread(seconds: float) -> float:
    """Return the CPU time per second of StopSignal's thread while the main thread sleeps."""
    [ident] = [thread.ident for thread in threading.enumerate() if thread.name == "stop signal"]
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    start = time.clock_gettime(clock)
    time.sleep(seconds)
    return (time.clock_gettime(clock) - start) / seconds


def one_stop(dist: Distributed, step: float) -> float:
    """Return the seconds from the request until this rank stops, by the clock of the one host."""
    import torch

    from utils.preemption import StopSignal

    requested_at = torch.zeros(1, dtype=torch.float64)
    with StopSignal(dist) as stop:
        dist.barrier()
        number = 0
        while True:
            if number == 20 and dist.rank == dist.world_size - 1:
                requested_at[0] = time.monotonic()
                stop.request("benchmark")
            if stop.should_stop():
                break
            number += 1
            time.sleep(step)
            dist.barrier()
        stopped_at = time.monotonic()
    return stopped_at - float(dist.all_reduce_mean(requested_at)) * dist.world_size


if __name__ == "__main__":
    main()

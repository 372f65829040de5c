"""Compare predicted step times of DDP with measured ones, on hosts whose links have a known rate and delay.

    python -m tests.validation.step_time [--write]     as root; several minutes; --write: into docs/performance.md

Hosts are network namespaces. `tc` gives each link a rate, and a process on each link gives it a delay. The
computation is measured without communication on each number of ranks. Three numbers of the links and of gloo are
fitted at FITTED_RATES on FITTED_RANKS; all other configurations are held out.
"""
from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Hosts
from tests.faults import packets
from utils.plan.communication import Link, Network
from utils.plan.step import BUCKET, FIRST_BUCKET, MIB, Computation, Gradient, fill_buckets, simulate

ROOT = Path(__file__).resolve().parents[2]
RATES, DELAYS, RANKS = (100, 160, 250), (1.0, 3.0), (2, 4, 8)  # Mbit/s, ms
FITTED_RATES, FITTED_RANKS = (100, 250), (2, 8)
# Width and depth of an MLP, batch, bucket_cap_mb, micro-steps.
MODELS: tuple[tuple[int, int, int, float | None, int], ...] = (
    (512, 6, 256, None, 1), (512, 6, 256, 1, 2), (1024, 2, 128, 4, 1))
MARKS = ("<!-- step time -->", "<!-- end of step time -->")


@dataclass
class Row:
    """A measured configuration."""

    rate: float
    delay: float
    ranks: int
    model: int
    computed: float  # seconds of a step without communication
    measured: float
    predicted: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def held_out(self) -> bool:
        return self.rate not in FITTED_RATES or self.ranks not in FITTED_RANKS


def gradient_sizes(model: int) -> list[int]:
    """Return the bytes of the gradients of an MLP in the order of the backward pass."""
    width, depth, *_ = MODELS[model]
    return [size for _ in range(depth) for size in (4 * width, 4 * width * width)]


# --- one rank

def rank_main(models: list[int]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def lower_quartile(step: Any, count: int) -> float:  # other programs on this machine only slow it down
        seconds = []
        for _ in range(count):
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(sorted(slowest.tolist())[count // 4])

    runs = {}
    for model in models:
        width, depth, batch, cap, micro_steps = MODELS[model]
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        ddp = DDP(nn.Sequential(*layers), bucket_cap_mb=cap)
        inputs = torch.randn(batch, width)

        def step(ddp: DDP = ddp, inputs: Any = inputs, micro_steps: int = micro_steps, sync: bool = True) -> None:
            for i in range(micro_steps):
                with ExitStack() as stack:
                    if not sync or i < micro_steps - 1:
                        stack.enter_context(ddp.no_sync())
                    ddp(inputs).square().mean().backward()
        runs[model] = step
        step()
        step()  # the first one rebuilds the buckets
    for line in sys.stdin:  # once for each network
        for model, run in runs.items():
            computed = lower_quartile(lambda run=run: run(sync=False), 9)
            measured = lower_quartile(run, 9)
            if dist.get_rank() == 0:
                rate, delay = json.loads(line)
                found = Row(rate, delay, dist.get_world_size(), model, computed, measured)
                print(json.dumps(vars(found)), flush=True)
        if dist.get_rank() == 0:
            print("end", flush=True)


# --- all of them

def limit_rate(hosts: Hosts, host: str, rate: float) -> None:
    """Limit what a host sends to this rate, in Mbit/s."""
    packets.run(hosts, host, f"tc qdisc replace dev eth0 root tbf rate {rate}mbit burst 64kb latency 200ms")


def measure(sizes: tuple[int, ...] = RANKS, rates: tuple[int, ...] = RATES, delays: tuple[float, ...] = DELAYS,
            models: tuple[int, ...] = tuple(range(len(MODELS)))) -> Iterator[Row]:
    """Yield a row for each configuration."""
    for ranks, delay in itertools.product(sizes, delays):
        with Hosts(ranks, subnet="10.79.7") as hosts, ExitStack() as stack:
            for host in hosts.hosts if delay else ():
                packets.delay(hosts, host, delay / 2000)  # what it sends, and what it receives
            env = {"MASTER_ADDR": hosts.address["h1"], "MASTER_PORT": "29511", "WORLD_SIZE": str(ranks),
                   "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "tests.validation.step_time", "--rank", *map(str, models)]
            processes = [stack.enter_context(hosts.popen(
                host, command, env={**env, "RANK": str(rank)}, cwd=ROOT, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE)) for rank, host in enumerate(hosts.hosts)]
            for rate in rates:
                for host in hosts.hosts:
                    limit_rate(hosts, host, rate)
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write(json.dumps([rate, delay]) + "\n")
                    process.stdin.flush()
                assert processes[0].stdout is not None
                for line in iter(processes[0].stdout.readline, "end\n"):
                    if not line:
                        raise RuntimeError("a rank ended; its error is above")
                    yield Row(**json.loads(line))
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()


@dataclass(frozen=True)
class Fit:
    """What is fitted."""

    share: float  # of the rate that gloo reaches
    latency: float  # seconds per message, besides the delay
    cpu_rate: float  # bytes per second that gloo moves on all cores of this machine, which all hosts share
    delayed: float  # the part of this work that delays the computation which it overlaps with


def predict(row: Row, fitted: Fit, computed: float) -> float:
    """Predict a step. Link and CPU work at the same time in part: the root of the sum of the squares of their times."""
    *_, cap, micro_steps = MODELS[row.model]
    sizes = gradient_sizes(row.model)
    begin = computed * (1 - 2 / 3 / micro_steps)
    ready = itertools.accumulate(sizes)
    gradients = [Gradient(begin + (computed - begin) * done / sum(sizes), size)
                 for size, done in zip(sizes, ready, strict=True)]
    limits = (BUCKET, FIRST_BUCKET) if cap is None else (cap * MIB, cap * MIB)
    cpu = row.ranks / fitted.cpu_rate
    seconds_per_byte = math.hypot(8 / (fitted.share * row.rate * 1e6), cpu)
    link = Link(1 / seconds_per_byte, fitted.latency + row.delay / 1000)
    network = Network(link, link, 1, tree=False)
    step = simulate(Computation(tuple(gradients), computed), fill_buckets(gradients, *limits),
                    lambda size: network.all_reduce_seconds(size, row.ranks), cpu_seconds_per_byte=fitted.delayed * cpu)
    return step.total


def fit(rows: list[Row]) -> Fit:
    """Return what predicts the rows that are not held out best; set all predictions."""
    computed = {(ranks, model): statistics.median(
        row.computed for row in rows if (row.ranks, row.model) == (ranks, model))
        for ranks in RANKS for model in range(len(MODELS))}

    def error(numbers: Fit) -> float:
        return sum((predict(row, numbers, computed[row.ranks, row.model]) / row.measured - 1) ** 2
                   for row in rows if not row.held_out)
    candidates = itertools.product([0.9, 0.93, 0.96], [0.0, 3e-4, 1e-3, 2e-3],
                                   [1.4e8, 1.7e8, 2e8, 2.3e8, 2.6e8, 3e8, 3.5e8, 4e8], [0.0, 0.3, 0.6, 1.0])
    best = min(itertools.starmap(Fit, candidates), key=error)
    for row in rows:
        row.predicted = predict(row, best, computed[row.ranks, row.model])
    return best


def wrong_rankings(rows: list[Row]) -> int:
    """Count the pairs of configurations that differ by more than 15 % and are predicted the other way round."""
    return sum((a.measured - b.measured) * (a.predicted - b.predicted) <= 0
               for a, b in itertools.combinations(rows, 2)
               if max(a.measured, b.measured) > 1.15 * min(a.measured, b.measured))


def report(rows: list[Row], fitted: Fit) -> str:
    held_out = [row for row in rows if row.held_out]
    errors = [abs(row.error) for row in held_out]
    lines = [
        f"`python -m tests.validation.step_time`, {datetime.date.today()}, {os.cpu_count()} cores, gloo: "
        f"{len(rows)} configurations, {len(held_out)} held out from fitting.",
        f"Held out: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, "
        f"{wrong_rankings(held_out)} wrong rankings among pairs that differ by more than 15 %.",
        f"Fitted: {fitted.share:.0%} of the rate, {fitted.latency * 1e3:.1f} ms per message, "
        f"{fitted.cpu_rate / 1e6:.0f} MB/s that gloo moves on all cores, {fitted.delayed:.0%} of which delays the "
        "computation.", "",
        "| Mbit/s | delay, ms | ranks | model | computed, ms | measured, ms | predicted, ms | error | |",
        "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        width, depth, batch, cap, micro_steps = MODELS[row.model]
        model = f"{depth} x {width}, bucket {cap or 'default'}" + (f", {micro_steps} micro-steps" * (micro_steps > 1))
        lines.append(f"| {row.rate} | {row.delay} | {row.ranks} | {model} | {1e3 * row.computed:.0f} | "
                     f"{1e3 * row.measured:.0f} | {1e3 * row.predicted:.0f} | {row.error:+.0%} | "
                     f"{'' if row.held_out else 'fitted'} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    if words[:1] == ["--rank"]:
        rank_main([int(word) for word in words[1:]])
        return 0
    rows = []
    for row in measure():
        rows.append(row)
        print(json.dumps(vars(row)), file=sys.stderr, flush=True)
    text = report(rows, fit(rows))
    print(text)
    if words == ["--write"]:
        page = ROOT / "docs" / "performance.md"
        before, _, rest = page.read_text().partition(MARKS[0])
        page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

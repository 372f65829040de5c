"""Compare step times that plan.py predicts for DDP with measured ones, on links with a known rate and delay.

    python -m tests.bench.step_time [--write]     as root; half an hour; --write: into docs/performance.md

Hosts are network namespaces. `tc` gives each link a rate, and a process on each link gives it a delay. The
computation is measured without communication on each number of ranks; its median is plan.py's --compute-seconds.

Nominal: plan.py is given the rate and the delay. Fitted: three numbers of the links are fitted on one set of models,
rates and numbers of ranks. They are tested on a second set, which shares none of these with the first one.
"""
from __future__ import annotations

import datetime
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cluster.hosts import Hosts
from tests.faults import packets
from utils.tools.plan import traced
from utils.tools.plan.hardware import Hardware, Link, Network
from utils.tools.plan.step_model import Workload, scaling, workload

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("<!-- step time -->", "<!-- end of step time -->")
PAYLOAD = 1448 / 1514  # what TCP with time stamps carries of an Ethernet frame; tc counts frames


def mlp(batch: int, *widths: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for sizes in itertools.pairwise(widths) for layer in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(batch, widths[0])


def deep_mlp(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return mlp(batch, *[512] * 7)


def wide_mlp(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return mlp(batch, *[1024] * 3)


def uneven_mlp(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return mlp(batch, 256, 1024, 512, 768, 256)


def cnn(batch: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for sizes in itertools.pairwise((3, 64, 128, 256, 256))
              for layer in (nn.Conv2d(*sizes, 3, stride=2, padding=1), nn.BatchNorm2d(sizes[1]), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 100)), torch.randn(batch, 3, 32, 32)


def transformer(batch: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(batch, 64, 256)


class Case(NamedTuple):
    """A training."""

    model: Callable[[int], tuple[nn.Module, torch.Tensor]]
    batch: int
    bucket_mb: float | None = None
    micro_steps: int = 1

    def __str__(self) -> str:
        text = f"{self.model.__name__}, bucket {self.bucket_mb or 'default'}"
        return text + f", {self.micro_steps} micro-steps" * (self.micro_steps > 1)


class Grid(NamedTuple):
    cases: tuple[int, ...]
    rates: tuple[int, ...]  # Mbit/s
    delays: tuple[float, ...]  # ms, one way
    ranks: tuple[int, ...]


CASES = (Case(deep_mlp, 256), Case(deep_mlp, 256, 1, 2), Case(wide_mlp, 128, 4),
         Case(uneven_mlp, 128, 1, 3), Case(cnn, 8), Case(transformer, 2, 2))
FITTED = Grid((0, 1, 2), (100, 250), (1.0, 3.0), (2, 8))
HELD_OUT = Grid((3, 4, 5), (50, 75, 160), (0.5, 5.0), (3, 4, 6))


@dataclass
class Row:
    """A measured configuration."""

    rate: float
    delay: float
    ranks: int
    case: int
    computed: float  # seconds of a step's forward and backward passes without communication
    measured: float


# --- one rank

def rank_main(cases: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def lower_quartile(step: Callable[[], None], count: int = 7) -> float:  # other programs here only slow it down
        seconds = []
        for _ in range(count):
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(sorted(slowest.tolist())[count // 4])

    def prepare(case: Case) -> Callable[[bool], None]:
        model, inputs = case.model(case.batch)
        ddp = DDP(model, bucket_cap_mb=case.bucket_mb)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

        def step(train: bool) -> None:
            for i in range(case.micro_steps):
                with ExitStack() as stack:
                    if not train or i < case.micro_steps - 1:
                        stack.enter_context(ddp.no_sync())
                    ddp(inputs).square().mean().backward()
            if train:
                optimizer.step()
                optimizer.zero_grad()
        step(True)
        step(True)  # the first one rebuilds the buckets
        return step

    steps = {case: prepare(CASES[case]) for case in cases}
    for line in sys.stdin:  # once for each network
        for case, step in steps.items():
            computed = lower_quartile(lambda step=step: step(False))  # type: ignore[misc]
            measured = lower_quartile(lambda step=step: step(True))  # type: ignore[misc]
            if dist.get_rank() == 0:
                rate, delay = json.loads(line)
                found = Row(rate, delay, dist.get_world_size(), case, computed, measured)
                print(json.dumps(vars(found)), flush=True)
        if dist.get_rank() == 0:
            print("end", flush=True)


# --- all of them

def limit_rate(hosts: Hosts, host: str, rate: float) -> None:
    """Limit what a host sends to this rate, in Mbit/s."""
    packets.run(hosts, host, f"tc qdisc replace dev eth0 root tbf rate {rate}mbit burst 64kb latency 200ms")


def measure(grid: Grid) -> Iterator[Row]:
    """Yield a row for each configuration."""
    for ranks, delay in itertools.product(grid.ranks, grid.delays):
        with Hosts(ranks, subnet="10.79.7") as hosts, ExitStack() as stack:
            for host in hosts.hosts:
                packets.delay(hosts, host, delay / 2000)  # what it sends, and what it receives
            env = {"MASTER_ADDR": hosts.address["h1"], "MASTER_PORT": "29511", "WORLD_SIZE": str(ranks),
                   "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "tests.bench.step_time", "--rank", *map(str, grid.cases)]
            processes = [stack.enter_context(hosts.popen(
                host, command, env={**env, "RANK": str(rank)}, cwd=ROOT, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE)) for rank, host in enumerate(hosts.hosts)]
            for rate in grid.rates:
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


class Links(NamedTuple):
    """What plan.py is told about the links: what is known about them, or what is fitted."""

    share: float = PAYLOAD  # of the rate
    latency: float = 0.0  # seconds per message, besides the delay
    host_rate: float = math.inf  # bytes per second that gloo moves on all cores, which all hosts share here

    def network(self, row: Row) -> Network:
        seconds_per_byte = math.hypot(8 / (self.share * row.rate * 1e6), row.ranks / self.host_rate)
        link = Link(1 / seconds_per_byte, self.latency + row.delay / 1000)
        return Network(link, link, 1, tree=False)


NOMINAL = Links()


@functools.cache
def plan(case: int, compute_seconds: float) -> Workload:
    """Return what `plan.py --model --compute-seconds` makes of a training."""
    model, batch, bucket_mb, micro_steps = CASES[case]
    trace = _trace(model.__name__, batch, micro_steps)
    shape = traced.computation(trace, Hardware().accelerator("a100-40"))
    return workload(traced.scaled_to(shape, compute_seconds, micro_steps), bucket_mb, micro_steps)


@functools.cache
def _trace(name: str, batch: int, micro_steps: int) -> Any:
    return traced.trace_factory(f"tests.bench.step_time:{name}", batch, "sgd", "fp32", micro_steps)


def predict(row: Row, links: Links = NOMINAL) -> float:
    """Return the step time that plan.py predicts."""
    work = plan(row.case, row.computed / CASES[row.case].micro_steps)
    point, = scaling(work, links.network(row), [row.ranks])
    return point.step.total


def fit(rows: list[Row]) -> Links:
    """Return the numbers of the links that predict these rows best."""
    candidates = itertools.starmap(Links, itertools.product(
        (0.9, 0.91, 0.92, 0.93, 0.94, 0.95, PAYLOAD), (0.0, 1e-4, 3e-4, 1e-3, 2e-3),
        (1.5e8, 2e8, 2.5e8, 3e8, 4e8, 5e8, 7e8, 1e9, math.inf)))
    return min(candidates, key=lambda links: sum((predict(row, links) / row.measured - 1) ** 2 for row in rows))


def report(fitted_rows: list[Row], rows: list[Row]) -> str:
    computed = {key: statistics.median(row.computed for row in group) for key, group in itertools.groupby(
        sorted(fitted_rows + rows, key=_hosts_and_case), _hosts_and_case)}
    for row in fitted_rows + rows:
        row.computed = computed[_hosts_and_case(row)]
    fitted = fit(fitted_rows)

    def errors(rows: list[Row], links: Links) -> str:
        found = [abs(predict(row, links) / row.measured - 1) for row in rows]
        return f"mean error {statistics.mean(found):.1%}, worst {max(found):.1%}"

    lines = [
        f"`python -m tests.bench.step_time`, {datetime.date.today()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, gloo:\n{len(fitted_rows)} configurations for the fit, {len(rows)} others.", "",
        f"- Nominal links, all {len(fitted_rows + rows)} configurations: {errors(fitted_rows + rows, NOMINAL)}.",
        f"- Nominal links, the {len(rows)} outside the fit: {errors(rows, NOMINAL)}.",
        f"- Fitted links, the {len(rows)} outside the fit: {errors(rows, fitted)}.", "",
        f"Fitted: {fitted.share:.1%} of the rate, {fitted.latency * 1e3:.1f} ms per message, "
        f"{fitted.host_rate / 1e6:.0f} MB/s that gloo moves on all cores."]
    return "\n".join(lines)


def _hosts_and_case(row: Row) -> tuple[int, int]:
    return row.ranks, row.case


def main(words: list[str]) -> int:
    if words[:1] == ["--rank"]:
        rank_main([int(word) for word in words[1:]])
        return 0
    rows: list[list[Row]] = []
    for grid in (FITTED, HELD_OUT):
        rows.append([])
        for row in measure(grid):
            rows[-1].append(row)
            print(json.dumps(vars(row)), file=sys.stderr, flush=True)
    text = report(*rows)
    print(text)
    if words == ["--write"]:
        page = ROOT / "docs" / "performance.md"
        before, _, rest = page.read_text().partition(MARKS[0])
        page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Implement `ddpkit bench`: measure collectives, or the scaling of a training."""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ...distributed import Distributed, setup_distributed
from ...errors import LaunchError
from ...gather import gather_json
from ...log import get_logger, print_result
from ..cli.arguments import ArgumentParser
from . import collective_bench as collectives
from . import host_pairs, links, scaling
from .charts import draw_lines
from .collective_operations import OPERATIONS, Participants
from .trials import TrialFailed, Trials

_log = get_logger(__name__)
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "03_text_lm.py"
_SMALLEST = 1 << 10  # bytes in the smallest message
EPILOG = """\
Start it with any launcher, like a training:
  torchrun --standalone --nproc-per-node 2 -m ddpkit bench collectives
  srun -N 2 --ntasks-per-node 4 --gpus-per-node 4 ddpkit bench collectives -b 8 -e 1G
  ddpkit launch -m ddpkit bench collectives --pairs

columns, as nccl-tests defines them (GB is 10^9 bytes):
  time     of one iteration: mean over the iterations and ranks, without the barrier
  algbw    size / time
  busbw    algbw * factor: all_reduce 2(n-1)/n; all_gather and reduce_scatter (n-1)/n
  #wrong   number of elements with a wrong value, over all ranks
  p50 p99  percentiles of the iterations; the slowest rank gives the time of an iteration
all_reduce runs in place, the others out of place.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit status. words: arguments; None: sys.argv."""
    args = _parse(words)
    run: int = args.run(args)
    return run


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="ddpkit bench", description="Measure collectives, or the scaling of a training."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    subparser = commands.add_parser(
        "collectives",
        help="measure collectives and the links between hosts",
        description="Measure collectives as nccl-tests does, on any backend of torch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparser.set_defaults(run=_collectives)
    subparser.add_argument(
        "operations",
        nargs="*",
        metavar="OPERATION",
        help=f"default: all of {', '.join(OPERATIONS)}",
    )
    subparser.add_argument("--pairs", action="store_true", help="measure each pair of hosts")
    sweep = subparser.add_argument_group("sizes and iterations, as in nccl-tests")
    add = sweep.add_argument
    add("-b", "--minbytes", type=_bytes, default=_SMALLEST, metavar="N", help="default: 1K")
    add("-e", "--maxbytes", type=_bytes, default=1 << 25, metavar="N", help="default: 32M")
    add("--iters", type=int, default=20, metavar="N", help="timed iterations; default: 20")
    output = subparser.add_argument_group("output")
    add = output.add_argument
    add("--output", type=Path, metavar="FILE", help="write the table, or the pairs, as JSON")
    add("--png", type=Path, metavar="FILE", help="draw the bus bandwidth (needs matplotlib)")
    add("--links", type=Path, metavar="FILE", help="write latency and bandwidth for ddpkit plan")
    two = commands.add_parser(
        "ddp",
        help="measure how a training scales, and where its time goes",
        description="Run a training script on 1, 2, 4, ... ranks, by ddpkit launch. The script "
        "writes its own files: start with an empty checkpoint folder.",
        epilog=scaling.COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    two.set_defaults(run=_ddp)
    add = two.add_argument
    add("-n", "--ntasks", type=int, metavar="N", help="ranks in all; default: as ddpkit launch")
    add("--launcher", default="auto", metavar="NAME", help="as of ddpkit launch; default: auto")
    add("--batch", type=int, default=8, metavar="N", help="for {batch} in ARGUMENTS; default: 8")
    add("--steps", type=int, default=10, metavar="N", help="measured per phase; default: 10")
    add("--trial-timeout", type=float, default=600, metavar="SECONDS", help="default: 600")
    add("--full-only", action="store_true", help="weak scaling on one rank and on all ranks only")
    add("--output", type=Path, metavar="FILE", help="write the table as JSON")
    add("--png", type=Path, metavar="FILE", help="draw the efficiency (needs matplotlib)")
    help_script = "training script and ARGUMENTS; default: examples/03_text_lm.py"
    add("script", nargs=argparse.REMAINDER, help=help_script)
    args = parser.parse_args(words)
    if args.run is _ddp:
        if min(args.batch, args.steps) < 1 or not args.trial_timeout > 0:
            two.error("expected --batch, --steps and --trial-timeout above 0. Correct them")
        return args
    unknown = [name for name in args.operations if name not in OPERATIONS]
    if unknown:
        subparser.error(
            f"{unknown[0]!r} is not an operation. Expected some of {', '.join(OPERATIONS)}"
        )
    if not 0 < args.minbytes <= args.maxbytes or args.iters < 1:
        subparser.error("expected 0 < -b <= -e, and --iters at least 1. Correct them")
    if args.pairs:
        ignored = [
            f"--{name}"
            for name in ("minbytes", "png", "links")
            if getattr(args, name) not in (None, _SMALLEST)
        ]
        ignored += ["OPERATION"] if args.operations else []
        if ignored:
            subparser.error(
                f"--pairs measures an exchange of --maxbytes between each pair of hosts and "
                f"ignores {', '.join(ignored)}. Leave that out, or measure without --pairs"
            )
    args.operations = list(dict.fromkeys(args.operations))  # without duplicates
    return args


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected a number such as 8, 4K, 1G"
        )
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


# collectives ------------------------------------------------------------------------------------


def _collectives(args: argparse.Namespace) -> int:
    with setup_distributed() as job:
        ranks = Participants(job.rank, job.world_size, job.device)
        if job.world_size == 1:
            _log.error("found one rank. Expected at least two: start them with a launcher")
            return 2
        return _pairs(args, job) if args.pairs else _sweep(args, job, ranks)


def _sweep(args: argparse.Namespace, job: Distributed, ranks: Participants) -> int:
    sweep = collectives.Sweep(args.minbytes, args.maxbytes, args.iters)
    results: list[collectives.CollectiveResult] = []
    _log.info(collectives.HEADER)

    def report(result: collectives.CollectiveResult) -> None:
        results.append(result)
        _log.info(collectives.show(result))
        if args.output and job.is_main:  # after each size: a kill loses no result
            rows = [collectives.as_dict(result) for result in results]
            content = {"backend": job.backend, "ranks": job.world_size, "hosts": job.num_nodes}
            text = json.dumps({**content, "results": rows}, indent=1)
            collectives.write(args.output, f"{text}\n")

    names = args.operations or list(OPERATIONS)
    missing = collectives.measure_all(names, sweep, ranks, report)
    if args.links:
        inside, between = links.measure_links(sweep, ranks, job.node_rank, results)
        if job.is_main:
            links.write_links(args.links, job.backend, job.num_nodes, inside, between)
    if args.png and job.is_main:
        lines: dict[str, list[tuple[float, float]]] = {
            name: [
                (result.size, result.bus_bandwidth / 1e9)
                for result in results
                if result.operation == name
            ]
            for name in names
        }
        plural = "s" * (job.num_nodes > 1)
        title = f"{job.backend}, {job.world_size} ranks on {job.num_nodes} host{plural}"
        draw_lines(args.png, lines, title=title, x="bytes", y="bus bandwidth, GB/s", log=True)
    _log.info(collectives.summary(results, missing))
    return 1 if not results or any(result.wrong for result in results) else 0


def _pairs(args: argparse.Namespace, job: Distributed) -> int:
    if job.num_nodes < 2:
        _log.error("--pairs: found one host. Expected at least two: start ranks on several hosts")
        return 2
    bandwidths, names, measured = _measure_hosts(job, args.maxbytes, args.iters)
    _log.info(f"# {'host':>14} {'host':>14} {'GB/s':>8} {'us':>8}   both directions at once")
    for (a, b), link in measured.items():
        gigabytes, micro = link.bandwidth / 1e9, link.latency * 1e6
        _log.info(f"  {names[a]:>14} {names[b]:>14} {gigabytes:>8.4f} {micro:>8.1f}")
    if args.output and job.is_main:
        rows = [{"hosts": [names[a], names[b]], **vars(link)} for (a, b), link in measured.items()]
        collectives.write(args.output, json.dumps({"pairs": rows}, indent=1) + "\n")
    _log.info(host_pairs.describe(bandwidths, names))
    return 0


def _measure_hosts(
    job: Distributed, size: int, iterations: int
) -> tuple[dict[host_pairs.Pair, float], list[str], dict[host_pairs.Pair, links.PairResult]]:
    """Return the bandwidth of each pair of hosts, the hosts' names, and all results."""
    node_ranks = gather_json(job.node_rank)
    by_node = dict(zip(node_ranks, gather_json(socket.gethostname()), strict=True))
    names = [name for _, name in sorted(by_node.items())]
    ranks = Participants(job.rank, job.world_size, job.device)
    measured = links.measure_pairs(node_ranks, ranks, size, iterations)
    return {pair: link.bandwidth for pair, link in measured.items()}, names, measured


# ddp --------------------------------------------------------------------------------------------


def _ddp(args: argparse.Namespace) -> int:
    script = args.script or [str(_EXAMPLE), "--accumulate", "1", "--batch-size", "{batch}"]
    kinds = ["weak"]
    if "{batch}" in " ".join(script) and not args.full_only:
        kinds.append("strong")  # strong scaling needs a global batch that can be divided
    options = ["--launcher", args.launcher]
    if args.ntasks:
        options += ["-n", str(args.ntasks)]
    try:
        trials = Trials(script, options, args.trial_timeout)
        points = _measure(args, trials, kinds)
    except LaunchError as error:
        print(f"ddpkit bench: error: {error}", file=sys.stderr)
        return 2
    except TrialFailed as error:
        print(f"ddpkit bench: error: {error}", file=sys.stderr)
        return 1
    weak = next(point for point in reversed(points) if point.kind == "weak")
    _write_points(args, points, script)
    print_result(scaling.explain(weak, scaling.find_causes(weak)))
    return 0


def _measure(
    args: argparse.Namespace, trials: Trials, kinds: Sequence[str]
) -> list[scaling.MeasuredPoint]:
    """Measure and print each kind of scaling on each number of ranks."""
    world_size = trials.world_size
    numbers = [1, world_size] if args.full_only else scaling.numbers_of_ranks(world_size)
    points: list[scaling.MeasuredPoint] = []
    print_result(scaling.HEADER)
    for kind in kinds:
        first = None
        for ranks in filter(trials.can_run, numbers):
            batch = scaling.batch_per_rank(kind, args.batch, world_size, ranks)
            if batch is None:
                print_result(
                    f"# strong scaling on {ranks} ranks is not measured: they cannot share a "
                    f"global batch of {args.batch * world_size} equally. Use another --batch"
                )
                continue
            reports = scaling.run(trials, ranks, args.steps, batch)
            point = scaling.split(kind, trials.hosts(ranks), reports, first)
            first = first or point
            points.append(point)
            print_result(point.show())
    return points


def _write_points(
    args: argparse.Namespace, points: list[scaling.MeasuredPoint], script: list[str]
) -> None:
    if args.output:
        rows = [{**vars(point), "reports": None} for point in points]
        collectives.write(args.output, json.dumps({"script": script, "points": rows}, indent=1))
    if args.png:
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            lines.setdefault(point.kind, []).append((point.ranks, point.efficiency * 100))
        title = Path(script[0]).name
        draw_lines(args.png, lines, title=title, x="ranks", y="efficiency, %")

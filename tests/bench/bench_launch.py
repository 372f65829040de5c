#!/usr/bin/env python3
"""Measure what launch.py costs against its commands, and the time of submit.py --dry-run.

python tests/bench/bench_launch.py                    examples/01_ddp_minimal.py on two ranks here
python tests/bench/bench_launch.py --pairs 20 --ntasks-per-node 4
python tests/bench/bench_launch.py --launcher srun    in a job, on all its hosts

Columns: direct s, the commands of `launch.py --dry-run`, started at once; launch s, launch.py
itself; ratio of one pair, launch / direct: median and quartiles over the pairs. A first pair does
not count. The bar is 1.03. Where trainings of one length differ by more than that, the next line
is more precise: the overhead of launch.py, from a command that sleeps. Exit status 1 when a launch
failed, else 0.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [str(ROOT / "examples" / "01_ddp_minimal.py"), "--epochs", "10", "--backend", "gloo"]
SLEEP = ["sleep", "0.5"]
REPEATS = 11


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--ntasks-per-node", type=int, default=2)
    parser.add_argument("--launcher", default="local", help="that of launch.py")
    args = parser.parse_args()
    if args.pairs < 2 or args.ntasks_per_node < 1:
        parser.error("--pairs is at least 2, --ntasks-per-node at least 1")
    launch = [
        sys.executable,
        str(ROOT / "scripts" / "launch.py"),
        "--launcher",
        args.launcher,
        "--ntasks-per-node",
        str(args.ntasks_per_node),
    ]
    commands = dry_run([*launch, "--dry-run", *TRAIN])
    pairs = []
    for pair in range(-1, args.pairs):
        sides = {"direct": commands, "launch": [[*launch, *TRAIN]]}
        took = {
            name: seconds(sides[name])
            for name in (sorted(sides) if pair % 2 else sorted(sides, reverse=True))
        }
        if pair >= 0:
            pairs.append((took["direct"], took["launch"]))
            ratio = took["launch"] / took["direct"]
            print(f"pair {pair + 1} of {args.pairs}: {ratio:.3f}", file=sys.stderr, flush=True)
    ratios = [launch / direct for direct, launch in pairs]
    low, _, high = statistics.quantiles(ratios, method="inclusive")
    took_directly = statistics.median(direct for direct, _ in pairs)
    print("direct s  launch s  ratio  quartiles")
    print(
        f"{took_directly:8.3f}  {statistics.median(b for _, b in pairs):8.3f}  "
        f"{statistics.median(ratios):5.3f}  {low:.3f} to {high:.3f}"
    )
    asleep = [[*launch, *SLEEP]], dry_run([*launch, "--dry-run", *SLEEP])
    with_launch, alone = (
        statistics.median(seconds(side) for _ in range(REPEATS)) for side in asleep
    )
    overhead = with_launch - alone
    percent = 100 * overhead / took_directly
    print(
        f"overhead of launch.py: {overhead:.3f} s, {percent:.1f} % of direct; medians of {REPEATS}"
    )
    dry = [
        sys.executable,
        str(ROOT / "utils"),
        "submit",
        "run",
        "--site",
        "derecho",
        "--account",
        "A",
        "--nodes",
        "4",
        "--time",
        "1:00:00",
        "--dry-run",
        TRAIN[0],
    ]
    submit_seconds = statistics.median(seconds([dry]) for _ in range(REPEATS))
    print(f"submit.py --dry-run: {submit_seconds:.3f} s, median of {REPEATS}")


def dry_run(launch: list[str]) -> list[list[str]]:
    """Return the commands that launch.py prints, with a port and the names of hosts filled in."""
    lines = subprocess.run(launch, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        ["bash", "-c", re.sub(r"<([\w.-]+)>", r"\1", line.replace("<free port>", "29571"))]
        for line in lines
    ]


def seconds(commands: list[list[str]]) -> float:
    """Return the wall time until all commands, started at the same moment, have ended."""
    start = time.perf_counter()
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in commands
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    took = time.perf_counter() - start
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(f"{shlex.join(process.args)} ended with {process.returncode}:\n{output}")  # type: ignore[arg-type]
    return took


if __name__ == "__main__":
    main()

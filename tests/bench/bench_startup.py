#!/usr/bin/env python3
"""Measure what setup_distributed() costs at the start, against bare torch.

python tests/bench/bench_startup.py                          torchrun and processes started directly
python tests/bench/bench_startup.py --mpiexec mpiexec        also under that mpiexec; can be repeated
python tests/bench/bench_startup.py --mpiexec "mpiexec --allow-run-as-root" --pairs 50
python tests/bench/bench_startup.py --pairs 0                only detection and import, without torch

Whole launches have two ranks on this host over gloo. Exit status: 0 whatever the figures are;
1 when a launch failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
LAUNCH_SECONDS = 180.0
IMPORT_PAIRS = 40
FIRST_PAIRS = 1  # which are not counted
DETECT_PROCESSES = 10

COLUMNS = """\
columns of the launches, each a median over the pairs:
  launch     torchrun: torchrun --standalone, 2 ranks. direct: 2 processes with RANK, WORLD_SIZE,
             MASTER_ADDR and MASTER_PORT set, the same for both sides. mpiexec: bare torch takes
             RANK from the MPI's own variable and MASTER_ADDR and MASTER_PORT from its environment;
             the kit is given nothing
  until      first all-reduce: from the start of the launch until the last rank has done its first
             all-reduce. end: until the launch has ended, with the process group destroyed
  bare s     seconds of init_process_group("gloo")
  kit s      seconds of setup_distributed("gloo")
  ratio      kit / bare of one pair; the median over the pairs. The bar is 1.05
  IQR        first and third quartile of the pairs' ratios
Each pair is one launch of either side, one right after the other, in alternating order. A first
pair fills the caches and is not counted.

columns of the detection, for the last rank of 100,000 tasks on 10,000 nodes:
  first ms   the first detect() of a process, including the compilation of regular expressions;
             median over processes. A launch pays this once
  next ms    a later detect() of the same process; median over calls. The bar is 1 ms

columns of the import:
  pass ms    python -c pass
  import ms  python -c "import utils.launchers"
  added ms   the difference of one pair, the median over the pairs. The bar is 25 ms
"""

# Each rank writes the time of its first all-reduce; CLOCK_MONOTONIC is the same for all processes.
FIRST_ALL_REDUCE = """
dist.all_reduce(torch.ones(1))
with open(os.path.join(sys.argv[1], str(dist.get_rank())), "w") as file:
    file.write(repr(time.monotonic()))
"""
BARE = f"""\
import os, sys, time
import torch
import torch.distributed as dist
for name, openmpi, hydra in (("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
                             ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
    if name not in os.environ:
        os.environ[name] = os.environ.get(openmpi) or os.environ[hydra]
dist.init_process_group("gloo")
{FIRST_ALL_REDUCE}
dist.destroy_process_group()
"""
KIT = f"""\
import os, sys, time
import torch
import torch.distributed as dist
from utils import setup_distributed
job = setup_distributed("gloo")
{FIRST_ALL_REDUCE}
job.close()
"""
DETECT = """\
import json, sys, time
from utils.launchers import detect
def once():
    start = time.perf_counter()
    placement = detect()
    return 1e3 * (time.perf_counter() - start), placement
first, placement = once()
later = sorted(once()[0] for _ in range(100))
print(json.dumps([first, later[50], placement.rank, placement.world_size]))
"""


class Command(NamedTuple):
    """A process to start."""

    words: list[str]
    environ: dict[str, str] = {}  # additional variables


Commands = Callable[[Path, Path], list[Command]]  # of a program that writes to a folder


@dataclass
class Launch:
    """One way to start two ranks. All commands of one side start together."""

    name: str
    bare: Commands
    kit: Commands


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=20, help="launches of either side (default: %(default)s)"
    )
    parser.add_argument(
        "--mpiexec",
        action="append",
        default=[],
        metavar="COMMAND",
        help="also launch with this mpiexec, which may have options",
    )
    args = parser.parse_args(arguments)
    if args.pairs < 0:
        parser.error(f"--pairs must be 0 or more, got {args.pairs}")

    print(
        f"host {socket.gethostname()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}",
        flush=True,
    )
    if args.pairs:
        bench_launches([torchrun(), direct(), *map(mpiexec, args.mpiexec)], args.pairs)
    bench_detect()
    bench_import()


# Whole launches ----------------------------------------------------------------------------------


def torchrun() -> Launch:
    """Start two ranks with torchrun."""
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]

    def commands(program: Path, folder: Path) -> list[Command]:
        return [Command([sys.executable, *options, str(program), str(folder)])]

    return Launch("torchrun", commands, commands)


def direct() -> Launch:
    """Start two processes with the rank variables set."""

    def commands(program: Path, folder: Path) -> list[Command]:
        environ = {**free_address(), "WORLD_SIZE": str(RANKS)}
        words = [sys.executable, str(program), str(folder)]
        return [Command(words, {**environ, "RANK": str(rank)}) for rank in range(RANKS)]

    return Launch("direct", commands, commands)


def mpiexec(command: str) -> Launch:
    """Start two ranks with an mpiexec, which may have options."""

    def kit(program: Path, folder: Path) -> list[Command]:
        words = [*shlex.split(command), "-n", str(RANKS), sys.executable, str(program), str(folder)]
        return [Command(words)]

    def bare(program: Path, folder: Path) -> list[Command]:
        return [Command(one.words, free_address()) for one in kit(program, folder)]

    return Launch(command, bare, kit)


def free_address() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


class Times(NamedTuple):
    """Seconds from the start of a launch."""

    first_all_reduce: float  # of the last rank
    end: float


def bench_launches(launches: Sequence[Launch], pairs: int) -> None:
    """Print the table of the launches."""
    print(
        f"torch {version('torch')}, {RANKS} ranks on this host over gloo, {pairs} pairs", flush=True
    )
    rows = [("launch", "until", "bare s", "kit s", "ratio", "IQR")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare, kit = folder / "bare.py", folder / "kit.py"
        bare.write_text(BARE)
        kit.write_text(KIT)

        for launch in launches:
            sides = {
                "bare": lambda launch=launch: run(launch.name, launch.bare, bare, folder),
                "kit": lambda launch=launch: run(launch.name, launch.kit, kit, folder),
            }
            measured = measure_pairs(sides, pairs, launch.name)
            for index, until in enumerate(("first all-reduce", "end")):
                seconds = [(pair["bare"][index], pair["kit"][index]) for pair in measured]
                rows.append((launch.name, until, *compare(seconds)))
    show(rows)


def measure_pairs(
    sides: dict[str, Callable[[], Times]], pairs: int, name: str
) -> list[dict[str, Times]]:
    """Run both sides `pairs` times in alternating order, after FIRST_PAIRS."""
    measured = []
    for number in range(1 - FIRST_PAIRS, pairs + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        measured.append({side: sides[side]() for side in order})
        if number > 0 and (number % 5 == 0 or number == pairs):
            print(f"{name}: pair {number} of {pairs}", flush=True)
    return measured[FIRST_PAIRS:]


def run(name: str, commands: Commands, program: Path, folder: Path) -> Times:
    """Launch a program once. Ends this process with the program's output when that fails."""
    for rank in range(RANKS):
        (folder / str(rank)).unlink(missing_ok=True)
    planned = commands(program, folder)

    with ExitStack() as at_end:
        outputs: list[TextIO] = []
        processes = []
        start = time.monotonic()
        for command in planned:
            output = at_end.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(
                command.words,
                env=environment() | command.environ,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            at_end.callback(kill, process)
            outputs.append(output)
            processes.append(process)

        problem = wait(processes, start + LAUNCH_SECONDS)
        end = time.monotonic()
        missing = [str(rank) for rank in range(RANKS) if not (folder / str(rank)).exists()]
        if missing and not problem:
            problem = f"ended, but rank {' and '.join(missing)} did no all-reduce"
        if problem:
            for output in outputs:
                output.seek(0)
            text = "\n".join(output.read() for output in outputs)
            sys.exit(f"{name}: the launch of {program.stem}.py {problem}. Its output:\n{text}")

    last = max(float((folder / str(rank)).read_text()) for rank in range(RANKS))
    return Times(last - start, end - start)


def wait(processes: Sequence[subprocess.Popen[str]], deadline: float) -> str:
    """Wait for the processes; return what went wrong, "" if all ended with status 0."""
    try:
        status = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        return f"did not end within {LAUNCH_SECONDS:.0f} s"
    return f"ended with status {' and '.join(map(str, status))}" if any(status) else ""


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(pairs: Sequence[tuple[float, float]]) -> tuple[str, str, str, str]:
    """Return bare s, kit s, ratio and IQR of (bare, kit) in seconds."""
    ratios = [kit / bare for bare, kit in pairs]
    return (
        f"{statistics.median(bare for bare, _ in pairs):.3f}",
        f"{statistics.median(kit for _, kit in pairs):.3f}",
        f"{statistics.median(ratios):.3f}",
        quartiles(ratios, ".3f"),
    )


def quartiles(values: Sequence[float], form: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{form}} to {values[0]:{form}}"
    low, _, high = statistics.quantiles(values, method="inclusive")
    return f"{low:{form}} to {high:{form}}"


# Detection ---------------------------------------------------------------------------------------


def big_allocations(folder: Path) -> dict[str, dict[str, str]]:
    """Return the environments of the last rank of 100,000 tasks on 10,000 nodes."""
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "99999",
        "SLURM_NTASKS": "100000",
        "SLURM_STEP_NUM_TASKS": "100000",
        "SLURM_NODEID": "9999",
        "SLURM_STEP_NODELIST": "n[00000-09999]",
        "SLURM_JOB_NUM_NODES": "10000",
    }
    last_of_10 = {"SLURM_LOCALID": "9", "SLURM_GTIDS": ",".join(map(str, range(99990, 100000)))}
    last_of_11 = {"SLURM_LOCALID": "10", "SLURM_GTIDS": ",".join(map(str, range(99989, 100000)))}
    even = {"SLURM_STEP_TASKS_PER_NODE": "10(x10000)"}
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "9,11," * 4999 + "9,11"}
    nodes = folder / "nodes"
    nodes.write_text("".join(f"x{node:05d}.cluster\n" * 10 for node in range(10000)))
    pals = {
        "PBS_JOBID": "1.pbs",
        "PBS_NODEFILE": str(nodes),
        "PALS_RANKID": "99999",
        "PALS_LOCAL_RANKID": "9",
        "PALS_LOCAL_SIZE": "10",
        "PALS_APID": "1",
    }
    return {
        "srun, 10(x10000)": slurm | last_of_10 | even,
        "srun, 9,11,9,11,...": slurm | last_of_11 | uneven,
        "srun, 9,11,9,11,... without SLURM_GTIDS": slurm | {"SLURM_LOCALID": "10"} | uneven,
        "PALS, size by PBS_NODEFILE": pals,
    }


def bench_detect() -> None:
    """Print the table of the detection."""
    rows: list[tuple[str, ...]] = [("detect()", "first ms", "next ms")]
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in big_allocations(Path(folder)).items():
            measured = []
            for _ in range(DETECT_PROCESSES):
                output = run_python(DETECT, environment() | variables)
                first, later, rank, world_size = json.loads(output)
                if (rank, world_size) != (99999, 100000):
                    sys.exit(f"{name}: rank {rank} of {world_size}; expected 99999 of 100000")
                measured.append((first, later))
            medians = [statistics.median(column) for column in zip(*measured, strict=True)]
            rows.append((name, *(f"{median:.3f}" for median in medians)))
    show(rows)


# Import ------------------------------------------------------------------------------------------


def bench_import() -> None:
    """Print the table of the import."""
    programs = ("pass", "import utils.launchers")
    for program in programs:  # writes the bytecode
        run_python(program, environment())

    pairs: list[tuple[float, float]] = []
    for pair in range(IMPORT_PAIRS):
        milliseconds = {}
        for program in programs if pair % 2 else reversed(programs):
            start = time.perf_counter()
            run_python(program, environment())
            milliseconds[program] = 1e3 * (time.perf_counter() - start)
        pairs.append((milliseconds[programs[0]], milliseconds[programs[1]]))

    source = ROOT / "utils" / "launchers" / "detect.py"
    cached = Path(importlib.util.cache_from_source(str(source))).exists()
    added = [after - before for before, after in pairs]
    row = (
        f"bytecode {'cached' if cached else 'not cached: the folder is not writable'}",
        *(f"{statistics.median(column):.1f}" for column in zip(*pairs, strict=True)),
        f"{statistics.median(added):.1f}",
        quartiles(added, ".1f"),
    )
    show([("import utils.launchers", "pass ms", "import ms", "added ms", "IQR"), row])


# Common ------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return this environment without rank variables; bytecode is cached, as users have it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    dropped = (*names, "PYTHONDONTWRITEBYTECODE")
    prefixes = ("SLURM_", "PBS_", "OMPI_", "PMI", "PALS_", "TORCHELASTIC_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith(prefixes)
    }
    return kept | {"PYTHONPATH": str(ROOT)}


def run_python(program: str, environ: dict[str, str]) -> str:
    """Run a program and return its output. Ends this process when it fails."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        sys.exit(f"{program}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)


if __name__ == "__main__":
    main()

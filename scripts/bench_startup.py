#!/usr/bin/env python3
"""What setup_distributed() costs at the start: whole launches against bare torch, detection, and the import.

python scripts/bench_startup.py                          torchrun and processes started directly
python scripts/bench_startup.py --mpiexec mpiexec        under that mpiexec as well; may be given several times
python scripts/bench_startup.py --mpiexec "mpiexec --allow-run-as-root" --pairs 50
python scripts/bench_startup.py --pairs 0                detection and import alone, without torch

Two ranks on this host over gloo. Exit status 0 whatever the figures are; 1 when a launch failed. Not here: the
rendezvous of many ranks (bench_rendezvous.py).
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

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
LAUNCH_SECONDS = 180.0
IMPORT_PAIRS = 40
DETECT_PROCESSES = 10

COLUMNS = """\
columns of the launches, each a median over the pairs:
  launch     torchrun: torchrun --standalone with 2 ranks. direct: 2 processes with RANK, WORLD_SIZE, MASTER_ADDR and
             MASTER_PORT set, the same for both sides. mpiexec: bare torch takes RANK from the MPI's own variable and
             MASTER_ADDR and MASTER_PORT from its environment; the kit is given nothing
  until      first all-reduce: from the start of the launch until the last rank has done its first all-reduce.
             end: until the launch has ended, with the process group destroyed
  bare s     seconds of init_process_group("gloo")
  kit s      seconds of setup_distributed("gloo")
  ratio      kit / bare of one pair; the median over the pairs. The bar is 1.05
  IQR        first and third quartile of the pairs' ratios
Each pair is one launch of either side, one right after the other, in alternating order; a pair before the first warms
the caches and is not counted.

columns of the detection, of the last rank of 100,000 tasks on 10,000 nodes, in a process with these variables:
  first ms   the first detect() of a process, median over processes: what a launch pays, regular expressions compiled
  next ms    a later detect() of the same process, median over calls. The bar is 1 ms

columns of the import:
  pass ms    python -c pass
  import ms  python -c "import utils.launchers"
  added ms   the difference of one pair, the median over the pairs. The bar is 25 ms
"""

# Both sides write the time of the last step into a file of their own; CLOCK_MONOTONIC is one clock for all processes.
ENDING = """
dist.all_reduce(torch.ones(1))
with open(os.path.join(sys.argv[1], str(dist.get_rank())), "w") as file:
    file.write(repr(time.monotonic()))
"""
BARE = """\
import os, sys, time
import torch
import torch.distributed as dist
for name, openmpi, hydra in (("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
                             ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
    if name not in os.environ:
        os.environ[name] = os.environ.get(openmpi) or os.environ[hydra]
dist.init_process_group("gloo")
""" + ENDING + """
dist.destroy_process_group()
"""
KIT = """\
import os, sys, time
import torch
import torch.distributed as dist
from utils import setup_distributed
job = setup_distributed("gloo")
""" + ENDING + """
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
print(json.dumps([first, later[50], placement.launcher, placement.rank, placement.world_size]))
"""

Commands = Callable[[Path, Path], list[tuple[list[str], dict[str, str]]]]  # program, folder -> command, more variables


@dataclass
class Launch:
    """One way to start two ranks: what is run, by side; all commands of a side start together."""

    name: str
    bare: Commands
    kit: Commands


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="launches of either side (default: %(default)s)")
    parser.add_argument("--mpiexec", action="append", default=[], metavar="PATH",
                        help="an mpiexec, with options if need be, to launch by as well")
    args = parser.parse_args(arguments)
    if args.pairs < 0:
        parser.error(f"--pairs must be 0 or more, got {args.pairs}")
    print(f"host {socket.gethostname()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Linux "
          f"{platform.release()}, Python {platform.python_version()}", flush=True)
    if args.pairs:
        bench_launches([torchrun(), direct(), *map(mpiexec, args.mpiexec)], args.pairs)
    bench_detect()
    bench_import()


# Whole launches ------------------------------------------------------------------------------------------------------

def torchrun() -> Launch:
    def commands(program: Path, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        return [([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                  str(program), str(folder)], {})]

    return Launch("torchrun", commands, commands)


def direct() -> Launch:
    def commands(program: Path, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        place = _free_place()
        return [([sys.executable, str(program), str(folder)],
                 {**place, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}) for rank in range(RANKS)]

    return Launch("direct", commands, commands)


def mpiexec(path: str) -> Launch:
    def kit(program: Path, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        return [([*shlex.split(path), "-n", str(RANKS), sys.executable, str(program), str(folder)], {})]

    def bare(program: Path, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        return [(command, _free_place()) for command, _ in kit(program, folder)]

    return Launch(path, bare, kit)


def _free_place() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def bench_launches(launches: Sequence[Launch], pairs: int) -> None:
    print(f"torch {version('torch')}, {RANKS} ranks on this host over gloo, {pairs} pairs", flush=True)
    rows = [("launch", "until", "bare s", "kit s", "ratio", "IQR")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare, kit = folder / "bare.py", folder / "kit.py"
        bare.write_text(BARE)
        kit.write_text(KIT)
        for one in launches:
            measured: list[tuple[tuple[float, float], tuple[float, float]]] = []  # of each pair: bare and kit
            for pair in range(-1, pairs):
                if pair % 2:
                    second = run(one.name, one.kit, kit, folder)
                    measured.append((run(one.name, one.bare, bare, folder), second))
                else:
                    first = run(one.name, one.bare, bare, folder)
                    measured.append((first, run(one.name, one.kit, kit, folder)))
                if pair < 0:
                    measured.clear()
                elif (pair + 1) % 5 == 0 or pair + 1 == pairs:
                    print(f"{one.name}: pair {pair + 1} of {pairs}", flush=True)
            rows += [(one.name, until, *compare([(b[i], k[i]) for b, k in measured]))
                     for i, until in enumerate(("first all-reduce", "end"))]
    show(rows)


def run(name: str, commands: Commands, program: Path, folder: Path) -> tuple[float, float]:
    """Seconds from the start to the first all-reduce of the last rank, and to the end of the launch."""
    for rank in range(RANKS):
        (folder / str(rank)).unlink(missing_ok=True)
    planned = commands(program, folder)
    with ExitStack() as at_end:
        outputs = [at_end.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in planned]
        start = time.monotonic()
        processes = []
        for (command, more), output in zip(planned, outputs, strict=True):
            processes.append(subprocess.Popen(command, env=environment() | more, cwd=folder, stdin=subprocess.DEVNULL,
                                              stdout=output, stderr=output, start_new_session=True))
            at_end.callback(_kill, processes[-1])
        try:
            status = [process.wait(max(0.1, start + LAUNCH_SECONDS - time.monotonic())) for process in processes]
            how = f"ended with status {' and '.join(map(str, status))}"
        except subprocess.TimeoutExpired:
            how, status = f"did not end within {LAUNCH_SECONDS:.0f} s", [1]
        end = time.monotonic()
        missing = [rank for rank in range(RANKS) if not (folder / str(rank)).exists()]
        if missing and not any(status):
            how = f"ended, but rank {' and '.join(map(str, missing))} did no all-reduce"
        if any(status) or missing:
            for output in outputs:
                output.seek(0)
            said = "\n".join(output.read() for output in outputs)
            sys.exit(f"{name}: the launch of {program.stem}.py {how}. Its output:\n{said}")
    return max(float((folder / str(rank)).read_text()) for rank in range(RANKS)) - start, end - start


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(pairs: Sequence[tuple[float, float]]) -> tuple[str, str, str, str]:
    """bare s, kit s, ratio and IQR of (bare, kit) in seconds."""
    ratios = [kit / bare for bare, kit in pairs]
    return (f"{statistics.median(bare for bare, _ in pairs):.3f}", f"{statistics.median(kit for _, kit in pairs):.3f}",
            f"{statistics.median(ratios):.3f}", quartiles(ratios, ".3f"))


def quartiles(values: Sequence[float], form: str) -> str:
    low, _, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"{low:{form}} to {high:{form}}"


# Detection -----------------------------------------------------------------------------------------------------------

def big_allocations(folder: Path) -> dict[str, dict[str, str]]:
    """Environments of the last rank of 100,000 tasks on 10,000 nodes."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "99999", "SLURM_NTASKS": "100000",
             "SLURM_STEP_NUM_TASKS": "100000", "SLURM_NODEID": "9999", "SLURM_STEP_NODELIST": "n[00000-09999]",
             "SLURM_JOB_NUM_NODES": "10000"}
    last_of_10 = {"SLURM_LOCALID": "9", "SLURM_GTIDS": ",".join(map(str, range(99990, 100000)))}
    last_of_11 = {"SLURM_LOCALID": "10", "SLURM_GTIDS": ",".join(map(str, range(99989, 100000)))}
    even = {"SLURM_STEP_TASKS_PER_NODE": "10(x10000)"}
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "9,11," * 4999 + "9,11"}
    nodes = folder / "nodes"
    nodes.write_text("".join(f"x{node:05d}.cluster\n" * 10 for node in range(10000)))
    pals = {"PBS_JOBID": "1.pbs", "PBS_NODEFILE": str(nodes), "PALS_RANKID": "99999", "PALS_LOCAL_RANKID": "9",
            "PALS_LOCAL_SIZE": "10", "PALS_APID": "1"}
    return {"srun, 10(x10000)": slurm | last_of_10 | even,
            "srun, 9,11,9,11,...": slurm | last_of_11 | uneven,
            "srun, 9,11,9,11,... without SLURM_GTIDS": slurm | {"SLURM_LOCALID": "10"} | uneven,
            "PALS, size by PBS_NODEFILE": pals}


def bench_detect() -> None:
    rows: list[tuple[str, ...]] = [("detect()", "first ms", "next ms")]
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in big_allocations(Path(folder)).items():
            measured = []
            for _ in range(DETECT_PROCESSES):
                answer = python("detect()", DETECT, environment() | variables)
                first, later, *placement = json.loads(answer)
                if placement[1:] != [99999, 100000]:
                    sys.exit(f"{name}: detect() answered {placement}; expected rank 99999 of 100000")
                measured.append((first, later))
            rows.append((name, *(f"{statistics.median(column):.3f}" for column in zip(*measured, strict=True))))
    show(rows)


# Import --------------------------------------------------------------------------------------------------------------

def bench_import() -> None:
    pairs: list[tuple[float, float]] = []
    programs = ("pass", "import utils.launchers")
    for program in programs:  # writes the bytecode
        python(program, program, environment())
    for pair in range(IMPORT_PAIRS):
        took = {}
        for program in programs if pair % 2 else programs[::-1]:
            start = time.perf_counter()
            python(program, program, environment())
            took[program] = 1e3 * (time.perf_counter() - start)
        pairs.append((took[programs[0]], took[programs[1]]))
    source = ROOT / "utils" / "launchers.py"
    cached = Path(importlib.util.cache_from_source(str(source))).exists()
    added = [after - before for before, after in pairs]
    show([("import utils.launchers", "pass ms", "import ms", "added ms", "IQR"),
          (f"bytecode {'cached' if cached else 'not cached: the folder is not writable'}",
           *(f"{statistics.median(column):.1f}" for column in zip(*pairs, strict=True)),
           f"{statistics.median(added):.1f}", quartiles(added, ".1f"))])


# Common --------------------------------------------------------------------------------------------------------------

def environment() -> dict[str, str]:
    """This environment without what would tell a rank; bytecode is cached on both sides, as users have it."""
    foreign = ("PYTHONDONTWRITEBYTECODE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
               "MASTER_PORT")
    prefixes = ("SLURM_", "PBS_", "OMPI_", "PMI", "PALS_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if name not in foreign and not name.startswith(prefixes)}
    return kept | {"PYTHONPATH": str(ROOT)}


def python(name: str, program: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"{name} ended with status {done.returncode}. Its output:\n{done.stdout}{done.stderr}")
    return done.stdout


def show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure how `ddpkit launch` and its agents grow with the number of ranks.

python tests/bench/bench_scale.py                     64 and 512 ranks
python tests/bench/bench_scale.py --ranks 4000        500 agents: 12 GB of memory

Everything runs on this host: an `ssh` that starts the command here stands for the hosts, each of
which has an agent and eight ranks. A rank is `sleep`. bench_rendezvous.py measures rank 0.

Exit status: 0 whatever the figures are; 1 when ranks did not start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIZES = (64, 512)
RANKS_PER_HOST = 8
START_SECONDS = 300.0
IDLE_SECONDS = 5.0
# An ssh that ignores its options and the host.
SSH = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift ;; esac; shift; done
shift
exec sh -c "$*"
"""

COLUMNS = """\
columns:
  seconds     from the command until the last rank runs. All agents share the cores of this host
  cpu         CPU seconds of `ddpkit launch` until then, and of one agent
  MB          memory, at its peak
  files       open files
  idle        share of a core while the ranks run
"""


class Use(NamedTuple):
    """What a process has used."""

    cpu_seconds: float
    megabytes: float
    files: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, metavar="N")
    args = parser.parse_args()
    if min(args.ranks) < RANKS_PER_HOST:
        parser.error(f"--ranks must be {RANKS_PER_HOST} or more")
    print(
        f"host {socket.gethostname()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n"
        f"{'ranks':>6} {'agents':>7} {'seconds':>8}   {'launch: cpu':>11} {'MB':>6} {'files':>6} "
        f"{'idle':>6}   {'agent: cpu':>11} {'MB':>6} {'files':>6} {'idle':>6}",
        flush=True,
    )
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            measure(ranks, Path(folder))


def measure(ranks: int, folder: Path) -> None:
    """Start a launch, print the row, and end it."""
    hosts = ranks // RANKS_PER_HOST
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    (folder / "nodes").write_text("".join(f"n{host}\n" for host in range(hosts)))
    started = folder / "started"
    started.touch()
    environment = {
        "HOME": str(folder),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PBS_JOBID": "1.bench",
        "PBS_NODEFILE": str(folder / "nodes"),
    }
    launch = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--launcher", "ssh"]
    options = ["--ntasks-per-node", str(RANKS_PER_HOST), "--independent"]
    rank = ["sh", "-c", f"echo >> {started}; exec {shutil.which('sleep')} 3600"]
    start = time.monotonic()
    process = subprocess.Popen(
        [*launch, *options, *rank], env=environment, cwd=folder, stderr=subprocess.PIPE
    )
    try:
        while started.stat().st_size < hosts * RANKS_PER_HOST:
            if process.poll() is not None or time.monotonic() > start + START_SECONDS:
                process.kill()
                sys.exit(f"the ranks did not start: {process.communicate()[1].decode()}")
            time.sleep(0.02)
        seconds = time.monotonic() - start
        agent = agent_of(process.pid)
        first = [use(process.pid), use(agent)]
        time.sleep(IDLE_SECONDS)
        last = [use(process.pid), use(agent)]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
    columns = "   ".join(
        f"{before.cpu_seconds:11.2f} {now.megabytes:6.1f} {now.files:6d} "
        f"{100 * (now.cpu_seconds - before.cpu_seconds) / IDLE_SECONDS:4.1f} %"
        for before, now in zip(first, last, strict=True)
    )
    print(f"{hosts * RANKS_PER_HOST:6d} {hosts:7d} {seconds:8.2f}   {columns}", flush=True)


def agent_of(launch: int) -> int:
    """Return the process id of an agent, which is what one of its children has become."""
    for child in children(launch):
        if b"tools.launch.agent" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise RuntimeError(f"process {launch} has no agent")


def children(pid: int) -> list[int]:
    """Return the child processes of a process, of all its threads."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for thread in found for child in thread]


def use(pid: int) -> Use:
    """Return what a process has used until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:")).split()[1]
    return Use(
        (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        int(peak) * 1024 / 1e6,
        len(os.listdir(f"/proc/{pid}/fd")),
    )


if __name__ == "__main__":
    main()

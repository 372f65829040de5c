#!/usr/bin/env python3
"""How the rendezvous and the roll call grow with the number of ranks: the real agree(), without torch, on this host.

python scripts/bench_rendezvous.py                       100, 500, 1000, 2000 and 4000 ranks
python scripts/bench_rendezvous.py --ranks 100 8000      other sizes

Rank 0 has a process of its own, the other ranks are threads of four processes of lower priority. They find rank 0 as
ranks of srun do, and hand in the cards of hosts with 8 GPUs each. The largest size is repeated with a soft limit of
256 open files.
Exit status 0 whatever the figures are; 1 when the ranks did not meet. Not here: whole launches (bench_startup.py).
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils import __version__, rollcall
from utils.launchers import Placement
from utils.rendezvous import Rendezvous, agree

SIZES = (100, 500, 1000, 2000, 4000)
PROCESSES = 4
RANKS_PER_HOST = 8
CORES_PER_RANK = 16
FEW_FILES = 256
TIMEOUT = 100.0  # seconds, as setup_distributed() has it by default

COLUMNS = """\
columns:
  ranks         number of ranks, all of which are let go at one moment
  seconds       from that moment until the last rank has the verdict. The bar is 10 s at 4000 ranks
  ms per rank   seconds / ranks; it stays equal or falls where the time grows at most linearly
  rank 0 cpu    seconds of CPU time that rank 0 itself took. The rest is the other ranks, which share this host's
                cores here and have their own on a cluster
  judge         seconds of rank 0's time in the checks of all cards
  open files    rank 0's soft limit of open files before and after
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, metavar="N",
                        help=f"numbers of ranks (default: {' '.join(map(str, SIZES))})")
    args = parser.parse_args(arguments)
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be 2 or more, got {min(args.ranks)}")
    print(f"host {socket.gethostname()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Linux "
          f"{platform.release()}, Python {platform.python_version()}\n")
    print(f"{'ranks':>6} {'seconds':>8} {'ms per rank':>12} {'rank 0 cpu':>11} {'judge':>7}  open files", flush=True)
    for ranks in args.ranks:
        meet(ranks, None)
    meet(max(args.ranks), FEW_FILES)


def meet(ranks: int, open_files: int | None) -> None:
    """One rendezvous of so many ranks, printed as one line. Ends this process when they do not meet."""
    context = multiprocessing.get_context("spawn")
    job = f"{os.getpid()}{time.monotonic_ns()}"
    others = [range(first, ranks, PROCESSES) for first in range(1, min(PROCESSES, ranks - 1) + 1)]
    works: list[tuple[Callable[..., None], Any]] = [(rank_zero, open_files), *((other_ranks, one) for one in others)]
    pipes, processes = [], []
    for function, its_own in works:
        here, there = context.Pipe()
        processes.append(context.Process(target=function, args=(there, ranks, job, its_own), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        for pipe in pipes:
            _hear(pipe)
        start = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        rank_0, *ends = [_hear(pipe) for pipe in pipes]
        seconds = max(rank_0["end"], *ends) - start
        for pipe in pipes:
            pipe.send("over")
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    print(f"{ranks:6d} {seconds:8.3f} {1e3 * seconds / ranks:12.3f} {rank_0['cpu']:11.3f} {rank_0['judge']:7.3f}  "
          f"{rank_0['before']} -> {rank_0['after']}", flush=True)
    for note in rank_0["notes"]:
        print(f"       note: {note}", flush=True)


def _hear(pipe: Connection) -> Any:
    try:
        said = pipe.recv() if pipe.poll(TIMEOUT + 60) else "failed: no answer"
    except EOFError:
        said = "failed: the process ended, its message is above"
    if isinstance(said, str) and said.startswith("failed"):
        sys.exit(f"the ranks did not meet: {said}")
    return said


def rank_zero(pipe: Connection, ranks: int, job: str, open_files: int | None) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files is not None:
        before = open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    judging = 0.0

    def judge(cards: list[rollcall.Card]) -> tuple[str | None, list[dict[str, Any]]]:
        nonlocal judging
        start = time.monotonic()
        verdict = rollcall.judge(cards)
        judging = time.monotonic() - start
        return verdict

    placement, card = introduce(0, ranks)
    pipe.send("ready")
    pipe.recv()
    cpu = time.process_time()
    try:
        met = agree(placement, card, judge, timeout=TIMEOUT, environ=step(job))
    except BaseException:
        return pipe.send(f"failed: {traceback.format_exc()}")
    pipe.send({"end": time.monotonic(), "cpu": time.process_time() - cpu, "judge": judging, "before": before,
               "after": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "notes": met.notes})
    pipe.recv()
    if met.monitor is not None:
        met.monitor.started()


def other_ranks(pipe: Connection, ranks: int, job: str, numbers: range) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 0 else min(hard, 8 * len(numbers) + 256), hard))
    threading.stack_size(256 << 10)
    # On a cluster every rank has a core of its own. Here thousands of threads share a few with rank 0: let them not
    # starve it, nor each wake up 200 times a second to ask for the interpreter's lock.
    os.nice(10)
    sys.setswitchinterval(60)
    go = threading.Event()
    introduced = threading.Semaphore(0)
    met: list[tuple[float, Rendezvous]] = []
    failed: list[str] = []

    def one(rank: int) -> None:
        placement, card = introduce(rank, ranks)
        introduced.release()
        go.wait()
        try:
            found = agree(placement, card, rollcall.judge, timeout=TIMEOUT, environ=step(job))
            met.append((time.monotonic(), found))
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in numbers]
    for thread in threads:
        thread.start()
    for _ in threads:
        introduced.acquire()
    pipe.send("ready")
    pipe.recv()
    go.set()
    for thread in threads:
        thread.join()
    pipe.send(f"failed: {len(failed)} of {len(threads)} ranks of one process, the first: {failed[0]}" if failed
              else max(end for end, _ in met))
    pipe.recv()
    for _, found in met:
        if found.monitor is not None:
            found.monitor.started()


def introduce(rank: int, ranks: int) -> tuple[Placement, rollcall.Card]:
    """The placement and the card of a rank on a host of 8 GPUs and 128 cores, 16 of them its own."""
    node, local_rank = divmod(rank, RANKS_PER_HOST)
    placement = Placement("slurm", rank, ranks, local_rank, min(RANKS_PER_HOST, ranks - node * RANKS_PER_HOST))
    devices = [f"GPU-{node:016x}{index:016x}" for index in range(8)]
    card = rollcall.card(placement, backend="nccl", devices=devices, mask="CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
                         torch="2.13.0", kit=__version__, gloo="", gloo_loopback=False)
    cores = ((1 << CORES_PER_RANK) - 1) << CORES_PER_RANK * local_rank
    return placement, card | {"host": f"n{node:05d}", "cores": f"{cores:x}",
                              "host_cores": CORES_PER_RANK * RANKS_PER_HOST}


def step(job: str) -> dict[str, str]:
    """The variables of a step of srun whose rank 0 is on this host."""
    return {"SLURM_CLUSTER_NAME": "bench", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "127.0.0.1"}


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure how rank 0 grows with the number of ranks: the real agree() and Monitor, without torch.

python tests/bench/bench_rendezvous.py                       100, 500, 1000, 2000 and 4000 ranks
python tests/bench/bench_rendezvous.py --ranks 100 8000      other sizes

Everything runs on this host. Rank 0 is one process; the other ranks are threads of four
processes with lower priority. They find rank 0 as ranks of srun do, and report hosts with 8 GPUs
each. Afterwards they send heartbeats for some seconds. The largest size is repeated with a soft
limit of 256 open files. bench_scale.py measures `ddpkit launch` and its agents.

Exit status: 0 whatever the figures are; 1 when ranks did not join.
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

# The repository: `utils` is found from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import __version__
from utils.launchers import Placement
from utils.launchers.slurm import SlurmStep
from utils.monitor.hangs.hang_watch import HangWatch, time_before
from utils.monitor.monitor import Monitor
from utils.startup import Rendezvous, agree
from utils.startup.reports import RankReport, check_reports, make_report

SIZES = (100, 500, 1000, 2000, 4000)
PROCESSES = 4
RANKS_PER_HOST = 8
CORES_PER_RANK = 16
# Four NUMA nodes of 32 cores with four L3 caches, GPU 0 and 1 on node 3, as reports have it.
TOPOLOGY = ";".join(
    f"{cache // 4}:" + ",".join(f"{core}+{core + 128}" for core in range(8 * cache, 8 * cache + 8))
    for cache in range(16)
)
GPU_NODES = [3, 3, 1, 1, 0, 0, 2, 2]
FEW_FILES = 256
NCCL_SECONDS = 600.0  # torch's time limit of a collective
BEAT_SECONDS = 10.0
TIMEOUT_SECONDS = 100.0  # the default of setup_distributed()

COLUMNS = """\
columns:
  ranks         number of ranks, all released at the same moment
  seconds       from that moment until the last rank has its assignment. The bar: 10 s, 4000 ranks
  ms per rank   seconds / ranks; stays equal or falls where the time grows at most linearly
  rank 0 cpu    CPU seconds of rank 0 itself. The rest is the other ranks, which share this host's
                cores here and have their own on a cluster
  MB            memory that rank 0 has taken for the connections and reports
  files         connections and other files that it has open then
  beats cpu     its share of a core while all ranks send heartbeats, as they do with NCCL's default
                time limit of 600 s
  checks        seconds that check_reports() takes for the reports of all ranks, measured apart
  open files    rank 0's soft limit of open files before and after
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=SIZES,
        metavar="N",
        help=f"numbers of ranks (default: {' '.join(map(str, SIZES))})",
    )
    args = parser.parse_args(arguments)
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be 2 or more, got {min(args.ranks)}")

    print(
        f"host {socket.gethostname()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}\n"
    )
    print(
        f"{'ranks':>6} {'seconds':>8} {'ms per rank':>12} {'rank 0 cpu':>11} {'MB':>6} {'files':>6} "
        f"{'beats cpu':>9} {'checks':>7}  open files",
        flush=True,
    )
    for ranks in args.ranks:
        measure(ranks, None)
    measure(max(args.ranks), FEW_FILES)


def measure(ranks: int, open_files: int | None) -> None:
    """Let the ranks join once and print the row. Ends this process when they do not.

    open_files: the soft limit of rank 0; None leaves it.
    """
    context = multiprocessing.get_context("spawn")
    job_id = f"{os.getpid()}{time.monotonic_ns()}"
    others = [range(first, ranks, PROCESSES) for first in range(1, min(PROCESSES, ranks - 1) + 1)]
    works: list[tuple[Callable[..., None], Any]] = [
        (rank_zero, open_files),
        *((other_ranks, numbers) for numbers in others),
    ]

    pipes, processes = [], []
    for function, argument in works:
        pipe, child_pipe = context.Pipe()
        arguments = (child_pipe, ranks, job_id, argument)
        processes.append(context.Process(target=function, args=arguments, daemon=True))
        processes[-1].start()
        child_pipe.close()
        pipes.append(pipe)

    try:
        for pipe in pipes:
            receive(pipe)
        start = time.monotonic()
        for pipe in pipes:
            pipe.send("start")
        rank_0, *ends = [receive(pipe) for pipe in pipes]
        seconds = max(rank_0["end"], *ends) - start
        for pipe in pipes:
            pipe.send("beats")
        beats_cpu = receive(pipes[0])
        for pipe, process in zip(pipes, processes, strict=True):  # rank 0 first: it notices others
            pipe.send("end")
            process.join(30)
    finally:
        for process in processes:
            process.kill()

    print(
        f"{ranks:6d} {seconds:8.3f} {1e3 * seconds / ranks:12.3f} {rank_0['cpu']:11.3f} "
        f"{rank_0['megabytes']:6.1f} {rank_0['files']:6d} {100 * beats_cpu:7.1f} % "
        f"{check_seconds(ranks):7.3f}  {rank_0['files_before']} -> {rank_0['files_after']}",
        flush=True,
    )
    for note in rank_0["notes"]:
        print(f"       note: {note}", flush=True)


def receive(pipe: Connection) -> Any:
    """Return what a process sends; end this process when it fails."""
    try:
        message = pipe.recv() if pipe.poll(TIMEOUT_SECONDS + 60) else "failed: no response"
    except EOFError:
        message = "failed: the process ended, its message is above"
    if isinstance(message, str) and message.startswith("failed"):
        sys.exit(f"the ranks did not join: {message}")
    return message


def rank_zero(pipe: Connection, ranks: int, job_id: str, open_files: int | None) -> None:
    """Be rank 0 in this process."""
    files_before, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files is not None:
        files_before = open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_before, hard_limit))

    placement, report = make_rank(0, ranks)
    pipe.send("ready")
    pipe.recv()
    megabytes_before = megabytes()
    cpu_start = time.process_time()
    try:
        found = agree(
            placement,
            report,
            launcher=SlurmStep(),
            timeout=TIMEOUT_SECONDS,
            environ=step_variables(job_id),
        )
    except BaseException:
        return pipe.send(f"failed: {traceback.format_exc()}")
    pipe.send(
        {
            "end": time.monotonic(),
            "cpu": time.process_time() - cpu_start,
            "megabytes": megabytes() - megabytes_before,
            "files": len(os.listdir("/proc/self/fd")),
            "files_before": files_before,
            "files_after": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "notes": found.notes,
        }
    )
    pipe.recv()

    monitor = Monitor(found.connections, rank=0, host="n00000 (pid 1)")
    monitor.watch(lambda: HangWatch(time_before(NCCL_SECONDS), ranks, before_torch=True))
    time.sleep(1)
    cpu_start = time.process_time()
    time.sleep(BEAT_SECONDS)
    pipe.send((time.process_time() - cpu_start) / BEAT_SECONDS)
    pipe.recv()
    os._exit(0)


def megabytes() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def other_ranks(pipe: Connection, ranks: int, job_id: str, numbers: range) -> None:
    """Be the ranks of these numbers, each in a thread."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 8 * len(numbers) + 256
    soft_limit = needed if hard_limit < 0 else min(hard_limit, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    threading.stack_size(256 << 10)
    # On a cluster every rank has its core. Here thousands of threads share a few with
    # rank 0: they must not starve it, nor wake up 200 times a second for the interpreter's lock.
    os.nice(10)
    sys.setswitchinterval(60)

    start = threading.Event()
    prepared = threading.Semaphore(0)
    joined: list[tuple[float, Rendezvous]] = []
    failed: list[str] = []

    def run(rank: int) -> None:
        placement, report = make_rank(rank, ranks)
        prepared.release()
        start.wait()
        environ = step_variables(job_id)
        try:
            found = agree(
                placement, report, launcher=SlurmStep(), timeout=TIMEOUT_SECONDS, environ=environ
            )
            joined.append((time.monotonic(), found))
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in numbers]
    for thread in threads:
        thread.start()
    for _ in threads:
        prepared.acquire()
    pipe.send("ready")
    pipe.recv()
    start.set()
    for thread in threads:
        thread.join()

    if failed:
        first = f"{len(failed)} of {len(threads)} ranks of one process, the first: {failed[0]}"
        return pipe.send(f"failed: {first}")
    pipe.send(max(end for end, _ in joined))
    pipe.recv()
    interval = HangWatch(time_before(NCCL_SECONDS), ranks).interval
    beat = {"kind": "beat", "entered": 0, "location": "train.py, line 17, in train"}
    number = 0
    while not pipe.poll(interval):
        number += 1
        for _, found in joined:
            for connection in found.connections:
                connection.send({**beat, "progress": number})


def check_seconds(ranks: int) -> float:
    """Return the seconds that rank 0's checks take."""
    reports = [make_rank(rank, ranks)[1] for rank in range(ranks)]
    start = time.monotonic()
    check_reports(reports)
    return time.monotonic() - start


def make_rank(rank: int, ranks: int) -> tuple[Placement, RankReport]:
    """Return placement and report of a rank on a host of 8 GPUs and 128 cores, 16 for each rank.

    The launcher has bound no rank, and the kit binds all of them.
    """
    node, local_rank = divmod(rank, RANKS_PER_HOST)
    local_world_size = min(RANKS_PER_HOST, ranks - node * RANKS_PER_HOST)
    placement = Placement("slurm", rank, ranks, local_rank, local_world_size)
    report = make_report(
        placement,
        backend="nccl",
        devices=[f"GPU-{node:016x}{index:016x}" for index in range(8)],
        device_nodes=GPU_NODES,
        device_masks="CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        torch_version="2.13.0",
        kit_version=__version__,
    )
    report["host"] = f"n{node:05d}"
    report["topology"] = "" if local_rank else TOPOLOGY
    report["host_cores"] = 2 * CORES_PER_RANK * RANKS_PER_HOST
    report["cores"] = f"{(1 << report['host_cores']) - 1:x}"
    return placement, report


def step_variables(job_id: str) -> dict[str, str]:
    """Return the variables of a step of srun whose rank 0 is on this host."""
    return {
        "SLURM_CLUSTER_NAME": "bench",
        "SLURM_JOB_ID": job_id,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }


if __name__ == "__main__":
    main()

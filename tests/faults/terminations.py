"""Train with DataLoader workers, send SIGTERM to all processes at a random moment, and check that all ranks save.

python tests/faults/terminations.py [--stops 50] [--workers 0 2 8] [--methods fork forkserver spawn] [--ranks 2]

As in a preemption by Slurm, the ranks, their workers, and the fork server get the signal at the same time, in a random
order. The moment is after the first step of both ranks, and before the end of the third epoch, so that workers of a
next epoch may be starting. A stop is right if every rank ends with status 75, has saved, and leaves no process behind.
The ranks are forked from this process, which has imported torch. Exit status 0 if all stops are right.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "2"
from tests.faults import quick_imports  # by spawned workers, too

# isort: split
import numpy
import torch
import torch.distributed
from torch.utils.data import DataLoader

from utils import setup_distributed
from utils.checkpoint import Checkpointer
from utils.preemption import EXIT_REQUEUE, StopSignal

quick_imports.done()

LIMIT_SECONDS = 200.0


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items use numpy's threads in the worker."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        square = numpy.full((64, 64), float(index))
        time.sleep(0.002)
        return torch.from_numpy((square @ square)[0, :4])


def train(folder: Path, workers: int, method: str) -> int:
    """Train until a stop; return the exit status of this rank."""
    options: dict[str, Any] = {"multiprocessing_context": method} if workers else {}
    numpy.ones((500, 500)) @ numpy.ones((500, 500))  # OpenBLAS starts threads again in each forked child
    with setup_distributed("gloo", launcher="env") as job, StopSignal(job) as stop, \
            Checkpointer(folder / "checkpoints") as checkpoints:
        weights = torch.zeros(4, dtype=torch.float64)
        loader = DataLoader(Numbers(), batch_size=4, num_workers=workers, **options)
        step = 0
        while not stop.stopped:
            for batch in loader:
                weights += job.all_reduce_mean(float(batch.mean()))
                step += 1
                if step == 1:
                    (folder / f"rank-{job.rank}").touch()
                if stop.should_stop():
                    break
        checkpoints.save_and_wait(step, {"weights": weights})
        (folder / f"saved-{job.rank}").touch()
    return stop.exit_status


def start_rank(rank: int, ranks: int, port: int, folder: Path, workers: int, method: str) -> int:
    """Fork a session that is one rank; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        target = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        faulthandler.dump_traceback_later(1.8 * LIMIT_SECONDS)
        try:
            status = train(folder, workers, method)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        # As at the end of a script: ends and joins what multiprocessing has started.
        from multiprocessing.util import _exit_function
        _exit_function()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def processes_of(sessions: list[int]) -> list[int]:
    """The process ids in these sessions, without those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.append(int(path.parent.name))
    return found


def stop_once(ranks: int, workers: int, method: str, folder: Path) -> str:
    """Start all ranks and stop them; return what went wrong, or ""."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids = [start_rank(rank, ranks, port, folder, workers, method) for rank in range(ranks)]
    limit = time.monotonic() + LIMIT_SECONDS
    try:
        while not all((folder / f"rank-{rank}").exists() for rank in range(ranks)):
            if time.monotonic() > limit:
                return "the training does not start"
            time.sleep(0.01)
        time.sleep(random.uniform(0, 1.5 if method == "fork" else 6))

        targets = processes_of(pids)
        random.shuffle(targets)
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

        statuses, limit = [], time.monotonic() + LIMIT_SECONDS
        for pid in pids:
            while not (done := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > limit:
                    return "a rank does not end"
                time.sleep(0.01)
            statuses.append(os.waitstatus_to_exitcode(done[1]))
        if statuses != [EXIT_REQUEUE] * ranks or not all((folder / f"saved-{rank}").exists() for rank in range(ranks)):
            return f"exit statuses {statuses}"

        time.sleep(0.5)  # the fork server and the resource tracker end after their rank
        while left := processes_of(pids):
            if time.monotonic() > limit:
                return f"{len(left)} processes are left"
            time.sleep(0.01)
        return ""
    finally:
        for pid in processes_of(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--methods", nargs="+", default=["fork", "forkserver", "spawn"])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    cases = [(workers, method) for workers in args.workers for method in (args.methods if workers else ["fork"])]
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    right: collections.Counter[tuple[int, str]] = collections.Counter()
    for number in range(args.stops):
        case = cases[number % len(cases)]
        with tempfile.TemporaryDirectory(prefix="terminations-") as name:
            problem = stop_once(args.ranks, *case, Path(name))
            counts[case] += 1
            right[case] += not problem
            print(f"{number + 1}: {case[0]} workers, {case[1]}: {problem or 'right'}", flush=True)
            if problem:
                output = (Path(name) / "output").read_text(errors="replace")
                print(output[-6000:], flush=True)
    for workers, method in cases:
        print(f"{workers} workers{f', {method}' if workers else ''}: {right[workers, method]} of "
              f"{counts[workers, method]} right")
    print(f"{right.total()} of {args.stops} stops right with Python {sys.version.split()[0]}")
    return int(right.total() < args.stops)


if __name__ == "__main__":
    # Spawned workers import this file under its own name, not as __main__.
    from tests.faults import terminations

    sys.exit(terminations.main())

"""The end of a process whose gloo threads have not yet dropped what the last collective gave them.

Run by itself (`python -m tests.faults.test_end`) it is the ranks: pairs of processes, one pair after the other.
"""
from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 3


def test_no_thread_of_gloo_aborts_the_process_at_its_end() -> None:
    ended = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout.count("sum 2.0")) == (0, 10 * PAIRS), ended.stdout + ended.stderr


def train(rank: int, port: int) -> None:
    import torch

    from utils import setup_distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with setup_distributed("gloo", launcher="env"):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))  # holds the process group to the end
        own = str(os.getpid())
        for task in os.listdir("/proc/self/task"):  # on this one processor they run only while the main thread waits
            if task != own:
                os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
        for _ in range(5):
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            print(f"sum {float(total)}", flush=True)
            del total
    sys.modules["holds"] = model  # type: ignore[assignment]


def main() -> None:
    import torch
    torch.set_num_threads(1)
    statuses = []
    for _ in range(PAIRS):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                return train(rank, port)  # and on to the end of the interpreter, which is what this is about
            ranks.append(pid)
        statuses += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(f"exit statuses of the ranks: {statuses}" if any(statuses) else 0)


if __name__ == "__main__":
    main()

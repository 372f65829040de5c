"""A process ends without an abort while gloo's threads still hold tensors of the last collective.

`python -m tests.faults.test_end` is the program of the ranks: one pair of processes after the other.
"""
from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.faults.programs import ROOT

PAIRS = 3


def test_no_thread_of_gloo_aborts_its_process() -> None:
    ended = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True, timeout=200)
    output = ended.stdout + ended.stderr
    assert (ended.returncode, ended.stdout.count("sum 2.0")) == (0, 10 * PAIRS), output


def train(rank: int, port: int) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from utils import setup_distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with setup_distributed("gloo", launcher="env"):
        model = DistributedDataParallel(torch.nn.Linear(1, 1))  # holds the group to the very end
        for thread in os.listdir("/proc/self/task"):
            if thread != str(os.getpid()):  # on one core they then run mostly while this one waits
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)
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
                return train(rank, port)  # and on to the end of the interpreter
            ranks.append(pid)
        statuses += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(f"exit statuses of the ranks: {statuses}" if any(statuses) else 0)


if __name__ == "__main__":
    main()

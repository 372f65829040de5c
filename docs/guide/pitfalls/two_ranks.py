"""Start two ranks on this host, on CPUs. The scripts of this folder need no launcher for that."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed
from ddpkit import Distributed, setup_distributed

Program = Callable[[Distributed], None]
TIMEOUT = 6  # seconds that a rank waits in a collective

# The first optimizer imports a lot. The ranks are forked from this process, and need not do it.
torch.optim.SGD([torch.zeros(1)])


def run(**programs: Program) -> None:
    """Run programs one after the other, each on two new ranks, whose lines begin with its name."""
    for name, program in programs.items():
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]  # a free one
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=_run_rank, args=(program, rank, port), name=name)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if failed := [str(rank) for rank, process in enumerate(ranks) if process.exitcode]:
            print(f"{name}, rank {' and rank '.join(failed)} failed", flush=True)


def show(job: Distributed, text: object) -> None:
    """Print the texts of the ranks, in their order. All ranks have to call this."""
    texts = [""] * job.world_size
    torch.distributed.all_gather_object(texts, str(text))
    if not job.is_main:
        return
    program = multiprocessing.current_process().name
    if texts[0] == texts[1]:
        print(f"{program}, both ranks: {text}", flush=True)
    else:
        for rank, rank_text in enumerate(texts):
            print(f"{program}, rank {rank}: {rank_text}", flush=True)


def _run_rank(program: Program, rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.stdout, table = open(os.devnull, "w"), sys.stdout  # without the table of the start
    try:
        with setup_distributed("gloo", collective_timeout=TIMEOUT, check_training=False) as job:
            sys.stdout = table
            program(job)
    except RuntimeError:  # leaving the block has printed the cause
        sys.exit(1)

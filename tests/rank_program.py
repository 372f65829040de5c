"""A rank for the tests of launches: it reports who and where it is, and fails in the way that it is asked for.

rank_program.py [--join | --torch] [--mpi4py before|after] [--notes FOLDER] [--wait] [--fault WHAT:RANK] [words...]

Without --join and --torch the rank does not contact the others and needs no torch. --join is the start-up exchange
alone; --torch is setup_distributed() and a sum over all ranks. --notes writes the process id to FOLDER/RANK and the
signals that arrive to FOLDER/RANK.signals; --wait waits for all ranks and then for SIGTERM, and exits with status 5.

Faults, of one rank or (without :RANK) of all: exit=STATUS, kill (with --wait); late, exit-before, kill-during,
kill-after-exchange, shared-gpu, version, nccl (at the start); raise, kill-training, return, exit, close, hang (in a
training of 60 to 2,000 steps). FAULT, FAULT_TIMEOUT and FAULT_WITHOUT_WITH in the environment mean the same.
"""
from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.launchers import Placement, detect

LEAVING = ("return", "exit", "close")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--mpi4py", choices=["before", "after"])
    parser.add_argument("--notes", type=Path, metavar="FOLDER")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--fault", default=os.environ.get("FAULT", ""), metavar="WHAT:RANK")
    parser.add_argument("--timeout", type=float, default=float(os.environ.get("FAULT_TIMEOUT", "40")))
    parser.add_argument("words", nargs="*")
    return parser.parse_args()


def report(rank: Placement, *more: str) -> None:
    """Print one line: the rank, its place, its GPUs, and `more`."""
    line = [f"rank {rank.rank} of {rank.world_size}", f"local {rank.local_rank} of {rank.local_world_size}",
            f"on {socket.gethostname()}", f"by {rank.launcher}", *more]
    sys.stdout.write(", ".join(line) + "\n")
    sys.stdout.flush()


def identity(rank: Placement, words: list[str]) -> None:
    """Report what the rank sees of its environment."""
    environ = os.environ
    report(rank, f"GPU {gpu_of(rank)}", f"notes {rank.notes}", f"value {environ.get('VALUE')!r}",
           f"threads {environ.get('OMP_NUM_THREADS')}", f"folder {os.getcwd()}", f"arguments {words}")


def gpu_of(rank: Placement) -> str:
    """The GPU that setup_distributed() would pin, by the rule of utils/rendezvous/checks.py."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "none").split(",")
    if len(visible) == 1:
        return visible[0]
    return visible[rank.local_rank or 0] if len(visible) >= (rank.local_world_size or 1) else "too few"


def join(rank: Placement, timeout: float) -> None:
    """Meet the other ranks without torch."""
    from utils.launchers.detect import find_launcher
    from utils.rendezvous import agree
    from utils.rendezvous.checks import make_report

    launcher = find_launcher().launcher
    met = (agree(rank, make_report(rank), launcher=launcher, timeout=timeout)
           if rank.world_size > 1 else None)
    for note in rank.notes:
        sys.stderr.write(f"note: {note}\n")
    report(rank, f"rank 0 at {met.master_addr if met else '-'}")


def all_reduce(mpi4py: str | None, timeout: float) -> None:
    """Start torch.distributed, and MPI before or after it."""
    if mpi4py == "before":
        from mpi4py import MPI
    from utils import setup_distributed

    with setup_distributed(timeout=timeout) as dist:
        line = f"rank {dist.rank} of {dist.world_size}"
        assert dist.all_reduce_mean(float(dist.rank)) == (dist.world_size - 1) / 2
        if mpi4py == "after":
            from mpi4py import MPI
        if mpi4py:
            world = MPI.COMM_WORLD
            line += f", MPI says rank {world.Get_rank()} of {world.Get_size()}, sum {world.allreduce(1)}"
        sys.stdout.write(line + "\n")


def wait(rank: Placement, folder: Path, what: str, faulty: bool) -> None:
    """Fail when all ranks run, or wait for SIGTERM and exit with status 5."""
    while not all((folder / str(other)).exists() for other in range(rank.world_size)):
        time.sleep(0.02)
    if faulty and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if faulty and what.startswith("exit="):
        sys.exit(int(what.partition("=")[2]))
    limit = time.monotonic() + 60
    while not _terminated and time.monotonic() < limit:
        time.sleep(0.02)
    sys.exit(5)


_terminated: list[int] = []


def take_notes(rank: Placement, folder: Path, *, catch: bool) -> None:
    """Write the process id; with `catch` also each signal that arrives."""
    if catch:
        log = open(folder / f"{rank.rank}.signals", "a", buffering=1)  # noqa: SIM115

        def note(number: int, _: object) -> None:
            log.write(f"{signal.Signals(number).name}\n")
            if number == signal.SIGTERM:
                _terminated.append(number)

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, note)
    partial = folder / f"{rank.rank}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / str(rank.rank))


def train_with_fault(rank: Placement, what: str, faulty: bool, timeout: float) -> None:
    """setup_distributed() and a DDP training, in which the faulty rank does something wrong."""
    if what == "late" and faulty:
        time.sleep(timeout * 2.5)
        sys.exit(0)
    if what == "exit-before" and faulty:
        sys.exit("this rank ends before it starts")
    from utils import device, distributed, setup_distributed
    from utils.connection import Connection

    def kill(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if what == "kill-during" and faulty:  # between its report and the result, as a rank that runs out of memory
        Connection.receive_one = kill  # type: ignore[assignment,method-assign]
    if what == "kill-after-exchange" and faulty:
        device.pin = kill
    if what == "shared-gpu":  # as if both ranks of a host were given one GPU
        device.visible_devices = lambda backend: ["GPU-5f3c"]
    if what == "version" and faulty:
        distributed.__version__ = "0.0.9"
    start = time.monotonic()
    try:
        dist = setup_distributed("nccl" if what == "nccl" else None, timeout=timeout,
                                 collective_timeout=4 if what == "hang" else None)
    except BaseException as error:
        print(f"rank {rank.rank} gave up after {time.monotonic() - start:.1f} s: {error}", flush=True)
        raise
    if os.environ.get("FAULT_WITHOUT_WITH"):
        train(dist, what, faulty)
    else:
        with dist:
            train(dist, what, faulty)


def train(dist: object, what: str, faulty: bool) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    model = DDP(torch.nn.Linear(4, 4))
    for step in range(60 if what in LEAVING else 2000):
        if faulty and step == 20:
            if what == "return":
                return
            go_wrong(dist, what)
        model(torch.ones(1, 4)).sum().backward()
        time.sleep(0.01)


def go_wrong(dist: object, what: str) -> None:
    if what == "raise":
        raise ValueError("the loss is not a number")
    if what == "kill-training":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(0)
    if what == "close":
        dist.close()  # type: ignore[attr-defined]
        sys.exit(0)
    if what == "hang":
        time.sleep(600)


def main() -> None:
    args = parse()
    what, _, faulty_rank = args.fault.partition(":")
    if args.torch and not what:
        return all_reduce(args.mpi4py, args.timeout)
    rank = detect()
    faulty = not faulty_rank or rank.rank == int(faulty_rank)
    if args.notes:
        take_notes(rank, args.notes, catch=args.wait)
    if args.join:
        join(rank, args.timeout)
    elif args.torch:
        train_with_fault(rank, what, faulty, args.timeout)
    else:
        identity(rank, args.words)
    if args.wait:
        wait(rank, args.notes, what, faulty)


if __name__ == "__main__":
    main()

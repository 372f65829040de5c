"""A rank for the tests of launches: it reports who and where it is, and fails in the way that it is asked for.

rank_program.py [--join | --torch] [--mpi4py before|after] [--notes FOLDER] [--wait] [--fault WHAT:RANK]
                [--timeout SECONDS] [words...]

Without --join and --torch the rank does not contact the others. --join is the start-up exchange alone, without
torch; --torch is setup_distributed() and a sum over all ranks. --notes writes the process id to FOLDER/RANK and the
signals that arrive to FOLDER/RANK.signals; --wait waits for all ranks and then for SIGTERM, and exits with status 5.

Faults of one rank: late, kill-during (with --join); exit=STATUS, kill (with --wait); interface,
nccl, kill-after-exchange, raise, kill-training, leave=STATUS, return, exit, close, hang, more (with --torch).
"""
from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.launchers import Placement, detect


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--join", "--torch", "--wait"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--mpi4py", choices=["before", "after"])
    parser.add_argument("--notes", type=Path, metavar="FOLDER")
    parser.add_argument("--fault", default="", metavar="WHAT:RANK")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("words", nargs="*")
    return parser.parse_args()


def report(rank: Placement, *more: str) -> None:
    """Print one line: the rank, its place, and `more`."""
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
    """The GPU that setup_distributed() would pin, by the rule of utils/startup/reports.py."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "none").split(",")
    if len(visible) == 1:
        return visible[0]
    return visible[rank.local_rank or 0] if len(visible) >= (rank.local_world_size or 1) else "too few"


def kill(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at_the_start(fault: str, timeout: float) -> None:
    from utils.channel import Channel

    if fault == "late":
        time.sleep(timeout + 5)
        sys.exit("this rank ends before it starts")
    if fault == "kill-during":  # between its report and the result, as a rank that runs out of memory
        Channel.receive_one = kill  # type: ignore[assignment,method-assign]


def join(rank: Placement, args: argparse.Namespace) -> None:
    """Meet the other ranks without torch, and start MPI before or after it."""
    from utils.launchers.detect import find_launcher
    from utils.monitor.monitor import Monitor
    from utils.startup import agree
    from utils.startup.exchange import host_and_pid
    from utils.startup.reports import make_report

    if args.mpi4py == "before":
        from mpi4py import MPI
    own_report = make_report(rank)
    met = agree(rank, own_report, launcher=find_launcher().launcher, timeout=args.timeout)
    monitor = Monitor(met.connections, rank=rank.rank, host=host_and_pid(own_report)) if met.connections else None
    if args.fault:
        time.sleep(args.timeout)  # in place of torch, which connects the ranks
    if monitor is not None:
        monitor.connected()
    if args.mpi4py == "after":
        from mpi4py import MPI

    for note in (*rank.notes, *met.notes):
        sys.stderr.write(f"note: {note}\n")
    world = MPI.COMM_WORLD if args.mpi4py else None
    report(rank, f"rank 0 at {met.master_addr if monitor else '-'}", *([
        f"MPI says rank {world.Get_rank()} of {world.Get_size()}, sum {world.allreduce(1)}"] if world else []))
    if monitor is not None:
        monitor.leave(None)


_terminated: list[int] = []


def take_notes(rank: Placement, folder: Path, *, catch: bool) -> None:
    """Write the process id; with `catch` also each signal that arrives."""
    if catch:
        log = os.open(folder / f"{rank.rank}.signals", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def note(number: int, _: object) -> None:
            os.write(log, f"{signal.Signals(number).name}\n".encode())  # one signal may interrupt another
            if number == signal.SIGTERM:
                _terminated.append(number)

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, note)
    partial = folder / f"{rank.rank}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / str(rank.rank))


def wait(rank: Placement, folder: Path, fault: str) -> None:
    """Fail when all ranks run, or wait for SIGTERM and exit with status 5."""
    while not all((folder / str(other)).exists() for other in range(rank.world_size)):
        time.sleep(0.02)
    if fault == "kill":
        kill()
    if fault.startswith("exit="):
        sys.exit(int(fault.partition("=")[2]))
    limit = time.monotonic() + 60
    while not _terminated and time.monotonic() < limit:
        time.sleep(0.02)
    sys.exit(5)


def all_reduce(timeout: float) -> None:
    from tests.faults import quick_imports
    from utils import setup_distributed

    with setup_distributed(timeout=timeout) as dist:
        quick_imports.done()
        assert dist.all_reduce_mean(float(dist.rank)) == (dist.world_size - 1) / 2
        sys.stdout.write(f"rank {dist.rank} of {dist.world_size}\n")


def train_with_fault(fault: str, what: str, timeout: float) -> None:
    """setup_distributed() and steps with an all-reduce, in which the faulty rank does something wrong."""
    from tests.faults import quick_imports
    from utils import setup_distributed
    from utils.host import device

    if fault == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "ib7"
    if fault == "kill-after-exchange":
        device.pin = kill
    if fault == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist = setup_distributed("nccl" if fault == "nccl" else None, timeout=timeout,
                             collective_timeout=4 if what == "hang" else None)
    quick_imports.done()
    with contextlib.nullcontext() if what in ("exit", "close") else dist:
        train(dist, fault, 20 if what == "more" != fault else 60 if what in ("return", "exit", "close") else 2000)
        if what == "more" and dist.rank == 0:
            time.sleep(0.5)  # the faulty rank needs the others before this one ends


def train(dist: object, fault: str, steps: int) -> None:
    import torch

    gradients = torch.ones(20)  # without a DDP, whose import of torch._dynamo takes as long as that of torch
    for step in range(20 if fault == "return" else steps):
        if step == 20:
            go_wrong(dist, fault)
        torch.distributed.all_reduce(gradients)
        time.sleep(0.01)


def go_wrong(dist: object, fault: str) -> None:
    if fault == "raise":
        raise ValueError("the loss is not a number")
    if fault == "kill-training":
        kill()
    if fault.startswith("leave="):
        os._exit(int(fault.partition("=")[2]))
    if fault == "hang":
        time.sleep(600)
    if fault == "close":
        dist.close()  # type: ignore[attr-defined]
    if fault in ("close", "exit"):
        sys.exit(0)


def main() -> None:
    args = parse()
    what, _, faulty_rank = args.fault.partition(":")
    if args.torch and not what:
        return all_reduce(args.timeout)
    rank = detect()
    fault = what if faulty_rank == str(rank.rank) else ""
    if args.notes:
        take_notes(rank, args.notes, catch=args.wait)
    fail_at_the_start(fault, args.timeout)
    if args.join:
        join(rank, args)
    elif args.torch:
        train_with_fault(fault, what, args.timeout)
    else:
        identity(rank, args.words)
    if args.wait:
        wait(rank, args.notes, fault)


if __name__ == "__main__":
    main()

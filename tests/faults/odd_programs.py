"""Healthy trainings that look odd from outside, none of which knows the kit: no alarm may be raised for any of them.

tests/faults/odd_programs.py [--programs NAME ...] [--keep FOLDER]

Run it by hand: it takes about ten minutes. Each runs on two ranks under `ddpkit launch --hang-timeout 4`, with a notice
after 2 s without progress. A run is right when every rank reaches its last line, the exit status is 0, no hang is told,
no process is left, and the notice comes as often as is listed: once for each pause in which a rank waits for another.
"""
from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.faults.watched import launch  # noqa: E402

HANG_SECONDS, NOTICE_SECONDS, PAUSE_SECONDS = 4, 2, 10
START = f"""\
import os, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PAUSE = {PAUSE_SECONDS}

def compute(seconds=PAUSE):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)

def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 1))
"""
END = """\
    dist.barrier()
    dist.destroy_process_group()
    print(f"done {rank}\\n", end="", flush=True)
"""


class Odd(NamedTuple):
    """A program, between START and END, and how many notices it may get."""

    body: str
    notices: int = 0
    end: str = END


PROGRAMS = {
    "evaluation on rank 0": Odd("""\
for epoch in range(2):
    train(model)
    if rank == 0:
        compute()
    dist.barrier()
""", notices=2),
    "compile": Odd("""\
compiled = torch.compile(model)
if rank == 0:
    compute()  # as a compiler does
train(compiled)
""", notices=1),
    "compiler in a process": Odd("""\
if rank == 0:
    busy = "import time; end = time.monotonic() + 10\\nwhile time.monotonic() < end: sum(range(1000))"
    subprocess.run([sys.executable, "-c", busy], check=True)
train(model)
""", notices=1),
    "all ranks compute": Odd("""\
train(model)
compute()
train(model)
"""),
    "all ranks look for a file": Odd("""\
train(model)
end = time.monotonic() + 2 * 4
while time.monotonic() < end and not os.path.exists("result"):
    time.sleep(0.05)
train(model)
"""),
    "objects": Odd("""\
for step in range(5):
    got = [None, None]
    dist.all_gather_object(got, {"rank": rank, "text": "x" * 100_000})
    word = [got[0]["rank"] if rank == 0 else None]
    dist.broadcast_object_list(word, src=0)
    train(model)
"""),
    "two groups": Odd("""\
own = [dist.new_group([0]), dist.new_group([1])][rank]
both = dist.new_group([0, 1])
for step in range(20):
    if rank == 0:
        dist.all_reduce(torch.ones(2), group=own)
    dist.all_reduce(torch.ones(3), group=both)
train(model)
"""),
    "join": Odd("""\
from torch.distributed.algorithms.join import Join
with Join([model]):
    train(model, 2 + 30 * rank)
"""),
    "profiler": Odd("""\
with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
    for step in range(5):
        train(model)
        profiler.step()
"""),
    "generator loader": Odd("""\
def batches():
    while True:
        time.sleep(0.02)
        yield torch.randn(4, 8)

for step, batch in enumerate(batches()):
    model(batch).mean().backward()
    if step == 100:
        break
"""),
    "spawned workers": Odd("""\
loader = torch.utils.data.DataLoader(range(40), num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
for epoch in range(2):
    for _ in loader:
        train(model, 1)
"""),
    "no_sync": Odd("""\
for step in range(40):
    if step % 8 == 7:
        train(model, 1)
    else:
        with model.no_sync():
            model(torch.randn(4, 8)).mean().backward()
"""),
    "many steps without a collective": Odd("""\
for step in range(60):
    model.module(torch.randn(4, 8)).mean().backward()
    time.sleep(0.05)
dist.all_reduce(torch.ones(1))
"""),
    "second group": Odd("""\
train(model)
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/second", rank=rank, world_size=2)
train(DDP(torch.nn.Linear(8, 1)))
"""),
    "no end of the group": Odd("train(model)\n", end="""\
    print(f"done {rank}\\n", end="", flush=True)
"""),
    "os._exit": Odd("train(model)\n", end="""\
    dist.barrier()
    print(f"done {rank}\\n", end="", flush=True)
    os._exit(0)
"""),
    "rank 1 ends long before": Odd("train(model)\n", end="""\
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        compute()
    print(f"done {rank}\\n", end="", flush=True)
"""),
    "exceptions that are caught": Odd("""\
for step in range(20):
    try:
        raise RuntimeError("CUDA out of memory")
    except RuntimeError:
        train(model, 1)
"""),
    "own excepthook and signals": Odd("""\
sys.excepthook = lambda *args: None
signal.signal(signal.SIGTERM, lambda *args: None)
signal.signal(signal.SIGALRM, lambda *args: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
for step in range(20):
    train(model)
signal.setitimer(signal.ITIMER_REAL, 0)
"""),
    "thread with its own group": Odd("""\
other = dist.new_group([0, 1])
def heartbeat():
    for _ in range(20):
        dist.all_reduce(torch.ones(1), group=other)
        time.sleep(0.05)
thread = threading.Thread(target=heartbeat)
thread.start()
for step in range(20):
    train(model, 1)
thread.join()
"""),
    "pipeline": Odd("""\
for step in range(50):
    value = torch.ones(16)
    if rank == 0:
        dist.send(value, 1)
        dist.recv(value, 1)
    else:
        dist.recv(value, 0)
        dist.send(value, 0)
"""),
    "asynchronous collectives": Odd("""\
for step in range(30):
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(4)]
    torch.randn(256, 256) @ torch.randn(256, 256)
    for work in works:
        work.wait()
"""),
    "pool of processes": Odd("""\
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    for step in range(5):
        pool.map(abs, range(100))
        train(model)
"""),
    "monitored barrier": Odd("""\
for step in range(5):
    train(model)
    dist.monitored_barrier()
"""),
    "own store": Odd("""\
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("a", "b")
train(model)
"""),
}


def source_of(odd: Odd) -> str:
    body = "".join(f"    {line}" if line.strip() else line for line in odd.body.splitlines(keepends=True))
    return START + body + odd.end


def judge(odd: Odd, folder: Path) -> str:
    """Run a program, and return what is wrong with it; "" where it is right."""
    run = launch(Path(sys.executable), folder, source_of(odd), hang_seconds=HANG_SECONDS,
                 variables={"DDPKIT_NOTICE_AFTER": str(NOTICE_SECONDS)})
    if run.status or sorted(re.findall(r"^done \d", run.stdout, re.MULTILINE)) != ["done 0", "done 1"]:
        return f"exit status {run.status}: {run.closing}"
    if run.left:
        return f"left behind: {run.left}"
    if "are watched" not in run.stderr:
        return "not watched"
    notices = re.findall(r"no progress for .*", run.stderr)
    if "The ranks hang" in run.stderr or len(notices) > odd.notices:
        return f"{len(notices)} notices, expected {odd.notices}: " + " | ".join(run.stderr.splitlines())
    return ""


def main() -> int:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--keep", type=Path, default=Path("/tmp/ddpkit-odd"), help="for the output of the runs")
    args = parser.parse_args()
    shutil.rmtree(args.keep, ignore_errors=True)
    wrong = 0
    for name in args.programs:
        text = judge(PROGRAMS[name], args.keep.absolute() / name.replace(" ", "-"))
        wrong += bool(text)
        print(f"{name:<34}{text or 'right'}", flush=True)
    print(f"{len(args.programs) - wrong} of {len(args.programs)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

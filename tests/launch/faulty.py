"""A rank that goes wrong in a way that is asked for, for the fault tests: FAULT=what:rank, FAULT_TIMEOUT=seconds."""
from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from utils import device, distributed, reception, setup_distributed
from utils.launchers import detect

what, _, rank_text = os.environ["FAULT"].partition(":")
timeout = float(os.environ.get("FAULT_TIMEOUT", "10"))
me = detect()
faulty = me.rank == int(rank_text or -1)

if what == "late" and faulty:
    time.sleep(timeout * 2.5)
    sys.exit(0)
if what == "exit-before" and faulty:
    sys.exit("this rank ends before it starts")
if what == "kill-during" and faulty:
    # Ends between its card and the verdict, as a rank that runs out of memory does.
    reception._is_verdict = lambda said: os.kill(os.getpid(), signal.SIGKILL)
if what == "die-after-roll-call" and faulty:
    device.pin = lambda chosen: os.kill(os.getpid(), signal.SIGKILL)
if what == "two-on-one-gpu":  # as if both ranks of a host were given the same GPU
    device.visible = lambda backend: ["GPU-5f3c"]
if what == "versions" and faulty:
    distributed.__version__ = "0.0.9"

start = time.monotonic()
try:
    dist = setup_distributed("nccl" if what == "nccl" else None, timeout=timeout,
                             collective_timeout=4 if what == "hang" else None)
except BaseException as error:
    print(f"rank {me.rank} gave up after {time.monotonic() - start:.1f} s: {error}", flush=True)
    raise


def train() -> None:
    model = DDP(torch.nn.Linear(4, 4))
    for step in range(60 if what in LEAVING else 2000):
        if faulty and step == 20:
            go_wrong()
            if what == "return":
                return
        model(torch.ones(1, 4)).sum().backward()
        time.sleep(0.01)


def go_wrong() -> None:
    if what == "raise":
        raise ValueError("the loss is not a number")
    if what == "kill-training":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(0)
    if what == "close":
        dist.close()
        sys.exit(0)
    if what == "hang":
        time.sleep(600)


LEAVING = ("return", "exit", "close")
if os.environ.get("FAULT_WITHOUT_WITH"):
    train()
else:
    with dist:
        train()

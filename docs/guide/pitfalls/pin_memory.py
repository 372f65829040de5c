"""A copy to the GPU waits for the GPU, unless it starts in pinned memory and with non_blocking."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Distributed, run, show

DATA = TensorDataset(torch.zeros(64, 1_000_000))


def copy(job: Distributed, *, pinned: bool) -> None:
    loader = DataLoader(DATA, batch_size=8, pin_memory=pinned and torch.cuda.is_available())
    if not torch.cuda.is_available():
        how = "does not wait" if pinned else "waits"
        show(job, f"no GPU here; on a GPU, the loop {how} for each copy")
        return
    device = torch.device("cuda", job.local_rank % torch.cuda.device_count())
    work = torch.ones(8192, 8192, device=device)
    waited = 0.0
    for (x,) in loader:
        work @ work  # the GPU computes, and the loop goes on
        start = time.perf_counter()
        x.to(device, non_blocking=pinned)
        waited += time.perf_counter() - start
    show(job, f"the loop waits {1000 * waited / len(loader):.2f} ms for each copy")


def wrong(job: Distributed) -> None:
    copy(job, pinned=False)


def right(job: Distributed) -> None:
    copy(job, pinned=True)


run(wrong=wrong, right=right)

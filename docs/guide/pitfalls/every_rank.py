"""Every rank prints, and every rank writes the same file."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from two_ranks import Distributed, run, show

FOLDER = Path(tempfile.mkdtemp())


def save(model: nn.Module, rename_now: bool) -> str:
    """Write a file under a temporary name and rename it, so that it is complete or absent."""
    temporary = FOLDER / "model.pt.tmp"
    torch.save(model.state_dict(), temporary)
    torch.distributed.barrier()  # so that rank 0 always renames first here
    if not rename_now:
        torch.distributed.barrier()
    try:
        temporary.rename(FOLDER / "model.pt")
        return "saved"
    except FileNotFoundError:
        return "FileNotFoundError: another rank has renamed the temporary file"
    finally:
        if rename_now:
            torch.distributed.barrier()


def wrong(job: Distributed) -> None:
    print("epoch 0, loss 0.25", flush=True)
    show(job, save(nn.Linear(2, 1), rename_now=job.is_main))


def right(job: Distributed) -> None:
    if job.is_main:
        print("epoch 0, loss 0.25", flush=True)
        torch.save(nn.Linear(2, 1).state_dict(), FOLDER / "model.pt")
    job.barrier()  # the file is complete for all ranks after this line
    show(job, f"sees {', '.join(path.name for path in FOLDER.iterdir())}")


run(wrong=wrong, right=right)

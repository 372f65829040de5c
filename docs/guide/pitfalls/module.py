"""The names in the state of a DDP-wrapped model begin with "module."."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show


def load(job: Distributed, state: dict) -> None:
    try:
        nn.Linear(2, 1).load_state_dict(state)
        show(job, f"loaded {list(state)}")
    except RuntimeError as error:
        show(job, " ".join(str(error).split()))


def wrong(job: Distributed) -> None:
    ddp = DDP(nn.Linear(2, 1))
    load(job, ddp.state_dict())


def right(job: Distributed) -> None:
    ddp = DDP(nn.Linear(2, 1))
    load(job, ddp.module.state_dict())


run(wrong=wrong, right=right)

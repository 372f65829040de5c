"""The names in the state of a DDP-wrapped model begin with "module."."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from two_ranks import Distributed, run, show


def load(dist: Distributed, state: dict) -> None:
    try:
        nn.Linear(2, 1).load_state_dict(state)
        show(dist, f"loaded {list(state)}")
    except RuntimeError as error:
        show(dist, " ".join(str(error).split()))


def wrong(dist: Distributed) -> None:
    ddp = DDP(nn.Linear(2, 1))
    load(dist, ddp.state_dict())


def right(dist: Distributed) -> None:
    ddp = DDP(nn.Linear(2, 1))
    load(dist, ddp.module.state_dict())


run(wrong=wrong, right=right)

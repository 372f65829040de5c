"""Start processes as ranks of a launch of their own, for the checks of `doctor`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from .rank_environment import clean, rank_variables

_ROOT = Path(__file__).resolve().parents[3]  # the folder in sys.path for `import utils`
_DROPPED = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC")  # set by an agent for its own workers


def words(module: str) -> list[str]:
    """Return the command that calls main() of a module of this package.

    Not -m: Python would search the working folder first, which may have its own `utils`.
    """
    program = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {module} import main; "
        "sys.exit(main())"
    )
    return [sys.executable, "-c", program]


def environment(nodes: Sequence[int], rank: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of a rank.

    nodes: host number of each rank. address, port: where rank 0 listens.
    """
    environ = {
        name: value for name, value in clean(os.environ).items() if not name.startswith(_DROPPED)
    }
    return environ | rank_variables(
        rank=rank,
        world_size=len(nodes),
        local_rank=nodes[:rank].count(nodes[rank]),
        local_world_size=nodes.count(nodes[rank]),
        node_rank=nodes[rank],
        address=address,
        port=port,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])

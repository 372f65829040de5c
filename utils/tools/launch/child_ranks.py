"""Start processes as ranks of another launch than this one: in a check of `doctor`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from .rank_environment import clean, rank_variables

_ROOT = Path(__file__).resolve().parents[3]  # what `import utils` needs
_DROPPED = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC")  # of an agent that does not know the process


def words(module: str) -> list[str]:
    """Return the command that calls main() of a module of this package.

    Not -m: the folder that this command runs in would come first, and may have its own `utils`.
    """
    program = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {module} import main; "
        "sys.exit(main())"
    )
    return [sys.executable, "-c", program]


def environment(nodes: Sequence[int], rank: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of a rank. nodes: the host number of each rank. address: of rank 0."""
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

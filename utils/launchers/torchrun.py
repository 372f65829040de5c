"""torchrun, python -m torch.distributed.run, and other programs that run torch's elastic agent.

Source: https://pytorch.org/docs/stable/elastic/run.html. Tested with the real launcher.
"""

from __future__ import annotations

from collections.abc import Mapping

from .by_hand import RANK_VARIABLES
from .launcher import Launcher, is_set, number
from .rank_variables import InheritedVariables

_RUN_ID = "TORCHELASTIC_RUN_ID"


class Torchrun(Launcher):
    """The agent on each host is the parent of its workers, the ranks."""

    name = "torchrun"
    rank_variable, world_size_variable, local_rank_variable, local_world_size_variable = (
        RANK_VARIABLES
    )
    marker_variables = (_RUN_ID,)
    identity_variables = (_RUN_ID, "MASTER_PORT")
    parent_programs = ("torchrun", "accelerate")
    requires_master_address = True
    sets_rank_variables = True
    # Each agent counts its own ranks, and two agents may share a host.
    counts_all_local_ranks = False

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, _RUN_ID)) and super().is_present(environ)

    def is_parent(self, command: str) -> bool:
        # Programs of many names run the agent in Python: "python -m torch.distributed.run x.py",
        # "/env/bin/python3.11 /env/bin/accelerate launch x.py".
        program = command.partition(" ")[0].rpartition("/")[2]
        return program.startswith(("python", "pypy")) or super().is_parent(command)

    def may_start_below(self, inherited: InheritedVariables) -> bool:
        # A program that a worker has started inherits the variables, and may be run by Python too.
        return inherited.new_worker

    def agents(self, environ: Mapping[str, str]) -> int | None:
        return number(environ, "GROUP_WORLD_SIZE")

    def has_store(self, environ: Mapping[str, str]) -> bool:
        return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

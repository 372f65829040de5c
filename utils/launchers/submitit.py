"""submitit's LocalExecutor, which starts the tasks of a job on this host.

In a Slurm job of submitit the launcher is srun. Source: submitit/local/local.py, class
LocalJobEnvironment. Tested with submitit 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping

from .launcher import Launcher, Placement


class Submitit(Launcher):
    """A controller process, python -m submitit.local._local, starts the tasks."""

    name = "submitit"
    rank_variable = "SUBMITIT_LOCAL_GLOBALID"
    world_size_variable = "SUBMITIT_LOCAL_NTASKS"
    local_rank_variable = "SUBMITIT_LOCAL_LOCALID"
    marker_variables = ("SUBMITIT_LOCAL_JOB_ID",)
    identity_variables = ("SUBMITIT_LOCAL_JOB_ID",)  # "4711", the controller's process id

    def is_parent(self, command: str) -> bool:
        return "submitit.local" in command

    def read(self, environ: Mapping[str, str]) -> Placement:
        placement = super().read(environ)
        return placement.replace(local_world_size=placement.world_size)

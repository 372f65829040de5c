"""flux run and flux submit of the Flux framework.

Source: flux-environment(7). Tested only against the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

from .launcher import Launcher, Placement, number
from .name_service import NameService


class Flux(Launcher):
    """flux-shell on each host is the parent of the tasks."""

    name = "flux"
    rank_variable = "FLUX_TASK_RANK"
    world_size_variable = "FLUX_JOB_SIZE"
    local_rank_variable = "FLUX_TASK_LOCAL_ID"
    job_variables = ("FLUX_JOB_NNODES",)
    identity_variables = ("FLUX_JOB_ID",)  # "f2ZzXqGWZfD"
    parent_programs = ("flux-shell",)
    also_sets = ("mpich",)
    mpi_libraries = ("",)  # Flux starts the programs of every MPI library

    def read(self, environ: Mapping[str, str]) -> Placement:
        placement = super().read(environ)
        nodes = number(environ, "FLUX_JOB_NNODES")
        # No variable holds the tasks of this node. One node and one task on each are certain.
        if nodes == 1:
            return placement.replace(local_world_size=placement.world_size)
        if nodes == placement.world_size:
            return placement.replace(local_world_size=1)
        return placement

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        if not environ.get("PMI_FD"):
            return None
        from .pmi import KeyValueSpace  # Flux does not publish names

        return KeyValueSpace(environ)

"""mpiexec of HPE PALS, on HPE Cray EX systems with PBS.

Source: mpiexec(1) of HPE PALS. Tested only against the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..launch_error import LaunchError
from .launcher import Launcher, Placement, is_set, node_file, number

_APPLICATION = "PALS_APID"  # "7b6dd8f0-6c30-4d4c-9f1c-0a8e5b1f3e52", one for each mpiexec


class PALS(Launcher):
    """palsd on each host starts the ranks. No variable of its own holds the world size.

    It comes from cray-pmi's PMI_SIZE, from a WORLD_SIZE passed by the user, or from the node file.
    """

    name = "pals"
    rank_variable = "PALS_RANKID"
    local_rank_variable = "PALS_LOCAL_RANKID"
    local_world_size_variable = "PALS_LOCAL_SIZE"
    marker_variables = (_APPLICATION,)
    job_variables = ("PMI_RANK", "PMI_SIZE", "PBS_NODEFILE", "WORLD_SIZE")
    identity_variables = (_APPLICATION,)
    parent_programs = ("palsd",)
    also_sets = ("mpich",)
    mpi_libraries = ("MPICH", "CRAY MPICH")

    def is_present(self, environ: Mapping[str, str]) -> bool:
        # srun on a Cray sets PALS variables, too (Slurm's mpi/cray_shasta), with this value.
        step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        if environ.get(_APPLICATION) == step:
            return False
        return bool(is_set(environ, self.rank_variable, _APPLICATION))

    def read(self, environ: Mapping[str, str]) -> Placement:
        rank = number(environ, self.rank_variable)
        local_rank = number(environ, self.local_rank_variable)
        local_size = number(environ, self.local_world_size_variable)
        if rank is None:
            raise LaunchError(
                f"pals: {_APPLICATION}={environ[_APPLICATION]} is set, but PALS_RANKID is not. "
                f"Start the script by mpiexec, or unset {_APPLICATION} too"
            )

        world_size = self._reported_world_size(environ, rank)
        if world_size is not None:
            return Placement(self.name, rank, world_size, local_rank, local_size)

        hosts = len(set(node_file(environ).split()))
        if not hosts or not local_size:
            raise LaunchError(
                f"pals: PALS_RANKID={rank}, but no variable holds the world size (PMI_SIZE and "
                "PBS_NODEFILE are missing). Pass it: mpiexec --env WORLD_SIZE=..."
            )
        world_size = local_size * hosts
        note = (
            f"world size {world_size} = PALS_LOCAL_SIZE {local_size} x {hosts} hosts of "
            "PBS_NODEFILE. Where hosts have different numbers of ranks, pass it: "
            "mpiexec --env WORLD_SIZE=..."
        )
        return Placement(self.name, rank, world_size, local_rank, local_size, (note,))

    def _reported_world_size(self, environ: Mapping[str, str], rank: int) -> int | None:
        if number(environ, "PMI_RANK") == rank and is_set(environ, "PMI_SIZE"):
            return number(environ, "PMI_SIZE")

        # WORLD_SIZE belongs to this launch if RANK is not set, or if all variables set with RANK
        # match. Otherwise it was inherited from another launch.
        pairs = {
            "RANK": self.rank_variable,
            "LOCAL_RANK": self.local_rank_variable,
            "LOCAL_WORLD_SIZE": self.local_world_size_variable,
        }
        matches = all(number(environ, one) == number(environ, two) for one, two in pairs.items())
        if is_set(environ, "RANK") and not matches:
            return None
        return number(environ, "WORLD_SIZE")

"""mpiexec of the MPICH family: MPICH, Intel MPI, MVAPICH2, and other programs that implement PMI-1.

Sources: mpiexec(1) of MPICH, the Intel MPI Developer Reference, the MVAPICH2 User Guide. Tested
with MPICH 4 and 5 and Intel MPI 2021; MVAPICH2 only against its documentation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..host import process
from ..launch_error import LaunchError
from .launcher import Launcher, Placement, is_set
from .name_service import NameService

# The processes, one on each host, that start the ranks. mpiexec itself is not one of them: a user's
# wrapper may have such a name.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "mpispawn")


class Hydra(Launcher):
    """What the launchers of this family share."""

    def identity(self, environ: Mapping[str, str], placement: Placement) -> str:
        found = super().identity(environ, placement)
        if found or not placement.on_one_host:
            return found
        # On one host all ranks descend from one proxy. No variable identifies the launch.
        for pid in process.parent_pids():
            if process.name(pid) in _PROXIES:
                started = process.start_time(pid)
                return f"{self.name}:{os.uname().nodename}:{pid}:{started}"
        return ""

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        from .pmi import PublishedNames

        return PublishedNames(environ)


class MPICH(Hydra):
    """MPICH's mpiexec, called Hydra."""

    name = "mpich"
    rank_variable = "PMI_RANK"
    world_size_variable = "PMI_SIZE"
    local_rank_variable = "MPI_LOCALRANKID"
    local_world_size_variable = "MPI_LOCALNRANKS"
    marker_variables: tuple[str, ...] = ("PMI_FD", "PMI_ID", "PMI_PORT")
    parent_programs = ("hydra_pmi_proxy", "mpirun*", "mpiexec*")
    mpi_libraries: tuple[str, ...] = ("MPICH", "CRAY MPICH", "MVAPICH")

    def is_present(self, environ: Mapping[str, str]) -> bool:
        # srun --mpi=pmi2, Flux and PALS set PMI_RANK, too, but not these.
        return bool(is_set(environ, self.local_rank_variable, self.local_world_size_variable))

    def read(self, environ: Mapping[str, str]) -> Placement:
        if is_set(environ, "PMI_PORT") and not is_set(environ, "PMI_RANK", "PMI_SIZE"):
            raise LaunchError(
                f"{self.name}: PMI_PORT is set, but PMI_RANK and PMI_SIZE are not, as with "
                "mpiexec -pmi-port. Start again without -pmi-port"
            )
        return super().read(environ)


class IntelMPI(MPICH):
    """Intel's version of Hydra, which sets MPICH's variables and more."""

    name = "intel-mpi"
    marker_variables = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST")
    identity_variables = ("I_MPI_HYDRA_UUID",)
    also_sets = ("mpich",)
    mpi_libraries = ("Intel", "MPICH")

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, *self.marker_variables)) and super().is_present(environ)

    def is_parent(self, command: str) -> bool:
        # "hydra_pmi_proxy --control-port h1:45027 ..." is MPICH's; Intel's has no such option.
        return super().is_parent(command) and "--control-port" not in command


class PMI(Hydra):
    """A process manager that sets the variables of PMI-1 and none of its own."""

    name = "mpich"
    rank_variable = "PMI_RANK"
    world_size_variable = "PMI_SIZE"
    local_rank_variable = "PMI_LOCAL_RANK"
    local_world_size_variable = "PMI_LOCAL_SIZE"
    parent_programs = ("mpispawn", "pmi_proxy", "mpirun*", "mpiexec*")
    mpi_libraries = MPICH.mpi_libraries

    def is_present(self, environ: Mapping[str, str]) -> bool:
        # To start a single process from a rank, people unset these two and leave the others.
        return bool(is_set(environ, self.rank_variable, self.world_size_variable))


class MVAPICH(Hydra):
    """MVAPICH2 by mpirun_rsh or its Hydra, which set MPICH's variables as well."""

    name = "mvapich"
    rank_variable = "MV2_COMM_WORLD_RANK"
    world_size_variable = "MV2_COMM_WORLD_SIZE"
    local_rank_variable = "MV2_COMM_WORLD_LOCAL_RANK"
    local_world_size_variable = "MV2_COMM_WORLD_LOCAL_SIZE"
    parent_programs = ("mpispawn", "hydra_pmi_proxy", "mpirun*", "mpiexec*")
    also_sets = ("mpich",)
    mpi_libraries = ("MVAPICH", "MPICH")

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        if not environ.get("PMI_FD"):
            return None
        from .pmi import KeyValueSpace  # mpirun_rsh does not publish names

        return KeyValueSpace(environ)

"""mpiexec and mpirun of Open MPI 4 (ORTE) and 5 (PRRTE).

Source: mpirun(1), "Environment variables". Tested with Open MPI 4.1 and 5.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from .launcher import Launcher
from .name_service import NameService


class OpenMPI(Launcher):
    """A daemon on each host, orted or prted, is the parent of the ranks."""

    name = "openmpi"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    world_size_variable = "OMPI_COMM_WORLD_SIZE"
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_world_size_variable = "OMPI_COMM_WORLD_LOCAL_SIZE"
    marker_variables = ("PMIX_NAMESPACE", "PMIX_RANK")
    # PMIX_NAMESPACE is "prterun-h1-4711@1" in version 5 and a number in version 4.
    identity_variables = ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports")
    parent_programs = ("prted", "orted", "prterun", "orterun", "mpirun*", "mpiexec*")
    mpi_libraries = ("Open MPI",)

    def name_service(self, environ: Mapping[str, str]) -> NameService:
        from .pmix import connect  # imports ctypes, which few processes need

        # Set by version 5 only.
        return connect(in_child=bool(environ.get("PRTE_LAUNCHED")))

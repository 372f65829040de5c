"""The launchers of MPICH, Intel MPI, Open MPI and HPE PALS (mpiexec); Flux; submitit.

Sources: mpiexec(1) of MPICH and of PALS, the Intel MPI Developer Reference, mpirun(1) of Open MPI,
flux-environment(7), submitit/local/local.py. PALS and Flux are tested only against the
documentation. MVAPICH2 sets PMI-1's variables and is detected as MPICH.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import LaunchError
from ..host import process
from .launcher import Launcher, NameService, Placement, is_set, node_file, number

# One process on each host starts the ranks. mpiexec itself is left out, because a user's wrapper
# may have such a name.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "mpispawn")


class Hydra(Launcher):
    """Shared by the launchers of the Hydra family."""

    def identity(self, environ: Mapping[str, str], placement: Placement) -> str:
        found = super().identity(environ, placement)
        if found or not placement.on_one_host:
            return found
        # All ranks on one host descend from one proxy. No variable identifies the launch.
        proxies = (pid for pid in process.parent_pids() if process.name(pid) in _PROXIES)
        pid = next(proxies, None)
        return f"{self.name}:{os.uname().nodename}:{pid}:{process.start_time(pid)}" if pid else ""

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        from .pmi import PublishedNames

        return PublishedNames(environ)


class MPICH(Hydra):
    """MPICH's mpiexec, called Hydra."""

    name = "mpich"
    command = "mpiexec (MPICH)"
    rank_variable = "PMI_RANK"
    world_size_variable = "PMI_SIZE"
    local_rank_variable = "MPI_LOCALRANKID"
    local_world_size_variable = "MPI_LOCALNRANKS"
    marker_variables: tuple[str, ...] = ("PMI_FD", "PMI_ID", "PMI_PORT")
    parent_programs = ("hydra_pmi_proxy", "mpirun*", "mpiexec*")
    mpi_libraries: tuple[str, ...] = ("MPICH", "CRAY MPICH", "MVAPICH")

    def is_present(self, environ: Mapping[str, str]) -> bool:
        # srun --mpi=pmi2, Flux and PALS also set PMI_RANK, but not these.
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
    command = "mpiexec (Intel MPI)"
    marker_variables = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST")
    identity_variables = ("I_MPI_HYDRA_UUID",)
    also_sets = ("mpich",)
    mpi_libraries = ("Intel", "MPICH")

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, *self.marker_variables)) and super().is_present(environ)

    def is_parent(self, command: str) -> bool:
        # MPICH's command is "hydra_pmi_proxy --control-port h1:45027 ..."; Intel's has no such
        # option.
        return super().is_parent(command) and "--control-port" not in command


class PMI(Hydra):
    """A process manager that sets PMI-1's variables and none of its own."""

    name = "mpich"
    command = "mpiexec (PMI)"
    rank_variable = "PMI_RANK"
    world_size_variable = "PMI_SIZE"
    local_rank_variable = "PMI_LOCAL_RANK"
    local_world_size_variable = "PMI_LOCAL_SIZE"
    parent_programs = ("mpispawn", "pmi_proxy", "mpirun*", "mpiexec*")
    mpi_libraries = MPICH.mpi_libraries

    def is_present(self, environ: Mapping[str, str]) -> bool:
        # To start a single process from a rank, people unset these two variables only.
        return bool(is_set(environ, self.rank_variable, self.world_size_variable))


_SLURM_NODES = "SLURM_JOB_NODELIST"


class OpenMPI(Launcher):
    """orted or prted, a daemon on each host, is the parent of the ranks."""

    name = "openmpi"
    command = "mpirun (Open MPI)"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    world_size_variable = "OMPI_COMM_WORLD_SIZE"
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_world_size_variable = "OMPI_COMM_WORLD_LOCAL_SIZE"
    marker_variables = ("PMIX_NAMESPACE", "PMIX_RANK")
    # PMIX_NAMESPACE is "prterun-h1-4711@1" in version 5 and a number in version 4.
    identity_variables = ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports")
    parent_programs = ("prted", "orted", "prterun", "orterun", "mpirun*", "mpiexec*")
    mpi_libraries = ("Open MPI",)
    export_hint = " (mpiexec -x MASTER_ADDR -x MASTER_PORT), or install mpi4py for this Open MPI"

    def candidate_hosts(self, environ: Mapping[str, str]) -> tuple[list[str], str]:
        if not self.all_have_hosts(environ):
            return super().candidate_hosts(environ)
        from ..job.slurm_job import expand_hostlist

        try:
            return expand_hostlist(environ[_SLURM_NODES]), _SLURM_NODES
        except ValueError as error:
            raise LaunchError(f"{_SLURM_NODES}: {error}") from None

    def all_have_hosts(self, environ: Mapping[str, str]) -> bool:
        # In a Slurm job, its daemons are a step. In a PBS job, only the first host has the node
        # file.
        return bool(is_set(environ, _SLURM_NODES))


_APPLICATION = "PALS_APID"  # "7b6dd8f0-6c30-4d4c-9f1c-0a8e5b1f3e52", another one for each mpiexec


class PALS(Launcher):
    """palsd on each host starts the ranks. It sets no variable for the world size.

    The size comes from cray-pmi's PMI_SIZE, from a WORLD_SIZE set by the user, or from the node
    file.
    """

    name = "pals"
    command = "mpiexec (PALS)"
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
        # On a Cray, srun sets PALS variables, too (Slurm's mpi/cray_shasta), with this value.
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

        world_size = None
        if number(environ, "PMI_RANK") == rank:
            world_size = number(environ, "PMI_SIZE")
        # WORLD_SIZE belongs to this launch if RANK is not set, or if all variables set with RANK
        # match. Otherwise it is inherited from another launch.
        by_hand = [number(environ, name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        matches = not is_set(environ, "RANK") or by_hand == [rank, local_rank, local_size]
        if world_size is None and matches:
            world_size = number(environ, "WORLD_SIZE")
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


class Flux(Launcher):
    """flux-shell on each host is the parent of the tasks, the ranks."""

    name = "flux"
    command = "flux run"
    rank_variable = "FLUX_TASK_RANK"
    world_size_variable = "FLUX_JOB_SIZE"
    local_rank_variable = "FLUX_TASK_LOCAL_ID"
    job_variables = ("FLUX_JOB_NNODES",)
    identity_variables = ("FLUX_JOB_ID",)  # "f2ZzXqGWZfD"
    parent_programs = ("flux-shell",)
    also_sets = ("mpich",)
    mpi_libraries = ("",)  # programs of any MPI library

    def read(self, environ: Mapping[str, str]) -> Placement:
        placement = super().read(environ)
        tasks, nodes = placement.world_size, number(environ, "FLUX_JOB_NNODES")
        # No variable has the number of this node's tasks. With one node, or one task per node, it
        # is known.
        if nodes and nodes in (1, tasks):
            return placement.replace(local_world_size=tasks // nodes)
        return placement

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        from .pmi import KeyValueSpace  # Flux has no name service of its own

        return KeyValueSpace(environ) if environ.get("PMI_FD") else None


class Submitit(Launcher):
    """A controller process, python -m submitit.local._local, is the parent of the tasks."""

    name = "submitit"
    rank_variable = "SUBMITIT_LOCAL_GLOBALID"
    world_size_variable = "SUBMITIT_LOCAL_NTASKS"
    local_rank_variable = "SUBMITIT_LOCAL_LOCALID"
    local_world_size_variable = "SUBMITIT_LOCAL_NTASKS"  # all tasks are on one host
    marker_variables = ("SUBMITIT_LOCAL_JOB_ID",)
    identity_variables = ("SUBMITIT_LOCAL_JOB_ID",)  # "4711": process id of the controller

    def is_parent(self, command: str) -> bool:
        return "submitit.local" in command

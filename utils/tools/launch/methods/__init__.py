"""The ways to start processes on the hosts of a job: one class each, with its command line.

A class also knows how a stop signal reaches the ranks, what the exit status and error messages
mean, and what environment its command needs. choose() picks one.
"""

from __future__ import annotations

from ...schedulers.allocation import Allocation
from ..launch_plan import HostInfo, Method, PlanError, index_of, job_name
from .agents import Local, Pbsdsh, PbsTmrsh, Ssh
from .mpiexec import IntelMpi, Mpich, MpiexecMethod, OpenMpi, Pals
from .srun import Srun

# In the order in which their patterns are compared with the output of `mpiexec --version`.
MPIEXECS: tuple[type[MpiexecMethod], ...] = (Pals, OpenMpi, IntelMpi, Mpich)
_BY_NAME: dict[str, type[Method]] = {
    method.name: method for method in (Srun, MpiexecMethod, PbsTmrsh, Pbsdsh, Ssh, Local)
}
NAMES = tuple(_BY_NAME)  # what --launcher can be, besides "auto" and the path of an mpiexec


def choose(
    name: str, allocation: Allocation | None, host_info: HostInfo, hosts: tuple[str, ...]
) -> Method:
    """Choose the method for these hosts of a job. PlanError where it cannot be used.

    name: one of NAMES, or "auto" for the best available one.
    """
    method = _best(allocation, host_info, hosts) if name == "auto" else _BY_NAME[name]
    if method is Local:
        return Local("")
    name = method.name
    if allocation is None:
        raise PlanError(
            f"--launcher {name} needs an allocation, but this process is in no job of PBS or "
            "Slurm. Start it in a job (sbatch, salloc, qsub, qsub -I), or leave --launcher out to "
            "use this host alone"
        )
    if method.scheduler not in ("", allocation.scheduler):
        raise PlanError(
            f"--launcher {name} was given in {job_name(allocation)}, where {name} cannot start "
            "anything. Leave --launcher out"
        )
    if issubclass(method, MpiexecMethod):
        found = host_info.programs.mpiexec
        if found is None:
            titles = ", ".join(each.title for each in MPIEXECS)
            raise PlanError(
                f"no mpiexec of {titles} is on PATH. Load the module of one, or leave --launcher "
                "out"
            )
        return found.method(found.path)
    path = host_info.programs.find(name)
    if path is None:
        raise PlanError(
            f"{name} was not found on PATH, and is needed to start ranks on {len(hosts)} hosts of "
            f"{job_name(allocation)}. Add its folder to PATH, or choose another --launcher"
        )
    return method(path)


def _best(
    allocation: Allocation | None, host_info: HostInfo, hosts: tuple[str, ...]
) -> type[Method]:
    if allocation is None:
        return Local
    programs = host_info.programs
    only_this_host = len(hosts) == 1 and index_of(host_info.name, hosts) is not None

    if allocation.scheduler == "slurm":
        if programs.find(Srun.name):
            return Srun
        if only_this_host:
            return Local
        return Ssh if programs.find(Ssh.name) else Srun

    if programs.pals is not None:
        return MpiexecMethod  # other launchers cannot set up the network of a Cray
    if only_this_host:
        return Local
    # Agents come before other mpiexecs: Hydra does not end the other ranks when one fails, and
    # Open MPI leaves them no time after a stop.
    for method in (PbsTmrsh, Pbsdsh, Ssh):
        if programs.find(method.name):
            return method
    return MpiexecMethod

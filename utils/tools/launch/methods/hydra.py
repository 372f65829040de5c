"""Hydra, the mpiexec of MPICH and of Intel MPI. Source: mpiexec.hydra(1) of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ....host.gpus import MASKS
from ..launch_plan import HOST_FILE, REMOTE_SHELL, Plan, PlanError, Request
from .native_launcher import MpiexecMethod, labels_output


class Mpich(MpiexecMethod):
    """MPICH's Hydra, and what Intel's has in common with it."""

    title = "MPICH"
    version_pattern = r"HYDRA build details"
    host_file_option: ClassVar[str] = "-f"  # MPICH has no -machinefile of its own

    def configure_in_pbs(self, request: Request) -> None:
        super().configure_in_pbs(request)
        allocation = request.allocation
        assert allocation is not None
        slots = allocation.ranks_per_host
        first = next((index for index, count in enumerate(slots) if count), 0)
        # qstat reports no cores for names that only the node file has, of hosts that it knows too.
        known = allocation.cores_per_host[first] is not None
        used = allocation.hosts[first] in request.hosts
        if first and self.remote_shell and known and used:
            raise PlanError(
                f"{allocation.hosts[0]} has no slot of PBS job {allocation.job_id} (mpiprocs=0). "
                f"OpenPBS never informs it of the end of a task on {allocation.hosts[first]}: this "
                "mpiexec would wait for ever. Request mpiprocs=1 or more on "
                f"{allocation.hosts[0]}, or choose --launcher pbs_tmrsh"
            )

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        return [self.path, *self._options(plan), *words]

    def _options(self, plan: Plan) -> Iterator[str]:
        if self.remote_shell:
            yield from ("-launcher", "ssh", "-launcher-exec", REMOTE_SHELL)
        elif self.in_slurm:
            yield from ("-launcher", "slurm")
        if self.hosts_have_own_masks and not set(MASKS).isdisjoint(plan.environ):
            # Without a list Hydra passes on all variables, the mask of this host included.
            yield from ("-genvlist", ",".join(self.variables_to_pass_on(plan)))
        if labels_output(plan):
            yield "-prepend-rank"
        yield from self.binding_options(plan)
        yield from (self.host_file_option, HOST_FILE, "-n", str(sum(plan.processes)))

    def binding_options(self, plan: Plan) -> Sequence[str]:
        """Return what keeps this mpiexec from binding its processes to cores."""
        return ()


class IntelMpi(Mpich):
    """Intel MPI's Hydra."""

    title = "Intel MPI"
    version_pattern = r"Intel\(R\) MPI"
    host_file_option = "-machinefile"  # its -f lists hosts without numbers of ranks

    def binding_options(self, plan: Plan) -> Sequence[str]:
        chosen_by_user = any(name.startswith("I_MPI_PIN") for name in plan.environ)
        if chosen_by_user and not plan.options.torchrun:
            return ()
        return ("-genv", "I_MPI_PIN", "off")

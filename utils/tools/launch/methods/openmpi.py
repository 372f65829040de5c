"""Open MPI's mpiexec. Source: mpiexec(1) of Open MPI 4 and 5, prte(1)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

from .. import remote_shell
from ..child_processes import Processes
from ..hosts import index_of
from ..launch_plan import HOST_FILE, Plan, PlanError, Request
from .native_launcher import MpiexecMethod, labels_output


class OpenMpi(MpiexecMethod):
    """Open MPI: version 5 starts its daemons with PRRTE, older versions with ORTE."""

    title = "Open MPI"
    version_pattern = r"\((Open MPI|OpenRTE|PRRTE)\)|\bPRRTE\b|Open MPI"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._is_new = False  # version 5 or later, which has other names for options
        self._other_srun = False
        self._is_root = False

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        mpiexec = request.host_info.programs.mpiexec
        assert mpiexec is not None
        self._is_new = mpiexec.major >= 5
        self._other_srun = mpiexec.other_srun
        self._is_root = request.host_info.is_root
        return super().configure(request, environ)

    def configure_in_slurm(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        if any(request.gpus):
            # Its srun leaves this host out, where mpiexec itself is the daemon.
            environ.pop("SLURM_GPUS", None)
        environ = super().configure_in_slurm(request, environ)
        if self.components:
            return environ

        # Open MPI starts no more processes on a host than SLURM_TASKS_PER_NODE allows.
        assert request.allocation is not None
        slots = dict(zip(request.hosts, request.processes, strict=True))
        counts = [slots.get(host, 1) for host in request.allocation.hosts]
        environ["SLURM_TASKS_PER_NODE"] = ",".join(map(str, counts))

        folder = os.path.dirname(self.path)
        path = environ.get("PATH", os.defpath)
        if self._other_srun and folder not in path.split(os.pathsep):
            environ["PATH"] = f"{path}{os.pathsep}{folder}"
        return environ

    def gpus_of_daemons(self, request: Request) -> Sequence[int]:
        index = index_of(request.host_info.name, request.hosts)
        return [count for host, count in enumerate(self.gpus_to_claim) if host != index]

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        return [self.path, *self._options(plan), *words]

    def _options(self, plan: Plan) -> Iterator[str]:
        if self._is_root:
            yield "--allow-run-as-root"
        if self.remote_shell:
            yield from self._remote_shell_options(plan)
        elif self.in_slurm and self._other_srun:
            yield "--noprefix"  # otherwise it puts its folder before PATH and uses the srun there
        if labels_output(plan):
            yield from ("--output", "tag") if self._is_new else ("--tag-output",)
        yield from ("--bind-to", "none", "--hostfile", HOST_FILE)
        for name in self.variables_to_pass_on(plan):
            yield from ("-x", name)
        yield from ("-n", str(sum(plan.processes)))

    def _remote_shell_options(self, plan: Plan) -> Iterator[str]:
        option, shell = ("--prtemca", "ssh") if self._is_new else ("--mca", "rsh")
        agent = remote_shell.words(plan.python)  # a script would have to exist on every host
        if " " in agent[0]:
            raise PlanError(
                f"the path of Python, {agent[0]}, has a space, where Open MPI would split it. Set "
                "PYTHON to one without, or choose --launcher pbs_tmrsh"
            )
        yield from (option, "ras", "^slurm,tm,pbs")  # the job's slots may be fewer
        yield from (option, "plm", shell)
        yield from (option, f"plm_{shell}_agent", " ".join(agent))
        # Without the tree only this host needs the remote shell.
        yield from (option, f"plm_{shell}_no_tree_spawn", "1")
        yield "--leave-session-attached"  # PBS may end what has left the session it started

    def host_file(self, plan: Plan) -> str:
        return "".join(
            f"{host} slots={count}\n"
            for host, count in zip(plan.hosts, plan.processes, strict=True)
        )

    def send_signal(self, number: int, pid: int, plan: Plan, processes: Processes) -> None:
        """Pass SIGTERM on as SIGUSR1: at SIGTERM Open MPI kills the ranks after 1 to 4 seconds."""
        processes.signal(signal.SIGUSR1 if number == signal.SIGTERM else number)

"""Start the processes of all hosts with one command: what the native launchers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from ....host.gpus import MASKS
from ....job.slurm_job import components
from .. import remote_shell
from ..launch_plan import AgentStart, Method, Plan, Request
from .srun_environment import daemon_variables, step_environment

# Valid on one host only: an mpiexec must not carry these to others.
_HOST_VARIABLES = {
    "HOSTNAME",
    "HOST",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "TMPDIR",
    "DISPLAY",
    "XDG_RUNTIME_DIR",
}
_HOST_PREFIXES = (
    "SSH_",
    "PBS_",
    "SLURM",
    "XDG_SESSION",
    "BASH_FUNC_",
    "OMPI_",
    "PMIX_",
    "PRTE_",
)


class NativeMethod(Method):
    """One command, srun or an mpiexec, starts the ranks or one agent on each host."""

    is_native_launcher = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # Slurm: the hosts of each component of a heterogeneous job.
        self.components: tuple[tuple[str, ...], ...] = ()
        # Slurm: GPUs of each host, where a step does not get them unless it requests them.
        self.gpus_to_claim: tuple[int, ...] = ()

    def take_requests(
        self, request: Request, environ: Mapping[str, str], *, keep_task_requests: bool
    ) -> dict[str, str]:
        """Note what a step of this Slurm job has to request; return the environment for srun."""
        self.components = components(request.environ)
        environ, self.gpus_to_claim = step_environment(
            request, environ, keep_task_requests=keep_task_requests
        )
        return environ

    def gpus_of_components(self) -> list[int]:
        """Return the GPUs that a step on one host of each component has to request."""
        ends = itertools.accumulate(map(len, self.components))
        return [
            equal(self.gpus_to_claim[end - len(hosts) : end])
            for end, hosts in zip(ends, self.components, strict=True)
        ]

    def agent_starts(
        self, plan: Plan, agent: Callable[[str], list[str]], secret: Mapping[str, str]
    ) -> list[AgentStart]:
        environ = {**plan.environ, **secret}
        # The command may list the names of the variables to pass on.
        words = self.command(plan._replace(environ=environ), agent("rank"))
        return [AgentStart(words, tuple(range(len(plan.hosts))), environ, by_native_launcher=True)]


class MpiexecMethod(NativeMethod):
    """One mpiexec starts the ranks or one agent on each host."""

    name = "mpiexec"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.remote_shell = ""  # path of pbs_tmrsh or srun, to be used instead of ssh
        self.in_slurm = False

    def describe(self) -> str:
        return f"by {self.title}'s mpiexec"

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        assert request.allocation is not None
        if request.allocation.scheduler == "slurm":
            return self.configure_in_slurm(request, environ)
        self.configure_in_pbs(request)
        return environ

    def configure_in_slurm(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        """Prepare the environment for the srun by which this mpiexec starts its daemons."""
        self.in_slurm = True
        environ = self.take_requests(request, environ, keep_task_requests=False)
        if self.components:  # its own srun would reach the first component only
            self.remote_shell = request.host_info.programs.find("srun") or ""
            return environ
        return environ | daemon_variables(request.environ, self.gpus_of_daemons(request))

    def configure_in_pbs(self, request: Request) -> None:
        self.remote_shell = request.host_info.programs.find("pbs_tmrsh") or ""

    def gpus_of_daemons(self, request: Request) -> Sequence[int]:
        """Return the GPUs that the step of the daemons has to request on each host."""
        return self.gpus_to_claim

    def variables(self, plan: Plan) -> dict[str, str]:
        if not self.remote_shell:
            return {}
        code = remote_shell.code(self.remote_shell, self.gpus_of_components())
        return {remote_shell.VARIABLE: code}

    @property
    def hosts_have_own_masks(self) -> bool:
        """Whether the daemon of each host gets that host's own GPU mask from the scheduler."""
        return self.in_slurm or bool(self.remote_shell)

    def variables_to_pass_on(self, plan: Plan) -> list[str]:
        """Return the names of the variables that have the same value on every host."""
        masks = MASKS if self.hosts_have_own_masks else ()
        return [
            name
            for name in sorted(plan.environ)
            if name not in masks
            and name not in _HOST_VARIABLES
            and not name.startswith(_HOST_PREFIXES)
        ]


def labels_output(plan: Plan) -> bool:
    """Return whether the native launcher is to put the rank before each line of output."""
    return plan.options.label and plan.native_launcher_starts_ranks


def equal(numbers: Sequence[int]) -> int:
    """Return the number that all of them are; 0 where they differ."""
    return numbers[0] if len(set(numbers)) == 1 else 0

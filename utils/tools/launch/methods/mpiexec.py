"""The mpiexec of Open MPI, MPICH, Intel MPI and PALS.

Source: mpiexec(1) of Open MPI 4 and 5, of PALS, prte(1), mpiexec.hydra(1) of MPICH and Intel MPI.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import ClassVar

from ....host.masks import MASKS
from .. import remote_shell
from ..child_processes import Processes
from ..launch_plan import HOST_FILE, REMOTE_SHELL, Plan, PlanError, Request, index_of
from .srun import MEMORY_REQUESTS, NativeMethod, daemon_variables

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


class MpiexecMethod(NativeMethod):
    """One mpiexec starts the ranks or one agent on each host."""

    name = "mpiexec"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.remote_shell = ""  # path of pbs_tmrsh, to be used instead of ssh
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
        environ = self.step_environment(request, environ, keep_task_requests=False)
        gpus, restarted = self.gpus_of_daemons(request), request.options.restarted
        found = daemon_variables(request.environ, gpus, restarted=restarted)
        if "SLURM_MEM_PER_NODE" in found:
            environ = {name: environ[name] for name in environ if name not in MEMORY_REQUESTS}
        return environ | found

    def configure_in_pbs(self, request: Request) -> None:
        self.remote_shell = request.host_info.programs.find("pbs_tmrsh") or ""

    def gpus_of_daemons(self, request: Request) -> Sequence[int]:
        """Return the GPUs that the step of the daemons has to request on each host."""
        return self.gpus_to_claim

    def variables(self, plan: Plan) -> dict[str, str]:
        if not self.remote_shell:
            return {}
        return {remote_shell.VARIABLE: remote_shell.code(self.remote_shell)}

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


class Mpich(MpiexecMethod):
    """MPICH's Hydra, and what it shares with Intel MPI's."""

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
        used = allocation.hosts[first] in request.hosts.names
        if first and self.remote_shell and known and used:
            raise PlanError(
                f"{allocation.hosts[0]} has no slot of PBS job {allocation.job_id} (mpiprocs=0). "
                f"OpenPBS never informs it of the end of a task on {allocation.hosts[first]}: this "
                "mpiexec would wait for ever. Request mpiprocs=1 or more on "
                f"{allocation.hosts[0]}, or choose --launcher pbs_tmrsh"
            )

    def options(self, plan: Plan) -> Iterator[str]:
        if self.remote_shell:
            yield from ("-launcher", "ssh", "-launcher-exec", REMOTE_SHELL)
        elif self.in_slurm:
            yield from ("-launcher", "slurm")
        if self.hosts_have_own_masks and not set(MASKS).isdisjoint(plan.environ):
            # Without a list Hydra passes on all variables, the mask of this host included.
            yield from ("-genvlist", ",".join(self.variables_to_pass_on(plan)))
        if plan.launcher_labels_output:
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


class OpenMpi(MpiexecMethod):
    """Open MPI: version 5 starts its daemons with PRRTE, older versions with ORTE."""

    title = "Open MPI"
    reports_errors = True
    version_pattern = r"\((Open MPI|OpenRTE|PRRTE)\)|\bPRRTE\b|Open MPI"

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        mpiexec = request.host_info.programs.mpiexec
        assert mpiexec is not None
        self._is_new = mpiexec.major >= 5  # version 5 has renamed options
        self._other_srun = mpiexec.other_srun
        self._is_root = request.host_info.is_root
        return super().configure(request, environ)

    def configure_in_slurm(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        if any(request.hosts.gpus):
            # Its srun leaves this host out: mpiexec itself is the daemon here.
            environ.pop("SLURM_GPUS", None)
        environ = super().configure_in_slurm(request, environ)
        # Open MPI starts no more processes on a host than SLURM_TASKS_PER_NODE allows.
        assert request.allocation is not None
        slots = dict(zip(request.hosts.names, request.hosts.ranks, strict=True))
        slots = {} if request.options.torchrun else slots  # one agent on each host
        counts = [slots.get(host, 1) for host in request.allocation.hosts]
        environ["SLURM_TASKS_PER_NODE"] = ",".join(map(str, counts))

        folder = os.path.dirname(self.path)
        path = environ.get("PATH", os.defpath)
        if self._other_srun and folder not in path.split(os.pathsep):
            environ["PATH"] = f"{path}{os.pathsep}{folder}"
        return environ

    def gpus_of_daemons(self, request: Request) -> Sequence[int]:
        index = index_of(request.host_info.name, request.hosts.names)
        return [count for host, count in enumerate(self.gpus_to_claim) if host != index]

    def options(self, plan: Plan) -> Iterator[str]:
        if self._is_root:
            yield "--allow-run-as-root"
        if self.remote_shell:
            yield from self._remote_shell_options(plan)
        elif self.in_slurm and self._other_srun:
            yield "--noprefix"  # otherwise its folder comes first in PATH, with its srun
        if plan.launcher_labels_output:
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
        yield from (option, "ras", "^slurm,tm,pbs")  # the job may have fewer slots than ranks
        yield from (option, "plm", shell)
        yield from (option, f"plm_{shell}_agent", " ".join(agent))
        # Without the tree only this host needs the remote shell.
        yield from (option, f"plm_{shell}_no_tree_spawn", "1")
        yield "--leave-session-attached"  # PBS may end processes that leave its session

    def host_file(self, plan: Plan) -> str:
        return "".join(
            f"{host} slots={count}\n"
            for host, count in zip(plan.hosts, plan.processes, strict=True)
        )

    def send_signal(self, number: int, pid: int, plan: Plan, processes: Processes) -> None:
        """Pass SIGTERM on as SIGUSR1: at SIGTERM Open MPI kills the ranks after 1 to 4 seconds."""
        processes.signal(signal.SIGUSR1 if number == signal.SIGTERM else number)


class Pals(MpiexecMethod):
    """Only PALS gives its ranks the keys to the Slingshot network of a Cray."""

    title = "PALS"
    reports_errors = True
    version_pattern = r"\bPALS\b|\bpals\b"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._reads_node_file = False  # the node file lists exactly the hosts of the plan

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        environ = super().configure(request, environ)
        if not request.options.torchrun:
            environ["WORLD_SIZE"] = str(
                sum(request.hosts.ranks)
            )  # PALS itself does not always set it
        return environ

    def configure_in_pbs(self, request: Request) -> None:
        assert request.allocation is not None
        slots = zip(request.allocation.hosts, request.allocation.ranks_per_host, strict=True)
        listed = tuple(host for host, count in slots if count)
        self._reads_node_file = (
            bool(request.environ.get("PBS_NODEFILE")) and listed == request.hosts.names
        )

    def options(self, plan: Plan) -> Iterator[str]:
        counts = plan.processes
        if len(set(counts)) > 1:
            raise PlanError(
                f"the hosts have different numbers of ranks ({', '.join(map(str, counts))}), and "
                "PALS starts the same number on every host. Give --ntasks-per-node, or choose "
                "--launcher pbs_tmrsh or --torchrun"
            )
        yield from ("-n", str(sum(counts)), "--ppn", str(counts[0]))
        if plan.launcher_labels_output:
            yield "--label"
        if not self._reads_node_file:
            yield from ("--hosts", ",".join(plan.hosts))

        # The kit binds the ranks. PALS would count CPUs from 0, across sockets, whatever the GPUs.
        yield from ("--cpu-bind", "none")

"""srun: its command line and environment, also below an mpiexec; how it passes on signals.

Source: srun(1), scancel(1), scontrol(1).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from ....host.masks import MASKS
from ....job.commands import SchedulerError, run_command
from ....job.slurm_job import in_step
from ..child_processes import Processes
from ..launch_plan import HOST_FILE, AgentStart, Method, Plan, Request, index_of

_QUERY_SECONDS = 10.0  # time limit of scontrol and scancel


# Requests for the job's own tasks, and the binding of an outer step. They apply to nothing else.
TASK_REQUESTS = (
    "SLURM_GPU_BIND",
    "SLURM_TRES_BIND",
    "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
    "SLURM_DISTRIBUTION",
    "SLURM_DIST_PLANESIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
)
GPU_REQUESTS = (
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPUS_PER_SOCKET",
)


# A step requests no memory if another step of its job runs: that one holds all of it.
MEMORY_REQUESTS = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU")


class NativeMethod(Method):
    """One command, srun or an mpiexec, starts the ranks or one agent on each host."""

    is_native_launcher = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # Slurm: GPUs of each host, if a step has to request them to get them.
        self.gpus_to_claim: tuple[int, ...] = ()

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        return [self.path, *self.options(plan), *words]

    def options(self, plan: Plan) -> Iterator[str]:
        """Yield the options of the command."""
        raise NotImplementedError

    def step_environment(
        self, request: Request, environ: Mapping[str, str], *, keep_task_requests: bool
    ) -> dict[str, str]:
        """Return the variables for the srun of a step of this job; note the GPUs to request.

        srun takes the options of sbatch and salloc from the environment (srun(1), INPUT ENVIRONMENT
        VARIABLES), even if the step starts other tasks than the job requested.
        keep_task_requests: whether the step starts the same tasks that the job requested.
        """
        found = dict(environ)
        if not keep_task_requests:
            found = {name: value for name, value in environ.items() if name not in TASK_REQUESTS}
        # TRES_PER_TASK may be about cores.
        requested = any(map(found.get, GPU_REQUESTS))
        if not requested and "gpu" not in found.get("SLURM_TRES_PER_TASK", ""):
            self.gpus_to_claim = tuple(count or 0 for count in request.hosts.gpus)
        return found

    def agent_starts(
        self,
        plan: Plan,
        agent: Callable[[str], list[str]],
        secret: Mapping[str, str],
        environ: str = "",
    ) -> list[AgentStart]:
        variables = {**plan.environ, **secret}
        # The command may list the names of the variables to pass on.
        words = self.command(plan._replace(environ=variables), agent("rank"))
        return [AgentStart(words, tuple(range(len(plan.hosts))), variables)]


class Srun(NativeMethod):
    """srun starts the ranks, or one agent on each host, as a step of a Slurm job."""

    name = title = "srun"
    scheduler = "slurm"
    reports_errors = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._as_requested = False  # the job requested these same tasks, in any order
        self._inside_step = False  # we run in a step of this job, which holds its resources
        self._partial = False  # other hosts of the job are left out
        self._overlaps = False  # another step of this job holds its cores, GPUs and memory

    @property
    def keeps_job_layout(self) -> bool:
        return self._as_requested

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        assert request.allocation is not None
        options = request.options
        self._partial = request.hosts.partial
        self._inside_step = in_step(request.environ)
        # Slurm keeps the previous step until a lost host has responded.
        self._overlaps = self._inside_step or options.restarted
        self._as_requested = (
            request.hosts.ranks == request.allocation.ranks_per_host
            and options.ntasks is None
            and options.ranks_per_node is None
            and not options.torchrun
            and not self._inside_step
            and request.environ.get("SLURM_NTASKS", "") == str(sum(request.hosts.ranks))
        )

        binding = environ.get("SLURM_CPU_BIND")  # set by the user, or left by an outer step
        environ = self.step_environment(request, environ, keep_task_requests=self._as_requested)
        if self._overlaps:
            environ = {name: environ[name] for name in environ if name not in MEMORY_REQUESTS}
        if binding and not self._inside_step and not options.torchrun:
            environ["SLURM_CPU_BIND"] = binding
        if not self._as_requested:
            if all(_shares(request.hosts.cores, request.hosts.ranks)):
                # --cpus-per-task is given. srun 26.05 warns if it exceeds the variable.
                environ.pop("SLURM_CPUS_PER_TASK", None)
            # Where --nodes cannot be given, srun takes the number of hosts from here.
            count = str(len(request.hosts.names))
            environ |= {"SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count}
        return environ

    def options(self, plan: Plan) -> Iterator[str]:
        if plan.launcher_labels_output:
            yield "--label"
        if plan.options.input:
            yield "--input=0"  # otherwise every rank reads it
        yield "--kill-on-bad-exit=1"  # otherwise the other ranks wait for the one that failed
        if not plan.environ.get("SLURM_CPU_BIND"):
            yield "--cpu-bind=none"  # the kit binds the ranks, within the cores of the job
        if plan.environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
            yield "--export=ALL"

        shares = _shares(plan.cores, plan.processes)
        known = [share for share in shares if share is not None]
        cores_per_process = min(known, default=None)
        overcommit = cores_per_process == 0

        if not self._as_requested:
            yield from self._task_options(plan, overcommit)
        if self._overlaps:
            yield from ("--overlap", "--mem=0")

        # Without --cpus-per-task the step would have one core for each rank.
        requested = plan.environ.get("SLURM_CPUS_PER_TASK", "") if self._as_requested else ""
        if requested.isdecimal():
            yield f"--cpus-per-task={requested}"
        elif overcommit:
            yield "--overcommit"
        elif cores_per_process is not None:
            yield f"--cpus-per-task={cores_per_process}"

        gpus = self.gpus_to_claim
        if any(gpus):
            yield f"--gres=gpu:{gpus[0]}" if len(set(gpus)) == 1 else f"--gpus={sum(gpus)}"

    def _task_options(self, plan: Plan, overcommit: bool) -> Iterator[str]:
        """Yield how many tasks start on which hosts."""
        processes = plan.processes
        uneven_cores = len(set(plan.cores)) > 1
        # An overcommitted srun fills the cores of each host, however many these are.
        fills_cores = overcommit and uneven_cores
        if len(set(processes)) == 1 and not fills_cores:
            yield f"--nodes={len(processes)}"
            yield f"--ntasks={sum(processes)}"
            yield f"--ntasks-per-node={processes[0]}"
            yield "--distribution=block"
            if self._partial:
                yield f"--nodelist={','.join(plan.hosts)}"
        else:  # Slurm 23.11 and newer refuse --nodes beside these
            yield f"--ntasks={sum(processes)}"
            yield f"--nodelist={HOST_FILE}"
            yield "--distribution=arbitrary"

    def host_file(self, plan: Plan) -> str:
        return "".join(
            f"{host}\n" * count for host, count in zip(plan.hosts, plan.processes, strict=True)
        )

    def sets_variable(self, name: str) -> bool:
        return name.startswith("SLURM_")

    def agent_environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Leave GPU masks out: Slurm gives each agent its own host's mask, or none."""
        return {name: value for name, value in environ.items() if name not in MASKS}

    def send_signal(self, number: int, pid: int, plan: Plan, processes: Processes) -> None:
        """Signal the ranks by scancel where srun would not: at SIGTERM it kills its tasks, at
        SIGINT it only prints their state.
        """
        if number not in (signal.SIGTERM, signal.SIGINT):
            processes.signal(number)
            return
        step = step_of(plan.environ.get("SLURM_JOB_ID", ""), pid)
        name = signal.Signals(number).name.removeprefix("SIG")
        with suppress(SchedulerError):  # the step has ended meanwhile, or Slurm does not respond
            run_command(["scancel", f"--signal={name}", step], timeout_seconds=_QUERY_SECONDS)

    def listen_ports(self, plan: Plan) -> Sequence[int]:
        """Return the ports of a login host, perhaps behind a firewall; () on a host of the job."""
        return () if index_of(plan.host, plan.hosts) is not None else srun_ports()


def _shares(cores: Sequence[int | None], processes: Sequence[int]) -> list[int | None]:
    """Return the cores per process on each host; None if unknown."""
    pairs = zip(cores, processes, strict=True)
    return [None if total is None else total // count for total, count in pairs]


def daemon_variables(
    environ: Mapping[str, str], gpus: Sequence[int], *, restarted: bool = False
) -> dict[str, str]:
    """Return the variables for the srun by which an mpiexec starts a daemon on each host.

    environ: environment of ddpkit launch. gpus: GPUs to request on each host, because the step gets
    none otherwise. restarted: whether Slurm may still keep the step of an earlier start.
    """
    found = {}
    if environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
        found["SLURM_EXPORT_ENV"] = "ALL"
    if in_step(environ) or restarted:  # the other step holds the cores, GPUs and memory
        found |= {"SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none", "SLURM_MEM_PER_NODE": "0"}
    if any(gpus):
        if len(set(gpus)) == 1:
            found["SLURM_GPUS_PER_NODE"] = str(gpus[0])
        else:
            found["SLURM_GPUS"] = str(sum(gpus))
    return found


def for_part_of_job(environ: Mapping[str, str], gpus: Sequence[int | None]) -> Mapping[str, str]:
    """Return the environment for a step on some hosts of a job, which has fewer GPUs than the job.

    gpus: number of GPUs on each of these hosts.
    """
    if not environ.get("SLURM_GPUS"):
        return environ
    found = {name: value for name, value in environ.items() if name != "SLURM_GPUS"}
    if len(set(gpus)) == 1 and gpus[0]:
        found["SLURM_GPUS_PER_NODE"] = str(gpus[0])
    return found


def _scontrol(*arguments: str) -> str:
    """Return what scontrol prints; nothing where Slurm does not respond."""
    try:
        return run_command(["scontrol", *arguments], timeout_seconds=_QUERY_SECONDS)
    except SchedulerError:
        return ""


def step_of(job_id: str, pid: int) -> str:
    """Return the step that an srun of this host has started, as scancel expects it.

    Where it is not known, return the job: a signal to it reaches all steps, not the batch script.
    """
    for line in _scontrol("--oneliner", "show", "step", job_id).splitlines():
        # "StepId=7.1 UserId=0 State=RUNNING ... SrunHost:Pid=node1:4711 ..."
        found = re.match(r"StepId=(\S+)", line)
        if found and re.search(rf"\sSrunHost:Pid=[^\s:]*:{pid}(\s|$)", line):
            return found[1]
    return job_id


def srun_ports() -> range:
    """Return the ports of a login host that compute nodes can reach: SrunPortRange of the site."""
    # "SrunPortRange           = 60001-63000"; "0-0" where it is not set
    output = _scontrol("show", "config")
    found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", output, re.MULTILINE)
    if found is None or not int(found[1]):
        return range(0)
    return range(int(found[1]), int(found[2]) + 1)

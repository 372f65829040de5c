"""srun: its command line and environment, and how it passes on signals.

Source: srun(1), scancel(1), scontrol(1).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ....host.gpus import MASKS
from ....job.commands import SchedulerError, run_command
from ....job.slurm_job import in_step
from ..child_processes import Processes
from ..hosts import index_of
from ..launch_plan import HOST_FILE, Plan, Request
from .mpiexec import NativeMethod, equal, labels_output

_QUERY_SECONDS = 10.0


class Srun(NativeMethod):
    """srun starts the ranks, or one agent on each host, as a step of a Slurm job."""

    name = title = "srun"
    scheduler = "slurm"
    reports_errors = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._as_requested = False  # the job requested these same tasks, in any order
        self._inside_step = False  # a step of this job surrounds us and holds its resources
        self._partial = False  # other hosts of the job are left out

    @property
    def keeps_job_layout(self) -> bool:
        return self._as_requested

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        assert request.allocation is not None
        options = request.options
        self._partial = request.hosts.partial
        self._inside_step = in_step(request.environ)
        self._as_requested = (
            request.hosts.ranks == request.allocation.ranks_per_host
            and options.ntasks is None
            and options.ntasks_per_node is None
            and not options.torchrun
            and not self._inside_step
            and request.environ.get("SLURM_NTASKS", "") == str(sum(request.hosts.ranks))
        )

        binding = environ.get("SLURM_CPU_BIND")  # of the user, unless an outer step has left it
        environ = self.take_requests(request, environ, keep_task_requests=self._as_requested)
        if binding and not self._inside_step and not options.torchrun:
            environ["SLURM_CPU_BIND"] = binding
        if not self._as_requested:
            # Where --nodes cannot be given, srun takes the number of hosts from here.
            count = str(len(request.hosts.names))
            environ |= {"SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count}
        return environ

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        return [self.path, *self._options(plan), *words]

    def _options(self, plan: Plan) -> Iterator[str]:
        if labels_output(plan):
            yield "--label"
        if plan.options.input:
            yield "--input=0"  # otherwise every rank reads it
        yield "--kill-on-bad-exit=1"  # otherwise the other ranks wait for the one that failed
        if not plan.environ.get("SLURM_CPU_BIND"):
            yield "--cpu-bind=none"  # the kit binds the ranks, within the cores of the job
        if plan.environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
            yield "--export=ALL"

        counts = zip(plan.cores, plan.processes, strict=True)
        shares = [cores // count for cores, count in counts if cores is not None]
        cores_per_process = min(shares, default=None)
        overcommit = cores_per_process == 0

        if not self._as_requested:
            yield from self._task_options(plan, overcommit)
        if self._inside_step:
            yield "--overlap"  # the surrounding step holds the cores and GPUs that we want

        # Without --cpus-per-task the step would have one core for each rank.
        requested = plan.environ.get("SLURM_CPUS_PER_TASK", "") if self._as_requested else ""
        if requested.isdecimal():
            yield f"--cpus-per-task={requested}"
        elif overcommit:
            yield "--overcommit"
        elif cores_per_process is not None:
            yield f"--cpus-per-task={cores_per_process}"

        if gpus := equal(self.gpus_to_claim):
            yield f"--gres=gpu:{gpus}"
        elif any(self.gpus_to_claim):
            yield f"--gpus={sum(self.gpus_to_claim)}"

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
        else:  # since Slurm 23.11 not together with --nodes
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
        """Leave GPU masks out: each agent has that of its own host from Slurm, or none."""
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


def step_of(job_id: str, pid: int) -> str:
    """Return the step that an srun of this host has started, as scancel expects it.

    Where it is not known, return the job: a signal to it reaches all steps, not the batch script.
    """
    try:
        output = run_command(
            ["scontrol", "--oneliner", "show", "step", job_id], timeout_seconds=_QUERY_SECONDS
        )
    except SchedulerError:
        return job_id
    for line in output.splitlines():
        # "StepId=7.1 UserId=0 State=RUNNING ... SrunHost:Pid=node1:4711 ..."
        found = re.match(r"StepId=(\S+)", line)
        if found and re.search(rf"\sSrunHost:Pid=[^\s:]*:{pid}(\s|$)", line):
            return found[1]
    return job_id


def srun_ports() -> range:
    """Return the ports of a login host that compute nodes can reach: SrunPortRange of the site."""
    try:
        output = run_command(["scontrol", "show", "config"], timeout_seconds=_QUERY_SECONDS)
    except SchedulerError:
        return range(0)
    # "SrunPortRange           = 60001-63000"; "0-0" where it is not set
    found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", output, re.MULTILINE)
    if found is None or not int(found[1]):
        return range(0)
    return range(int(found[1]), int(found[2]) + 1)

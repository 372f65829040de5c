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
from ..launch_plan import HOST_FILE, Plan, PlanError, Request
from ..srun_errors import SrunErrors
from .native_launcher import NativeMethod, equal, labels_output
from .srun_environment import is_heterogeneous

_QUERY_SECONDS = 10.0


class Srun(NativeMethod):
    """srun starts the ranks, or one agent on each host, as a step of a Slurm job."""

    name = title = "srun"
    scheduler = "slurm"
    error_reader = SrunErrors

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
        self._partial = request.partial
        self._inside_step = in_step(request.environ)
        self._as_requested = (
            request.ranks == request.allocation.ranks_per_host
            and options.ntasks is None
            and options.ntasks_per_node is None
            and not options.torchrun
            and not self._inside_step
            and (is_heterogeneous(request.environ) or _asks_for_tasks(request))
        )

        binding = environ.get("SLURM_CPU_BIND")  # of the user, unless an outer step has left it
        environ = self.take_requests(request, environ, keep_task_requests=self._as_requested)
        if self.components and options.input and not options.torchrun:
            raise PlanError(
                "standard input is given in a heterogeneous job, where srun gives it to no rank "
                "reliably. Redirect it from /dev/null, or choose --launcher mpiexec"
            )
        if binding and not self._inside_step and not options.torchrun:
            environ["SLURM_CPU_BIND"] = binding
        if not self._as_requested and not self.components:
            # Where --nodes cannot be given, srun takes the number of hosts from here.
            count = str(len(request.hosts))
            environ |= {"SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count}
        return environ

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        return [self.path, *self._options_and_words(plan, words)]

    def _options_and_words(self, plan: Plan, words: Sequence[str]) -> Iterator[str]:
        if not self.components:
            yield from self._step_options(plan, slice(None))
            yield from words
        elif (
            self._as_requested
        ):  # each component has its own number of tasks, and of cores for a rank
            yield from self._common_options(plan)
            if gpus := equal(self.gpus_to_claim):
                yield f"--gres=gpu:{gpus}"
            yield f"--het-group={','.join(map(str, range(len(self.components))))}"
            yield from words
        else:  # one step on several components, each with its own options
            first = 0
            for group, hosts in enumerate(self.components):
                if group:
                    yield ":"
                yield f"--het-group={group}"
                yield from self._step_options(plan, slice(first, first + len(hosts)))
                yield from words
                first += len(hosts)

    def _common_options(self, plan: Plan) -> Iterator[str]:
        if labels_output(plan):
            yield "--label"
        if plan.rank_0_reads_input:
            yield "--input=0"  # otherwise every rank reads it
        yield "--kill-on-bad-exit=1"  # otherwise the other ranks wait for the one that failed
        if not plan.environ.get("SLURM_CPU_BIND"):
            yield "--cpu-bind=none"  # the kit binds the ranks, within the cores of the job
        if plan.environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
            yield "--export=ALL"

    def _step_options(self, plan: Plan, part: slice) -> Iterator[str]:
        """Yield the options of a step, or of its part on one component of a heterogeneous job."""
        yield from self._common_options(plan)
        processes = plan.processes[part]
        known_cores = [
            (cores, count)
            for cores, count in zip(plan.cores[part], processes, strict=True)
            if cores is not None
        ]
        cores_per_process = min((cores // count for cores, count in known_cores), default=None)
        overcommit = cores_per_process == 0

        if not self._as_requested:
            yield from self._task_options(plan, part, overcommit)
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

        claim = self.gpus_to_claim[part]
        if gpus := equal(claim):
            yield f"--gres=gpu:{gpus}"
        elif any(claim):
            yield f"--gpus={sum(claim)}"

    def _task_options(self, plan: Plan, part: slice, overcommit: bool) -> Iterator[str]:
        """Yield how many tasks start on which hosts."""
        processes = plan.processes[part]
        uneven_cores = len(set(plan.cores[part])) > 1
        # An overcommitted srun fills the cores of each host, however many these are.
        fills_cores = overcommit and uneven_cores and not self.components
        if len(set(processes)) == 1 and not fills_cores:
            yield f"--nodes={len(processes)}"
            yield f"--ntasks={sum(processes)}"
            yield f"--ntasks-per-node={processes[0]}"
            yield "--distribution=block"
            if self._partial:
                yield f"--nodelist={','.join(plan.hosts)}"
        elif self.components:
            raise PlanError(
                f"the hosts {', '.join(plan.hosts[part])} are one component of a heterogeneous job "
                f"and are to have different numbers of ranks ({', '.join(map(str, processes))}). "
                "srun starts the same number on each of them. Give --ntasks-per-node, or choose "
                "--torchrun or --launcher mpiexec"
            )
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


def _asks_for_tasks(request: Request) -> bool:
    return request.environ.get("SLURM_NTASKS", "") == str(request.world_size)


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

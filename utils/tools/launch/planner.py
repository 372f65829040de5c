"""Plan a launch: allocation, installed programs and options -> Plan. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...host.cores import CPU_BIND, NO_BINDING, parse_binding
from ..schedulers.allocation import Allocation
from .hosts import choose_hosts, job_name, notes_on_sharing
from .launch_plan import HostInfo, Options, Plan, PlanError, Request
from .methods import NAMES, choose
from .methods.srun_environment import for_part_of_job
from .rank_environment import clean, threads_per_rank


def make_plan(
    command: Sequence[str],
    options: Options,
    allocation: Allocation | None,
    host_info: HostInfo,
    environ: Mapping[str, str],
) -> Plan:
    """Plan how to run `command` as the ranks of one launch. PlanError where that is impossible.

    environ: of this process.
    """
    options = _checked(options)
    if environ.get("SLURM_HET_SIZE") and allocation is not None and options.launcher != "local":
        raise PlanError(
            f"{job_name(allocation)} has {environ['SLURM_HET_SIZE']} components "
            "(SLURM_HET_SIZE). Expected a job whose hosts are all alike. Start the ranks of a "
            "heterogeneous job with srun: srun --het-group=0,1 python train.py"
        )
    hosts = choose_hosts(options, allocation, host_info)
    given = environ.get(CPU_BIND, "")
    if given not in ("", NO_BINDING):
        try:
            parse_binding(given, max(hosts.ranks))
        except ValueError as error:
            raise PlanError(str(error)) from None
    if hosts.partial:
        environ = for_part_of_job(environ, hosts.gpus)
    method = choose(options.launcher, allocation, host_info, hosts.names)
    if not method.local and (method.name != "srun" or options.torchrun):
        if options.input and options.input_waits:
            raise PlanError(
                "standard input is given, a file or a pipe, but no rank would read it "
                f"{method.describe()}: only srun and --launcher local pass it to rank 0. Redirect "
                "it from /dev/null, and let the script open the file"
            )
        options = options._replace(input=False)  # an empty pipe, as of sshd or slurmstepd

    request = Request(options, allocation, host_info, environ, hosts)
    plan = Plan(
        method=method,
        hosts=hosts.names,
        ranks=hosts.ranks,
        cores=hosts.cores,
        threads=tuple(
            threads_per_rank(environ, allocation, options.torchrun, ranks, cores)
            for ranks, cores in zip(hosts.ranks, hosts.cores, strict=True)
        ),
        command=tuple(command),
        environ=method.configure(request, clean(environ)),
        options=options,
        python=host_info.python,
        host=host_info.name,
        notes=(
            *_notes_on_job(allocation),
            *hosts.notes,
            *notes_on_sharing(hosts, allocation, host_info, environ),
        ),
    )
    threads = [count for count in plan.threads if count is not None]
    if plan.native_launcher_starts_ranks and threads:  # its ranks have one environment on all hosts
        plan = plan._replace(environ={**plan.environ, "OMP_NUM_THREADS": str(min(threads))})
    return plan


def _checked(options: Options) -> Options:
    """Return the options in a consistent form. PlanError for a value that cannot be used."""
    if options.launcher not in ("auto", *NAMES):
        raise PlanError(
            f"--launcher is {options.launcher!r}. Expected auto, {', '.join(NAMES)} or the path of "
            "an mpiexec"
        )
    for (name, value), (other, other_value) in (
        (("-n", options.ntasks), ("--ntasks-per-node", options.ntasks_per_node)),
        (("--nodes", options.nodes), ("--nodelist", options.nodelist)),
    ):
        if value is not None and other_value is not None:
            raise PlanError(f"both {name} and {other} are given. Expected one of them")
    for name, value, least in (
        ("-n", options.ntasks, 1),
        ("--ntasks-per-node", options.ntasks_per_node, 1),
        ("--max-restarts", options.max_restarts, 0),
    ):
        if value is not None and value < least:
            raise PlanError(f"{name} is {value}. Expected {least} or more")
    # Only the elastic agent of torchrun restarts ranks.
    return options._replace(torchrun=options.torchrun or options.max_restarts > 0)


def _notes_on_job(allocation: Allocation | None) -> Iterator[str]:
    if allocation is None:
        return
    if allocation.restart_count:
        yield f"restart {allocation.restart_count} of {job_name(allocation)}"
    yield from allocation.notes


def describe(plan: Plan) -> Iterator[str]:
    """Yield lines for the user: how many ranks start on which hosts, and the notes."""
    fewest, most = min(plan.ranks), max(plan.ranks)
    each = f"{most} each" if fewest == most else f"{fewest} to {most} each"
    hosts = f"{len(plan.hosts)} hosts ({each})" if len(plan.hosts) > 1 else plan.hosts[0]
    agents = ", with one torchrun agent on each" if plan.options.torchrun else ""
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
    yield f"{ranks} on {hosts} {plan.method.describe()}{agents}"
    yield from plan.notes

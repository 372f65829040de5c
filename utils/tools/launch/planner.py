"""Plan a launch: allocation, installed programs and options -> Plan. Starts nothing.

Which hosts of a job get ranks, how many, and by which method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...host.cores import CPU_BIND, NO_BINDING, parse_binding
from ...host.masks import MASKS
from ...host.network import PORT_RANGE
from ...job import exclude_file
from ...job.slurm_job import expand_hostlist
from ...launchers.rank_variables import REQUIRE_SECRET, without_set_threads
from ..schedulers.allocation import Allocation
from .launch_plan import HostInfo, Hosts, Options, Plan, PlanError, Request, index_of, job_name
from .methods import NAMES, choose
from .methods.srun import for_part_of_job
from .rank_environment import clean, threads_per_rank, watched

RANKS_PER_GPU, RANKS_PER_CORE = 2, 4  # limits, unless Options.oversubscribe is set
_SHOWN = 8  # hosts in a message


def make_plan(
    command: Sequence[str],
    options: Options,
    allocation: Allocation | None,
    host_info: HostInfo,
    environ: Mapping[str, str],
) -> Plan:
    """Plan how to run `command` as the ranks of one launch. PlanError where that is impossible.

    environ: environment of this process.
    """
    options, environ = _checked(options), without_set_threads(environ)
    if options.spare and allocation is not None:
        options = options._replace(without=_known_bad(options, allocation, environ))
    if environ.get("SLURM_HET_SIZE") and allocation is not None and options.launcher != "local":
        raise PlanError(
            f"{job_name(allocation)} has {environ['SLURM_HET_SIZE']} components "
            "(SLURM_HET_SIZE). Expected a job whose hosts are all alike. Start its ranks with "
            "env -u SLURM_NTASKS -u SLURM_NPROCS srun --het-group=0,1 python train.py"
        )
    if options.torchrun and environ.get(REQUIRE_SECRET) == "1":
        raise PlanError(
            f"--torchrun is given, but {REQUIRE_SECRET} is set: torchrun's processes meet in a "
            "store that asks for no proof. Leave out --torchrun, which this launch does not need"
        )
    hosts = _choose_hosts(options, allocation, host_info)
    _check_numbers(options, hosts, host_info)
    binding = environ.get(CPU_BIND, "")
    if binding not in ("", NO_BINDING):
        try:
            parse_binding(binding, max(hosts.ranks))
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
        options = options._replace(input=False)  # an empty pipe, such as sshd's

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
        environ=method.configure(request, watched(clean(environ), on=options.watch)),
        options=options,
        python=host_info.python,
        host=host_info.name,
        notes=(
            *_notes_on_job(allocation),
            *_notes_on_port(environ),
            *hosts.notes,
            *_notes_on_sharing(hosts, allocation, host_info, environ),
        ),
        one_per_gpu=hosts.one_per_gpu,
        spares=hosts.spares,
    )
    threads = [count for count in plan.threads if count is not None]
    if plan.native_launcher_starts_ranks and threads:  # its ranks have one environment on all hosts
        plan = plan._replace(environ={**plan.environ, "OMP_NUM_THREADS": str(min(threads))})
    return plan


def _checked(options: Options) -> Options:
    """Return the options in a consistent form. PlanError for a value that cannot be used."""
    if options.launcher not in ("auto", *NAMES):
        raise PlanError(
            f"--launcher is {options.launcher!r}. Expected auto, {', '.join(NAMES)}, torchrun or "
            "the path of an mpiexec"
        )
    for (name, value), (other, other_value) in (
        (("-n", options.ntasks), ("--ntasks-per-node", options.ranks_per_node)),
        (("--nodes", options.nodes), ("--nodelist", options.nodelist)),
    ):
        if value is not None and other_value is not None:
            raise PlanError(f"both {name} and {other} are given. Expected one of them")
    for name, value, least in (
        ("-n", options.ntasks, 1),
        ("--ntasks-per-node", options.ranks_per_node, 1),
        ("--max-restarts", options.max_restarts, 0),
        ("--spare", options.spare, 0),
    ):
        if value is not None and value < least:
            raise PlanError(f"{name} is {value}. Expected {least} or more")
    return options


def _notes_on_job(allocation: Allocation | None) -> Iterator[str]:
    if allocation is None:
        return
    if allocation.restart_count:
        yield f"restart {allocation.restart_count} of {job_name(allocation)}"
    yield from allocation.notes


def _notes_on_port(environ: Mapping[str, str]) -> Iterator[str]:
    port = environ.get("MASTER_PORT")
    if port:
        yield (
            f"MASTER_PORT={port} is not used: each launch takes a free port. Where a firewall "
            f"leaves only some ports open, set {PORT_RANGE}=FIRST-LAST to those"
        )


def _choose_hosts(options: Options, allocation: Allocation | None, host_info: HostInfo) -> Hosts:
    """Choose hosts and ranks. PlanError where no host gets a rank, or the options do not match."""
    candidates, notes = _candidates(options, allocation, host_info)
    with_ranks = [host for host in candidates if host.ranks]
    if not with_ranks:
        assert allocation is not None
        raise PlanError(
            f"no host of {job_name(allocation)} gets a rank. Expected at least one slot. Request "
            "mpiprocs or tasks, or give --ntasks-per-node"
        )

    chosen = _selected(options, with_ranks)
    chosen, spares = _without_spares(options, allocation, chosen)
    if options.ntasks is not None:
        if options.ntasks % len(chosen):
            raise PlanError(
                f"-n is {options.ntasks}, but there are {len(chosen)} hosts, and each gets the "
                f"same number of ranks. Expected a multiple of {len(chosen)}. Change -n, or the "
                "number of hosts by --nodes"
            )
        each = options.ntasks // len(chosen)
        chosen = [host._replace(ranks=each) for host in chosen]
        notes = []  # they suggest other numbers of ranks

    if spares and allocation is not None and allocation.outlives_host is False:
        notes.append(
            f"{job_name(allocation)} may end when one of its hosts fails: it was submitted "
            "without -W tolerate_node_failures=all. Submit with it, where the site allows that"
        )
    names, ranks, cores, gpus = zip(*chosen, strict=True)
    one_per_gpu = (
        allocation is not None
        and allocation.tasks_requested
        and options.ntasks is options.ranks_per_node is None
        and not options.torchrun
        and max(allocation.ranks_per_host) == 1 < max(ranks)
    )
    partial = len(chosen) < len(with_ranks)
    return Hosts(names, ranks, cores, gpus, partial, tuple(notes), one_per_gpu, spares)


def _check_numbers(options: Options, hosts: Hosts, host_info: HostInfo) -> None:
    """Raise PlanError if an option gives a host more ranks than it can reasonably run.

    A mistake such as -n 500 would take the host down. The job's own request is not checked.
    """
    option = "--ntasks-per-node" if options.ntasks is None else "-n"
    given = options.ntasks or options.ranks_per_node
    if given is None or options.oversubscribe:
        return
    for name, ranks, cores, gpus in zip(
        hosts.names, hosts.ranks, hosts.cores, hosts.gpus, strict=True
    ):
        is_here = index_of(name, [host_info.name]) is not None
        gpus = host_info.gpus if gpus is None and is_here else gpus or 0
        cores = host_info.cores if cores is None and is_here else cores
        limit = gpus * RANKS_PER_GPU or (cores or ranks) * RANKS_PER_CORE
        if ranks > limit:
            kind, count = ("GPU", gpus) if gpus else ("core", cores)
            raise PlanError(
                f"{option} is {given}: {ranks} ranks on {name}, which has {count} "
                f"{kind}{'s' * (count != 1)}. Expected at most {limit} there, "
                f"{RANKS_PER_GPU if gpus else RANKS_PER_CORE} for each {kind}. Give fewer, or add "
                "--oversubscribe"
            )


class _Host(NamedTuple):
    name: str
    ranks: int
    cores: int | None
    gpus: int | None


def _candidates(
    options: Options, allocation: Allocation | None, host_info: HostInfo
) -> tuple[list[_Host], list[str]]:
    """Return all hosts that could get ranks, and notes for the user."""
    index = None if allocation is None else index_of(host_info.name, allocation.hosts)
    if allocation is None or options.launcher == "local" and index is None:
        ranks = options.ranks_per_node or host_info.gpus or 1
        return [_Host(host_info.name, ranks, None, None)], []

    counts, notes = _ranks_per_host(options, allocation, host_info)
    hosts = [
        _Host(*values)
        for values in zip(
            allocation.hosts,
            counts,
            allocation.cores_per_host,
            allocation.gpus_per_host,
            strict=True,
        )
    ]
    if options.launcher == "local" and index is not None:
        ranks = hosts[index].ranks or 1
        return [hosts[index]._replace(name=host_info.name, ranks=ranks)], notes
    return hosts, notes


def _ranks_per_host(
    options: Options, allocation: Allocation, host_info: HostInfo
) -> tuple[list[int], list[str]]:
    """Return --ntasks-per-node, else the slots of the job, else one rank for each GPU; and notes.

    One slot per host is treated as no request: the job requested no tasks, or one task for
    torchrun, as most job scripts for torchrun do. Then each GPU gets a rank.
    """
    slots, gpus = list(allocation.ranks_per_host), list(allocation.gpus_per_host)
    if options.ranks_per_node is not None:
        each = options.ranks_per_node
        return [each if count or not any(slots) else 0 for count in slots], []

    notes = []
    if max(slots) > 1:
        for host, slot, gpu in zip(allocation.hosts, slots, gpus, strict=True):
            if gpu and slot and slot != gpu:
                notes.append(
                    f"{job_name(allocation)} requests {slot} rank{'s' * (slot > 1)} but {gpu} "
                    f"GPU{'s' * (gpu > 1)} on {host}. For one rank on each GPU give ddpkit launch "
                    f"--ntasks-per-node {gpu}"
                )
                break
        return slots, notes

    index = index_of(host_info.name, allocation.hosts)
    has_slot_here = index is not None and slots[index] > 0
    one_requested = allocation.tasks_requested and not options.torchrun
    unknown = all(count is None for count in gpus)
    if unknown and host_info.gpus > 1 and has_slot_here and not one_requested:
        notes.append(
            f"{job_name(allocation)} does not report how many GPUs it has. {host_info.gpus} are "
            f"assumed on each host, as counted on {host_info.name}. Otherwise give "
            "--ntasks-per-node"
        )
        gpus = [host_info.gpus] * len(slots)
    return [(gpu or 1) if slot else 0 for slot, gpu in zip(slots, gpus, strict=True)], notes


def _selected(options: Options, hosts: list[_Host]) -> list[_Host]:
    """Return the hosts that --nodes or --nodelist selects; all of them without either."""
    if options.nodes is None and options.nodelist is None:
        return hosts

    shown = ", ".join(host.name for host in hosts[:_SHOWN]) + ", ..." * (len(hosts) > _SHOWN)
    available = f"the {len(hosts)} hosts with ranks: {shown}"
    if options.nodes is not None:
        most = len(hosts) - options.spare
        if not 1 <= options.nodes <= most:
            spares = f" with --spare {options.spare}" * bool(options.spare)
            raise PlanError(
                f"--nodes is {options.nodes}. Expected 1 to {most}{spares}, out of {available}"
            )
        return hosts[: options.nodes + options.spare]

    try:
        names = expand_hostlist(options.nodelist or "")
    except ValueError as error:
        raise PlanError(f"--nodelist: {error}") from None
    selected = [host for host in hosts if index_of(host.name, names) is not None]
    known = [host.name for host in selected]
    missing = [name for name in names if index_of(name, known) is None]
    if missing or not selected:
        raise PlanError(
            f"--nodelist is {options.nodelist!r}, but {', '.join(missing[:_SHOWN]) or 'no name'} "
            f"is not a host with ranks. Expected names out of {available}"
        )
    return selected


def _known_bad(
    options: Options, allocation: Allocation, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return hosts to leave out: first failed ones, then listed ones while spares remain."""
    file = environ.get(exclude_file.VARIABLE)
    listed = exclude_file.listed(file, allocation.hosts) if file else []
    more = [host for host in listed if index_of(host, options.without) is None]
    return (*options.without, *more[: max(0, options.spare - len(options.without))])


def _without_spares(
    options: Options, allocation: Allocation | None, hosts: list[_Host]
) -> tuple[list[_Host], tuple[str, ...]]:
    """Return the hosts that get ranks, always the same number, and the names of the spare ones.

    Failed hosts are left out. PlanError if too few are left.
    """
    if not options.spare:
        return hosts, ()
    if allocation is None or options.launcher == "local":
        raise PlanError(
            f"--spare is {options.spare}, but the ranks run on this host alone. Expected a job of "
            "several hosts. Leave --spare out, or start in such a job"
        )
    count = len(hosts) - options.spare
    if count < 1:
        raise PlanError(
            f"--spare is {options.spare}, but {job_name(allocation)} has only {len(hosts)} "
            f"host{'s' * (len(hosts) > 1)} for ranks. Expected more hosts than spare ones. Request "
            "more, or reduce --spare"
        )
    if len({host.ranks for host in hosts}) > 1:
        raise PlanError(
            "--spare needs hosts that can replace each other, but they have "
            f"{', '.join(str(host.ranks) for host in hosts[:_SHOWN])} ranks. Expected the same "
            "number on each. Give --ntasks-per-node, or leave --spare out"
        )
    left = [host for host in hosts if index_of(host.name, options.without) is None]
    if len(left) < count:
        raise PlanError(
            f"{', '.join(options.without)} must be left out, and only {len(left)} of the "
            f"{count} hosts that the ranks need are left"
        )
    return left[:count], tuple(host.name for host in left[count:])


def _notes_on_sharing(
    hosts: Hosts, allocation: Allocation | None, host_info: HostInfo, environ: Mapping[str, str]
) -> Iterator[str]:
    """Yield notes where ranks have to share cores, or may share GPUs with another job."""
    index = None if allocation is None else index_of(host_info.name, allocation.hosts)
    if allocation is not None and allocation.scheduler == "pbs" and index is not None:
        gpus = allocation.gpus_per_host[index]
        masked = any(environ.get(mask) for mask in MASKS)
        if gpus and gpus < host_info.gpus and not masked:
            yield (
                f"{job_name(allocation)} holds {gpus} of the {host_info.gpus} GPUs of "
                f"{host_info.name}, and PBS does not report which. Another job may use the same "
                "ones. Request whole hosts (-l place=scatter:excl), or ask the site for the "
                "cgroups hook of PBS"
            )

    for host, ranks, cores in zip(hosts.names, hosts.ranks, hosts.cores, strict=True):
        if cores is not None and cores < ranks:
            pbs = allocation is not None and allocation.scheduler == "pbs"
            yield (
                f"the {ranks} ranks on {host} share {cores} core{'s' * (cores > 1)}, all that the "
                f"job has there. For more, request {'ncpus' if pbs else '--cpus-per-task'}; for "
                f"fewer ranks, {'mpiprocs' if pbs else '--ntasks-per-node'}"
            )
            return


def describe(plan: Plan) -> Iterator[str]:
    """Yield lines for the user: how many ranks start on which hosts, and the notes."""
    fewest, most = min(plan.ranks), max(plan.ranks)
    each = f"{most} each" if fewest == most else f"{fewest} to {most} each"
    hosts = f"{len(plan.hosts)} hosts ({each})" if len(plan.hosts) > 1 else plan.hosts[0]
    agents = ", with one torchrun agent on each" if plan.options.torchrun else ""
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
    per_gpu = (
        ", one for each GPU: the job requests one task per host, as for torchrun; to start one "
        "rank, give ddpkit launch --ntasks-per-node 1"
    ) * plan.one_per_gpu
    spares = f"; spare: {', '.join(plan.spares[:_SHOWN])}" if plan.spares else ""
    spares += f" and {len(plan.spares) - _SHOWN} more" if len(plan.spares) > _SHOWN else ""
    if plan.options.without:  # listed as bad by earlier jobs
        spares += f"; left out: {', '.join(plan.options.without[:_SHOWN])}"
    yield f"{ranks} on {hosts} {plan.method.describe()}".rstrip() + agents + spares + per_gpu
    yield from plan.notes

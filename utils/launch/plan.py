"""What is to be started where, and by which means: allocation, programs, options -> Plan. Pure functions.

Not here: the words of each means (commands.py), looking for programs (programs.py), starting anything (run.py).
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..launchers import LAUNCHERS
from ..schedulers.allocation import Allocation
from ..schedulers.pbs import short
from ..schedulers.slurm import components, expand_hostlist
from .gpus import MASKS
from .programs import KINDS, Mpiexec

MEANS = ("srun", "mpiexec", "pbs_tmrsh", "pbsdsh", "ssh", "local")
_HAND_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
# What a launcher leaves behind in the environment of a rank's children, beside what launchers.py lists.
_LEFT_BEHIND = ("PMI_FD", "PMI_PORT", "PMI_ID", "TORCHELASTIC_RUN_ID", "I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST",
                "PMIX_RANK", "PMIX_NAMESPACE", "SLURM_STEP_ID", "SLURM_STEPID")
_KEPT = ("PBS_NODEFILE", "FLUX_JOB_NNODES", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_GTIDS",
         "SLURM_STEP_TASKS_PER_NODE")  # tell a rank nothing by themselves
# What a job of Slurm asked for its tasks, or how an outer step was bound, is no request for other tasks.
_OF_TASKS = ("SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK",
             "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE",
             "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE",
             "SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
             "SLURM_NTASKS", "SLURM_NPROCS")
_GPU_REQUESTS = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET")
_OTHER_REQUESTS = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
                   "SLURM_MEM_PER_NODE")
# SLURM_NTASKS_HET_GROUP_1, SLURM_NTASKS_PACK_GROUP_1: what component 1 of a heterogeneous job asked for.
_COMPONENT = re.compile(r"_(?:HET|PACK)_GROUP_\d+$")


class PlanError(RuntimeError):
    """The ranks cannot be started in this way; the message says what was found and what to do."""


class Options(NamedTuple):
    by: str = "auto"  # or one of MEANS
    torchrun: bool = False  # one agent of torchrun on each host, instead of one process for each rank
    restarts: int = 0  # how often torchrun may start the ranks again
    ranks_per_node: int | None = None
    hosts: str | None = None  # "2": the first two of the job's hosts; or their names, "n3,n4" or "n[3-4]"
    ranks: int | None = None  # in all, the same number on each host
    prefix_output: bool = False  # each line of a rank starts with its rank
    output_dir: str = ""  # absolute; each rank writes into a file there, instead of to our streams


class Finder(Protocol):
    """What plan() asks about programs; see programs.Programs."""

    def find(self, name: str) -> str | None: ...
    @property
    def mpiexec(self) -> Mpiexec | None: ...
    @property
    def pals(self) -> Mpiexec | None: ...


class Here(NamedTuple):
    """This host and process."""

    host: str
    gpus: int
    python: str  # sys.executable
    programs: Finder
    root: bool = False  # whether this is the superuser, whom Open MPI refuses unless told


class Plan(NamedTuple):
    means: str
    path: str  # of the program that starts: srun, an mpiexec, pbs_tmrsh, ...; empty for local
    hosts: tuple[str, ...]  # those that get ranks, in rank order
    ranks: tuple[int, ...]  # of each of these hosts
    command: tuple[str, ...]  # the script or program of a rank, and its arguments
    python: str
    environ: Mapping[str, str]  # for the ranks, without their numbers
    threads: tuple[int | None, ...]  # OMP_NUM_THREADS on each host; None leaves it as it is
    cores: tuple[int | None, ...]
    host: str  # this host
    options: Options
    mpiexec: Mpiexec | None = None
    remote_shell: str = ""  # pbs_tmrsh or srun, where mpiexec is to use it instead of ssh
    part: bool = False  # whether other hosts of the job are left out, as --hosts says
    as_asked: bool = False  # srun: the job asked for these very tasks, in whatever order
    scheduler: str = ""  # of the allocation
    gpus_to_claim: tuple[int, ...] = ()  # srun: GPUs of each host, where a step does not get them by itself
    components: tuple[tuple[str, ...], ...] = ()  # Slurm: the hosts of each component of a heterogeneous job
    inside_step: bool = False  # srun: a step of this job surrounds us and holds its resources
    node_file: str = ""  # PBS: the node file, where it lists these hosts
    root: bool = False
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(self.ranks)

    @property
    def is_script(self) -> bool:
        """Whether Python runs it: "train.py" or "-m package.module" with arguments."""
        return self.command[0] == "-m" or self.command[0].endswith(".py")

    @property
    def script(self) -> str:
        """The path of the script, which every host must have; empty for a module or a program."""
        return self.command[0] if self.command[0].endswith(".py") else ""

    @property
    def program(self) -> tuple[str, ...]:
        """What each rank runs."""
        if self.command[0] in ("python", "python3"):  # which may be none, or another one, on PATH
            return (self.python, *self.command[1:])
        return (self.python, "-u", *self.command) if self.is_script else self.command

    @property
    def agents(self) -> bool:
        """Whether agents start the ranks, rather than the program that starts the launch."""
        return self.options.torchrun or self.means not in ("srun", "mpiexec")


def plan(command: Sequence[str], options: Options, allocation: Allocation | None, here: Here,
         environ: Mapping[str, str]) -> Plan:
    """How to run `command` as the ranks of one launch. PlanError says why it cannot be done and what would."""
    options = _settled(options)
    if options.ranks is not None:
        count = len(plan(command, options._replace(ranks=None), allocation, here, environ).hosts)
        if options.ranks % count:
            raise PlanError(f"-n is {options.ranks}, but there are {count} hosts, and each gets the same number of "
                            f"ranks. Expected a multiple of {count}, or --hosts with a number of hosts")
        options = options._replace(ranks=None, ranks_per_node=options.ranks // count)
    hosts, ranks, cores, notes = _places(options, allocation, here)
    wanted = [i for i, count in enumerate(ranks) if count > 0]
    if allocation is not None and not wanted:
        raise PlanError(f"no host of {_job(allocation)} gets a rank. Expected at least one slot: ask for mpiprocs or "
                        "tasks, or give --ranks-per-node")
    having, wanted = len(wanted), _chosen(options.hosts, hosts, wanted)
    part = allocation if len(wanted) < having else None
    if part is not None:
        environ = _for_part(environ, part, [part.gpus_per_host[i] for i in wanted])
    chosen_hosts, chosen_ranks = tuple(hosts[i] for i in wanted), tuple(ranks[i] for i in wanted)
    chosen_cores = tuple(cores[i] for i in wanted)
    notes += [*_shared_gpus(allocation, here, environ), *_shared_cores(chosen_hosts, chosen_ranks, chosen_cores)]
    means, path, mpiexec = _means(options, allocation, here, chosen_hosts)
    base = Plan(means, path, chosen_hosts, chosen_ranks, tuple(command), here.python, {}, (), chosen_cores, here.host,
                options, mpiexec, part=part is not None, root=here.root,
                scheduler=allocation.scheduler if allocation else "", notes=(*_about_job(allocation), *notes))
    environment = clean(environ)
    threads = tuple(_threads(environ, allocation, options, count, core)
                    for count, core in zip(chosen_ranks, chosen_cores, strict=True))
    if allocation is not None and allocation.scheduler == "slurm" and means in ("srun", "mpiexec"):
        base, environment = _in_slurm(base, allocation, environ, environment, wanted, here)
    elif allocation is not None and allocation.scheduler == "pbs" and means == "mpiexec":
        base = _mpiexec_in_pbs(base, allocation, environ, here)
    if not base.agents:  # one environment for all hosts
        known = [count for count in threads if count is not None]
        if known:
            environment["OMP_NUM_THREADS"] = str(min(known))
        if means == "mpiexec" and mpiexec is not None and mpiexec.kind == "pals":
            environment["WORLD_SIZE"] = str(sum(chosen_ranks))  # PALS itself does not always tell it
    return base._replace(environ=environment, threads=threads)


def _about_job(allocation: Allocation | None) -> Iterator[str]:
    if allocation is None:
        return
    if allocation.restart_count:
        yield f"restart {allocation.restart_count} of {_job(allocation)}"
    yield from allocation.notes


def _settled(options: Options) -> Options:
    if options.by not in ("auto", *MEANS):
        raise PlanError(f"--by is {options.by!r}; expected auto, {', '.join(MEANS)} or the path of an mpiexec")
    if options.ranks is not None and options.ranks_per_node is not None:
        raise PlanError("both -n and --ranks-per-node are given. Expected one of them")
    for name, value, least in (("-n", options.ranks, 1), ("--ranks-per-node", options.ranks_per_node, 1),
                               ("--restarts", options.restarts, 0)):
        if value is not None and value < least:
            raise PlanError(f"{name} is {value}; expected {least} or more")
    return options._replace(torchrun=options.torchrun or options.restarts > 0)  # the elastic agent alone restarts ranks


def _job(allocation: Allocation) -> str:
    return f"{'Slurm' if allocation.scheduler == 'slurm' else 'PBS'} job {allocation.job_id}"


# Where ------------------------------------------------------------------------------------------------------------

def _places(options: Options, allocation: Allocation | None, here: Here) -> tuple[
        list[str], list[int], list[int | None], list[str]]:
    """Hosts, ranks and cores of each, and notes."""
    if allocation is None or options.by == "local":
        index = _index_of(here.host, allocation.hosts) if allocation else None
        if allocation is not None and index is not None:
            (ranks, notes), cores = _ranks(options, allocation, here), allocation.cores_per_host
            return [here.host], [ranks[index] or 1], [cores[index]], notes
        return [here.host], [options.ranks_per_node or here.gpus or 1], [None], []
    ranks, notes = _ranks(options, allocation, here)
    return list(allocation.hosts), ranks, list(allocation.cores_per_host), notes


def _ranks(options: Options, allocation: Allocation, here: Here) -> tuple[list[int], list[str]]:
    """Ranks of each host: --ranks-per-node, else the slots asked for; one for each GPU where a host has one slot."""
    slots, gpus = list(allocation.ranks_per_host), list(allocation.gpus_per_host)
    if options.ranks_per_node is not None:
        return [options.ranks_per_node if count or not any(slots) else 0 for count in slots], []
    notes = []
    if max(slots) <= 1:
        at = _index_of(here.host, allocation.hosts)
        if all(count is None for count in gpus) and here.gpus > 1 and at is not None and slots[at]:
            notes.append(f"{_job(allocation)} does not say how many GPUs it has: {here.gpus} for each host, as counted "
                         f"on {here.host}. Otherwise give --ranks-per-node")
            gpus = [here.gpus] * len(slots)
        return [(gpu or 1) if slot else 0 for slot, gpu in zip(slots, gpus, strict=True)], notes
    for host, slot, gpu in zip(allocation.hosts, slots, gpus, strict=True):
        if gpu and slot > gpu:
            notes.append(f"{_job(allocation)} asks for {slot} ranks on {host} and for {gpu} GPUs. For one rank on each "
                         f"GPU give --ranks-per-node {gpu}")
            break
    return slots, notes


def _chosen(text: str | None, hosts: Sequence[str], wanted: list[int]) -> list[int]:
    """The indices of `wanted` that --hosts names: the first so many, or by name."""
    if text is None:
        return wanted
    having = f"{len(wanted)} with ranks: {', '.join(hosts[i] for i in wanted[:8])}{', ...' * (len(wanted) > 8)}"
    if text.isdecimal():
        if not 1 <= int(text) <= len(wanted):
            raise PlanError(f"--hosts is {text}; expected 1 or more, and no more than there are ({having})")
        return wanted[:int(text)]
    try:
        names = expand_hostlist(text)
    except ValueError as error:
        raise PlanError(f"--hosts: {error}") from None
    named = {short(name) for name in names}
    found = [i for i in wanted if short(hosts[i]) in named]
    known = {short(hosts[i]) for i in found}
    missing = [name for name in names if short(name) not in known]
    if missing or not found:
        raise PlanError(f"--hosts is {text!r}, but {', '.join(missing[:8]) or 'no name'} is none of the hosts that "
                        f"there are ({having}). Give a number, or names out of these")
    return found


def _for_part(environ: Mapping[str, str], allocation: Allocation, gpus: list[int | None]) -> Mapping[str, str]:
    """The environment for a step on a part of a job's hosts: what the whole job has is too much to ask for."""
    if allocation.scheduler == "slurm" and components(environ):
        raise PlanError("--hosts was given in a heterogeneous job, of which launch.py uses all components. Leave it "
                        "out, or start the ranks by srun --het-group")
    if not environ.get("SLURM_GPUS"):
        return environ
    each = {"SLURM_GPUS_PER_NODE": str(gpus[0])} if len(set(gpus)) == 1 and gpus[0] else {}
    return {name: value for name, value in environ.items() if name != "SLURM_GPUS"} | each


def _shared_gpus(allocation: Allocation | None, here: Here, environ: Mapping[str, str]) -> list[str]:
    """A note where PBS gives a part of this host's GPUs and does not say which: each job would take the first ones."""
    at = _index_of(here.host, allocation.hosts) if allocation is not None and allocation.scheduler == "pbs" else None
    asked = allocation.gpus_per_host[at] if allocation is not None and at is not None else None
    if allocation is None or not asked or asked >= here.gpus or any(environ.get(mask) for mask in MASKS):
        return []
    return [f"{_job(allocation)} holds {asked} of the {here.gpus} GPUs of {here.host}, and PBS does not say which: "
            "another job may use the same ones. Ask for whole hosts (-l place=scatter:excl), or ask the site for the "
            "cgroups hook of PBS"]


def _shared_cores(hosts: Sequence[str], ranks: Sequence[int], cores: Sequence[int | None]) -> Iterator[str]:
    """A note on the first host that has more ranks than cores of the job."""
    for host, count, core in zip(hosts, ranks, cores, strict=True):
        if core is not None and core < count:
            yield (f"the {count} ranks on {host} share {core} core{'s' * (core > 1)}, all that the job has there "
                   "(--overcommit). For more, ask for --cpus-per-task or --ntasks-per-node")
            return


def _index_of(host: str, hosts: Sequence[str]) -> int | None:
    """The index of this host among hosts that may be spelled with or without a domain."""
    return next((i for i, one in enumerate(hosts) if short(one) == short(host)), None)


# By what means --------------------------------------------------------------------------------------------------------

def _means(options: Options, allocation: Allocation | None, here: Here,
           hosts: Sequence[str]) -> tuple[str, str, Mpiexec | None]:
    """The means, the path of its program, and which mpiexec it is."""
    by = options.by if options.by != "auto" else _best(allocation, here, hosts)
    if by == "local":
        return by, "", None
    if allocation is None:
        raise PlanError(f"--by {by} needs an allocation, and this process is in no job of PBS or Slurm. Start it "
                        "from a job (sbatch, salloc, qsub, qsub -I), or leave --by out to use this host alone")
    if by in ("srun", "pbs_tmrsh", "pbsdsh") and allocation.scheduler != ("slurm" if by == "srun" else "pbs"):
        raise PlanError(f"--by {by} was asked for in {_job(allocation)}, to which {by} cannot start anything. Leave "
                        "--by out")
    if by == "mpiexec":
        found = here.programs.mpiexec
        if found is None:
            raise PlanError(f"no mpiexec of {', '.join(KINDS.values())} is on PATH. Load the module of one, or leave "
                            "--by out")
        return by, found.path, found
    path = here.programs.find(by)
    if path is None:
        raise PlanError(f"{by} was not found on PATH, and is needed to start ranks on {len(hosts)} hosts of "
                        f"{_job(allocation)}. Add its folder to PATH, or choose another means by --by")
    return by, path, None


def _best(allocation: Allocation | None, here: Here, hosts: Sequence[str]) -> str:
    if allocation is None:
        return "local"
    alone = len(hosts) == 1 and short(hosts[0]) == short(here.host)
    if allocation.scheduler == "slurm":
        order = ("srun", "local") if alone else ("srun", "ssh")
        return next((by for by in order if by == "local" or here.programs.find(by)), "srun")
    if here.programs.pals is not None:
        return "mpiexec"  # only PALS gives its ranks the keys to Slingshot
    if alone:
        return "local"
    # Agents before a foreign mpiexec: Hydra ends no others when a rank fails, Open MPI leaves no time after a stop.
    for by in ("pbs_tmrsh", "pbsdsh"):
        if here.programs.find(by):
            return by
    return "ssh" if here.programs.find("ssh") else "mpiexec"


def _in_slurm(base: Plan, allocation: Allocation, environ: Mapping[str, str], environment: dict[str, str],
              wanted: Sequence[int], here: Here) -> tuple[Plan, dict[str, str]]:
    """The plan and the environment for srun, ours or the one by which an mpiexec starts a daemon on each host."""
    parts, srun = components(environ), base.means == "srun"
    inside_step = bool(environ.get("SLURM_STEP_ID"))
    same = base.ranks == allocation.ranks_per_host and base.options.ranks_per_node is None
    asked = environ.get("SLURM_NTASKS", "") == str(base.world_size) or bool(parts)
    as_asked = srun and same and asked and not inside_step and not base.options.torchrun
    if parts:
        environment = _without_first_component(environment)
    if not as_asked:
        environment = _without_requests(environment, _OF_TASKS)
    gpus = tuple(allocation.gpus_per_host[index] or 0 for index in wanted)
    if base.mpiexec is not None and base.mpiexec.kind == "openmpi" and any(gpus):
        environment.pop("SLURM_GPUS", None)  # its srun leaves out this host, whose daemon it is itself
    claim = gpus if parts or not _asks_for_gpus(environment) else ()
    if parts and not as_asked and any(claim):  # else they would be asked for twice
        environment = _without_requests(environment, _GPU_REQUESTS)
    base = base._replace(components=parts, as_asked=as_asked, inside_step=srun and inside_step, gpus_to_claim=claim)
    if srun:
        if not as_asked and not parts:  # where --nodes cannot be given, srun believes these
            environment |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(base.hosts)))
    elif parts:  # its own srun would reach the first component only
        base = base._replace(remote_shell=here.programs.find("srun") or "")
    else:
        environment |= _for_daemons(base, environ, claim)
        if base.mpiexec is not None and base.mpiexec.kind == "openmpi":  # it starts no more ranks than this says
            slots = dict(zip(base.hosts, (1,) * len(base.hosts) if base.options.torchrun else base.ranks, strict=True))
            environment["SLURM_TASKS_PER_NODE"] = ",".join(str(slots.get(host, 1)) for host in allocation.hosts)
            folder = os.path.dirname(base.mpiexec.path)
            if base.mpiexec.other_srun and folder not in environment.get("PATH", "").split(os.pathsep):
                environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), folder])
    return base, environment


def _without_requests(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The environment without these requests to Slurm, those of components included."""
    return {name: value for name, value in environ.items() if _COMPONENT.sub("", name) not in names}


def _without_first_component(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the requests of the first component that are there once more, with its number behind.

    The batch script of "-n1 : -N2 --ntasks-per-node=2" has SLURM_NTASKS=1, which srun takes for component 1 too: it
    started 3 of 5 tasks. Seen with Slurm 25.11.
    """
    numbered = {_COMPONENT.sub("", name) for name in environ if _COMPONENT.search(name)}
    drop = numbered.intersection((*_OF_TASKS, *_GPU_REQUESTS, *_OTHER_REQUESTS))
    return {name: value for name, value in environ.items() if name not in drop}


def _asks_for_gpus(environ: Mapping[str, str]) -> bool:
    """Whether srun reads a request for GPUs there; TRES_PER_TASK may be about cores alone."""
    return any(environ.get(name) for name in _GPU_REQUESTS) or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")


def _for_daemons(base: Plan, environ: Mapping[str, str], gpus: tuple[int, ...]) -> dict[str, str]:
    """For the srun of an mpiexec, whose step gets no GPUs by itself where the job asked for whole nodes or tasks."""
    found = {"SLURM_EXPORT_ENV": "ALL"} if environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL" else {}
    if environ.get("SLURM_STEP_ID"):  # the step around us holds the cores and GPUs that it wants
        found |= {"SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none"}
    if base.mpiexec is not None and base.mpiexec.kind == "openmpi":
        at = _index_of(base.host, base.hosts)
        gpus = tuple(count for index, count in enumerate(gpus) if index != at)
    if any(gpus):
        found |= {"SLURM_GPUS_PER_NODE": str(gpus[0])} if len(set(gpus)) == 1 else {"SLURM_GPUS": str(sum(gpus))}
    return found


def _mpiexec_in_pbs(base: Plan, allocation: Allocation, environ: Mapping[str, str], here: Here) -> Plan:
    kind = base.mpiexec.kind if base.mpiexec else ""
    remote_shell = here.programs.find("pbs_tmrsh") if kind != "pals" else None
    listed = {host: count for host, count in zip(allocation.hosts, allocation.ranks_per_host, strict=True) if count}
    node_file = environ.get("PBS_NODEFILE", "") if tuple(listed) == base.hosts else ""
    first = next((index for index, count in enumerate(allocation.ranks_per_host) if count), 0)
    # Without cores that host is none that qstat tells of: the node file has other names for the same hosts.
    if (first and kind in ("mpich", "intel-mpi") and remote_shell and allocation.cores_per_host[first] is not None
            and allocation.hosts[first] in base.hosts):
        raise PlanError(f"{allocation.hosts[0]} has no slot of {_job(allocation)} (mpiprocs=0), and OpenPBS never "
                        f"tells it that what it has started on {allocation.hosts[first]} has ended: this mpiexec would "
                        f"wait for ever. Ask for mpiprocs=1 or more on {allocation.hosts[0]}, or choose --by pbs_tmrsh")
    return base._replace(remote_shell=remote_shell or "", node_file=node_file)


# The environment ------------------------------------------------------------------------------------------------------

def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what says that a process is a rank of another launch."""
    drop = {name for launcher in LAUNCHERS for name in launcher.variables}.difference(_KEPT) | set(_LEFT_BEHIND)
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        drop |= {*_HAND_SET, "MASTER_ADDR", "MASTER_PORT"}  # they go together
    return {name: value for name, value in environ.items() if name not in drop}


def _threads(environ: Mapping[str, str], allocation: Allocation | None, options: Options, ranks: int,
             cores: int | None) -> int | None:
    """OMP_NUM_THREADS of a rank. PBS sets it to the cores of a chunk, and torchrun to 1 where it is not set."""
    text = environ.get("OMP_NUM_THREADS", "")
    if not text:
        return max(1, cores // ranks) if options.torchrun and cores else None
    of_pbs = allocation is not None and allocation.scheduler == "pbs" and text == environ.get("NCPUS")
    if not (of_pbs and text.isdecimal()):
        return None
    share = (cores or int(text)) // ranks
    return min(int(text), max(1, share))


def describe(plan: Plan) -> Iterator[str]:
    """Lines that tell a person how many ranks start where."""
    shape = sorted(set(plan.ranks), reverse=True)
    each = f"{shape[0]} each" if len(shape) == 1 else f"{shape[-1]} to {shape[0]} each"
    hosts = f"{len(plan.hosts)} hosts ({each})" if len(plan.hosts) > 1 else plan.hosts[0]
    how = f"by {KINDS[plan.mpiexec.kind]}'s mpiexec" if plan.mpiexec else f"by {plan.means}"
    how = "alone" if plan.means == "local" else how
    agents = ", with one torchrun agent on each" if plan.options.torchrun else ""
    yield f"{plan.world_size} rank{'s' * (plan.world_size > 1)} on {hosts} {how}{agents}"
    yield from plan.notes

"""The command lines of a plan: srun, each mpiexec, and what starts an agent on a host. Pure functions.

Sources of the options: srun(1), the manual pages of mpiexec of PALS, MPICH, Open MPI and Intel MPI, pbs_tmrsh(8),
pbsdsh(1), ssh(1). Not here: which of them is used (plan.py), running them (run.py, control.py).
"""
from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence

from . import remote_shell
from .gpus import MASKS
from .plan import Plan, PlanError, clean

HOST_FILE = "@hosts@"  # stands for the path of a file with host_file(); native.py makes it
REMOTE_SHELL = "@remote-shell@"  # stands for the path of a script with remote_shell.script(); native.py makes it
# Run by each worker of a torchrun that may restart: the number of its host is known there only.
_SET_NODE_RANK = ("import os, sys; os.environ['NODE_RANK'] = os.environ['GROUP_RANK']; "
                  "os.execvp(sys.argv[1], sys.argv[1:])")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
                  "MASTER_PORT")  # of each rank, as torchrun names them
# True of one host only: mpiexec must not carry it to others.
_OF_THIS_HOST = {"HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL", "_", "TMPDIR", "DISPLAY", "XDG_RUNTIME_DIR"}
_OF_THIS_HOST_PREFIXES = ("SSH_", "PBS_", "SLURM", "XDG_SESSION", "BASH_FUNC_", "OMPI_", "PMIX_", "PRTE_")


def native_command(plan: Plan, words: Sequence[str]) -> list[str]:
    """The one command that starts `words` as every rank; under torchrun, as one agent on each host."""
    if plan.means == "srun":
        return [plan.path, *_srun(plan, words)]
    assert plan.mpiexec is not None
    options = {"pals": _pals, "openmpi": _openmpi, "mpich": _hydra, "intel-mpi": _hydra}[plan.mpiexec.kind]
    return [plan.path, *options(plan), *words]


def remote_shell_variables(plan: Plan) -> dict[str, str]:
    """What the native command needs in its environment besides plan.environ."""
    if not plan.remote_shell:
        return {}
    return {remote_shell.VARIABLE: remote_shell.code(plan.remote_shell, gpus_of_components(plan))}


def counts(plan: Plan) -> tuple[int, ...]:
    """Processes that the native command starts on each host."""
    return tuple(1 for _ in plan.hosts) if plan.options.torchrun else plan.ranks


def host_file(plan: Plan) -> str:
    """The text that HOST_FILE stands for."""
    if plan.means == "srun":
        return "".join(f"{host}\n" * count for host, count in zip(plan.hosts, counts(plan), strict=True))
    openmpi = plan.mpiexec is not None and plan.mpiexec.kind == "openmpi"
    between = " slots=" if openmpi else ":"
    return "".join(f"{host}{between}{count}\n" for host, count in zip(plan.hosts, counts(plan), strict=True))


# srun -----------------------------------------------------------------------------------------------------------------

def _srun(plan: Plan, words: Sequence[str]) -> Iterator[str]:
    if not plan.components:
        yield from (*_step(plan, slice(None)), *words)
    elif plan.as_asked:  # each component has its own number of tasks, and of cores for a rank
        gpus = _same(plan.gpus_to_claim)
        yield from (*_always(plan), *([f"--gres=gpu:{gpus}"] if gpus else []),
                    f"--het-group={','.join(map(str, range(len(plan.components))))}", *words)
    else:  # one step of several components, each with options of its own
        first = 0
        for group, hosts in enumerate(plan.components):
            part = slice(first, first + len(hosts))
            yield from (*([":"] if group else []), f"--het-group={group}", *_step(plan, part), *words)
            first = part.stop


def _always(plan: Plan) -> Iterator[str]:
    if _labels(plan):
        yield "--label"
    yield "--kill-on-bad-exit=1"  # else the others go on, or wait, when one has failed
    if plan.environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
        yield "--export=ALL"


def _step(plan: Plan, part: slice) -> Iterator[str]:
    """The options of a step, or of its part on one component of a heterogeneous job."""
    yield from _always(plan)
    each = counts(plan)[part]
    share = [cores // count for cores, count in zip(plan.cores[part], each, strict=True) if cores is not None]
    overcommit = bool(share) and not min(share)  # more ranks than cores
    if not plan.as_asked:
        # Overcommitted, srun fills each core of hosts with different numbers of them.
        if len(set(each)) == 1 and not (overcommit and len(set(plan.cores[part])) > 1 and not plan.components):
            yield from (f"--nodes={len(each)}", f"--ntasks={sum(each)}", f"--ntasks-per-node={each[0]}",
                        "--distribution=block")
            if plan.part:
                yield f"--nodelist={','.join(plan.hosts)}"
        elif plan.components:
            raise PlanError(f"the hosts {', '.join(plan.hosts[part])} are one component of a heterogeneous job and are "
                            f"to have different numbers of ranks ({', '.join(map(str, each))}). srun starts the same "
                            "number on each of them: give --ranks-per-node, or choose --torchrun or --by mpiexec")
        else:  # since Slurm 23.11 not together with --nodes
            yield from (f"--ntasks={sum(each)}", f"--nodelist={HOST_FILE}", "--distribution=arbitrary")
    if plan.inside_step:
        yield "--overlap"  # the step around us holds the cores and GPUs that we want
    asked = plan.environ.get("SLURM_CPUS_PER_TASK", "") if plan.as_asked else ""
    if asked.isdecimal() or share and not overcommit:  # srun alone would bind each rank to one core
        yield f"--cpus-per-task={asked if asked.isdecimal() else min(share)}"
    elif overcommit:
        yield "--overcommit"
    claim = plan.gpus_to_claim[part]
    if gpus := _same(claim):
        yield f"--gres=gpu:{gpus}"
    elif any(claim):
        yield f"--gpus={sum(claim)}"


def _same(numbers: Sequence[int]) -> int:
    """The number that all of them are; 0 where they differ."""
    return numbers[0] if len(set(numbers)) == 1 else 0


def gpus_of_components(plan: Plan) -> list[int]:
    """The GPUs that a step on one host of each component has to ask for."""
    ends = itertools.accumulate(map(len, plan.components))
    return [_same(plan.gpus_to_claim[end - len(hosts):end]) for end, hosts in zip(ends, plan.components, strict=True)]


# mpiexec --------------------------------------------------------------------------------------------------------------

def _pals(plan: Plan) -> Iterator[str]:
    each = set(counts(plan))
    if len(each) > 1:
        raise PlanError(f"the hosts have different numbers of ranks ({', '.join(map(str, counts(plan)))}), and PALS "
                        "starts the same number on every host. Give --ranks-per-node, or choose --by pbs_tmrsh or "
                        "--torchrun")
    yield from ("-n", str(sum(counts(plan))), "--ppn", str(each.pop()), *(["--label"] * _labels(plan)))
    if not plan.node_file:  # PALS reads the node file by itself
        yield from ("--hosts", ",".join(plan.hosts))
    cores = [count for count in plan.cores if count]
    if plan.options.torchrun or not cores or len(cores) < len(plan.hosts):
        yield from ("--cpu-bind", "none")
    else:
        depth = min(count // ranks for count, ranks in zip(cores, plan.ranks, strict=True))
        yield from ("--depth", str(depth), "--cpu-bind", "depth") if depth > 0 else ("--cpu-bind", "none")


def _hydra(plan: Plan) -> Iterator[str]:
    assert plan.mpiexec is not None
    if plan.remote_shell:
        yield from ("-launcher", "ssh", "-launcher-exec", REMOTE_SHELL)
    elif plan.scheduler == "slurm":
        yield from ("-launcher", "slurm")
    if _masks_are_of_each_host(plan) and not set(MASKS).isdisjoint(plan.environ):
        yield from ("-genvlist", ",".join(_passed_on(plan)))  # by itself it passes on all of this host's
    if _labels(plan):
        yield "-prepend-rank"
    if plan.options.torchrun and plan.mpiexec.kind == "intel-mpi":
        yield from ("-genv", "I_MPI_PIN", "off")
    # -f of Intel MPI lists hosts only, and MPICH has no -machinefile of its own
    option = "-machinefile" if plan.mpiexec.kind == "intel-mpi" else "-f"
    yield from (option, HOST_FILE, "-n", str(sum(counts(plan))))


def _openmpi(plan: Plan) -> Iterator[str]:
    assert plan.mpiexec is not None
    new = plan.mpiexec.major >= 5
    kind = "--prtemca" if new else "--mca"
    if plan.root:
        yield "--allow-run-as-root"
    if plan.remote_shell:
        yield from (kind, "ras", "^slurm,tm,pbs")  # the job's own slots may be fewer, or of one component
        name = "plm_ssh" if new else "plm_rsh"
        agent = remote_shell.words(plan.python)  # no script, which every host would have to have
        if " " in agent[0]:
            raise PlanError(f"the path of Python, {agent[0]}, has a space, where Open MPI would take it apart. Set "
                            "PYTHON to one without, or choose --by pbs_tmrsh")
        # Without the tree no other host needs it; PBS may end what has left the session that it has started.
        yield from (kind, "plm", name[4:], kind, f"{name}_agent", " ".join(agent), kind, f"{name}_no_tree_spawn", "1",
                    "--leave-session-attached")
    elif plan.scheduler == "slurm" and plan.mpiexec.other_srun:
        yield "--noprefix"  # else it puts its own folder before PATH and takes the srun there
    if _labels(plan):
        yield from ("--output", "tag") if new else ("--tag-output",)
    yield from ("--bind-to", "none", "--hostfile", HOST_FILE)
    for name in _passed_on(plan):
        yield from ("-x", name)
    yield from ("-n", str(sum(counts(plan))))


def _labels(plan: Plan) -> bool:
    """Whether the native launcher is to put the rank before each line; agents do it by themselves."""
    return plan.options.prefix_output and not plan.agents


def _masks_are_of_each_host(plan: Plan) -> bool:
    """Whether the daemon on each host has that host's own mask of GPUs from the scheduler, if there are masks."""
    return plan.scheduler == "slurm" or bool(plan.remote_shell)


def _passed_on(plan: Plan) -> list[str]:
    """The variables that are the same on every host."""
    own = set(MASKS) if _masks_are_of_each_host(plan) else set()
    return [name for name in sorted(plan.environ) if name not in own and name not in _OF_THIS_HOST
            and not name.startswith(_OF_THIS_HOST_PREFIXES)]


# Agents ---------------------------------------------------------------------------------------------------------------

def reach(plan: Plan, host: str, words: Sequence[str]) -> list[str]:
    """What runs `words` on one host of the plan."""
    if plan.means == "local" or plan.means == "ssh" and host == plan.host:
        return list(words)
    if plan.means == "ssh":
        return [plan.path, "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-T", host, shlex.join(["exec", *words])]
    library_path = plan.environ.get("LD_LIBRARY_PATH")  # Python itself may need it, and nothing passes it on
    words = [*(["/usr/bin/env", f"LD_LIBRARY_PATH={library_path}"] if library_path else []), *words]
    return [plan.path, *(["-h", host, "--"] if plan.means == "pbsdsh" else [host]), *words]


def starter(plan: Plan, host: str, words: Sequence[str]) -> list[str]:
    """The same, kept from ending by a stop: PBS signals all of the job's first host, and stops travel in band."""
    return ["/bin/sh", "-c", "trap '' TERM INT USR1 USR2 HUP; exec \"$@\"", "launch", *reach(plan, host, words)]


def rank_variables(plan: Plan, host: int, local_rank: int, address: str, port: str) -> dict[str, str]:
    """What tells a rank that is started without a launcher of its own who it is."""
    return {"RANK": str(sum(plan.ranks[:host]) + local_rank), "WORLD_SIZE": str(plan.world_size),
            "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(plan.ranks[host]), "NODE_RANK": str(host),
            "GROUP_RANK": str(host), "MASTER_ADDR": address, "MASTER_PORT": port}


def torchrun_words(plan: Plan, host: int, address: str, port: str, own_address: str) -> list[str]:
    """The torchrun agent of a host."""
    options = [f"--nproc-per-node={plan.ranks[host]}", f"--max-restarts={plan.options.restarts}"]
    if plan.options.output_dir:
        options += [f"--log-dir={plan.options.output_dir}/{plan.hosts[host]}", "--redirects=3"]
    elif plan.options.prefix_output:
        options += ["--tee=3"]  # torchrun puts the local rank before each line: "[default0]:"
    if len(plan.hosts) == 1:
        options += ["--standalone"]
    elif plan.options.restarts:  # the ranks meet again after a failure, which needs a store that outlives them
        options += [f"--nnodes={len(plan.hosts)}", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}",
                    f"--rdzv-id={port}", f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={own_address}"]
    else:
        options += [f"--nnodes={len(plan.hosts)}", f"--node-rank={host}", f"--master-addr={address}",
                    f"--master-port={port}", f"--local-addr={own_address}"]
    words = plan.command if plan.is_script else ("--no-python", *plan.program)
    if plan.options.restarts:
        words = ("--no-python", plan.python, "-c", _SET_NODE_RANK, *plan.program)
    return [plan.python, "-m", "torch.distributed.run", *options, *words]


def host_words(plan: Plan, host: int, address: str, port: str,
               own_address: str) -> list[tuple[list[str], dict[str, str]]]:
    """What the agent of a host starts there: words and variables of each process."""
    count = plan.threads[host]
    threads = {} if count is None else {"OMP_NUM_THREADS": str(count)}
    if plan.options.torchrun:
        # torchrun sets GROUP_RANK only; where it may restart the ranks it numbers the hosts itself (_SET_NODE_RANK).
        node_rank = {} if plan.options.restarts else {"NODE_RANK": str(host)}
        return [(torchrun_words(plan, host, address, port, own_address), {**node_rank, **threads})]
    return [(list(plan.program), {**rank_variables(plan, host, local, address, port), **threads})
            for local in range(plan.ranks[host])]


# For a person ---------------------------------------------------------------------------------------------------------

def printed(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """The plan as lines for a shell that has `environ`. What the start alone decides stands in <angle brackets>."""
    if plan.means in ("srun", "mpiexec"):
        words = native_command(plan, ["<agent>"] if plan.agents else plan.program)
        line = shlex.join([*_changed(plan, environ), *words])
        for name, mark, text, mode in (("remote_shell", REMOTE_SHELL, remote_shell.script(plan.python), "700"),
                                       ("hosts", HOST_FILE, host_file(plan), "600")):
            if mark in line:
                text = text.replace("\\", "\\\\").replace("%", "%%").replace("\n", "\\n")
                line = line.replace(mark, f'"${name}"')
                line = f'{name}=$(mktemp) && printf {shlex.quote(text)} >"${name}" && chmod {mode} "${name}" && {line}'
        yield line
    if plan.agents:
        address = "127.0.0.1" if len(plan.hosts) == 1 else f"<{plan.hosts[0]}>"
        for host, name in enumerate(plan.hosts):
            for words, variables in host_words(plan, host, address, "<free port>", f"<{name}>"):
                settings = [f"{key}={value}" for key, value in variables.items()]
                if plan.means in ("srun", "mpiexec"):
                    yield f"# on {name}: {shlex.join(['env', *settings, *words])}"
                else:
                    yield shlex.join(reach(plan, name, ["env", *settings, *words]))


def _changed(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """The words of env that make the environment of the native command out of `environ`; none where it is the same."""
    wanted = {**plan.environ, **remote_shell_variables(plan)}
    kept = clean(environ)  # srun itself sets what this leaves out of Slurm's anew
    unset = [name for name in environ if name not in wanted
             and (name in kept or plan.means != "srun" or not name.startswith("SLURM_"))]
    changed = [f"{name}={value}" for name, value in wanted.items() if environ.get(name) != value]
    return ["env", *(word for name in unset for word in ("-u", name)), *changed] if unset or changed else []

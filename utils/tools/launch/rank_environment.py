"""Make the environment of the ranks: what is removed, what differs between hosts, what is set."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, MutableMapping, Sequence

from ...host.masks import MASKS
from ...launchers.detect import LAUNCHERS
from ...launchers.rank_variables import LAUNCH_RANK
from ...launchers.rank_variables import RANK_VARIABLES as RANK_VARIABLES
from ..schedulers.allocation import Allocation

# These describe one host: a rank gets its own host's value, never another host's.
_OF_HOST = {
    "HOSTNAME",
    "HOST",
    "TMPDIR",
    "CUDA_DEVICE_ORDER",
    "PBS_NODENUM",
    "PBS_TASKNUM",
    "PBS_VNODENUM",
    "PBS_MOMPORT",
    "SLURMD_NODENAME",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURM_PROCID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    "SLURM_TOPOLOGY_ADDR",
    "SSH_CONNECTION",
    "SSH_CLIENT",
    "SSH_TTY",
    "XDG_RUNTIME_DIR",
    "XDG_SESSION_ID",
}
_OF_HOST_PREFIXES = ("SLINGSHOT_",)  # network keys that PALS gives to its processes
WATCH, WATCHED = "DDPKIT_WATCH", "DDPKIT_WATCHED"  # see rank_site/sitecustomize.py
RANK_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_site")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PYTHON = re.compile(r"python[\d.]*")
_WITHOUT_SITE = {
    "I": "ignores PYTHONPATH",
    "E": "ignores PYTHONPATH",
    "S": "does not import sitecustomize",
}
# Variables of a host that are sent to agents without a value of their own.
_SENT_IF_MISSING = {"TMPDIR", "CUDA_DEVICE_ORDER", "PBS_MOMPORT"}


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that make a process a rank of another launch."""
    dropped = {name for launcher in LAUNCHERS for name in launcher.rank_variables} | {LAUNCH_RANK}
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        dropped |= set(RANK_VARIABLES)  # an address without a rank may be the user's choice
    return {name: value for name, value in environ.items() if name not in dropped}


def watched(environ: Mapping[str, str], *, on: bool = True) -> dict[str, str]:
    """Return an environment in which ranks are watched, whatever they run; see rank_site.

    on: False removes the variables of a watch around this process.
    """
    found = {name: value for name, value in environ.items() if name not in (WATCH, WATCHED)}
    folders = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    folders = [path for path in folders if os.path.abspath(path) != RANK_SITE]
    if on:
        found[WATCH] = _PACKAGE
        folders.insert(0, RANK_SITE)
    found.pop("PYTHONPATH", None)
    if folders:
        found["PYTHONPATH"] = os.pathsep.join(folders)
    return found


def why_unwatched(command: Sequence[str]) -> str | None:
    """Return why a command is not watched in an environment of watched(); None if it may be.

    Python loads the watch through PYTHONPATH and its site module. What a script starts is unknown.
    """
    program = os.path.basename(command[0])
    if _PYTHON.fullmatch(program):
        for word in command[1:]:
            if not word.startswith("-") or word in ("-m", "-c", "-"):
                break
            for option, effect in _WITHOUT_SITE.items():
                if not word.startswith("--") and option in word[1:]:
                    return f"{program} -{option} {effect}"
        return None
    path = shutil.which(command[0])
    others = any(word.endswith(".py") or "python" in os.path.basename(word) for word in command)
    if path is None or others:
        return None
    try:
        with open(path, "rb") as file:
            is_binary = file.read(4) == b"\x7fELF"
    except OSError:
        return None
    return f"{program} does not run in Python" if is_binary else None


def unwatched_line(reason: str) -> str:
    """Return the line for a user whose --hang-timeout does not apply."""
    return (
        f"nothing watches the ranks, and --hang-timeout does not apply: {reason}. Expected a "
        "script of Python that reads PYTHONPATH. A script that calls setup_distributed() applies "
        "it by itself"
    )


def rank_variables(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    address: str,
    port: int | str,
) -> dict[str, str]:
    """Return RANK_VARIABLES and LAUNCH_RANK of one rank."""
    values = (rank, world_size, local_rank, local_world_size, node_rank, node_rank, address, port)
    variables = dict(zip(RANK_VARIABLES, map(str, values), strict=True))
    return {**variables, LAUNCH_RANK: f"{rank}/{world_size}"}


def correct_slurm_variables(environ: MutableMapping[str, str], num_hosts: int) -> None:
    """Set Slurm's variables of a task as srun would set them for this rank.

    environ: has RANK_VARIABLES. num_hosts: number of hosts of the launch.

    In a rank of an mpiexec, Slurm's variables describe the mpiexec's daemon on this host, or the
    batch script. Code that reads them, such as Lightning, would take the number of daemons for the
    number of ranks.
    """
    for name, source in (
        ("SLURM_PROCID", "RANK"),
        ("SLURM_LOCALID", "LOCAL_RANK"),
        ("SLURM_NODEID", "NODE_RANK"),
        ("SLURM_NTASKS", "WORLD_SIZE"),
        ("SLURM_NPROCS", "WORLD_SIZE"),
        ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"),
    ):
        environ[name] = environ[source]
    environ["SLURM_NNODES"] = environ["SLURM_STEP_NUM_NODES"] = str(num_hosts)
    environ.pop("SLURM_GTIDS", None)
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
        environ.pop(name, None)

    tasks_per_node = environ["LOCAL_WORLD_SIZE"]
    if int(tasks_per_node) * num_hosts == int(environ["WORLD_SIZE"]):
        environ["SLURM_NTASKS_PER_NODE"] = tasks_per_node
        for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
            environ[name] = f"{tasks_per_node}(x{num_hosts})"


def threads_per_rank(
    environ: Mapping[str, str],
    allocation: Allocation | None,
    torchrun: bool,
    ranks: int,
    cores: int | None,
) -> int | None:
    """Return OMP_NUM_THREADS for the ranks of a host; None to leave it unchanged.

    PBS sets it to the cores of a chunk, which several ranks share. torchrun sets it to 1 where it
    is unset.
    """
    text = environ.get("OMP_NUM_THREADS", "")
    if not text:
        return max(1, cores // ranks) if torchrun and cores else None
    in_pbs = allocation is not None and allocation.scheduler == "pbs"
    set_by_pbs = in_pbs and text == environ.get("NCPUS") and text.isdecimal()
    if not set_by_pbs:
        return None
    share = (cores or int(text)) // ranks
    return min(int(text), max(1, share))


def rank_environment(
    sent: Mapping[str, str], own: Mapping[str, str], *, same_host: bool
) -> dict[str, str]:
    """Return the environment of an agent's ranks.

    sent: environment of the launch. own: the agent's environment, which wins for variables that the
    scheduler sets on each host. same_host: whether ddpkit launch runs on this host.
    """
    environ = {
        name: value
        for name, value in sent.items()
        if name in _SENT_IF_MISSING or not _is_of_host(name)
    }
    environ |= {name: value for name, value in own.items() if _is_of_host(name) or name in MASKS}
    for name in MASKS:
        # "0,1" may be right on every host; GPU-<uuid> is right only on the host of that GPU.
        by_uuid = environ.get(name, "").startswith(("GPU-", "MIG-"))
        if by_uuid and not same_host and name not in own:
            del environ[name]
    return environ


def _is_of_host(name: str) -> bool:
    return name in _OF_HOST or name.startswith(_OF_HOST_PREFIXES)

"""Slurm's srun.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES". Tested with Slurm 22.05, 25.11 and 26.05.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping

from ..errors import LaunchError
from ..host import network
from ..job.slurm_steps import SPECIAL_STEPS, step_name
from .launcher import Launcher, Placement, is_set, number, shown
from .torchrun import unused_allocation

_STEP = "SLURM_STEP_ID"
_NUM_TASKS = "SLURM_NTASKS"  # the job's tasks in a batch script, the step's in a task
_LOCAL_TASKS = "SLURM_GTIDS"  # "2,3": ranks of this node's tasks
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"  # "2(x3),1": 2 tasks on three nodes, 1 on the next
_NODE_LIST = "SLURM_STEP_NODELIST"  # "n[1-2,04]"

_SHELLS = ("sh", "bash", "zsh", "ksh", "dash", "ash", "csh", "tcsh", "fish")
_SHELL_OPTIONS_WITH_VALUE = ("--init-file", "--rcfile", "-o", "+o", "-O", "+O")
_TERMINALS = ("tmux", "screen", "SCREEN", "code", "node")


class SlurmStep(Launcher):
    """slurmstepd is the parent of a step's tasks, the ranks.

    Batch scripts and interactive steps have most of these variables, too, but are no tasks.
    """

    name = "slurm"
    command = "srun (Slurm)"
    rank_variable = "SLURM_PROCID"
    world_size_variable = "SLURM_STEP_NUM_TASKS"
    local_rank_variable = "SLURM_LOCALID"
    marker_variables = (_STEP, "SLURM_STEPID")
    job_variables = (_NUM_TASKS, "SLURM_NODEID", _LOCAL_TASKS, _TASKS_PER_NODE)
    identity_variables = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", _STEP, "SLURM_RESTART_COUNT")
    also_sets = ("mpich",)  # by srun --mpi=pmi2
    is_noted_when_ignored = False  # every process of a job has Slurm's variables

    def is_present(self, environ: Mapping[str, str]) -> bool:
        step, rank = step_name(environ), number(environ, self.rank_variable)
        if rank is None or step in SPECIAL_STEPS:
            return False
        if rank > 0:  # only rank 0 may be a batch script; read() reports what is missing
            return True
        # A batch script may have inherited variables of another job's step.
        return bool(step) and not self._contradicts_step(environ)

    def is_undecided(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, _STEP, self.rank_variable))

    def is_parent(self, command: str) -> bool:
        # "slurmstepd: [44.0]"; "slurmstepd: [44.0+1]" for a component of a heterogeneous job
        return _step_of_daemon(command).partition("+")[0].isdecimal()

    def starts_shell(self, command: str, environ: Mapping[str, str]) -> bool:
        if _step_of_daemon(command) in SPECIAL_STEPS:
            return True
        # srun --pty starts a shell for a person, which has the variables of rank 0.
        has_terminal = is_set(environ, "SLURM_PTY_PORT")
        is_one_task = environ.get(self.world_size_variable) == "1"
        return bool(has_terminal) and not is_one_task and _is_interactive_shell(command)

    def read(self, environ: Mapping[str, str]) -> Placement:
        rank, local_rank = number(environ, self.rank_variable), number(environ, "SLURM_LOCALID")
        tasks, step_tasks = number(environ, _NUM_TASKS), number(environ, self.world_size_variable)
        world_size = tasks if step_tasks is None else step_tasks
        if rank is None or world_size is None:
            found = shown(environ, self.variables) or "the parent process is of a step"
            raise LaunchError(
                f"slurm: {found}, but SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS is "
                "missing. Start the script by srun"
            )
        if not is_set(environ, _STEP):
            raise LaunchError(
                f"slurm: SLURM_PROCID={rank}, but SLURM_STEP_ID is not set; srun sets both. Start "
                "the script by srun, or unset SLURM_PROCID"
            )
        if tasks is not None and tasks != world_size:
            raise LaunchError(
                f"slurm: SLURM_NTASKS={tasks} but SLURM_STEP_NUM_TASKS={world_size} with "
                f"SLURM_PROCID={rank}; expected equal values, as srun sets them. Unset what was "
                "set by hand and start the script by srun"
            )
        local_size = self._local_world_size(environ, rank, local_rank)
        return Placement(self.name, rank, world_size, local_rank, local_size)

    def notes(self, environ: Mapping[str, str], placement: Placement) -> Iterator[str]:
        if placement.world_size == 1 and is_set(environ, "SLURM_PTY_PORT"):
            yield from unused_allocation(environ, "srun --pty started one task")

    def candidate_hosts(self, environ: Mapping[str, str]) -> tuple[list[str], str]:
        from ..job.slurm_job import expand_hostlist

        try:
            nodes = expand_hostlist(environ.get(_NODE_LIST, ""))
            first_of_component = [expand_hostlist(part)[0] for part in _component_nodes(environ)]
        except ValueError as error:
            raise LaunchError(f"{_NODE_LIST}: {error}") from None

        if first_of_component:
            # Rank 0 is in the step's first component.
            hosts = [first for first in first_of_component if first in nodes or not nodes] + nodes
        else:
            # Slurm 26.05 and newer, which set SLURM_JOB_SLUID, put rank 0 on the first node of the
            # network topology, and sort the list by name.
            is_sorted = is_set(environ, "SLURM_JOB_SLUID")
            is_arbitrary = environ.get("SLURM_DISTRIBUTION") == "arbitrary"
            hosts = nodes if is_sorted or is_arbitrary else nodes[:1]
        return list(dict.fromkeys(hosts)), _NODE_LIST

    def resolve(self, host: str) -> list[str]:
        return _node_addresses(host)

    def _contradicts_step(self, environ: Mapping[str, str]) -> bool:
        """Whether some of rank 0's variables belong to a batch script."""
        tasks, step_tasks = number(environ, _NUM_TASKS), number(environ, self.world_size_variable)
        if tasks is not None and step_tasks is not None and tasks != step_tasks:
            return True
        is_alone = environ.get(_LOCAL_TASKS, "").strip() == "0"
        return is_alone and (_tasks_on_node(environ) or 1) > 1

    def _local_world_size(
        self, environ: Mapping[str, str], rank: int, local_rank: int | None
    ) -> int | None:
        ranks, on_node = environ.get(_LOCAL_TASKS, "").split(","), _tasks_on_node(environ)
        if local_rank is None or local_rank >= len(ranks) or ranks[local_rank] != str(rank):
            return on_node  # SLURM_GTIDS is inherited from another step
        # Leftover variables of a batch script look like rank 0.
        if rank == 0 and on_node not in (None, len(ranks)):
            raise LaunchError(
                f"slurm: {shown(environ, (_LOCAL_TASKS,))} is {len(ranks)} tasks on this node, but "
                f"SLURM_STEP_TASKS_PER_NODE has {on_node}. Unset what was set by hand and start "
                "the script by srun"
            )
        return len(ranks)


def _tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Return this node's entry of SLURM_STEP_TASKS_PER_NODE; None if it is unknown."""
    node, text = number(environ, "SLURM_NODEID"), environ.get(_TASKS_PER_NODE, "").strip()
    # A heterogeneous job's list is sorted by node name, so SLURM_NODEID is no index into it.
    if node is None or not text or is_set(environ, "SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
        return None
    from ..job.slurm_job import expand_counts

    try:
        counts = expand_counts(text)
    except ValueError:
        raise LaunchError(
            f"{_TASKS_PER_NODE} is {text[:80]!r}; expected the form 2(x3),1"
        ) from None
    return counts[node] if node < len(counts) else None


def _step_of_daemon(command: str) -> str:
    """Return the step in a daemon's command: "slurmstepd: [44.0+1]" -> "0+1"; "" for others."""
    if not command.startswith("slurmstepd:"):
        return ""
    return command.partition("[")[2].partition("]")[0].rpartition(".")[2]


def _is_interactive_shell(command: str) -> bool:
    """Whether a command is a shell without a script or -c, or a program that opens one."""
    program, *words = command.split() or [""]
    program = program.rpartition("/")[2].lstrip("-").rstrip(":")  # "-bash", "tmux: server"
    if program not in _SHELLS:
        return program in _TERMINALS
    remaining = iter(words)
    for word in remaining:
        if word in _SHELL_OPTIONS_WITH_VALUE:
            next(remaining, None)
        elif not word.startswith("-") or word.endswith("c") and not word.startswith("--"):
            return False  # a script, or -c, -lc
    return True


def _component_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the node lists of a heterogeneous job's components, in order."""
    for kind in ("HET", "PACK"):  # older versions write PACK
        names = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{number}" for number in itertools.count())
        if nodes := list(itertools.takewhile(bool, map(environ.get, names))):
            return [str(node) for node in nodes]
    return []


@functools.cache
def _node_addresses(node: str) -> list[str]:
    """Return the IP addresses at which Slurm reaches a node, as scontrol reports them."""
    from ..job.commands import SchedulerError, run_command
    from ..job.slurm_job import records

    try:
        output = run_command(["scontrol", "show", "node", node], timeout_seconds=10)
        return network.resolve(records(output)[0]["NodeAddr"])
    except (SchedulerError, LookupError):
        return []

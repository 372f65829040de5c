"""Which launcher started this process, and as which rank: environ -> Placement.

Standard library only, no torch. One short class per launcher: a new one is a class and its place in LAUNCHERS.
Not here: addresses and ports (rendezvous.py), devices (device.py), what a job was allocated (schedulers/).

Sources of the variable names: the manual pages of torchrun, mpiexec (Open MPI, MPICH, Intel MPI, HPE PALS, MVAPICH2),
srun(1), flux-environment(7), jsrun(1); every one but PALS, MVAPICH2, Flux and jsrun was also seen on the real launcher.
"""
from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

from .parents import parent_commands
from .placement import LaunchError as LaunchError
from .placement import Placement as Placement
from .placement import is_set, number, shown
from .rank_variables import Inherited, inherited


class Launcher:
    """One launcher: the variables that it gives a rank, and the program that is a rank's parent under it.

    The class attributes are names of variables; "" where the launcher has none.
    """

    name = ""
    rank = world_size = local_rank = local_world_size = ""
    also: tuple[str, ...] = ()  # further variables that this launcher's decision looks at
    parents = ""  # a pattern for the names of the programs that start ranks

    def present(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher left its mark, even an incomplete one."""
        return bool(is_set(environ, self.rank, self.world_size, self.local_rank, self.local_world_size))

    def read(self, environ: Mapping[str, str]) -> Placement:
        """The placement that the variables give. LaunchError where they are incomplete or contradictory."""
        missing = [name for name in (self.rank, self.world_size) if not is_set(environ, name)]
        if missing:
            found = ", ".join(f"{name}={environ[name]!r}" for name in self.variables if name in environ)
            raise LaunchError(f"{self.name}: {' and '.join(missing)} not set, but {found}. Expected both or none: "
                              "start the script by a launcher, or unset what was set by hand")
        rank, world_size = number(environ, self.rank), number(environ, self.world_size)
        assert rank is not None and world_size is not None
        return Placement(self.name, rank, world_size,
                         number(environ, self.local_rank), number(environ, self.local_world_size))

    @property
    def variables(self) -> tuple[str, ...]:
        own = (self.rank, self.world_size, self.local_rank, self.local_world_size, *self.also)
        return tuple(name for name in own if name)

    def started(self, command: str) -> bool:
        """Whether `command`, the command line of a parent process, is of the program that starts these ranks."""
        return bool(self.parents) and re.match(rf"(\S*/)?({self.parents})(\s|$)", command) is not None


class Torchrun(Launcher):
    """torchrun and python -m torch.distributed.run / .launch; the worker's parent is the agent."""

    name = "torchrun"
    rank, world_size, local_rank, local_world_size = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    also = ("TORCHELASTIC_RUN_ID",)
    parents = (r"(\S*python\S*\s.*?/)?(torchrun|accelerate\s+launch)|"
               r"\S*python\S*\s(.*\s)?-m\s+torch\.distributed\.(run|launch)")

    def present(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, "TORCHELASTIC_RUN_ID")) and super().present(environ)


class OpenMPI(Launcher):
    """Open MPI 4 (orted) and 5 (prted)."""

    name = "openmpi"
    rank, world_size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local_rank, local_world_size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    parents = r"prted|orted|prterun|orterun|mpirun\S*|mpiexec\S*"


class MPICH(Launcher):
    """Hydra, the mpiexec of MPICH."""

    name = "mpich"
    rank, world_size, local_rank, local_world_size = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    also = ("PMI_ID", "PMI_PORT")
    parents = r"hydra_pmi_proxy|mpirun\S*|mpiexec\S*"

    def present(self, environ: Mapping[str, str]) -> bool:
        # srun --mpi=pmi2, Flux and PALS set PMI_RANK too, but not MPI_LOCALRANKID.
        return bool(is_set(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))

    def read(self, environ: Mapping[str, str]) -> Placement:
        if is_set(environ, "PMI_PORT") and not is_set(environ, "PMI_RANK", "PMI_SIZE"):
            raise LaunchError("mpich: PMI_PORT is set but PMI_RANK and PMI_SIZE are not, as mpiexec -pmi-port does. "
                              "Start again without -pmi-port")
        return super().read(environ)


class IntelMPI(MPICH):
    """Intel's Hydra: MPICH's variables and its own."""

    name = "intel-mpi"
    also = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_LOCALHOST")
    # MPICH's proxy has --control-port on its command line, Intel's has not.
    parents = r"hydra_pmi_proxy(?!.*--control-port)|mpirun\S*|mpiexec\S*"

    def present(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, *self.also)) and super().present(environ)


class PMI(Launcher):
    """A process manager that speaks PMI and says nothing of its own; counted to the MPICH family."""

    name = "mpich"
    rank, world_size, local_rank, local_world_size = "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"
    parents = r"mpispawn|pmi_proxy|mpirun\S*|mpiexec\S*"

    def present(self, environ: Mapping[str, str]) -> bool:
        # People unset PMI_RANK and PMI_SIZE to start single processes from a rank, and leave the others.
        return bool(is_set(environ, "PMI_RANK", "PMI_SIZE"))


class PALS(Launcher):
    """mpiexec of HPE Cray EX. It gives no world size: that is PMI_SIZE under cray-pmi, else by the node file."""

    name = "pals"
    rank, local_rank, local_world_size = "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
    also = ("PMI_RANK", "PMI_SIZE", "PBS_NODEFILE", "WORLD_SIZE")
    parents = r"palsd"

    def present(self, environ: Mapping[str, str]) -> bool:
        # srun of a Cray sets PALS variables too (Slurm's mpi/cray_shasta), with this application id.
        by_srun = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        return bool(is_set(environ, "PALS_RANKID", "PALS_APID")) and environ.get("PALS_APID") != by_srun

    def read(self, environ: Mapping[str, str]) -> Placement:
        notes: tuple[str, ...] = ()
        rank = number(environ, "PALS_RANKID")
        local_rank, local_world_size = number(environ, "PALS_LOCAL_RANKID"), number(environ, "PALS_LOCAL_SIZE")
        if rank is None:
            raise LaunchError(f"pals: PALS_APID={environ['PALS_APID']} is set, but PALS_RANKID is not. Start the "
                              "script by mpiexec, or unset PALS_APID too")
        if number(environ, "PMI_RANK") == rank and is_set(environ, "PMI_SIZE"):
            world_size = number(environ, "PMI_SIZE")
        elif is_set(environ, "WORLD_SIZE") and self._is_ours(environ):
            world_size = number(environ, "WORLD_SIZE")
        else:
            hosts = len(set(_node_file(environ).split()))
            if not hosts or not local_world_size:
                raise LaunchError(f"pals: PALS_RANKID={rank}, but nothing tells the world size (PMI_SIZE and "
                                  "PBS_NODEFILE are missing). Pass it: mpiexec --env WORLD_SIZE=...")
            world_size = local_world_size * hosts
            notes = (f"world size {world_size} = PALS_LOCAL_SIZE {local_world_size} x {hosts} hosts of PBS_NODEFILE; "
                     "where hosts have different numbers of ranks pass it: mpiexec --env WORLD_SIZE=...",)
        assert world_size is not None
        return Placement(self.name, rank, world_size, local_rank, local_world_size, notes)

    @staticmethod
    def _is_ours(environ: Mapping[str, str]) -> bool:
        """Whether WORLD_SIZE is of this launch: it stands alone, or beside the RANK that launch.py has given."""
        beside = {"RANK": "PALS_RANKID", "LOCAL_RANK": "PALS_LOCAL_RANKID", "LOCAL_WORLD_SIZE": "PALS_LOCAL_SIZE"}
        return not is_set(environ, "RANK") or all(
            number(environ, name) == number(environ, own) for name, own in beside.items())


class MVAPICH(Launcher):
    """MVAPICH2 by mpirun_rsh or its Hydra, which set MPICH's variables as well."""

    name = "mvapich"
    rank, world_size = "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"
    local_rank, local_world_size = "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
    parents = r"mpispawn|hydra_pmi_proxy|mpirun\S*|mpiexec\S*"


class Slurm(Launcher):
    """srun. A batch script and an interactive step have most of these variables too, and are no tasks."""

    name = "slurm"
    rank, world_size, local_rank = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    also = ("SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_STEP_TASKS_PER_NODE")
    parents = r"slurmstepd:\s+\[[^\]]*\.(\d+)(\+\d+)?\]"

    SPECIAL_STEPS = 0xFFFFFFF0  # slurm.h: 0xfffffffa is an interactive step, ...fb the batch script, ...fc extern

    def present(self, environ: Mapping[str, str]) -> bool:
        return not self.why_no_task(environ)

    def started(self, command: str) -> bool:
        return "slurmstepd" in command and super().started(command)  # a pattern takes 0.2 ms to compile

    def why_no_task(self, environ: Mapping[str, str]) -> str:
        """Why this process is no task of a step, as far as the variables tell; empty where it is one."""
        step, rank = environ.get("SLURM_STEP_ID", "").strip(), number(environ, "SLURM_PROCID")
        if rank is None or not step and rank == 0:  # a rank above 0 is no batch script's; read() says what is missing
            return "SLURM_STEP_ID or SLURM_PROCID is not set"
        if step.isdecimal() and int(step) >= self.SPECIAL_STEPS:
            return f"SLURM_STEP_ID={step} is an interactive or batch step"
        tasks, step_tasks = number(environ, "SLURM_NTASKS"), number(environ, "SLURM_STEP_NUM_TASKS")
        if rank == 0:  # a batch script has SLURM_PROCID=0, and may have inherited another step's variables
            if tasks is not None and step_tasks is not None and tasks != step_tasks:
                return f"SLURM_STEP_NUM_TASKS={step_tasks} is not SLURM_NTASKS={tasks}"
            on_node, here = self._tasks_on_node(environ), environ.get("SLURM_GTIDS", "").strip()
            if on_node is not None and here == "0" and on_node > 1:
                return f"SLURM_GTIDS=0 is one task, but the step has {on_node} on this node"
        return ""

    def read(self, environ: Mapping[str, str]) -> Placement:
        rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID")
        tasks, step_tasks = number(environ, "SLURM_NTASKS"), number(environ, "SLURM_STEP_NUM_TASKS")
        world_size = step_tasks if step_tasks is not None else tasks
        if rank is None or world_size is None:
            raise LaunchError(f"slurm: {shown(environ, self.variables) or 'the parent process is of a step'}, but "
                              "SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS is missing. Start the script by srun")
        if not is_set(environ, "SLURM_STEP_ID"):
            raise LaunchError(f"slurm: SLURM_PROCID={rank}, but SLURM_STEP_ID is not set; srun sets both. Start the "
                              "script by srun, or unset SLURM_PROCID")
        if tasks is not None and tasks != world_size:
            raise LaunchError(f"slurm: SLURM_NTASKS={tasks} but SLURM_STEP_NUM_TASKS={world_size} with "
                              f"SLURM_PROCID={rank}; expected equal values, as srun sets them. Unset what was set by "
                              "hand and start the script by srun")
        here = environ.get("SLURM_GTIDS", "").split(",")  # "2,3": the global ranks of this node's tasks
        if local_rank is not None and local_rank < len(here) and here[local_rank] == str(rank):
            # What a batch shell has left behind is of rank 0 alone.
            on_node = self._tasks_on_node(environ) if rank == 0 else None
            if on_node is not None and on_node != len(here):
                raise LaunchError(f"slurm: {shown(environ, ('SLURM_GTIDS',))} is {len(here)} tasks on this node, but "
                                  f"SLURM_STEP_TASKS_PER_NODE says {on_node}. Unset what was set by hand and start the "
                                  "script by srun")
            return Placement(self.name, rank, world_size, local_rank, len(here))
        return Placement(self.name, rank, world_size, local_rank, self._tasks_on_node(environ))

    @staticmethod
    def _tasks_on_node(environ: Mapping[str, str]) -> int | None:
        """This node's entry of SLURM_STEP_TASKS_PER_NODE, for example "2(x3),1"; None where it is not known."""
        node, text = number(environ, "SLURM_NODEID"), environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
        if node is None or not text or is_set(environ, "SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
            return None  # over several components the list is in the order of names, and SLURM_NODEID is not
        parts = text.split(",")
        try:
            if node < len(parts) and "(" not in text:  # ten thousand uneven nodes, at once
                return int(parts[node])
            for part in parts:
                times = int(part[part.index("(x") + 2:-1]) if "(" in part else 1
                if node < times:
                    return int(part.partition("(")[0])
                node -= times
        except ValueError:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE is {text[:80]!r}; expected the form 2(x3),1") from None
        return None


class Flux(Launcher):
    name = "flux"
    rank, world_size, local_rank = "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"
    also = ("FLUX_JOB_NNODES",)
    parents = r"flux-shell"

    def read(self, environ: Mapping[str, str]) -> Placement:
        placement, nodes = super().read(environ), number(environ, "FLUX_JOB_NNODES")
        # Flux does not tell the tasks of this node; it follows only where there is one node or one task on each.
        local_size = {1: placement.world_size, placement.world_size: 1}.get(nodes or 0)
        return placement.replace(local_world_size=local_size)


class Jsrun(Launcher):
    """jsrun of IBM LSF (JSM), which sets Open MPI's variables as well."""

    name = "jsrun"
    rank, world_size = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"
    local_rank, local_world_size = "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
    parents = r"jsmd|jskd|jsrun"


class ByHand(Launcher):
    """RANK and WORLD_SIZE set by a person or a script, believed only where no launcher left its mark."""

    name = "env"
    rank, world_size, local_rank, local_world_size = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"

    def present(self, environ: Mapping[str, str]) -> bool:
        # WORLD_SIZE alone is set in some people's profile; RANK alone leaks into batch scripts from the submit shell.
        allocated = is_set(environ, "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
        by_torchrun = is_set(environ, "TORCHELASTIC_RUN_ID")
        return bool(is_set(environ, "RANK")) and not by_torchrun and not (
            allocated and not is_set(environ, "WORLD_SIZE"))


class Single(Launcher):
    """No launcher: one process."""

    name = "single"

    def present(self, environ: Mapping[str, str]) -> bool:
        return True

    def read(self, environ: Mapping[str, str]) -> Placement:
        return Placement(self.name, 0, 1, 0, 1)


# The order in which launchers are believed when the parent processes say nothing: the one that usually runs inside
# the others comes first. Each is in the order of its own marks (Intel's Hydra has MPICH's too).
LAUNCHERS: tuple[Launcher, ...] = (Torchrun(), PALS(), MVAPICH(), Jsrun(), OpenMPI(), IntelMPI(), MPICH(), Flux(),
                                   Slurm(), PMI(), ByHand(), Single())
_STEP_SHELL = r"slurmstepd:\s+\[[^\]]*\.(batch|interactive|extern)\]"
# A shell without a script or -c, or what opens one: below `srun --pty` a person types into it, and only that of rank 0.
_TYPED_INTO = (r"(\S*/)?-?(ba|z|k|da|a|c|tc|fi)?sh(\s+(--init-file|--rcfile|[-+][oO])\s+\S+|"
               r"\s+-(?!\w*c(\s|$))\S+)*\s*$|(\S*/)?(tmux|screen|SCREEN|code|node)(:|\s|$)")
# Programs of many names run torch's elastic agent in Python, and the agent is the parent of its workers.
_PYTHON = r"(\S*/)?(python|pypy)[\w.]*(\s|$)"
_HAND_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def detect(environ: Mapping[str, str] = os.environ, *, ancestors: Iterable[str] | None = None,
           launcher: str | None = None) -> Placement:
    """The placement of this process, by the innermost launcher that started it.

    environ: the variables to read. ancestors: command lines of the parent processes, nearest first; read from /proc
    when None and environ is os.environ, else not used. launcher: a name of LAUNCHERS to believe instead of choosing.

    The same arguments give the same answer; only PBS_NODEFILE is opened, where nothing else tells a number.
    Raises LaunchError when the variables of the launcher are incomplete or contradict each other, or when the launcher
    asked for did not start this process; ValueError when there is no launcher of that name.
    """
    return _decide(environ, ancestors, launcher)[0]


def _decide(environ: Mapping[str, str], ancestors: Iterable[str] | None,
            forced: str | None) -> tuple[Placement, Launcher, str]:
    """The placement, the launcher that it is from, and why that one."""
    above = inherited(environ)
    if ancestors is None:
        below = None if above is None or above.own else above.parents_below()
        ancestors = parent_commands(below) if environ is os.environ else ()
    if above is not None:
        environ = above.environ
    if forced is not None:
        return _by_name(environ, forced)
    if above is not None and not above.own:
        return _below_a_rank(environ, above, ancestors)
    candidates = [one for one in LAUNCHERS if one.present(environ)]
    chosen, why = _innermost(environ, candidates, ancestors)
    placement = chosen.read(environ)
    notes = placement.notes + tuple(_notes(environ, chosen, candidates, placement))
    return placement.replace(notes=notes), chosen, why


def _below_a_rank(environ: Mapping[str, str], above: Inherited,
                  ancestors: Iterable[str]) -> tuple[Placement, Launcher, str]:
    """The placement of a process that a rank has started, with the variables of that rank's launcher.

    It is a rank where a launcher is among its parents below that rank, or where RANK and its like were set anew.
    """
    # A worker of the same torchrun has the same error file: what has new variables then was started by hand.
    candidates = [one for one in LAUNCHERS if one.present(environ)
                  and (above.new_agent or not isinstance(one, Torchrun))]
    for command in ancestors:
        if any(one.started(command) or isinstance(one, Torchrun) and re.match(_PYTHON, command)
               for one in candidates):
            chosen, why = _innermost(environ, candidates, [command])
            placement = chosen.read(environ)
            notes = placement.notes + tuple(_notes(environ, chosen, [chosen], placement))
            return placement.replace(notes=notes), chosen, why
    chosen, why = Single(), f"{above.process} started this process, and no launcher is between"
    if above.changed and is_set(environ, "RANK"):
        chosen, why = ByHand(), f"{above.process} started this process, with other variables than its own"
        return chosen.read(environ), chosen, why
    note = (f"this process was started by {above.process} and by no launcher: it runs alone, as rank 0 of 1. To start "
            "ranks from a rank, use a launcher")
    return chosen.read(environ).replace(notes=(note,)), chosen, why


def _by_name(environ: Mapping[str, str], name: str) -> tuple[Placement, Launcher, str]:
    named = [one for one in LAUNCHERS if one.name == name]
    if not named:
        known = ", ".join(dict.fromkeys(one.name for one in LAUNCHERS))
        raise ValueError(f"launcher is {name!r}; expected one of {known}")
    for one in named:
        if one.present(environ):
            return one.read(environ), one, "it was asked for by name"
    raise LaunchError(f"launcher={name!r} was asked for, but it did not start this process: "
                      f"{' and '.join(v for v in (named[0].rank, named[0].world_size) if v)} not set as it sets them. "
                      "Start the script by it, or leave the launcher out")


def _innermost(environ: Mapping[str, str], candidates: list[Launcher],
               ancestors: Iterable[str]) -> tuple[Launcher, str]:
    """The candidate whose program is the nearest parent; where no parent tells, the first in the order of LAUNCHERS."""
    # A numbered step's daemon proves a task, also where the variables are too torn to look like one: then read() fails.
    believed = [*candidates, *(one for one in LAUNCHERS if isinstance(one, Slurm) and one not in candidates
                               and is_set(environ, "SLURM_STEP_ID", "SLURM_PROCID"))]
    if len(believed) == 1:  # nothing but Single, which is always one
        return candidates[0], "no launcher's variables are set"
    typed = bool(is_set(environ, "SLURM_PTY_PORT")) and environ.get("SLURM_STEP_NUM_TASKS") != "1"
    for command in ancestors:
        for one in believed:
            if one.started(command) or isinstance(one, Torchrun) and re.match(_PYTHON, command):
                return one, f"the nearest launcher among the parent processes is: {command.strip()[:100]}"
        if _starts_shells(command) or typed and re.match(_TYPED_INTO, command):
            by_hand = next(one for one in candidates if isinstance(one, ByHand | Single))
            return by_hand, f"the parent process is a shell's, not a rank's: {command.strip()}"
    if isinstance(candidates[0], Single):
        return candidates[0], "no launcher's variables are set"
    return candidates[0], "its variables are set, and no parent process tells otherwise"


def _starts_shells(command: str) -> bool:
    """Whether a parent process starts a person's or a batch shell, not a rank: variables below it were inherited."""
    if "slurmstepd" in command:
        return re.match(_STEP_SHELL, command) is not None
    return command.partition(" ")[0].rpartition("/")[2] == "pbs_mom"


def _notes(environ: Mapping[str, str], chosen: Launcher, candidates: list[Launcher],
           placement: Placement) -> Iterator[str]:
    if chosen.name == "single":
        yield from _unused_allocation(environ, "no launcher started this process")
        if is_set(environ, "RANK", "WORLD_SIZE"):
            yield f"{shown(environ, _HAND_SET)} was ignored: RANK and WORLD_SIZE go together, and one is not set"
    if chosen.name == "slurm" and placement.world_size == 1 and is_set(environ, "SLURM_PTY_PORT"):
        yield from _unused_allocation(environ, "srun --pty started one task")
    ignored = [one for one in candidates if one.name not in (chosen.name, "slurm", "env", "single")
               and not (isinstance(one, PMI | MPICH) and isinstance(chosen, PALS | MVAPICH | Flux | Slurm | IntelMPI))
               and not (isinstance(one, OpenMPI) and isinstance(chosen, Jsrun))]
    for one in {one.name: one for one in reversed(ignored)}.values():
        yield (f"{shown(environ, one.variables[:4])} of {one.name} was ignored: {chosen.name} started this process as "
               f"rank {placement.rank} of {placement.world_size}")
    if (chosen.name not in ("torchrun", "env", "single") and not any(isinstance(one, Torchrun) for one in ignored)
            and is_set(environ, "RANK") and hand_set_is_stale(environ, placement)):
        yield (f"{shown(environ, _HAND_SET)} was ignored: {chosen.name} started this process as "
               f"rank {placement.rank} of {placement.world_size}")


def hand_set_is_stale(environ: Mapping[str, str], placement: Placement) -> bool:
    """Whether RANK, WORLD_SIZE or LOCAL_RANK in the environment is of another launch than `placement`."""
    actual = (placement.rank, placement.world_size, placement.local_rank, placement.local_world_size)
    return any(is_set(environ, name) and value is not None and environ[name].strip() != str(value)
               for name, value in zip(_HAND_SET, actual, strict=True))


def _unused_allocation(environ: Mapping[str, str], why: str) -> Iterator[str]:
    """A note where the scheduler gave more than one process can use, and why there is one."""
    job = size = start = ""
    if is_set(environ, "SLURM_JOB_ID"):
        job, start = f"Slurm job {environ['SLURM_JOB_ID']}", "srun"
        counts = {"tasks": environ.get("SLURM_NTASKS", ""), "nodes": environ.get("SLURM_JOB_NUM_NODES", "")}
        size = " on ".join(f"{count} {what}" for what, count in counts.items() if count not in ("", "1"))
    elif is_set(environ, "PBS_JOBID"):
        job, start, slots = f"PBS job {environ['PBS_JOBID']}", "mpiexec", _node_file(environ).count(b"\n")
        size = f"{slots} slots" if slots > 1 else ""
    elif is_set(environ, "LSB_JOBID"):
        job, start, slots = f"LSF job {environ['LSB_JOBID']}", "jsrun", number(environ, "LSB_DJOB_NUMPROC") or 1
        size = f"{slots} slots" if slots > 1 else ""
    if size:
        yield (f"{job} holds {size}, but {why}: it runs alone, as rank 0 of 1. "
               f"To use them all: {start} python ...")


def _node_file(environ: Mapping[str, str]) -> bytes:
    """The text of PBS_NODEFILE: a line with a host for each rank that mpiprocs asks for. Empty where unreadable."""
    try:
        with open(environ.get("PBS_NODEFILE", ""), "rb") as file:
            return file.read()
    except OSError:
        return b""


def _explain() -> int:
    """Print which launcher was found and why, which variables decided, and which were ignored."""
    try:
        placement, chosen, why = _decide(os.environ, None, sys.argv[1] if len(sys.argv) > 1 else None)
    except (LaunchError, ValueError) as error:
        print(f"cannot tell the rank: {error}", file=sys.stderr)
        return 1
    used = chosen.variables
    print(f"launcher          {placement.launcher}: {why}")
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        value = getattr(placement, name)
        print(f"{name:<17} {'not told by the launcher; found out after the start' if value is None else value}")
    print(f"decided by        {shown(os.environ, used) or 'no variable'}")
    others = dict.fromkeys(name for one in LAUNCHERS for name in one.variables if name not in used)
    print(f"ignored           {shown(os.environ, others) or 'nothing'}")
    for note in placement.notes:
        print(f"note              {note}")
    return 0


if __name__ == "__main__":
    sys.exit(_explain())

"""torchrun; ranks numbered by hand in its variables; single processes.

Source: https://pytorch.org/docs/stable/elastic/run.html.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping

from .launcher import Launcher, Placement, is_set, node_file, number, shown
from .rank_variables import LAUNCH_RANK

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ByHand(Launcher):
    """RANK and WORLD_SIZE set by a person or a script; used if there is no launcher."""

    name = "env"
    rank_variable, world_size_variable, local_rank_variable, local_world_size_variable = (
        RANK_VARIABLES
    )
    identity_variables = ("MASTER_PORT",)
    starts_processes = False
    requires_master_address = True
    is_noted_when_ignored = False

    def is_present(self, environ: Mapping[str, str]) -> bool:
        if not is_set(environ, "RANK") or is_set(environ, "TORCHELASTIC_RUN_ID"):
            return False  # some people's profiles set WORLD_SIZE alone
        # Batch scripts inherit a RANK without WORLD_SIZE from the shell that submitted them.
        in_job = is_set(environ, "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
        return bool(is_set(environ, "WORLD_SIZE")) or not in_job

    def describe_start(self, environ: Mapping[str, str]) -> str:
        if environ.get(LAUNCH_RANK):
            return "started by ddpkit launch"
        return "numbered by RANK and WORLD_SIZE"


class Single(Launcher):
    """No launcher: one process."""

    name = "single"
    starts_processes = False
    is_noted_when_ignored = False

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return True

    def starts_shell(self, command: str, environ: Mapping[str, str]) -> bool:
        return command.partition(" ")[0].rpartition("/")[2] == "pbs_mom"

    def read(self, environ: Mapping[str, str]) -> Placement:
        return Placement(self.name, 0, 1, 0, 1)

    def describe_start(self, environ: Mapping[str, str]) -> str:
        return "started without a launcher"

    def notes(self, environ: Mapping[str, str], placement: Placement) -> Iterator[str]:
        yield from unused_allocation(environ, "no launcher started this process")
        if is_set(environ, "RANK", "WORLD_SIZE"):
            yield (
                f"{shown(environ, RANK_VARIABLES)} was ignored: RANK and WORLD_SIZE go together, "
                "and one is not set"
            )


def is_stale(environ: Mapping[str, str], placement: Placement) -> bool:
    """Whether RANK or a similar variable belongs to another launch than `placement`."""
    numbers = placement[1:5]  # in the order of RANK_VARIABLES
    return any(
        is_set(environ, name) and value is not None and environ[name].strip() != str(value)
        for name, value in zip(RANK_VARIABLES, numbers, strict=True)
    )


def unused_allocation(environ: Mapping[str, str], reason: str) -> Iterator[str]:
    """Yield a note if the job holds more resources than one process can use.

    reason: why there is only one process.
    """
    job = size = ""
    launcher, slots = "mpiexec", 0
    if is_set(environ, "SLURM_JOB_ID"):
        job, launcher = f"Slurm job {environ['SLURM_JOB_ID']}", "srun"
        tasks, nodes = environ.get("SLURM_NTASKS", ""), environ.get("SLURM_JOB_NUM_NODES", "")
        counts = [(tasks, "tasks"), (nodes, "nodes")]
        size = " on ".join(f"{count} {unit}" for count, unit in counts if count not in ("", "1"))
    elif is_set(environ, "PBS_JOBID"):
        job, slots = f"PBS job {environ['PBS_JOBID']}", node_file(environ).count("\n")
    elif is_set(environ, "LSB_JOBID"):
        job, slots = f"LSF job {environ['LSB_JOBID']}", number(environ, "LSB_DJOB_NUMPROC") or 0
    if slots > 1:
        size = f"{slots} slots"
    if size:
        yield (
            f"{job} holds {size}, but {reason}: it runs alone, as rank 0 of 1. "
            f"To use them all: {launcher} python ..."
        )


_RUN_ID = "TORCHELASTIC_RUN_ID"


class Torchrun(Launcher):
    """The agent on each host is the parent of its workers, the ranks."""

    name = "torchrun"
    rank_variable, world_size_variable, local_rank_variable, local_world_size_variable = (
        RANK_VARIABLES
    )
    marker_variables = (_RUN_ID,)
    identity_variables = (_RUN_ID, "MASTER_PORT")
    parent_programs = ("torchrun", "accelerate")
    requires_master_address = True
    sets_rank_variables = True
    num_agents_variable = "GROUP_WORLD_SIZE"

    def is_present(self, environ: Mapping[str, str]) -> bool:
        return bool(is_set(environ, _RUN_ID)) and super().is_present(environ)

    def is_parent(self, command: str) -> bool:
        # Programs with many names run the agent in Python: "python -m torch.distributed.run x.py",
        # "/env/bin/python3.11 /env/bin/accelerate launch x.py".
        program = command.partition(" ")[0].rpartition("/")[2]
        return program.startswith(("python", "pypy")) or super().is_parent(command)

    def is_named(self, command: str) -> bool:
        # In "python -u -m torch.distributed.run x.py": the program, and the first word without "-".
        program, *others = command.split() or [""]
        script = next((word for word in others if not word.startswith("-")), "")
        names = (*self.parent_programs, "torch.distributed.run", "torch.distributed.launch")
        return any(word.rpartition("/")[2] in names for word in (program, script))

    def has_store(self, environ: Mapping[str, str]) -> bool:
        return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def write_error_file(cause: str, *, is_root_cause: bool) -> None:
    """Give torchrun's agent the cause. It takes the worker with the earliest time for the root.

    A killed worker has no file; its time is when the agent noticed. Other ranks' times are later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    timestamp = int(time.time()) + (0 if is_root_cause else 60)
    details = {"py_callstack": cause, "timestamp": str(timestamp)}
    message = {"message": cause, "extraInfo": details}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)

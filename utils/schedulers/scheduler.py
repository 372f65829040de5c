"""What every scheduler of the kit can do, and which one is here.

Not here: how Slurm or PBS does it (slurm_jobs.py, pbs_jobs.py).
"""
from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .command import SchedulerError
from .exit_status import EXIT_REQUEUE
from .job import Job

_SLURM_FILES = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf",
                "/var/spool/slurmd/conf-cache/slurm.conf")
STATES = ("queued", "held", "running", "ending", "completed", "failed", "cancelled", "timeout", "node_fail",
          "stopped", "never_ran", "unknown")


@dataclass(frozen=True)
class Status:
    """A job at one moment. state: one of STATES; only "completed" is success.

    "stopped": it ended with EXIT_REQUEUE, that is, after saving, and is to be continued by another job.
    """

    job_id: str
    state: str
    exit_code: int | None = None  # of the job script; 128+N where signal N ended it; None: it has none (yet)
    reason: str = ""  # why it waits or how it ended, in the scheduler's words or ours
    native: str = ""  # the scheduler's own word: "PENDING", "Q"
    position: int | None = None  # place among the waiting jobs of its queue, from 1
    hosts: tuple[str, ...] = ()
    name: str = ""
    queue: str = ""
    output: str | None = None  # path of the log
    restart_count: int | None = None

    @property
    def exit_status(self) -> int:
        """What a command that followed the job should exit with: 0 for success alone."""
        return 0 if self.state == "completed" else self.exit_code or 1

    @property
    def ended(self) -> bool:
        """Nothing more will happen to the job."""
        return self.state in ("completed", "failed", "stopped", "cancelled", "timeout", "node_fail", "never_ran")


def failed_or_stopped(exit_code: int | None) -> str:
    """The state of a job that did not end with 0."""
    return "stopped" if exit_code == EXIT_REQUEUE else "failed"


def combined(job_id: str, parts: Sequence[Status]) -> Status:
    """One status of the elements of an array, or of the components of a heterogeneous job."""
    order = ("running", "ending", "queued", "held", "failed", "node_fail", "timeout", "cancelled", "never_ran",
             "unknown", "stopped", "completed")
    first = min(parts, key=lambda part: order.index(part.state))
    if len(parts) == 1:
        return first
    counts = {state: sum(part.state == state for part in parts) for state in order}
    codes = [part.exit_code for part in parts if part.exit_code is not None and part.state == first.state]
    return Status(job_id, first.state, max(codes) if codes and first.ended else None,
                  ", ".join(f"{count} {state}" for state, count in counts.items() if count), first.native,
                  hosts=tuple(dict.fromkeys(host for part in parts for host in part.hosts)), name=first.name,
                  queue=first.queue, output=first.output, restart_count=first.restart_count)


class Scheduler(Protocol):
    """A batch scheduler. Every method that runs its commands raises SchedulerError with the command's own words."""

    name: str  # "slurm" or "pbs"

    def directives(self, job: Job) -> list[list[str]]:
        """The options of a job, each a list of words, unquoted: [["--nodes=2"], ...], [["-l", "walltime=..."], ...]."""

    def render(self, job: Job, template: str) -> str:
        """The job script. JobError names the field that cannot be put into it."""

    def check(self, job: Job) -> list[str]:
        """What would go wrong, each with its fix. What the scheduler cannot answer is no problem."""

    def submit(self, script: str | os.PathLike[str], *, options: Sequence[str] = (),
               folder: str | os.PathLike[str] | None = None) -> str:
        """Submit a script from a folder (the submit directory) and return the job id. options precede the script.

        SchedulerError holds the scheduler's own message and the line of the script that caused it, where known.
        """

    def status(self, job_id: str) -> Status:
        """The job now, or how it ended. state "unknown" where the scheduler knows the job no more."""

    def cancel(self, job_id: str) -> None:
        """End the job, or take it from the queue. A job that has ended already is no error."""

    def requeue(self, job_id: str) -> None:
        """Back into the queue, under the same id. Under PBS this is for operators only."""


def get_scheduler(name: str | None = None) -> Scheduler:
    """The scheduler called name, "slurm" or "pbs"; None: the one whose commands are here.

    SchedulerError when both or none are here.
    """
    from .pbs import configuration, program
    from .pbs_jobs import Pbs
    from .slurm_jobs import Slurm
    known: dict[str, Scheduler] = {"slurm": Slurm(), "pbs": Pbs()}
    if name is not None:
        if name not in known:
            raise SchedulerError(f"There is no scheduler {name[:60]!r}. Take one of: {', '.join(known)}.")
        return known[name]
    here = [name for name, found in (("slurm", shutil.which("sbatch")), ("pbs", program("qsub") != "qsub")) if found]
    if len(here) == 2:  # packages of one may be installed where the other runs
        here = [name for name, found in (("slurm", _slurm_is_set_up()), ("pbs", configuration())) if found] or here
    if len(here) != 1:
        raise SchedulerError(f"{'Both sbatch and qsub were' if here else 'Neither sbatch nor qsub was'} found. One "
                             "scheduler is expected. Say which one (slurm or pbs)" +
                             ("." if here else ", on a host that has its commands on PATH."))
    return known[here[0]]


def _slurm_is_set_up() -> bool:
    """Whether there is a configuration file: the one named, one of the package's, or that of a node without one."""
    named = os.environ.get("SLURM_CONF")
    return any(map(os.path.isfile, [named] if named else _SLURM_FILES))

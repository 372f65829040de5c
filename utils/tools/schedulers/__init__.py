"""Submitting jobs to Slurm and PBS, and querying them."""

from __future__ import annotations

import os
import shutil

from ...job.commands import SchedulerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .scheduler import Scheduler

# Without SLURM_CONF: the packages' files, and the copy that a host without one has from slurmctld.
_SLURM_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
)


def get_scheduler(name: str | None = None) -> Scheduler:
    """Return the scheduler called name ("slurm" or "pbs"); without a name, that of this host.

    Raises SchedulerError for any other name, and where this host has the commands of both or none.
    """
    from ...job.pbs_job import configuration, find_program
    from .pbs_scheduler import Pbs
    from .slurm_scheduler import SlurmScheduler

    schedulers: dict[str, Scheduler] = {"slurm": SlurmScheduler(), "pbs": Pbs()}
    if name is not None:
        if name not in schedulers:
            raise SchedulerError(
                f"There is no scheduler {name[:60]!r}. Expected one of: {', '.join(schedulers)}."
            )
        return schedulers[name]

    installed = {"slurm": shutil.which("sbatch"), "pbs": find_program("qsub") != "qsub"}
    found = [name for name in schedulers if installed[name]]
    if len(found) == 2:  # packages of one may be installed where the other runs
        configured = {"slurm": _slurm_is_configured(), "pbs": configuration()}
        found = [name for name in schedulers if configured[name]] or found
    if len(found) == 2:
        raise SchedulerError(
            "Both sbatch and qsub were found. Expected one scheduler. Name it, for `submit` with "
            "--site generic-slurm or --site generic-pbs."
        )
    if not found:
        raise SchedulerError(
            "Neither sbatch nor qsub was found. Expected the commands of one scheduler. Run this "
            "on a host that has them on PATH, or name the scheduler, for ddpkit submit with "
            "--site generic-slurm or --site generic-pbs."
        )
    return schedulers[found[0]]


def _slurm_is_configured() -> bool:
    named = os.environ.get("SLURM_CONF")
    return any(map(os.path.isfile, [named] if named else _SLURM_FILES))

"""Find the scheduler of this host, and the allocation around this process.

Modules are imported where they are used: a launch needs those of one allocation, and starts fast.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from .allocation import Allocation
from .command import SchedulerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .base import Scheduler

# Without SLURM_CONF: the packages' files, and the copy that a host without one has from slurmctld.
_SLURM_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
)


def current_allocation(
    environ: Mapping[str, str] = os.environ, *, query: bool = True
) -> Allocation | None:
    """Return what the scheduler allocated to the job around this process; None outside of a job.

    query: whether to run qstat or scontrol (tens of milliseconds) for what the variables lack: the
    hosts of a PBS job without a line in the node file, GPUs and cores per host, the restart count.
    What remains unknown is None.

    Raises AllocationError where variables or node file cannot be read or contradict each other.
    """
    # Slurm's spank_pbs plug-in sets PBS_JOBID too; PBS never sets SLURM_JOB_ID.
    if environ.get("SLURM_JOB_ID"):
        from .slurm.allocation import slurm_allocation

        return slurm_allocation(environ, query=query)
    if environ.get("PBS_JOBID"):
        from .pbs.allocation import pbs_allocation

        return pbs_allocation(environ, query=query)
    return None


def get_scheduler(name: str | None = None) -> Scheduler:
    """Return the scheduler called name ("slurm" or "pbs"); without a name, that of this host.

    Raises SchedulerError for any other name, and where this host has the commands of both or none.
    """
    from .pbs.jobs import Pbs
    from .pbs.programs import configuration, find_program
    from .slurm.jobs import Slurm

    schedulers: dict[str, Scheduler] = {"slurm": Slurm(), "pbs": Pbs()}
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
            "Both sbatch and qsub were found. Expected one scheduler. Name it, for submit.py with "
            "--site generic-slurm or --site generic-pbs."
        )
    if not found:
        raise SchedulerError(
            "Neither sbatch nor qsub was found. Expected the commands of one scheduler. Run this "
            "on a host that has them on PATH, or name the scheduler, for submit.py with "
            "--site generic-slurm or --site generic-pbs."
        )
    return schedulers[found[0]]


def _slurm_is_configured() -> bool:
    named = os.environ.get("SLURM_CONF")
    return any(map(os.path.isfile, [named] if named else _SLURM_FILES))

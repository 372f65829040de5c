"""The schedulers: submitting jobs to Slurm and PBS, querying them, and what they allocated.

Modules are imported where they are used: a launch loads only one scheduler's, and starts fast.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from ...job import current_job
from ...job.commands import SchedulerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .allocation import Allocation
    from .scheduler import Scheduler

# Read without SLURM_CONF: files of packages, and copies from slurmctld on hosts without a file.
_SLURM_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
)


def get_scheduler(name: str | None = None) -> Scheduler:
    """Return the scheduler called name ("slurm" or "pbs"); without a name, this host's.

    Raises SchedulerError for any other name, and if this host has the commands of both or none.
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
            "Both sbatch and qsub were found. Expected one scheduler. For ddpkit submit, name it: "
            "--site generic-slurm or --site generic-pbs."
        )
    if not found:
        raise SchedulerError(
            "Neither sbatch nor qsub was found. Expected the commands of one scheduler. Run this "
            "on a host that has them on PATH. For ddpkit submit, you can also name it: "
            "--site generic-slurm or --site generic-pbs."
        )
    return schedulers[found[0]]


def current_allocation(
    environ: Mapping[str, str] = os.environ, *, query: bool = True
) -> Allocation | None:
    """Return what the scheduler allocated to the job around this process; None outside of a job.

    query: whether to run qstat or scontrol (tens of milliseconds) for what the variables lack: the
    hosts of a PBS job without a line in the node file, GPUs and cores per host, the restart count.
    What remains unknown is None.

    Raises AllocationError where variables or node file cannot be read or contradict each other.
    """
    job = current_job(environ)
    if job is None:
        return None
    if job.scheduler == "slurm":
        from .slurm_allocation import slurm_allocation as read
    else:
        from .pbs_allocation import pbs_allocation as read
    return read(environ, query=query)


def _slurm_is_configured() -> bool:
    named = os.environ.get("SLURM_CONF")
    return any(map(os.path.isfile, [named] if named else _SLURM_FILES))

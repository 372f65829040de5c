"""Allocations, installed programs and plans for the tests of utils/launch."""
from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from utils.tools.launch.launch_plan import HostInfo, Mpiexec, Options, Plan
from utils.tools.launch.methods import IntelMpi, Mpich, OpenMpi, Pals
from utils.tools.launch.planner import make_plan
from utils.tools.schedulers.allocation import Allocation

PYTHON = "/env/bin/python"
TOOLS = {name: f"/bin/{name}" for name in ("srun", "pbs_tmrsh", "pbsdsh", "ssh")}
SLURM = {"SLURM_JOB_ID": "7", "PATH": "/bin"}
PBS = {"PBS_JOBID": "7.head", "PBS_NODEFILE": "/aux/7", "PBS_JOBCOOKIE": "c", "PATH": "/bin"}
MPICH, INTEL = Mpiexec("/mpich/mpiexec", Mpich, 5), Mpiexec("/intel/mpiexec", IntelMpi)
OPENMPI4, OPENMPI5 = Mpiexec("/o4/mpiexec", OpenMpi, 4), Mpiexec("/o5/mpiexec", OpenMpi, 5)
PALS = Mpiexec("/opt/cray/pals/default/bin/mpiexec", Pals)
Counts = tuple[int | None, ...]


class Programs(NamedTuple):
    paths: Mapping[str, str] = TOOLS
    mpiexec: Mpiexec | None = None
    pals: Mpiexec | None = None

    def find(self, name: str) -> str | None:
        return self.paths.get(name)


def job(scheduler: str = "slurm", ranks: tuple[int, ...] = (2, 2), gpus: Counts | None = None,
        cores: Counts | None = None, tasks_requested: bool = False) -> Allocation:
    """A job on hosts n1, n2, ... with these slots, GPUs and cores."""
    hosts = tuple(f"n{i + 1}" for i in range(len(ranks)))
    unknown = (None,) * len(ranks)
    return Allocation(scheduler, "7", hosts, ranks, gpus or unknown, cores or unknown, tasks_requested=tasks_requested)


def make(allocation: Allocation | None, environ: Mapping[str, str] | None = None, *,
         command: tuple[str, ...] = ("train.py", "--name", "a b"), programs: Programs | None = None,
         mpiexec: Mpiexec | None = None, gpus: int = 0, cores: int | None = None, host: str = "n1",
         python: str = PYTHON, **options: object) -> Plan:
    """The plan on host n1 of a job, or on a laptop; gpus, cores: of that host; mpiexec: the one that is used."""
    if environ is None:
        of_job = {"slurm": SLURM, "pbs": PBS}
        environ = of_job[allocation.scheduler] if allocation else {}
    if mpiexec is not None:
        programs = Programs(TOOLS if programs is None else programs.paths, mpiexec)
        options["launcher"] = "mpiexec"
    info = HostInfo(host, gpus, python, programs or Programs(), cores=cores)
    return make_plan(command, Options(**options), allocation, info, environ)


def in_job(base: Mapping[str, str], environ: Mapping[str, str] | None = None, *, ranks: tuple[int, ...] = (2, 2),
           gpus: Counts | None = None, cores: Counts | None = None, gpus_here: int = 0, tasks_requested: bool = False,
           **options: object) -> Callable[[], Plan]:
    """Plans a launch in a job. base: the variables of every such job; gpus_here: that n1 itself has."""
    allocation = job("pbs" if base is PBS else "slurm", ranks, gpus, cores, tasks_requested)
    return functools.partial(make, allocation, {**base, **(environ or {})}, gpus=gpus_here, **options)


slurm, pbs = functools.partial(in_job, SLURM), functools.partial(in_job, PBS)
alone = functools.partial(functools.partial, make, None)  # on a host without a job


def line(plan: Plan) -> str:
    """The command of a native launcher as a line of shell."""
    return shlex.join(plan.method.command(plan, plan.program)).replace("'@", "@").replace("@'", "@")

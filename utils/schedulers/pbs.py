"""PBS: what its node file, variables and qstat say was allocated to a job.

Not here: its jobs (pbs_jobs.py), what qstat prints (pbs_answers.py).
"""
from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping

from . import command
from .allocation import Allocation, AllocationError
from .pbs_answers import Record, chunk_resources, listing, moment_of, number, objects, seconds_of, text

_ADDRESS = re.compile(r"[0-9.]+|.*:.*")  # of IPv4 or IPv6: its parts are no domain
_PATIENCE = 10.0  # seconds that a job waits for qstat
_NO_HISTORY = 36  # the low byte of 15140 in pbs_error.h, for qstat -x where the server has no job_history_enable
_USUAL_FOLDER = "/opt/pbs"  # where OpenPBS and PBS Pro are installed unless told otherwise


class _Host:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = 0
        self.cores: int | None = None
        self.gpus: int | None = None


class _Hosts:
    """Hosts in the order in which they were first named; "n1" and "n1.pbs.lab" are one host."""

    def __init__(self) -> None:
        self.all: list[_Host] = []
        self._by_short_name: dict[str, list[_Host]] = {}

    def find(self, name: str) -> _Host:
        known = self._by_short_name.setdefault(short(name), [])
        for host in known:
            if _same(host.name, name):
                return host
        host = _Host(name)
        self.all.append(host)
        known.append(host)
        return host


def short(name: str) -> str:
    """"n1.pbs.lab" -> "n1"; an address stays whole."""
    return name.lower() if _ADDRESS.fullmatch(name) else name.lower().partition(".")[0]


def _same(name: str, other: str) -> bool:
    """Whether both name one host: in full, or one of them without its domain."""
    name, other = name.lower(), other.lower()
    return name == other or (short(name) == short(other) and ("." not in name or "." not in other))


def read_nodefile(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Each host of a node file once, in order, with its number of lines; the lines of a host may lie apart."""
    hosts = _Hosts()
    for line in lines:
        if line.strip():
            hosts.find(line.strip()).lines += 1
    return [(host.name, host.lines) for host in hosts.all]


def allocation(environ: Mapping[str, str], *, ask: bool = True) -> Allocation:
    """What PBS allocated to the job around this process. AllocationError when it cannot be read."""
    job_id = environ["PBS_JOBID"]
    job = _job(job_id) if ask else {}
    hosts = _Hosts()
    for name, lines in _nodefile(environ, job):
        hosts.find(name).lines = lines
    chunks = chunk_resources(text(job, "exec_host"), text(job, "exec_vnode"))
    counts_gpus = any("ngpus" in resources for _, resources in chunks)  # else PBS does not manage them here
    order: list[_Host] = []
    for name, resources in chunks:
        host = hosts.find(name)
        if host not in order:
            order.append(host)
        if "ncpus" in resources:
            host.cores = (host.cores or 0) + int(resources["ncpus"])
        if counts_gpus:
            host.gpus = (host.gpus or 0) + int(resources.get("ngpus", 0))
    found = order + [host for host in hosts.all if host not in order]
    if not found:
        raise AllocationError(f"PBS job {job_id} has no host: PBS_NODEFILE={environ.get('PBS_NODEFILE', '')} names "
                              "none and qstat does not tell. A running job has at least one. Start from its own shell.")
    index = environ.get("PBS_ARRAY_INDEX", "")
    runs = number(job, "run_count")
    return Allocation("pbs", job_id, tuple(host.name for host in found), tuple(host.lines for host in found),
                      tuple(host.gpus for host in found), tuple(host.cores for host in found),
                      int(index) if index.isdecimal() else None, None if runs is None else max(0, runs - 1),
                      tuple(_notes(job, len(chunks), found)))


def _notes(job: Record, chunks: int, hosts: list[_Host]) -> Iterator[str]:
    if chunks > len(hosts) == 1 and "pack" not in text(job, "Resource_List", "place"):
        yield (f"PBS has placed all {chunks} chunks of select={text(job, 'Resource_List', 'select')} on one host, "
               f"{hosts[0].name}. For {chunks} hosts ask for -l place=scatter")


def _nodefile(environ: Mapping[str, str], job: Record) -> list[tuple[str, int]]:
    """Hosts and lines of PBS_NODEFILE. Tasks of pbsdsh on the first host lack the variable: then by qstat alone."""
    path = environ.get("PBS_NODEFILE")
    if not path:
        return []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return read_nodefile(file)
    except OSError as error:
        if text(job, "exec_host"):
            return []
        raise AllocationError(f"PBS job {environ['PBS_JOBID']}: the node file PBS_NODEFILE={path} cannot be read "
                              f"({error.strerror}). It is expected on every host of a running job. "
                              "Start from a shell of the job itself.") from None


def _job(job_id: str) -> Record:
    """What qstat says about a job; empty where it does not answer."""
    try:
        return qstat_job(job_id, seconds=_PATIENCE) or {}
    except command.SchedulerError:
        return {}


def qstat_job(job_id: str, *, ended: bool = False, seconds: float = command.SECONDS) -> Record | None:
    """A job as qstat shows it; None when the answer does not hold it. SchedulerError when qstat fails.

    ended: also one that has ended, where the server keeps a history.
    """
    words = [program("qstat"), *(["-x"] if ended else []), "-f"]
    try:
        answer = command.ask([*words, "-F", "json", job_id], seconds=seconds)
    except command.SchedulerError as error:
        if not ended or error.exit_code != _NO_HISTORY:
            raise
        answer = "{}"
    try:
        jobs = objects(answer, "Jobs")
    except command.SchedulerError:
        jobs = listing(command.ask([*words, job_id], seconds=seconds))
    if ended and not jobs:  # OpenPBS 23 says on standard error alone that it keeps no history
        return qstat_job(job_id, seconds=seconds)
    for name, job in jobs.items():
        if name == job_id or name.partition(".")[0] == job_id:
            return job
    return next(iter(jobs.values())) if len(jobs) == 1 else None


def program(name: str) -> str:
    """The path of a command of PBS: that on PATH, unless it is Slurm's look-alike; else PBS_EXEC's; else name."""
    path = shutil.which(name)
    if path is not None and not _is_slurm_look_alike(path):
        return path
    for folder in (os.environ.get("PBS_EXEC"), configuration().get("PBS_EXEC"), _USUAL_FOLDER):
        if folder and os.access(os.path.join(folder, "bin", name), os.X_OK):
            return os.path.join(folder, "bin", name)
    return name


def _is_slurm_look_alike(path: str) -> bool:
    """Debian's slurm-wlm-torque has qsub, qstat and pbsnodes that submit to Slurm."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return head.startswith(b"#!") and b"perl" in head.split(b"\n")[0] and b"slurm" in head.lower()


def configuration() -> dict[str, str]:
    """The configuration file of PBS; empty where there is none."""
    try:
        with open(os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf"), encoding="utf-8", errors="replace") as file:
            pairs = [line.partition("=")[::2] for line in file if "=" in line]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, value in pairs}


def seconds_left(job_id: str) -> float | None:
    """Seconds until the walltime limit; None where there is no limit or no answer.

    What PBS counted is up to two minutes old, so the clock since the start counts too.
    """
    job = _job(job_id)
    limit = seconds_of(text(job, "Resource_List", "walltime"))
    if limit is None:
        return None
    used = float(seconds_of(text(job, "resources_used", "walltime")) or 0)
    start = moment_of(text(job, "stime"))
    if start is not None and 0 <= time.time() - start <= limit + 3600:
        used = max(used, time.time() - start)
    return max(0.0, limit - used)

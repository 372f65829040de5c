"""The job around this process as PBS describes it: node file, the output of qstat, the allocation.

PBS names one host in several ways and places; each host is listed once.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping

from . import commands as command
from .allocation import (
    Allocation,
    AllocationError,
    parse_duration,
    parse_number,
    same_host,
    short_name,
)
from .commands import SchedulerError

DEFAULT_PREFIX = "/opt/pbs"  # where the packages of OpenPBS and PBS Professional install


def find_program(name: str) -> str:
    """Return the path of a PBS command: on PATH, below PBS_EXEC or DEFAULT_PREFIX; else its name.

    The Debian package slurm-wlm-torque installs Perl scripts called qsub, qstat and pbsnodes that
    submit to Slurm, and they come before /opt/pbs/bin in a job's PATH. They are passed over.
    """
    path = shutil.which(name)
    if path is not None and not _submits_to_slurm(path):
        return path

    for prefix in (os.environ.get("PBS_EXEC"), configuration().get("PBS_EXEC"), DEFAULT_PREFIX):
        installed = os.path.join(prefix, "bin", name) if prefix else ""
        if os.access(installed, os.X_OK):
            return installed
    return name


def _submits_to_slurm(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            beginning = file.read(4096)
    except OSError:
        return False
    first_line = beginning.partition(b"\n")[0]
    return first_line.startswith(b"#!") and b"perl" in first_line and b"slurm" in beginning.lower()


def configuration() -> dict[str, str]:
    """Return the settings of pbs.conf(5), empty where there is no such file."""
    path = os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            settings = [line.partition("=") for line in file if "=" in line]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in settings}


# Low byte of PBSE_JOBHISTNOTSET (15140): qstat -x where the server has no job_history_enable.
_NO_HISTORY = 36


def query_objects(
    kind: str,
    program: str,
    *words: str,
    timeout_seconds: float = command.TIMEOUT_SECONDS,
) -> dict[str, Fields]:
    """Run qstat or pbsnodes and return its records; kind: see objects().

    Raises SchedulerError.
    """
    query = [find_program(program), "-F", "json", *words]
    return objects(command.run_command(query, timeout_seconds=timeout_seconds), kind)


def query_job(
    job_id: str, *, ended: bool = False, timeout_seconds: float = command.TIMEOUT_SECONDS
) -> Fields | None:
    """Return the record of a job; None where the output does not hold it.

    ended: also look among the jobs that have ended, where the server keeps a history.

    Raises SchedulerError when qstat fails, also for an unknown job.
    """
    options = ["-x", "-f"] if ended else ["-f"]
    try:
        jobs = query_objects("Jobs", "qstat", *options, job_id, timeout_seconds=timeout_seconds)
    except command.SchedulerError as error:
        if not ended or error.exit_code != _NO_HISTORY:
            raise
        jobs = {}
    if ended and not jobs:  # OpenPBS 23 exits with 0 where it keeps no history
        return query_job(job_id, timeout_seconds=timeout_seconds)
    for name, job in jobs.items():
        if name == job_id or name.partition(".")[0] == job_id:
            return job
    return next(iter(jobs.values())) if len(jobs) == 1 else None


class Host:
    """A host of a job. None: not known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = 0  # in the node file
        self.cores: int | None = None
        self.gpus: int | None = None


class PbsHosts:
    """Hosts in the order of their first mention; "n1" and "n1.pbs.lab" are one host."""

    def __init__(self) -> None:
        self.all: list[Host] = []
        self._by_short_name: dict[str, list[Host]] = {}

    def find(self, name: str) -> Host:
        """Return the host of this name, new where it has not been mentioned before."""
        namesakes = self._by_short_name.setdefault(short_name(name), [])
        for host in namesakes:
            if same_host(host.name, name):
                return host
        host = Host(name)
        self.all.append(host)
        namesakes.append(host)
        return host


def read_nodefile(lines: Iterable[str]) -> PbsHosts:
    """Return the hosts of a node file with their numbers of lines, which need not be adjacent."""
    hosts = PbsHosts()
    for line in lines:
        if line.strip():
            hosts.find(line.strip()).lines += 1
    return hosts


# One record: attribute -> text as printed. The members of an attribute have names such as
# "Resource_List.walltime", as in `qstat -f`.
Fields = dict[str, str]

# A line such as '"A": 005,': JSON has no such number, and versions before 2024 print it so.
_BARE_VALUE = re.compile(r'^(\s*"[^"\n]*":\s*)([^\s"{\[][^\n]*?)(,?)$', re.MULTILINE)
_CHUNK = re.compile(r"\(([^()]*)\)|([^()+]+)")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME = re.compile(r"\w+ +(\w{3}) +([0-9]+) +([0-9]+):([0-9]+):([0-9]+) +([0-9]{4})")


def objects(text: str, kind: str) -> dict[str, Fields]:
    """Return the records in the JSON output of qstat or pbsnodes, by name and in its order.

    kind: "Jobs" of `qstat -f -F json`, "Queue" with -Qf, "Server" with -Bf, "nodes" of
    `pbsnodes -a -F json`.

    PBS prints every value that looks like a number as a JSON number (a job named 0123 as 123, the
    variable B=1e5 as 100000). Numbers stay the text that was printed. Control characters are
    accepted.

    Raises SchedulerError where the text is not JSON of this form.
    """
    import json  # a launch needs the rest of this file often and this function seldom

    try:
        printed = json.loads(_BARE_VALUE.sub(r'\1"\2"\3', text), strict=False)
        return {name: dict(_flatten(record)) for name, record in printed.get(kind, {}).items()}
    except (ValueError, AttributeError):
        raise SchedulerError(
            f"PBS printed {text.strip()[:80]!r}. Expected a JSON object of {kind}. "
            "Run the command by hand to see whether the server responds."
        ) from None


def _flatten(record: dict[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _as_text(value)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(_as_text, value))
    return "null" if value is None else str(value).lower()  # True, False


def members(record: Fields, attribute: str) -> Fields:
    """Return the members of an attribute: "Resource_List" -> {"walltime": "01:00:00", ...}."""
    prefix = attribute + "."
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def chunk_resources(exec_host: str, exec_vnode: str) -> list[tuple[str, dict[str, int]]]:
    """Return host and resources of every chunk of a job, in order.

    "n1/0*2+n2/0" and "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1+n2[1]:ncpus=1)" ->
    [("n1", {"ncpus": 2, "ngpus": 1}), ("n2", {"ncpus": 2})]. The two lists have one part for each
    chunk. A virtual node need not be named after its host.
    """
    hosts = [part.partition("/")[0] for part in exec_host.split("+") if part]
    chunks = [inner or single for inner, single in _CHUNK.findall(exec_vnode)]
    if len(chunks) != len(hosts):
        chunks = [""] * len(hosts)
    return [(host, _sum_vnodes(chunk)) for host, chunk in zip(hosts, chunks, strict=True)]


def _sum_vnodes(chunk: str) -> dict[str, int]:
    """Sum the resources of "n2[0]:ncpus=1:mem=5kb+n2[1]:ncpus=1" -> {"ncpus": 2}."""
    sums: dict[str, int] = {}
    for vnode in chunk.split("+"):
        for resource in vnode.split(":")[1:]:
            name, _, value = resource.partition("=")
            if value.isdecimal():
                sums[name] = sums.get(name, 0) + int(value)
    return sums


def parse_time(text: str) -> float | None:
    """Return the seconds since 1970 of "Sat Nov 21 03:56:14 2026", local time in English.

    None for any other text.
    """
    match = _TIME.fullmatch(text)
    if match is None or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(match[group]) for group in range(2, 7))
    month = _MONTHS.index(match[1]) + 1
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


_TIMEOUT_SECONDS = 10.0  # of a query; a job is waiting


class PbsAllocation(Allocation):
    """An allocation of PBS."""

    def seconds_left(self) -> float | None:
        """Query the seconds until the walltime limit; None without a limit or a response.

        What PBS counted is up to two minutes old: the time since the start counts too.
        """
        job = _query_job(self.job_id)
        limit = _seconds(job, "Resource_List.walltime")
        if limit is None:
            return None
        used = float(_seconds(job, "resources_used.walltime") or 0)
        start = parse_time(job.get("stime", ""))
        since_start = time.time() - start if start is not None else 0.0
        if 0 <= since_start <= limit + 3600:
            used = max(used, since_start)
        return max(0.0, limit - used)


def pbs_allocation(environ: Mapping[str, str], *, query: bool = True) -> PbsAllocation:
    """Return what PBS allocated to the job around this process.

    query: whether to run qstat for what node file and variables lack.

    Raises AllocationError where the node file cannot be read or no host is found.
    """
    job_id = environ["PBS_JOBID"]
    job = _query_job(job_id) if query else {}
    hosts = _read_nodefile(environ, job)
    chunks = chunk_resources(job.get("exec_host", ""), job.get("exec_vnode", ""))
    in_order = _add_chunks(hosts, chunks)
    in_order += [host for host in hosts.all if host not in in_order]
    if not in_order:
        raise AllocationError(
            f"PBS job {job_id} has no host: PBS_NODEFILE={environ.get('PBS_NODEFILE', '')} names "
            "none, and neither does qstat. A running job has at least one. Start from a shell of "
            "the job itself."
        )

    runs = parse_number(job.get("run_count", ""))
    return PbsAllocation(
        "pbs",
        job_id,
        tuple(host.name for host in in_order),
        tuple(host.lines for host in in_order),
        tuple(host.gpus for host in in_order),
        tuple(host.cores for host in in_order),
        parse_number(environ.get("PBS_ARRAY_INDEX", "")),
        None if runs is None else max(0, runs - 1),
        _notes(job, len(chunks), in_order),
    )


def _add_chunks(hosts: PbsHosts, chunks: list[tuple[str, dict[str, int]]]) -> list[Host]:
    """Add the resources of all chunks to their hosts; return these hosts in order."""
    in_order: list[Host] = []
    counts_gpus = any("ngpus" in resources for _, resources in chunks)  # else PBS has no GPUs
    for name, resources in chunks:
        host = hosts.find(name)
        if host not in in_order:
            in_order.append(host)
        if "ncpus" in resources:
            host.cores = (host.cores or 0) + resources["ncpus"]
        if counts_gpus:
            host.gpus = (host.gpus or 0) + resources.get("ngpus", 0)
    return in_order


def _notes(job: Fields, chunks: int, hosts: list[Host]) -> tuple[str, ...]:
    if len(hosts) > 1 or chunks < 2 or "pack" in job.get("Resource_List.place", ""):
        return ()
    select = job.get("Resource_List.select", "")
    return (
        f"PBS has placed all {chunks} chunks of select={select} on one host, {hosts[0].name}. "
        f"For {chunks} hosts request -l place=scatter",
    )


def _read_nodefile(environ: Mapping[str, str], job: Fields) -> PbsHosts:
    """The hosts of PBS_NODEFILE; none without the variable, as in pbsdsh's tasks on the first host.

    qstat then has them.
    """
    path = environ.get("PBS_NODEFILE")
    if not path:
        return PbsHosts()
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return read_nodefile(file)
    except OSError as error:
        if job.get("exec_host"):
            return PbsHosts()
        raise AllocationError(
            f"PBS job {environ['PBS_JOBID']}: the node file PBS_NODEFILE={path} cannot be read "
            f"({error.strerror}). It was expected on every host of a running job. "
            "Start from a shell of the job itself."
        ) from None


def _query_job(job_id: str) -> Fields:
    """The record of a job; empty where qstat does not respond."""
    try:
        return query_job(job_id, timeout_seconds=_TIMEOUT_SECONDS) or {}
    except SchedulerError:
        return {}


def _seconds(job: Fields, name: str) -> int | None:
    return parse_duration(job.get(name, ""), plain_number_seconds=1)

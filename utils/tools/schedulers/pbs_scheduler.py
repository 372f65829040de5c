"""Write, check, submit and watch jobs under OpenPBS and PBS Professional."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...job.commands import SchedulerError, run_command
from ...job.notation import format_walltime, parse_number, parse_size
from ...job.pbs_job import (
    JOB_FINISHED,
    MISSING_JOBS,
    Fields,
    find_program,
    query_job,
    query_objects,
)
from .job_checks import check_dependency, check_paths, check_queue
from .job_spec import Job, JobError, option_name, option_value, split_directive
from .scheduler import Queue, Scheduler, State, Status, state_of_exit

_UNQUOTED = re.compile(r"[A-Za-z0-9_=.,:@%+/\[\]^*~-]+")  # qsub reads these as they are
_MAIL = {"begin": "b", "end": "e", "fail": "a"}  # a: PBS has ended the job
_DELETED = 91  # substate of a deleted job; the substate of failure also follows a lost host
_TIMEOUT_SECONDS = 10.0  # time limit of a query: a job or a user waits
_CANNOT_EXCLUDE = "PBS cannot exclude a host. For other hosts give a -l select with host=NAME"

_LETTERS: dict[State, str] = {"queued": "QWTM", "held": "HSU", "running": "RB", "ending": "E"}
_STATES = {letter: state for state, letters in _LETTERS.items() for letter in letters}
_PBS_ENDS: dict[int, tuple[State, str]] = {  # Exit_status below zero: PBS ended the job
    -29: ("timeout", "the walltime limit was reached"),
    -20: ("node_fail", "the first host of the job was lost"),
    -3: ("failed", "the job could not be started; does the folder of its output exist?"),
}


class Pbs(Scheduler):
    """The Scheduler for OpenPBS and PBS Professional."""

    name = "pbs"
    directive_prefix = "#PBS"
    submit_command = "qsub"
    time_limit_pattern = re.compile("-l *(.*,)?walltime=")
    option_pattern = re.compile("-[aAcCefGhIjJklmMNopPqrRSuvVWXz]")
    # "12.pbs-head", "79[].pbs_2", "12.sched@sched-2": number, submission server, server now
    job_id_pattern = re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:\.[A-Za-z0-9_.-]+)?(?:@[A-Za-z0-9_.-]+)?")
    job_id_examples = "1234, 1234.server or 1234[].server"

    def directives(self, job: Job) -> list[list[str]]:
        """Return the options of a job: one select, each chunk on a separate host.

        An option in job.directives replaces the kit's option for the same setting.
        """
        _refuse(job)
        self.check_directives(job)
        extra = [split_directive(entry) for entry in job.directives]
        replaced = {setting for words in extra for setting in _settings(words)}
        kept = [words for words in _field_options(job) if not replaced & set(_settings(words))]
        return kept + extra

    def quote(self, word: str) -> str:
        """Quote a word of a #PBS line, in which qsub knows quotes but no escapes."""
        if _UNQUOTED.fullmatch(word):
            return word
        for mark in "\"'":
            if mark not in word:
                return f"{mark}{word}{mark}"
        raise JobError(
            "directives",
            f"{word[:60]!r} has both kinds of quotes, which a #PBS line cannot hold. Give the "
            "option to qsub on its command line.",
        )

    def without_hosts(self, job: Job, hosts: Sequence[str]) -> tuple[Job, str]:
        return job, _CANNOT_EXCLUDE

    def exclude_hosts(self, job_id: str, hosts: Sequence[str], *, dry_run: bool = False) -> str:
        return _CANNOT_EXCLUDE

    def check(self, job: Job) -> list[str]:
        options = self.directives(job)
        server = ServerState.query()
        named = [option_value(words) for words in options if option_name(words) == "-q"]
        queue = named[-1].partition("@")[0] if named else ""  # "small" of "small@server"
        in_queue = replace(job, queue=queue or None)
        extra = [split_directive(entry) for entry in job.directives]
        if any("-l select" in _settings(words) for words in extra):  # it replaces these fields
            in_queue = replace(in_queue, nodes=1, gpus_per_node=0, cores_per_rank=None, memory=None)
        return [
            *check_queue(in_queue, server.as_queues(), "queue"),
            *check_dependency(job, self.status),
            *check_paths(job),
        ]

    def submit_words(self, options: Sequence[str], path: str) -> list[str]:
        """Let PBS run a command: USR1 and TERM would end the login shell around a script."""
        return [find_program("qsub"), *options, "--", "/bin/bash", "-l", path]

    def status(self, job_id: str) -> Status:
        self.check_job_id(job_id)
        return _query_status(job_id)

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        for job_id in job_ids:
            self.check_job_id(job_id)
        found = _query_known(job_ids)
        return {job_id: _status_of(job_id, found.get(job_id)) for job_id in job_ids}

    def cancel(self, job_id: str) -> None:
        self.check_job_id(job_id)
        run_command([find_program("qdel"), job_id], accepted_statuses=(0, JOB_FINISHED))


# Options of qsub ---------------------------------------------------------------------------------


def _refuse(job: Job) -> None:
    """Raise JobError for what Slurm supports and PBS does not."""
    if job.gpu_type:
        raise JobError(
            "gpus_per_node",
            f"{job.gpu_type}:{job.gpus_per_node} is for Slurm only: PBS knows no types of GPUs. "
            "Give the number, and what the site has for a type as --directive or chunk.",
        )
    if job.memory == "0":
        raise JobError(
            "memory", "0, all memory of the nodes, is for Slurm only. Give an amount, such as 64G."
        )
    if job.dependency and ("?" in job.dependency or "singleton" in job.dependency):
        raise JobError(
            "dependency", f"{job.dependency!r} is for Slurm only. Write for example afterany:1234."
        )
    if job.output and (not job.output.isascii() or re.search(r"[\"'\\`$%:]", job.output)):
        raise JobError(
            "output",
            f"{job.output!r} holds a pattern, a quote, a colon or a letter outside ASCII, which "
            "qsub refuses or misreads. Give a plain file name, or a folder with / at its end: the "
            "log is then named after the job id.",
        )


def _field_options(job: Job) -> Iterator[list[str]]:
    """Yield the options for the fields of a job."""
    yield ["-l", f"select={_select(job)}"]
    yield ["-l", "place=scatter"]  # by default two chunks may share a host
    if job.walltime:
        yield ["-l", f"walltime={format_walltime(job.walltime)}"]
    values = {
        "-j": "oe",
        "-k": "doe",  # write the log to its final place while the job runs
        "-o": job.output,
        "-m": "".join(_MAIL[event] for event in job.mail_type.split(","))
        if job.mail_type
        else None,
        "-r": None if job.requeue is None else "y" if job.requeue else "n",
    }
    if job.launch.spare:  # otherwise PBS ends the job when a node fails
        yield ["-W", "tolerate_node_failures=all"]
    for option, value in job.plain_options():
        name, _, prefix = option.qsub.partition(" ")
        yield [name, prefix + value]
    for name, setting in values.items():
        if setting is not None:
            yield [name, setting]


def _select(job: Job) -> str:
    """Return one chunk per node: "2:ncpus=8:mpiprocs=4:ompthreads=2:ngpus=4:mem=64gb".

    Without ompthreads, PBS sets OMP_NUM_THREADS of every rank to the cores of the whole chunk.
    """
    cores_per_rank = job.cores_per_rank or 1
    resources: dict[str, str | int | None] = {
        "ncpus": job.ranks * cores_per_rank,
        "mpiprocs": 1 if job.launch.launcher == "torchrun" else job.ranks,
        "ompthreads": cores_per_rank,
        "ngpus": job.gpus_per_node or None,
        "mem": job.memory and f"{job.memory.lower().removesuffix('b')}b",
    }
    in_chunk = {resource.partition("=")[0] for resource in job.chunk}
    parts = [
        f"{name}={value}"
        for name, value in resources.items()
        if value is not None and name not in in_chunk
    ]
    return ":".join([str(job.nodes), *parts, *job.chunk])


def _settings(words: Sequence[str]) -> list[str]:
    """Return the settings that an option decides: ["-l", "a=1,b=2"] -> ["-l a", "-l b"]."""
    name = option_name(words)
    value = option_value(words)
    if name == "-W":
        return [f"-W {value.partition('=')[0]}"]
    if name != "-l":
        return [name]
    decided = [f"-l {part.partition('=')[0].strip()}" for part in value.split(",")]
    if "-l nodes" in decided:  # Torque's option decides both
        decided += ["-l select", "-l place"]
    return decided


# Status -------------------------------------------------------------------------------------------


def _query_status(job_id: str) -> Status:
    """Query a job; after its end, as long as the server keeps its history."""
    try:
        job = query_job(job_id, ended=True)
    except SchedulerError as error:
        if error.exit_code not in MISSING_JOBS:
            raise
        job = None
    return _status_of(job_id, job)


def _query_known(job_ids: Sequence[str]) -> dict[str, Fields]:
    """Return the records of the jobs that the server knows; qstat reports unknown jobs as errors.

    Ids match by number, because the server may have another name. OpenPBS after 2023 prints only
    the first known job, so the query is repeated for the others until it finds none.
    """
    known: dict[str, Fields] = {}
    for options in (["-x", "-f"], ["-f"]):  # without a history, -x is an error or prints nothing
        while missing := [job_id for job_id in job_ids if job_id not in known]:
            jobs = query_objects(
                "Jobs", "qstat", *options, *missing, accepted_statuses=(0, *MISSING_JOBS)
            )
            numbers = {name.partition(".")[0]: job for name, job in jobs.items()}
            found = {job_id: jobs.get(job_id, numbers.get(job_id)) for job_id in missing}
            new = {job_id: job for job_id, job in found.items() if job is not None}
            if not new:
                break
            known.update(new)
        if known:
            break
    return known


def _status_of(job_id: str, job: Fields | None) -> Status:
    if job is None:
        reason = "PBS does not know this job, or no longer (see job_history_enable)"
        return Status(job_id, "unknown", reason=reason)

    status = _job_status(job_id, job)
    if "too many failed attempts" in status.reason:
        folder = "the folder of its output or its working folder is missing on the hosts"
        return replace(status, reason=f"{status.reason}: most often {folder}; then cancel it")
    return status


def _job_status(job_id: str, job: Fields) -> Status:
    """Return the status in one record of qstat."""
    scheduler_state = job.get("job_state", "")
    state: State = _STATES.get(scheduler_state, "unknown")
    reason = job.get("comment", "")
    exit_code = None  # before the end, the record may hold an earlier run's
    if scheduler_state in ("F", "X"):
        state, reason = _end(job, reason)
        exit_code = _exit_code(job)

    exec_host = [part.partition("/")[0] for part in job.get("exec_host", "").split("+")]
    return Status(
        job_id,
        state,
        exit_code,
        reason,
        scheduler_state,
        hosts=tuple(dict.fromkeys(filter(None, exec_host))),
        output=_log(job, job_id),
    )


def _end(job: Fields, comment: str) -> tuple[State, str]:
    """Return state and reason of a finished job. A job without Exit_status never ran.

    A job whose dependency cannot be met ends at once, with the substate of success.
    """
    substate = parse_number(job.get("substate", ""))
    exit_status = parse_number(job.get("Exit_status", ""), signed=True)
    if substate == _DELETED:
        return "cancelled", comment or "deleted"
    if exit_status is None:
        dependency = job.get("depend")
        if dependency:
            comment = f"it waited for {dependency}, which failed, was deleted or is not known"
        return "never_ran", comment or "it ended without having run"
    if exit_status in _PBS_ENDS:
        return _PBS_ENDS[exit_status]
    if exit_status < 0:
        return "failed", f"PBS ended it (Exit_status {exit_status}). {comment}".strip()
    return state_of_exit(exit_status), comment


def _exit_code(job: Fields) -> int | None:
    """Read Exit_status: 256+N where signal N ended the login shell; below zero: no exit code."""
    exit_status = parse_number(job.get("Exit_status", ""), signed=True)
    if exit_status is None or exit_status < 0:
        return None
    return exit_status if exit_status < 256 else 128 + exit_status - 256


def _log(job: Fields, job_id: str) -> str | None:
    """Return the path of the log: Output_Path without its host; JOB_ID.OU in a folder."""
    path = job.get("Output_Path", "")
    if re.match(r"[^/:]+:/", path):
        path = path.partition(":")[2]
    if path.endswith("/") or (path and os.path.isdir(path)):
        return os.path.join(path, f"{job_id}.OU")
    return path or None


# Limits -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ServerState:
    """What the server reports about its queues, itself and its hosts; empty without a response."""

    queues: Mapping[str, Fields]
    server: Fields
    host_sizes: Sequence[Mapping[str, float]]  # cores, GPUs and bytes of memory of each host

    @classmethod
    def query(cls) -> ServerState:
        """Query the server. Nothing is raised where it does not respond."""
        queues = _query("Queue", "qstat", "-Qf")
        if not queues:
            return cls({}, {}, [])
        servers = _query("Server", "qstat", "-Bf")
        vnodes = _query("nodes", "pbsnodes", "-a")
        return cls(queues, next(iter(servers.values()), {}), _sum_hosts(vnodes))

    @property
    def default_queue(self) -> str:
        """The queue of a job that names none; "" where it is not known."""
        return self.server.get("default_queue", "")

    def as_queues(self) -> list[Queue]:
        """Return all queues with the hosts of the whole site, and without limits.

        PBS ties hosts to queues in too many ways. qsub refuses jobs that exceed a queue's limits.
        """
        cores, gpus, memory = (
            int(max((size.get(name, 0) for size in self.host_sizes), default=0)) or None
            for name in ("ncpus", "ngpus", "mem")
        )
        return [
            Queue(
                name,
                is_default=name == self.default_queue,
                is_open=queue.get("enabled") != "False" and queue.get("from_route_only") != "True",
                max_nodes=len(self.host_sizes) or None,
                cores_per_node=cores,
                gpus_per_node=gpus,
                memory_per_node_bytes=memory,
            )
            for name, queue in self.queues.items()
        ]


def members(record: Fields, attribute: str) -> Fields:
    """Return the members of an attribute: "Resource_List" -> {"walltime": "01:00:00", ...}."""
    prefix = attribute + "."
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def _amount(value: str) -> float:
    return parse_size(value) or 0


def _query(kind: str, program: str, option: str) -> dict[str, Fields]:
    try:
        return query_objects(kind, program, option, timeout_seconds=_TIMEOUT_SECONDS)
    except SchedulerError:
        return {}


def _sum_hosts(vnodes: Mapping[str, Fields]) -> list[dict[str, float]]:
    """Sum the resources of the virtual nodes of each host."""
    sizes: dict[str, dict[str, float]] = {}
    for name, vnode in vnodes.items():
        available = members(vnode, "resources_available")
        size = sizes.setdefault(available.get("host", name), {})
        for resource, value in available.items():
            size[resource] = size.get(resource, 0) + _amount(value)
    return list(sizes.values())

"""Jobs under OpenPBS and PBS Pro: written, checked, submitted, watched.

Not here: what its commands print (pbs_answers.py), what was allocated to this job (pbs.py).
"""
from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import command
from .checks import Queue, check_dependency, check_paths, check_queue, parse_size
from .job import Job, JobError, format_walltime, split_directive
from .pbs import program, qstat_job
from .pbs_answers import Record, number, objects, text
from .pbs_limits import outside_limits
from .scheduler import Status, combined, failed_or_stopped
from .script import (
    blamed_lines,
    command_words,
    directive_texts,
    fill,
    option_of,
    probably,
    setup_lines,
    split_options,
    value,
)

# "12.pbs-head", "79[].pbs_2", "79[2]", "12.sched@sched-2": a number, the server that gave it, the one that has it now.
_JOB_ID = re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:\.[A-Za-z0-9_.-]+)?(?:@[A-Za-z0-9_.-]+)?")
_QUIET = re.compile(r"[A-Za-z0-9_=.,:@%+/\[\]^*~-]+")  # qsub takes these in a directive as they stand
_ARRAY = re.compile(r"([0-9]+)-([0-9]+)(?::[1-9][0-9]*)?(?:%[1-9][0-9]*)?")
_PATIENCE = 10.0  # seconds for each question before a submission
_UNKNOWN_JOB, _FINISHED = 153, 35  # exit statuses of qstat, qdel
# Exit_status below zero: PBS ended or could not start the job.
_ENDS = {-29: ("timeout", "the walltime was over"), -20: ("node_fail", "the first host of the job was lost"),
         -3: ("failed", "the job could not be started; does the folder of its output exist?")}
_STATES = {"Q": "queued", "W": "queued", "T": "queued", "M": "queued", "H": "held", "S": "held", "U": "held",
           "R": "running", "B": "running", "E": "ending"}
# What qsub says, and the options that it may mean; "Resource_List.walltime" names itself.
_BLAME = (("queue", ("-q",)), ("Unauthorized", ("-q", "-A")),
          ("ccount", ("-A",)), ("name", ("-N",)), ("select or place", ("select=", "place=")))


class Pbs:
    """The Scheduler (scheduler.py) for OpenPBS and PBS Pro."""

    name = "pbs"

    def directives(self, job: Job) -> list[list[str]]:
        """One select with all that a node gives, each chunk on a host of its own; then the extra options of the job.

        An extra option takes the place of ours when both say the same thing (-q, -l select, -l place, ...).
        """
        self._refuse(job)
        resources = {"select": _select(job), "place": "scatter",  # the default may put two chunks on one host
                     "walltime": job.walltime and format_walltime(job.walltime)}
        words = [["-l", f"{name}={value}"] for name, value in resources.items() if value]
        # -k doe: written to its final place while the job runs, so that it can be followed.
        ours = {"-N": job.name, "-q": job.queue, "-A": job.account, "-J": job.array, "-j": "oe", "-k": "doe",
                "-o": job.output, "-W": job.dependency and f"depend={job.dependency}",
                "-r": None if job.requeue is None else "ny"[job.requeue]}
        words += [[name, value] for name, value in ours.items() if value is not None]
        extra = [split_directive(entry) for entry in job.directives]
        said = {meaning for entry in extra for meaning in _meanings(entry)}
        return [entry for entry in words if not said & set(_meanings(entry))] + extra

    def _refuse(self, job: Job) -> None:
        """JobError for what Slurm would take and PBS does not."""
        if job.components:
            raise JobError("components", "these are for Slurm alone; in PBS they are chunks. Give a directive, such as "
                                         "'-l select=1:ncpus=4+2:ncpus=8:ngpus=4'.")
        if job.array:
            match = _ARRAY.fullmatch(job.array)
            if match is None or int(match[1]) >= int(match[2]):
                raise JobError("array", f"{job.array!r} is not one rising range, which is all that PBS takes. "
                                        "Write for example 0-9, 0-9:2 or 0-9%2.")
        if job.dependency and ("?" in job.dependency or "singleton" in job.dependency):
            raise JobError("dependency", f"{job.dependency!r} is for Slurm alone. Write for example afterany:1234.")
        if job.output and (not job.output.isascii() or re.search(r"[\"'\\`$%:]", job.output)):
            raise JobError("output", f"{job.output!r} holds a pattern, a quote, a colon or a letter that is not ASCII, "
                                     "which qsub refuses or misreads. Give a plain name of a file, or of a folder with "
                                     "/ at its end: the log is then named after the job id.")
        if job.signal_seconds and not job.walltime:
            raise JobError("signal_seconds", "PBS sends no signal before the end; the job script counts the walltime "
                                             "down itself, and none is given. Give a walltime.")

    def render(self, job: Job, template: str) -> str:
        """The job script. JobError names the field that cannot be put into it.

        PBS has no signal before the end (qsig would end the login shell that the script runs in, and with it the
        job): a process of the script sends USR1 to it.
        """
        lines = ["#PBS " + " ".join(map(_quote, words)) for words in self.directives(job)]
        setup = setup_lines(job)
        if job.signal_seconds and job.walltime:
            setup.append(f'(sleep {job.walltime - job.signal_seconds} && kill -USR1 "$$") '
                         "< /dev/null > /dev/null 2>&1 &")
        return fill(template, directives=lines, setup=setup, command=command_words(job))

    def check(self, job: Job) -> list[str]:
        """What would go wrong, each with its fix. What the scheduler cannot answer is no problem."""
        options, site = self.directives(job), _Site.ask()
        named = next((value(words) for words in reversed(options) if option_of(words) == "-q"), "").partition("@")[0]
        asked = replace(job, queue=named or None)
        if any("-l select" in _meanings(split_directive(entry)) for entry in job.directives):  # instead of these
            asked = replace(asked, nodes=1, gpus_per_node=0, cores_per_rank=None, memory=None)
        return (check_queue(asked, site.as_queues(), "queue")
                + outside_limits(options, named or site.default_queue, site.queues, site.server)
                + check_dependency(job, self.status) + check_paths(job))

    def submit(self, script: str | os.PathLike[str], *, options: Sequence[str] = (),
               folder: str | os.PathLike[str] | None = None) -> str:
        """Submit a script from a folder and return the job id. See Scheduler.submit."""
        words = [program("qsub"), *options, os.fspath(script)]
        return command.submit(words, folder, _JOB_ID,
                              lambda said: _blame(Path(folder or ".") / script, options, said))

    def status(self, job_id: str) -> Status:
        """The job now, or how it ended, as long as the server keeps its history."""
        _check_id(job_id)
        try:
            job = qstat_job(job_id, ended=True)
        except command.SchedulerError as error:
            if error.exit_code not in (_UNKNOWN_JOB, _FINISHED):
                raise
            job = None
        if job is None:
            return Status(job_id, "unknown", reason="PBS does not know this job, or no longer (see job_history_enable)")
        status = _status(job_id, job)
        if status.native == "H" and text(job, "depend"):
            return replace(status, reason=_why_held(job) or status.reason)
        if status.state == "failed" and text(job, "array") == "True":
            return _of_elements(status)
        if status.native == "Q":
            return replace(status, position=_position(job_id, status.queue))
        return status

    def cancel(self, job_id: str) -> None:
        """End the job, or take it from the queue. A job that has ended already is no error."""
        _check_id(job_id)
        command.ask([program("qdel"), job_id], good=(0, _FINISHED))

    def requeue(self, job_id: str) -> None:
        """Back into the queue, under the same id. PBS lets operators alone do this: exit status 159 for a user."""
        _check_id(job_id)
        command.ask([program("qrerun"), job_id])


def _select(job: Job) -> str:
    """"2:ncpus=8:mpiprocs=4:ompthreads=2:ngpus=4:mem=64gb".

    ompthreads: without it PBS sets OMP_NUM_THREADS to all the cores of a chunk, in every rank of it.
    """
    cores = job.cores_per_rank or 1
    mpiprocs = 1 if job.launcher == "torchrun" else job.ranks
    parts = [str(job.nodes), f"ncpus={job.ranks * cores}", f"mpiprocs={mpiprocs}", f"ompthreads={cores}"]
    if job.gpus_per_node:
        parts.append(f"ngpus={job.gpus_per_node}")
    if job.memory:
        parts.append(f"mem={job.memory.lower().removesuffix('b')}b")
    said = {resource.partition("=")[0] for resource in job.chunk}
    return ":".join([part for part in parts if part.partition("=")[0] not in said] + list(job.chunk))


def _meanings(words: Sequence[str]) -> list[str]:
    """What an option decides: ["-l", "select=1"] -> ["-l select"], ["-qgpu"] -> ["-q"], ["-W", "depend=.."] -> .."""
    name = option_of(words)
    value = " ".join([words[0][2:], *words[1:]]).strip()
    if name == "-l":
        found = [f"-l {part.partition('=')[0].strip()}" for part in value.split(",")]
        return [*found, "-l select", "-l place"] if "-l nodes" in found else found
    return [f"-W {value.partition('=')[0]}"] if name == "-W" else [name]


def _quote(word: str) -> str:
    """A word of a directive. qsub knows quotes, but no escape within them."""
    if _QUIET.fullmatch(word):
        return word
    if '"' not in word:
        return f'"{word}"'
    if "'" not in word:
        return f"'{word}'"
    raise JobError("directives", f"{word[:60]!r} has both kinds of quotes, which a #PBS line cannot hold. "
                                 "Give it to qsub by hand.")


def _check_id(job_id: str) -> None:
    if not _JOB_ID.fullmatch(job_id):
        raise command.SchedulerError(f"{job_id[:60]!r} is no job id of PBS, expected one like 1234, 1234.server or "
                                     "1234[].server. Give the id that was printed when the job was submitted.")


def _blame(script: Path, options: Sequence[str], said: str) -> str | None:
    """What qsub's message is about: a directive, or what the job asks for in all."""
    if "resource limits" in said:
        return _about_limits(script, options)
    named = re.findall(r"directive error: (.+)", said)
    named += re.findall(r"(?:Resource_List\.|Unknown resource: |resource is: |illegal )(-?[A-Za-z_]+)", said)
    named += re.findall(r"value (\w+)\.", said)
    return probably(blamed_lines(script, "#PBS", options,
                                 named + [name for phrase, names in _BLAME if phrase in said for name in names])[:1])


def _about_limits(script: Path, options: Sequence[str]) -> str:
    """The limits that the job is outside of. qsub does not say which, so without an answer of the server all that it
    asks for is shown."""
    asked = [words for line in directive_texts(script, "#PBS", options) for words in split_options(line)]
    site = _Site.ask()
    queue = next((value(words) for words in reversed(asked) if option_of(words) == "-q"), site.default_queue)
    outside = outside_limits(asked, queue.partition("@")[0], site.queues, site.server)
    if outside:
        return "\n".join(outside)
    shown = dict.fromkeys(shlex.join(words) for words in asked if option_of(words) in ("-l", "-q"))
    return (f"qsub does not say which limit. The job asks for: {' '.join(shown) or 'nothing but defaults'}. Compare "
            f"with resources_max and resources_min in: qstat -Qf {queue}".rstrip() + ", and in: qstat -Bf")


def _status(job_id: str, job: Record) -> Status:
    """The state of a record of qstat."""
    native = text(job, "job_state")
    code = number(job, "Exit_status")
    reason = text(job, "comment")
    state = _STATES.get(native, "unknown")
    if native in ("F", "X"):
        state, reason = _ended(job, code, reason)
        code = code if code is None or code < 256 else 128 + code - 256
        code = None if code is not None and code < 0 else code
    else:
        code = None  # of an earlier run
    hosts = dict.fromkeys(part.partition("/")[0] for part in text(job, "exec_host").split("+") if part)
    runs = number(job, "run_count")
    return Status(job_id, state, code, reason, native, hosts=tuple(hosts), name=text(job, "Job_Name"),
                  queue=text(job, "queue"), output=_log(job, job_id),
                  restart_count=None if runs is None else max(0, runs - 1))


def _of_elements(status: Status) -> Status:
    """The status of an array by its elements: PBS says 1 of the whole, whatever their exit statuses are."""
    try:
        jobs = objects(command.ask([program("qstat"), "-x", "-t", "-f", "-F", "json", status.job_id]), "Jobs")
    except command.SchedulerError:
        return status
    parts = [_status(job_id, job) for job_id, job in jobs.items() if re.search(r"\[[0-9]+\]", job_id)]
    return replace(combined(status.job_id, parts), output=status.output) if parts else status


def _ended(job: Record, code: int | None, comment: str) -> tuple[str, str]:
    """How a finished job ended. Without Exit_status it never ran, whatever else the record says.

    A job whose dependency cannot be met ends with the substate of success (92) and no Exit_status at once.
    """
    substate = number(job, "substate")
    if substate == 91:
        return "cancelled", comment or "deleted"
    if code is None:
        waited = text(job, "depend")
        return "never_ran", (f"it waited for {waited}, which failed, was deleted or is not known" if waited else
                             comment or "it ended without having run")
    if code in _ENDS:
        return _ENDS[code]
    if code < 0:
        return "failed", f"PBS ended it (Exit_status {code}). {comment}".strip()
    return ("completed" if code == 0 and substate == 92 else failed_or_stopped(code)), comment


def _log(job: Record, job_id: str) -> str | None:
    """The file of the log: Output_Path without its host; a folder holds ID.OU."""
    path = text(job, "Output_Path")
    path = path.partition(":")[2] if re.match(r"[^/:]+:/", path) else path
    index = re.search(r"\[([0-9]+)\]", job_id)
    if index:
        path = path.replace("^array_index^", index[1])
    if path.endswith("/") or (path and os.path.isdir(path)):
        return os.path.join(path, f"{job_id}.OU")
    return path or None


def _why_held(job: Record, asked: frozenset[str] = frozenset()) -> str:
    """Why a job that waits for others will wait for ever: PBS holds it when one of them was deleted before it ran, and
    then those that wait for it in turn."""
    for kind, first, others in re.findall(r"(after\w*):([^:,@]+)([^,]*)", text(job, "depend")):
        for other in {first, *re.findall(r":([^:,@]+)", others)} - asked:
            try:
                found = qstat_job(other, ended=True, seconds=10)
            except command.SchedulerError:
                continue
            if found and text(found, "job_state") == "F" and number(found, "Exit_status") is None:
                return f"waits for ever for {other} ({kind}), which was deleted or ended before it ran; cancel this job"
            if found and text(found, "job_state") == "H" and _why_held(found, asked | {other}):
                return f"waits for ever for {other} ({kind}), which itself waits for ever; cancel this job"
    return ""


def _position(job_id: str, queue: str) -> int | None:
    """The place among the queued jobs of its queue."""
    try:
        waiting = command.ask([program("qselect"), "-s", "Q", *(["-q", queue] if queue else [])]).split()
    except command.SchedulerError:
        return None
    ids = [name for name in waiting if name == job_id or name.partition(".")[0] == job_id.partition(".")[0]]
    return waiting.index(ids[0]) + 1 if ids else None


@dataclass(frozen=True)
class _Site:
    """What the server says of its queues, itself and its nodes; empty where it does not answer."""

    queues: dict[str, Record]
    server: Record
    sizes: dict[str, list[int]]  # of each host: cores, GPUs, bytes of memory

    @classmethod
    def ask(cls) -> _Site:
        def answer(kind: str, name: str, *options: str) -> dict[str, Record]:
            try:
                return objects(command.ask([program(name), *options, "-F", "json"], seconds=_PATIENCE), kind)
            except command.SchedulerError:
                return {}
        queues = answer("Queue", "qstat", "-Qf")
        if not queues:
            return cls({}, {}, {})
        servers = answer("Server", "qstat", "-Bf")
        return cls(queues, next(iter(servers.values()), {}), _sizes(answer("nodes", "pbsnodes", "-a")))

    @property
    def default_queue(self) -> str:
        return text(self.server, "default_queue")

    def as_queues(self) -> list[Queue]:
        """The queues, with the nodes of all: PBS ties nodes to queues in too many ways. Limits: outside_limits()."""
        cores, gpus, memory = (max((size[place] for size in self.sizes.values()), default=0) or None
                               for place in range(3))
        return [Queue(name, name == self.default_queue, text(queue, "enabled") != "False" and
                      text(queue, "from_route_only") != "True", None, len(self.sizes) or None, cores, gpus, memory)
                for name, queue in self.queues.items()]


def _sizes(vnodes: dict[str, Record]) -> dict[str, list[int]]:
    """Host -> cores, GPUs, bytes of memory, summed over its vnodes."""
    sizes: dict[str, list[int]] = {}
    for name, vnode in vnodes.items():
        size = sizes.setdefault(text(vnode, "resources_available", "host") or name, [0, 0, 0])
        size[0] += number(vnode, "resources_available", "ncpus") or 0
        size[1] += number(vnode, "resources_available", "ngpus") or 0
        size[2] += parse_size(text(vnode, "resources_available", "mem")) or 0
    return sizes

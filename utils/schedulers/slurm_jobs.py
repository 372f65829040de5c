"""Jobs under Slurm: written, checked, submitted, watched.

Not here: what its commands print (slurm_answers.py), what was allocated to this job (slurm.py).
"""
from __future__ import annotations

import getpass
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from . import command
from .checks import Queue, check_dependency, check_paths, check_queue
from .job import Job, JobError, format_walltime, split_directive
from .scheduler import Status, combined, failed_or_stopped
from .script import blamed_lines, command_words, fill, option_of, probably, setup_lines, value
from .slurm import expand_hostlist
from .slurm_answers import SEPARATOR, Record, gpu_count, parse_duration, records, table

_LONG = {"-J": "--job-name", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-t": "--time",
         "-p": "--partition", "-A": "--account", "-a": "--array", "-d": "--dependency", "-o": "--output",
         "-G": "--gpus"}
# An extra option takes the place of ours when both say the same thing.
_SAME = {"--gres": "--gpus-per-node", "--gpus": "--gpus-per-node", "--gpus-per-task": "--gpus-per-node",
         "--ntasks": "--ntasks-per-node", "--ntasks-per-gpu": "--ntasks-per-node", "--mem-per-cpu": "--mem",
         "--mem-per-gpu": "--mem", "--cpus-per-gpu": "--cpus-per-task", "--no-requeue": "--requeue"}
_OF_WHOLE_JOB = {"--job-name", "--output", "--open-mode", "--array", "--dependency", "--kill-on-invalid-dep",
                 "--signal", "--requeue"}
_STATES = {
    "PENDING": "queued", "CONFIGURING": "queued", "REQUEUED": "queued", "RUNNING": "running", "SIGNALING": "running",
    "RESIZING": "running", "SUSPENDED": "held", "STOPPED": "held", "REQUEUE_HOLD": "held", "SPECIAL_EXIT": "held",
    "RESV_DEL_HOLD": "held", "REQUEUE_FED": "queued", "COMPLETING": "ending", "STAGE_OUT": "ending",
    "COMPLETED": "completed", "FAILED": "failed", "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "node_fail",
    "NODE_FAIL": "node_fail", "DEADLINE": "timeout", "TIMEOUT": "timeout", "CANCELLED": "cancelled",
    "PREEMPTED": "cancelled", "REVOKED": "cancelled"}
_HELD = ("JobHeldUser", "JobHeldAdmin", "DependencyNeverSatisfied", "BadConstraints", "launch_failed_requeued_held",
         "job_requeued_in_held_state")
_PATIENCE = 10.0  # seconds for each question before a submission
_JOB_ID = re.compile(r"[0-9]+(?:_(?:[0-9]+|\[[0-9,:%-]+\])|\+[0-9]+)?")
_QUIET = re.compile(r"[A-Za-z0-9_=.,:@%+/\[\]&|^*()?~-]+")  # sbatch takes these in a directive as they stand
# What sbatch says, and the options that it may mean: of these first, whatever else a message has in it.
_BLAME_ALONE = (("accounting/qos policy", ("--time", "-t", "--qos", "-q", "--nodes", "-N", "--array", "-a")),
                ("account/partition", ("--account", "-A", "--partition", "-p")))
_BLAME = (("partition", ("--partition", "-p")), ("account", ("--account", "-A", "--partition", "-p")),
          ("time limit", ("--time", "-t")), ("gres", ("--gpus", "--gres", "-G")), ("gpu", ("--gpus", "--gres", "-G")),
          ("feature", ("--constraint", "-C")), ("dependency", ("--dependency", "-d")), ("memory", ("--mem",)),
          ("qos", ("--qos", "-q")), ("array", ("--array", "-a")), ("reservation", ("--reservation",)),
          ("licenses", ("--licenses", "-L")), ("signal", ("--signal",)), ("node count", ("--nodes", "-N")),
          ("node list", ("--nodelist", "-w")), ("cpu", ("--cpus-per-task", "-c")),
          ("node configuration", ("--gpus", "--gres", "--cpus-per-task", "--mem", "--constraint", "--nodes")))


class Slurm:
    """The Scheduler (scheduler.py) for Slurm."""

    name = "slurm"

    def __init__(self) -> None:
        self._ended: dict[str, dict[str, Status]] = {}  # of an array, the elements that were seen to have ended

    def directives(self, job: Job) -> list[list[str]]:
        """--option=value for all that the job says, then its extra options, which take the place of ours."""
        self._refuse(job)
        agents = job.launcher == "torchrun"  # one task a node, which has the cores of all ranks
        # Where the job says nothing of ranks or GPUs, `sbatch -n 3` may, and launch.py counts the GPUs.
        tasks = (1 if agents else job.ranks) if job.ranks_per_node or job.gpus_per_node else None
        cores = job.cores_per_rank and job.cores_per_rank * (job.ranks if agents else 1)
        ours: dict[str, object] = {
            "--job-name": job.name, "--nodes": job.nodes, "--ntasks-per-node": tasks,
            "--cpus-per-task": cores, "--gpus-per-node": job.gpus_per_node or None,
            "--mem": job.memory and job.memory.upper().removesuffix("B"),
            "--time": job.walltime and format_walltime(job.walltime), "--partition": job.queue,
            "--account": job.account, "--array": job.array, "--dependency": job.dependency,
            "--kill-on-invalid-dep": "yes" if job.dependency else None,  # else it would be queued for ever
            "--output": job.output, "--open-mode": "append",  # a job that is requeued goes on in its log
            "--signal": job.signal_seconds and f"B:USR1@{job.signal_seconds}"}
        words = [[f"{name}={value}"] for name, value in ours.items() if value is not None]
        if job.requeue is not None:
            words.append(["--requeue" if job.requeue else "--no-requeue"])
        extra = [split_directive(entry) for entry in job.directives]
        said = {_meaning(entry) for entry in extra}
        first = [entry for entry in words if _meaning(entry) not in said] + extra
        return first + [entry for text in job.components for entry in (["hetjob"], *_component(job, first, text))]

    def _refuse(self, job: Job) -> None:
        if job.chunk:
            raise JobError("chunk", "this is for PBS alone; Slurm has --constraint. Give directives instead.")
        if job.output and job.output.endswith("/"):
            raise JobError("output", f"{job.output!r} is a folder, expected a file. Add a name such as %x-%j.out.")
        if job.output and "\\" in job.output:
            raise JobError("output", f"{job.output!r} has a backslash, which Slurm leaves out. Give another name.")
        if job.dependency and "[" in job.dependency:
            raise JobError("dependency", f"{job.dependency!r} has brackets, which job ids of Slurm do not have.")

    def render(self, job: Job, template: str) -> str:
        """The job script. JobError names the field that cannot be put into it."""
        lines = ["#SBATCH " + " ".join(map(_quote, words)) for words in self.directives(job)]
        return fill(template, directives=lines, setup=setup_lines(job), command=command_words(job))

    def check(self, job: Job) -> list[str]:
        """What would go wrong, each with its fix. What the scheduler cannot answer is no problem."""
        partitions, options = _partitions(), self.directives(replace(job, components=()))
        named = os.environ.get("SBATCH_PARTITION") or next(
            (value(words) for words in reversed(options) if _meaning(words) == "--partition"), None)
        if not named and any(_meaning(words) in ("--qos", "-q") for words in options):
            partitions = [replace(one, is_default=False) for one in partitions]  # the site chooses by QOS
        return (check_queue(replace(job, queue=named), partitions, "partition") + _check_account(job)
                + check_dependency(job, self.status) + check_paths(job))

    def submit(self, script: str | os.PathLike[str], *, options: Sequence[str] = (),
               folder: str | os.PathLike[str] | None = None) -> str:
        """Submit a script from a folder and return the job id. See Scheduler.submit."""
        words = ["sbatch", "--parsable", *options, os.fspath(script)]
        return command.submit(words, folder, _JOB_ID,
                              lambda said: _blame(Path(folder or ".") / script, options, said))

    def status(self, job_id: str) -> Status:
        """The job now, or how it ended: by scontrol, later by sacct."""
        _check_id(job_id)
        try:
            jobs = records(command.ask(["scontrol", "show", "job", job_id]))
        except command.SchedulerError as error:
            if "invalid job id" not in error.said.lower():
                raise
            jobs = []
        found = [_status(job_id, job) for job in jobs]
        elements = [f"{job.get('ArrayJobId')}_{job.get('ArrayTaskId')}" for job in jobs if "ArrayTaskId" in job]
        # Slurm forgets the elements of an array one by one, five minutes after each has ended.
        forgotten = {name: one for name, one in self._ended.get(job_id, {}).items() if name not in elements}
        if all(status.ended for status in found) and (elements or not found):
            found += _from_accounting(job_id, {*elements, *forgotten})
        found += forgotten.values()
        if elements:
            now = {name: status for name, status in zip(elements, found, strict=False) if status.ended}
            self._ended[job_id] = forgotten | now
        status = _combined(job_id, found)
        if status.state != "queued" or not status.queue:
            return status
        return _with_position(status, jobs)

    def cancel(self, job_id: str) -> None:
        """End the job, or take it from the queue. A job that has ended already is no error."""
        _check_id(job_id)
        try:
            command.ask(["scancel", job_id])
        except command.SchedulerError:
            if not self.status(job_id).ended:
                raise

    def requeue(self, job_id: str) -> None:
        """Back into the queue, under the same id."""
        _check_id(job_id)
        command.ask(["scontrol", "requeue", job_id])


def _meaning(words: Sequence[str]) -> str:
    """What an option decides: -G, --gres and --gpus-per-node all decide about --gpus-per-node."""
    name = option_of(words)
    name = _LONG.get(name, name)
    return _SAME.get(name, name)


def _component(job: Job, first: Sequence[list[str]], text: str) -> list[list[str]]:
    """The options of a further component of a heterogeneous job: those of the first, but for what `text` says."""
    own: list[list[str]] = []
    for word in split_directive(text, "components"):
        if word.startswith("-") or not own:
            own.append([])
        own[-1].append(word)
    said = {_meaning(words) for words in own}
    gpus = [re.search(r"(?:--gpus-per-node|--gres)\W.*?([0-9]+)$", "=".join(words)) for words in own]
    counted = any(_meaning(words) == "--ntasks-per-node" for words in first)  # else launch.py counts the GPUs of hosts
    if counted and "--ntasks-per-node" not in said and job.ranks_per_node is None and job.launcher != "torchrun":
        own += [[f"--ntasks-per-node={found[1]}"] for found in gpus if found and int(found[1])]  # a rank for each
        said = {_meaning(words) for words in own}
    return [words for words in first if _meaning(words) not in said | _OF_WHOLE_JOB] + own


def _quote(word: str) -> str:
    """A word of a directive. sbatch knows double quotes and the backslash; a # outside of quotes ends the line."""
    if _QUIET.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_id(job_id: str) -> None:
    if not _JOB_ID.fullmatch(job_id):
        raise command.SchedulerError(f"{job_id[:60]!r} is no job id of Slurm, expected one like 1234, 1234_5 or "
                                     "1234+1. Give the id that was printed when the job was submitted.")


def _blame(script: Path, options: Sequence[str], said: str) -> str | None:
    """What sbatch's message is about."""
    lower = said.lower()
    named = re.findall(r"--[a-z][a-z-]+", said) + re.findall(r"specified: (\S+)", said)
    alone = [name for phrase, names in _BLAME_ALONE if phrase in lower for name in names]
    meant = alone or [name for phrase, names in _BLAME if phrase in lower for name in names]
    found = blamed_lines(script, "#SBATCH", options, named + meant)
    return probably(found if "policy" in lower else found[:1])  # of a policy it does not say which part


def _status(job_id: str, job: Record) -> Status:
    """The state of one record of scontrol."""
    native = job.get("JobState", "")
    reason = job.get("Reason", "").replace("None", "")
    state = _STATES.get(native, "unknown")
    if native == "PENDING" and (reason in _HELD or job.get("Priority") == "0"):
        state = "held"
    if native == "CANCELLED" and "Dependency" in reason:
        state = "never_ran"
    if not reason and job.get("PreemptTime", "None") not in ("None", "Unknown"):
        reason = "Preempted"
    code = _exit_code(state, job.get("ExitCode", ""))
    if state == "failed":
        state = failed_or_stopped(code)
    return Status(job_id, state, code, _reason(reason), native,
                  hosts=_hosts(job.get("NodeList", "")), name=job.get("JobName", ""),
                  queue=job.get("Partition", ""), output=job.get("StdOut") or None,
                  restart_count=int(job["Restarts"]) if job.get("Restarts", "").isdecimal() else None)


def _hosts(nodes: str) -> tuple[str, ...]:
    """None for "", "(null)", "None assigned" and whatever else is no list of nodes."""
    try:
        return () if " " in nodes or "(" in nodes else tuple(expand_hostlist(nodes))
    except ValueError:
        return ()


def _reason(reason: str) -> str:
    if reason == "DependencyNeverSatisfied":
        return "DependencyNeverSatisfied: the job that it waits for failed, was cancelled or never ran"
    return reason


def _exit_code(state: str, code: str) -> int | None:
    """"3:0" -> 3, "0:15" -> 143; None while the job has not ended."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", code)
    if match is None or state in ("queued", "held", "running", "ending", "never_ran", "unknown"):
        return None
    number = 128 + int(match[2]) if int(match[2]) else int(match[1])
    return number if number or state == "completed" else None


def _from_accounting(job_id: str, known: Collection[str]) -> list[Status]:
    """The states that sacct knows, but for the elements that are known; none where there is no accounting."""
    columns = ("JobID", "JobName", "State", "ExitCode", "Partition", "NodeList")
    try:
        answer = command.ask(["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}",
                              f"--format={','.join(columns)}", "--jobs", job_id])
    except command.SchedulerError:
        return []
    found = []
    for row in table(answer, columns):
        job = dict(row, JobState=row["State"].split(" ")[0], Reason=row["State"])  # "CANCELLED by 0"
        if row["JobID"] not in known:
            found.append(_status(job_id, job))
    return found


def _combined(job_id: str, parts: Sequence[Status]) -> Status:
    if not parts:
        return Status(job_id, "unknown", reason="Slurm does not know this job, or no longer")
    return combined(job_id, parts)


def _with_position(status: Status, jobs: Sequence[Record]) -> Status:
    """The place among the pending jobs of its partition, by priority."""
    ids = {job.get("JobId", "") for job in jobs} | {job.get("ArrayJobId", "") for job in jobs}
    try:
        answer = command.ask(["squeue", "--noheader", "--states", "PENDING", "--partition", status.queue, "--sort",
                              "-p,i", "--format", "%A"])
    except command.SchedulerError:
        return status
    for position, waiting in enumerate(answer.split(), 1):
        if waiting in ids:
            return replace(status, position=position)
    return status


def _partitions() -> list[Queue]:
    """The partitions by sinfo; none where it does not answer."""
    columns = ("partition", "open", "limit", "nodes", "cores", "memory", "gres")
    try:
        answer = command.ask(["sinfo", "--all", "--exact", "--noheader", "--format",
                              SEPARATOR.join(("%P", "%a", "%l", "%D", "%c", "%m", "%G"))], seconds=_PATIENCE)
    except command.SchedulerError:
        return []
    groups: dict[str, list[Record]] = {}
    for row in table(answer, columns):
        groups.setdefault(row["partition"].rstrip("*") if len(row["partition"]) > 1 else row["partition"],
                          []).append(row)
    limits = _limits()
    return [_limited(Queue(name, any(row["partition"].endswith("*") for row in rows), any(
        row["open"] == "up" for row in rows), parse_duration(rows[0]["limit"]), sum(
        _leading(row["nodes"]) for row in rows), max(_leading(row["cores"]) for row in rows), max(
        gpu_count(row["gres"]) for row in rows), max(_leading(row["memory"]) for row in rows) << 20),
                     limits.get(name, {})) for name, rows in groups.items()]


def _limits() -> dict[str, Record]:
    """Partition -> what scontrol says of it; empty where it does not answer."""
    try:
        shown = command.ask(["scontrol", "--all", "show", "partition"], seconds=_PATIENCE)
    except command.SchedulerError:
        return {}
    return {record.get("PartitionName", ""): record for record in records(shown)}


def _limited(queue: Queue, limits: Record) -> Queue:
    """A partition with its limits: MaxNodes=4 MinNodes=2 MaxCPUsPerNode=UNLIMITED MaxMemPerNode=4000 (megabytes)."""
    def least(known: int | None, name: str, unit: int = 1) -> int | None:
        limit = _leading(limits.get(name, "")) * unit  # 0 for UNLIMITED
        return min(known, limit) if known and limit else known

    return replace(queue, nodes=least(queue.nodes, "MaxNodes"), cores=least(queue.cores, "MaxCPUsPerNode"),
                   memory=least(queue.memory, "MaxMemPerNode", 1 << 20),
                   least_nodes=_leading(limits.get("MinNodes", "")) or 1)


def _leading(text: str) -> int:
    """"4+" -> 4."""
    match = re.match(r"[0-9]+", text)
    return int(match[0]) if match else 0


def _check_account(job: Job) -> list[str]:
    """Whether the accounts of this user fit, where Slurm insists on one."""
    try:
        config = command.ask(["scontrol", "show", "config"], seconds=_PATIENCE)
        enforced = re.search(r"^AccountingStorageEnforce\s*=\s*(.*)$", config, re.MULTILINE)
        if enforced is None or not re.search("associations|limits|safe|qos", enforced[1]):
            return []
        show = ["sacctmgr", "--noheader", "--parsable2", "show"]
        user = getpass.getuser()
        rows = command.ask([*show, "associations", f"user={user}", "format=Account"], seconds=_PATIENCE).split()
        default = command.ask([*show, "user", user, "format=DefaultAccount"], seconds=_PATIENCE).split()
    except (command.SchedulerError, OSError, KeyError):
        return []
    accounts = sorted(set(rows))
    given = (job.account or "").lower()  # Slurm keeps the names in lower case, and takes them in any
    if not accounts or given in map(str.lower, accounts) or (job.account is None and default):
        return []
    return [f"account: {job.account or 'none'} is given, and Slurm insists on an account of yours. "
            f"Take one of: {', '.join(accounts)}."]

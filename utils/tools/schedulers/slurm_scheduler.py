"""Write, check, submit and watch jobs under Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...job import slurm_exclusion
from ...job.commands import SchedulerError, run_command
from ...job.notation import format_walltime, parse_duration, parse_number
from ...job.slurm_job import Fields, expand_hostlist, records
from .job_checks import check_dependency, check_paths, check_queue
from .job_spec import Job, JobError, option_name, option_value, split_directive
from .scheduler import Queue, Scheduler, State, Status, state_of_exit
from .slurm_allocation import gpu_count

_LONG_NAMES = {
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-p": "--partition",
    "-A": "--account",
    "-d": "--dependency",
    "-o": "--output",
    "-G": "--gpus",
    "-q": "--qos",
    "-x": "--exclude",
}
_SAME_SETTING = {  # option of the kit -> options in job.directives that replace it
    "--gpus-per-node": "--gres --gpus --gpus-per-task",
    "--ntasks-per-node": "--ntasks --ntasks-per-gpu",
    "--cpus-per-task": "--cpus-per-gpu",
    "--mem": "--mem-per-cpu --mem-per-gpu",
    "--requeue": "--no-requeue",
}
_SETTINGS = {other: name for name, others in _SAME_SETTING.items() for other in others.split()}
_UNQUOTED = re.compile(r"[A-Za-z0-9_=.,:@%+/\[\]&|^*()?~-]+")  # sbatch reads these as they are
_MAX_LENGTH = 3000  # characters of the list of excluded hosts in a directive

# Separates the columns of sinfo and sacct.
SEPARATOR = "\x1f"
_TIMEOUT_SECONDS = 10.0  # time limit of a query: a user waits for the submission
_COLUMNS = {  # column -> sinfo's format
    "partition": "%P",
    "availability": "%a",
    "time_limit": "%l",
    "nodes": "%D",
    "cores": "%c",
    "megabytes": "%m",
    "gres": "%G",
}

_SCHEDULER_STATES: dict[State, str] = {
    "queued": "PENDING CONFIGURING REQUEUED REQUEUE_FED",
    "held": "SUSPENDED STOPPED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    "running": "RUNNING SIGNALING RESIZING",
    "ending": "COMPLETING STAGE_OUT",
    "completed": "COMPLETED",
    "failed": "FAILED OUT_OF_MEMORY",
    "node_fail": "NODE_FAIL BOOT_FAIL",
    "timeout": "TIMEOUT DEADLINE",
    "cancelled": "CANCELLED PREEMPTED REVOKED",
}
_STATES = {word: state for state, words in _SCHEDULER_STATES.items() for word in words.split()}
_HOLD_REASONS = (  # reasons of a pending job that does not start by itself
    "JobHeldUser",
    "JobHeldAdmin",
    "DependencyNeverSatisfied",
    "BadConstraints",
    "launch_failed_requeued_held",
    "job_requeued_in_held_state",
)
_HAS_EXIT_CODE = ("completed", "failed", "cancelled", "timeout", "node_fail")


class SlurmScheduler(Scheduler):
    """The Scheduler for Slurm."""

    name = "slurm"
    directive_prefix = "#SBATCH"
    job_id_pattern = re.compile(r"[0-9]+(?:_[0-9]+)?")
    job_id_examples = "1234 or 1234_5"
    submit_command = "sbatch"
    # Variables of sbatch that add to the options of a job, or contradict them. "GPUS" and the
    # like request other GPUs than --gpus-per-node; WAIT makes sbatch wait for the end.
    refused_variables = tuple(
        f"SBATCH_{name}" for name in ("ARRAY_INX", "GPUS", "GPUS_PER_TASK", "GRES", "WAIT")
    )
    # -W has no value: "-W group_list=x" is an option of qsub.
    option_pattern = re.compile("--[a-z]|-[aAbBcCdDeFGhHiIJkLmMnNoOpqQsStuvVwxZ]|-W$")
    account_variable = "SBATCH_ACCOUNT"
    time_limit_pattern = re.compile("--time[= ]|-t")
    can_requeue = True

    def directives(self, job: Job) -> list[list[str]]:
        """Return the options of a job.

        An option in job.directives replaces the kit's option for the same setting.
        """
        _refuse(job)
        self.check_directives(job)
        extra = [split_directive(entry) for entry in job.directives]
        replaced = {_setting(words) for words in extra}
        return [words for words in _field_options(job) if _setting(words) not in replaced] + extra

    def quote(self, word: str) -> str:
        """Quote a word of an #SBATCH line: sbatch reads double quotes, backslashes and comments."""
        if _UNQUOTED.fullmatch(word):
            return word
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def without_hosts(self, job: Job, hosts: Sequence[str]) -> tuple[Job, str]:
        options = self.directives(job)
        names, total = slurm_exclusion.nodes_of(hosts, _partition_of(options))
        if not names:
            return job, ""
        value = ",".join([*filter(None, [_last_value(options, "--exclude")]), *names])
        problem = slurm_exclusion.too_few(names, total, job.nodes)
        if not problem and len(value) > _MAX_LENGTH:
            problem = f"the list of {len(names)} nodes is too long for a directive"
        if problem:
            return job, problem
        kept = [
            directive
            for directive in job.directives
            if _setting(split_directive(directive)) != "--exclude"
        ]
        return replace(job, directives=(*kept, f"--exclude={value}")), ""

    def exclude_hosts(
        self,
        job_id: str,
        hosts: Sequence[str],
        *,
        dry_run: bool = False,
    ) -> str:
        self.check_job_id(job_id)
        return slurm_exclusion.exclude_hosts(job_id, hosts, dry_run)

    def check(self, job: Job) -> list[str]:
        options = self.directives(job)
        partitions = query_partitions()
        partition = _partition_of(options)
        if not partition and _last_value(options, "--qos"):
            # The site chooses the partition by QOS: any of them may be meant.
            partitions = [replace(partition, is_default=False) for partition in partitions]
        return [
            *check_queue(replace(job, queue=partition or None), partitions, "partition"),
            *check_dependency(job, self.status),
            *check_paths(job),
        ]

    def submit_words(self, options: Sequence[str], path: str) -> list[str]:
        return ["sbatch", "--parsable", *options, path]

    def status(self, job_id: str) -> Status:
        self.check_job_id(job_id)
        return _query_status(job_id)

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        for job_id in job_ids:
            self.check_job_id(job_id)
        known = _query_queue(job_ids)
        missing = [job_id for job_id in job_ids if job_id not in known]
        if missing:
            known |= _query_accounting(missing)
        return {job_id: _status_of(job_id, known.get(job_id, [])) for job_id in job_ids}

    def cancel(self, job_id: str) -> None:
        self.check_job_id(job_id)
        try:
            run_command(["scancel", job_id])
        except SchedulerError:
            if not self.status(job_id).ended:
                raise


# Options of sbatch --------------------------------------------------------------------------------


def _setting(words: Sequence[str]) -> str:
    """Return the setting that an option decides: "--gres=gpu:2" and "-G 2" -> "--gpus-per-node"."""
    name = option_name(words)
    name = _LONG_NAMES.get(name, name)
    return _SETTINGS.get(name, name)


def _last_value(options: Sequence[Sequence[str]], setting: str) -> str:
    """Return the value of the last option for a setting, which wins; "" if there is none."""
    values = [option_value(words) for words in options if _setting(words) == setting]
    return values[-1] if values else ""


def _partition_of(options: Sequence[Sequence[str]]) -> str:
    """Return the partition that sbatch will use; "" if it is left to Slurm."""
    return _last_value(options, "--partition") or os.environ.get("SBATCH_PARTITION", "")


def _refuse(job: Job) -> None:
    """Raise JobError for what PBS supports and Slurm does not."""
    if job.chunk:
        raise JobError(
            "chunk", "this is for PBS only; Slurm has --constraint. Give directives instead."
        )
    if job.output and job.output.endswith("/"):
        raise JobError(
            "output", f"{job.output!r} is a folder, expected a file. Add a name such as %x-%j.out."
        )
    if job.output and "\\" in job.output:
        raise JobError(
            "output", f"{job.output!r} has a backslash, which Slurm drops. Give another name."
        )
    if job.dependency and "[" in job.dependency:
        raise JobError(
            "dependency", f"{job.dependency!r} has brackets, which no job id of Slurm has."
        )


def _field_options(job: Job) -> Iterator[list[str]]:
    """Yield the options for the fields of a job."""
    # With torchrun one task per node has the cores of all ranks.
    one_agent = job.launch.launcher == "torchrun"
    tasks = 1 if one_agent else job.ranks
    # Without ranks and GPUs, `sbatch -n 3` decides the tasks, or the launch counts the GPUs.
    counts_tasks = bool(job.launch.ranks_per_node or job.gpus_per_node)
    cores = job.cores_per_rank and job.cores_per_rank * (job.ranks if one_agent else 1)
    gpus = f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else job.gpus_per_node
    values: dict[str, str | int | None] = {
        "--nodes": job.nodes,
        "--ntasks-per-node": tasks if counts_tasks else None,
        "--cpus-per-task": cores,
        "--gpus-per-node": gpus if job.gpus_per_node else None,
        "--mem": job.memory and job.memory.upper().removesuffix("B"),
        "--time": job.walltime and format_walltime(job.walltime),
        # Without this a job whose dependency cannot be met stays queued.
        "--kill-on-invalid-dep": "yes" if job.dependency else None,
        "--mail-type": job.mail_type and job.mail_type.upper(),
        "--output": job.output,
        "--open-mode": "append",  # a requeued job continues its log
    }
    plain = {option.sbatch: value for option, value in job.plain_options()}
    for name, value in {**plain, **values}.items():
        if value is not None:
            yield [f"{name}={value}"]
    if job.launch.spare:
        yield ["--no-kill"]  # otherwise Slurm ends the job when a node fails
    if job.requeue is not None:
        yield ["--requeue" if job.requeue else "--no-requeue"]


# Partitions ---------------------------------------------------------------------------------------


def query_partitions() -> list[Queue]:
    """Query the partitions; [] if sinfo does not respond."""
    query = ["sinfo", "--all", "--exact", "--noheader", "--format"]
    try:
        output = run_command(
            [*query, SEPARATOR.join(_COLUMNS.values())], timeout_seconds=_TIMEOUT_SECONDS
        )
    except SchedulerError:
        return []

    rows_by_name: dict[str, list[Fields]] = {}
    for row in table(output, list(_COLUMNS)):
        rows_by_name.setdefault(row["partition"].removesuffix("*"), []).append(row)
    limits = _query_limits()
    return [_partition(name, rows, limits.get(name, {})) for name, rows in rows_by_name.items()]


def _query_limits() -> dict[str, Fields]:
    try:
        output = run_command(
            ["scontrol", "--all", "show", "partition"], timeout_seconds=_TIMEOUT_SECONDS
        )
    except SchedulerError:
        return {}
    return {record.get("PartitionName", ""): record for record in records(output)}


def _partition(name: str, rows: Sequence[Fields], limits: Fields) -> Queue:
    """Make a partition from sinfo's rows, one for each kind of node, and scontrol's limits.

    The limits read MaxNodes=4 MinNodes=2 MaxCPUsPerNode=UNLIMITED MaxMemPerNode=4000 (megabytes).
    """

    def numbers(column: str) -> list[int]:
        return [parse_number(row[column]) or 0 for row in rows]

    def limited(value: int, limit_name: str) -> int:
        limit = parse_number(limits.get(limit_name, ""))
        return min(value, limit) if limit else value

    return Queue(
        name,
        is_default=any(row["partition"].endswith("*") for row in rows),
        is_open=any(row["availability"] == "up" for row in rows),
        max_walltime_seconds=parse_duration(rows[0]["time_limit"]),
        min_nodes=parse_number(limits.get("MinNodes", "")) or 1,
        max_nodes=limited(sum(numbers("nodes")), "MaxNodes"),
        cores_per_node=limited(max(numbers("cores")), "MaxCPUsPerNode"),
        gpus_per_node=max(gpu_count(row["gres"]) for row in rows),
        memory_per_node_bytes=limited(max(numbers("megabytes")), "MaxMemPerNode") << 20,
    )


# Status -------------------------------------------------------------------------------------------


def _query_status(job_id: str) -> Status:
    """Return the status from scontrol, or from sacct if scontrol no longer knows the job."""
    return _status_of(job_id, _query_controller(job_id) or _query_accounting([job_id]).get(job_id))


def _status_of(job_id: str, jobs: Sequence[Fields] | None) -> Status:
    if not jobs:
        return Status(job_id, "unknown", reason="Slurm does not know this job, or no longer")
    statuses = [_job_status(job_id, job) for job in jobs]
    # An array, which a user has submitted with sbatch, has a record for each element.
    return next((status for status in statuses if status.state != "completed"), statuses[0])


def _query_controller(job_id: str) -> list[Fields]:
    try:
        return records(run_command(["scontrol", "show", "job", job_id]))
    except SchedulerError as error:
        if "invalid job id" in error.output.lower():
            return []
        raise


_QUEUE_COLUMNS = (  # name in squeue, name in scontrol
    ("ArrayJobID", "JobId"),
    ("State", "JobState"),
    ("Reason", "Reason"),
    ("PriorityLong", "Priority"),
    ("exit_code", "ExitCode"),
    ("NodeList", "NodeList"),
    ("StdOut", "StdOut"),
)


def _query_queue(job_ids: Sequence[str]) -> dict[str, list[Fields]]:
    """Return the records of jobs that the controller knows, with scontrol's names."""
    columns = ",".join(f"{column}:{SEPARATOR}" for column, _ in _QUEUE_COLUMNS)
    query = ["squeue", "--noheader", "--states=all", f"--Format={columns}"]
    try:
        output = run_command([*query, f"--jobs={','.join(job_ids)}"])
    except SchedulerError as error:  # one unknown job is an error, several are not
        if "invalid job id" in error.output.lower():
            return {}
        raise
    found: dict[str, list[Fields]] = {}
    for row in table(output, [*(name for _, name in _QUEUE_COLUMNS), ""]):
        row["ExitCode"] = _wait_status(row["ExitCode"])
        found.setdefault(row["JobId"], []).append(row)
    return found


def _wait_status(text: str) -> str:
    """Write squeue's exit code as scontrol does: "19200", as of waitpid(2), is "75:0"."""
    value = parse_number(text)
    return text if value is None else f"{value >> 8}:{value & 127}"


def _query_accounting(job_ids: Sequence[str]) -> dict[str, list[Fields]]:
    """Return sacct's records with scontrol's names; {} without accounting."""
    columns = ("JobID", "State", "ExitCode", "NodeList")
    query = ["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}"]
    try:
        output = run_command([*query, f"--format={','.join(columns)}", "--jobs", ",".join(job_ids)])
    except SchedulerError:
        return {}
    found: dict[str, list[Fields]] = {}
    for row in table(output, columns):  # State is "CANCELLED by 0", JobID of an array "6_1"
        record = {**row, "JobState": row["State"].partition(" ")[0], "Reason": row["State"]}
        for job_id in {row["JobID"], re.split("[_+]", row["JobID"])[0]}:
            found.setdefault(job_id, []).append(record)
    return found


def _job_status(job_id: str, job: Fields) -> Status:
    """Return the status in one record of scontrol or sacct."""
    scheduler_state = job.get("JobState", "")
    reason = job.get("Reason", "").replace("None", "")
    state = _STATES.get(scheduler_state, "unknown")
    if scheduler_state == "PENDING" and (reason in _HOLD_REASONS or job.get("Priority") == "0"):
        state = "held"
    if scheduler_state == "CANCELLED" and "Dependency" in reason:
        state = "never_ran"
    exit_code = _exit_code(job.get("ExitCode", "")) if state in _HAS_EXIT_CODE else None
    if exit_code == 0 and state != "completed":
        exit_code = None
    if state == "failed":
        state = state_of_exit(exit_code)

    if (
        scheduler_state == "CANCELLED"
        and state == "cancelled"
        and reason not in (job.get("State"), "")
    ):
        reason = ""  # it explains the wait in the queue
    if not reason and job.get("PreemptTime", "None") not in ("None", "Unknown"):
        reason = "Preempted"
    if reason == "DependencyNeverSatisfied":
        reason += ": the job that it waits for failed, was cancelled or never ran"
    return Status(
        job_id,
        state,
        exit_code,
        reason,
        scheduler_state,
        hosts=_hosts(job.get("NodeList", "")),
        output=job.get("StdOut") or None,
    )


def _exit_code(text: str) -> int | None:
    """Read "3:0" as 3, and "0:15", where signal 15 ended the job, as 143."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if match is None:
        return None
    signal = int(match[2])
    return 128 + signal if signal else int(match[1])


def _hosts(nodes: str) -> tuple[str, ...]:
    """Return the hosts of NodeList; () for "", "(null)" and "None assigned"."""
    if " " in nodes or "(" in nodes:
        return ()
    try:
        return tuple(expand_hostlist(nodes))
    except ValueError:
        return ()


def table(text: str, columns: Sequence[str]) -> list[Fields]:
    """Return the rows of a table without a header, whose columns SEPARATOR divides."""
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]

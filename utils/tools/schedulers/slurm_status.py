"""The status of a Slurm job, from scontrol, sacct and squeue."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from ...job.commands import SchedulerError, run_command
from ...job.slurm_hostlist import expand_hostlist
from ...job.slurm_output import SEPARATOR, Fields, records, table
from ...job.units import parse_number
from .job_status import State, Status, combine, state_of_exit

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
_HOLD_REASONS = (  # of a pending job that does not start by itself
    "JobHeldUser",
    "JobHeldAdmin",
    "DependencyNeverSatisfied",
    "BadConstraints",
    "launch_failed_requeued_held",
    "job_requeued_in_held_state",
)
_HAS_EXIT_CODE = ("completed", "failed", "cancelled", "timeout", "node_fail")


class StatusQuery:
    """Query jobs, and remember the array elements that ended.

    Slurm forgets the elements of an array one by one, five minutes after each has ended.
    """

    def __init__(self) -> None:
        self._ended: dict[str, dict[str, Status]] = {}  # by job id, then by element id

    def status(self, job_id: str) -> Status:
        """Return the status from scontrol; for jobs that it no longer knows, from sacct."""
        jobs = _query_controller(job_id)
        parts = [_job_status(job_id, job) for job in jobs]
        elements = [
            f"{job.get('ArrayJobId')}_{job['ArrayTaskId']}" for job in jobs if "ArrayTaskId" in job
        ]
        forgotten = {
            element: status
            for element, status in self._ended.get(job_id, {}).items()
            if element not in elements
        }
        if elements:
            by_element = zip(elements, parts, strict=False)
            ended = {element: status for element, status in by_element if status.ended}
            self._ended[job_id] = forgotten | ended

        if all(part.ended for part in parts) and (elements or not parts):
            parts += _query_accounting(job_id, known={*elements, *forgotten})
        parts += forgotten.values()
        if not parts:
            reason = "Slurm does not know this job, or no longer"
            return Status(job_id, "unknown", reason=reason)

        status = combine(job_id, parts)
        if status.state == "queued" and status.queue:
            return replace(status, position=_query_position(status.queue, jobs))
        return status


def _query_controller(job_id: str) -> list[Fields]:
    """scontrol's records of a job: one, or one for each array element or component."""
    try:
        return records(run_command(["scontrol", "show", "job", job_id]))
    except SchedulerError as error:
        if "invalid job id" in error.output.lower():
            return []
        raise


def _query_accounting(job_id: str, known: Collection[str]) -> list[Status]:
    """The states that sacct has, without known elements; none where there is no accounting."""
    columns = ("JobID", "State", "ExitCode", "Partition", "NodeList")
    query = ["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}"]
    try:
        output = run_command([*query, f"--format={','.join(columns)}", "--jobs", job_id])
    except SchedulerError:
        return []
    found = []
    for row in table(output, columns):
        if row["JobID"] not in known:
            state = row["State"].partition(" ")[0]  # "CANCELLED by 0"
            found.append(_job_status(job_id, {**row, "JobState": state, "Reason": row["State"]}))
    return found


def _query_position(partition: str, jobs: Sequence[Fields]) -> int | None:
    """The place of a job among the pending jobs of its partition, by priority."""
    query = ["squeue", "--noheader", "--states", "PENDING", "--partition", partition]
    try:
        output = run_command([*query, "--sort", "-p,i", "--format", "%A"])
    except SchedulerError:
        return None
    ids = {job.get(name) for job in jobs for name in ("JobId", "ArrayJobId")}
    places = (place for place, pending in enumerate(output.split(), 1) if pending in ids)
    return next(places, None)


def _job_status(job_id: str, job: Fields) -> Status:
    """The status in one record of scontrol or sacct."""
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
        queue=job.get("Partition", ""),
        output=job.get("StdOut") or None,
        restart_count=parse_number(job.get("Restarts", "")),
    )


def _exit_code(text: str) -> int | None:
    """Read "3:0" as 3, and "0:15", where signal 15 ended the job, as 143."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if match is None:
        return None
    signal = int(match[2])
    return 128 + signal if signal else int(match[1])


def _hosts(nodes: str) -> tuple[str, ...]:
    """The hosts of NodeList; none for "", "(null)" and "None assigned"."""
    if " " in nodes or "(" in nodes:
        return ()
    try:
        return tuple(expand_hostlist(nodes))
    except ValueError:
        return ()

"""The status of a PBS job, from qstat and qselect."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from ...job.commands import SchedulerError, run_command
from ...job.pbs_output import Fields
from ...job.pbs_programs import find_program
from ...job.pbs_query import query_job, query_objects
from ...job.units import parse_number
from .job_status import State, Status, combine, state_of_exit

UNKNOWN_JOB, JOB_FINISHED = 153, 35  # exit statuses of qstat and qdel
_DELETED, _SUCCEEDED = 91, 92  # substates of a finished job
_TIMEOUT_SECONDS = 10.0  # of a query about another job

_LETTERS: dict[State, str] = {"queued": "QWTM", "held": "HSU", "running": "RB", "ending": "E"}
_STATES = {letter: state for state, letters in _LETTERS.items() for letter in letters}
_PBS_ENDS: dict[int, tuple[State, str]] = {  # Exit_status below zero: PBS ended the job
    -29: ("timeout", "the walltime limit was reached"),
    -20: ("node_fail", "the first host of the job was lost"),
    -3: ("failed", "the job could not be started; does the folder of its output exist?"),
}


def query_status(job_id: str) -> Status:
    """Query a job; one that has ended, as long as the server keeps its history."""
    try:
        job = query_job(job_id, ended=True)
    except SchedulerError as error:
        if error.exit_code not in (UNKNOWN_JOB, JOB_FINISHED):
            raise
        job = None
    if job is None:
        reason = "PBS does not know this job, or no longer (see job_history_enable)"
        return Status(job_id, "unknown", reason=reason)

    status = _job_status(job_id, job)
    if status.scheduler_state == "H" and job.get("depend"):
        return replace(status, reason=_why_held_forever(job) or status.reason)
    if status.state == "failed" and job.get("array") == "True":
        return _combine_elements(status)
    if status.scheduler_state == "Q":
        return replace(status, position=_query_position(job_id, status.queue))
    return status


def _job_status(job_id: str, job: Fields) -> Status:
    """The status in one record of qstat."""
    scheduler_state = job.get("job_state", "")
    state: State = _STATES.get(scheduler_state, "unknown")
    reason = job.get("comment", "")
    exit_code = None  # until the job has ended, the record may hold that of an earlier run
    if scheduler_state in ("F", "X"):
        state, reason = _end(job, reason)
        exit_code = _exit_code(job)

    exec_host = [part.partition("/")[0] for part in job.get("exec_host", "").split("+")]
    runs = parse_number(job.get("run_count", ""))
    return Status(
        job_id,
        state,
        exit_code,
        reason,
        scheduler_state,
        hosts=tuple(dict.fromkeys(filter(None, exec_host))),
        queue=job.get("queue", ""),
        output=_log(job, job_id),
        restart_count=None if runs is None else max(0, runs - 1),
    )


def _end(job: Fields, comment: str) -> tuple[State, str]:
    """State and reason of a finished job. One without Exit_status never ran.

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
    if exit_status == 0 and substate != _SUCCEEDED:
        return "failed", comment
    return state_of_exit(exit_status), comment


def _exit_code(job: Fields) -> int | None:
    """Read Exit_status: 256+N where signal N ended the login shell; below zero: no exit code."""
    exit_status = parse_number(job.get("Exit_status", ""), signed=True)
    if exit_status is None or exit_status < 0:
        return None
    return exit_status if exit_status < 256 else 128 + exit_status - 256


def _log(job: Fields, job_id: str) -> str | None:
    """The path of the log: Output_Path without its host; a folder holds JOB_ID.OU."""
    path = job.get("Output_Path", "")
    if re.match(r"[^/:]+:/", path):
        path = path.partition(":")[2]
    index = re.search(r"\[([0-9]+)\]", job_id)
    if index:
        path = path.replace("^array_index^", index[1])
    if path.endswith("/") or (path and os.path.isdir(path)):
        return os.path.join(path, f"{job_id}.OU")
    return path or None


def _combine_elements(status: Status) -> Status:
    """The status of an array by its elements: PBS gives a failed one exit status 1."""
    try:
        jobs = query_objects("Jobs", "qstat", "-x", "-t", "-f", job_id=status.job_id)
    except SchedulerError:
        return status
    parts = [
        _job_status(job_id, job) for job_id, job in jobs.items() if re.search(r"\[[0-9]+\]", job_id)
    ]
    return replace(combine(status.job_id, parts), output=status.output) if parts else status


def _why_held_forever(job: Fields, seen: frozenset[str] = frozenset()) -> str:
    """Why a job waits for ever for another one; "" where it does not.

    PBS holds a job after one that was deleted before it ran, and then those after it in turn.
    """
    dependencies = re.findall(r"(after\w*):([^:,@]+)([^,]*)", job.get("depend", ""))
    for kind, first, rest in dependencies:
        for other in {first, *re.findall(r":([^:,@]+)", rest)} - seen:
            try:
                found = query_job(other, ended=True, timeout_seconds=_TIMEOUT_SECONDS) or {}
            except SchedulerError:
                continue
            waits = f"waits for ever for {other} ({kind}), which"
            if found.get("job_state") == "F" and "Exit_status" not in found:
                return f"{waits} was deleted or ended before it ran; cancel this job"
            if found.get("job_state") == "H" and _why_held_forever(found, seen | {other}):
                return f"{waits} itself waits for ever; cancel this job"
    return ""


def _query_position(job_id: str, queue: str) -> int | None:
    """The place of a job among the queued jobs of its queue."""
    query = [find_program("qselect"), "-s", "Q", *(["-q", queue] if queue else [])]
    try:
        queued = run_command(query).split()
    except SchedulerError:
        return None
    number = job_id.partition(".")[0]
    places = (place for place, one in enumerate(queued, 1) if one.partition(".")[0] == number)
    return next(places, None)

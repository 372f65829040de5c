"""Query the PBS server for jobs, queues and nodes."""

from __future__ import annotations

from . import commands as command
from .pbs_output import Fields, listing, objects
from .pbs_programs import find_program

# Low byte of PBSE_JOBHISTNOTSET (15140): qstat -x where the server has no job_history_enable.
_NO_HISTORY = 36


def query_objects(
    kind: str,
    program: str,
    *options: str,
    job_id: str | None = None,
    timeout_seconds: float = command.TIMEOUT_SECONDS,
) -> dict[str, Fields]:
    """Run qstat or pbsnodes and return its records; kind: see objects().

    Raises SchedulerError.
    """
    query = [find_program(program), *options, "-F", "json", *([job_id] if job_id else [])]
    return objects(command.run_command(query, timeout_seconds=timeout_seconds), kind)


def query_job(
    job_id: str, *, ended: bool = False, timeout_seconds: float = command.TIMEOUT_SECONDS
) -> Fields | None:
    """Return the record of a job; None where the output does not hold it.

    ended: also look among the jobs that have ended, where the server keeps a history.

    Raises SchedulerError when qstat fails, also for an unknown job.
    """
    query = [find_program("qstat"), *(["-x"] if ended else []), "-f"]
    try:
        output = command.run_command(
            [*query, "-F", "json", job_id], timeout_seconds=timeout_seconds
        )
    except command.SchedulerError as error:
        if not ended or error.exit_code != _NO_HISTORY:
            raise
        output = "{}"
    try:
        jobs = objects(output, "Jobs")
    except command.SchedulerError:
        jobs = listing(command.run_command([*query, job_id], timeout_seconds=timeout_seconds))

    if ended and not jobs:  # OpenPBS 23 exits with 0 where it keeps no history
        return query_job(job_id, timeout_seconds=timeout_seconds)
    for name, job in jobs.items():
        if name == job_id or name.partition(".")[0] == job_id:
            return job
    return next(iter(jobs.values())) if len(jobs) == 1 else None

"""Query submitted jobs: their status, list, output, and cancelling them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ...job.commands import SchedulerError
from ...launch_protocol import EXIT_REQUEUE
from ...visible_text import visible
from ..schedulers.scheduler import Scheduler, State, Status, state_of_exit
from . import bad_hosts as exclusion
from . import submissions as records
from .following import Log, breaks_chain, cause, describe, follow, note, restarts
from .submissions import Submission

MAX_LISTED = 20  # submissions at most
_STATES: dict[str, State] = {
    records.UNTIL: "timeout",
    records.TIME_LIMIT: "timeout",
    records.HOST_LOST: "node_fail",
    records.CANCELLED: "cancelled",
}
# Records that win over the scheduler's status. With other records, the scheduler may have ended the
# job, and knows better how.
_EXACT = (0, EXIT_REQUEUE, records.NOT_STARTED, records.TIME_LIMIT, records.HOST_LOST)
_COLUMNS = ("job", "state", "submitted", "name", "folder")


def combined_exit_status(statuses: Sequence[int]) -> int:
    """Return the first failed job's status, else EXIT_REQUEUE if a job saved and stopped, or 0."""
    failed = [status for status in statuses if status not in (0, EXIT_REQUEUE)]
    return failed[0] if failed else max(statuses, default=0)


def query(scheduler: Scheduler, folder: Path | None, job_id: str) -> Status:
    """Query a job. Its own record counts if the scheduler no longer knows the job, or knows less.

    folder: folder of its submission; None: it has no record. Raises SchedulerError if the scheduler
    does not respond and nothing is recorded.
    """
    try:
        status = scheduler.status(job_id)
    except SchedulerError:
        if (found := _with_record(folder, job_id, None)) is None:
            raise
        return found
    return _with_record(folder, job_id, status) or status


def _with_record(folder: Path | None, job_id: str, status: Status | None) -> Status | None:
    """Return a job's recorded status if it knows more than the scheduler's, else the latter.

    status: the scheduler's status; None: it does not respond.
    """
    recorded = records.read_status(folder, job_id) if folder is not None else None
    if status is not None and (recorded is None or not is_over(status)):
        return status
    if recorded is None:
        return None
    counts = status is None or recorded in _EXACT or status.state == "unknown"
    return _recorded_status(job_id, recorded, status) if counts else status


def _recorded_status(job_id: str, recorded: int | str, status: Status | None) -> Status:
    """Return a job's recorded status, with the scheduler's status in the reason."""
    if recorded == records.NOT_STARTED:
        reason = "it refused to start: the job before it in the chain failed"
        return Status(job_id, "never_ran", 1, reason)
    state = _STATES[recorded] if isinstance(recorded, str) else state_of_exit(recorded)
    code = None if isinstance(recorded, str) else recorded
    if status is None:
        return Status(job_id, state, code, "recorded by the job; the scheduler does not respond")
    if status.state == "unknown":
        return Status(job_id, state, code, "recorded by the job; the scheduler does not know it")
    reason = status.reason
    if (status.state, status.exit_code or 0) != (state, code or 0):
        says = f"the scheduler says: {status.state.replace('_', ' ')}"
        reason = f"recorded by the job; {says}{reason and ', '}{reason}"
    return dataclasses.replace(status, state=state, exit_code=code, reason=reason)


def print_status(
    scheduler: Scheduler, submission: Submission | None, job_id: str, as_json: bool = False
) -> int:
    """Print a job's status, why it failed, and the failed jobs before it in its chain.

    Returns an exit status.
    """
    folder = submission.folder if submission is not None else None
    status = query(scheduler, folder, job_id)
    if as_json:
        print(json.dumps({**dataclasses.asdict(status), "folder": folder and str(folder)}))
        return _exit_status(status)
    print(visible(describe(status)))
    failed_before = False
    if submission is not None:
        for restart in restarts(status, submission.logs(job_id)):
            print(f"  {visible(restart)}")
        if found := cause(status, submission.logs(job_id)):
            print(f"  {visible(found)}")
        for earlier_id in submission.before(job_id):
            earlier = query(scheduler, folder, earlier_id)
            if earlier.state == "completed":
                print(f"  not needed: job {earlier_id} of its chain has completed the training")
                return 0
            if breaks_chain(earlier):
                print(f"  earlier in its chain, {visible(describe(earlier))}")
                failed_before = True
        if failed_before and status.state in ("queued", "held"):
            print(
                "  This job will refuse to start, since it continues that one. Cancel it with: "
                f"ddpkit submit cancel {job_id}"
            )
        print(f"  record: {visible(str(submission.folder))}")

    return int(failed_before) or _exit_status(status)


def _exit_status(status: Status) -> int:
    if status.state == "stopped":
        return EXIT_REQUEUE
    return int(status.state == "unknown" or (status.ended and status.state != "completed"))


def print_list(
    parent: Path, scheduler_named: Callable[[str], Scheduler], as_json: bool = False
) -> int:
    """Print a line for each job of the latest submissions in a folder, the newest first."""
    submissions = records.read_all(parent)
    listed = submissions[:MAX_LISTED]
    statuses = _query_all(listed, scheduler_named)
    if as_json:
        for submission in listed:
            for row in _rows(submission, statuses, parent):
                print(json.dumps(dict(zip(_COLUMNS, row, strict=True))))
        return 0
    if not submissions:
        note(f"no submissions in {parent}")
        return 0
    rows: list[tuple[str, ...]] = [tuple(map(str.upper, _COLUMNS))]
    for submission in listed:
        for row in _rows(submission, statuses, parent):
            rows.append(tuple(visible(cell, one_line=True) for cell in row))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[4]]))
    if len(submissions) > MAX_LISTED:
        note(f"{len(submissions) - MAX_LISTED} earlier submissions in {parent} are not shown")
    file = exclusion.path(parent)
    for text in exclusion.describe(exclusion.listed(parent)):
        note(f"hosts that jobs submitted from here avoid ({file}): {text}")
    return 0


def _query_all(
    submissions: Sequence[Submission], scheduler_named: Callable[[str], Scheduler]
) -> dict[str, Status]:
    """Query the jobs of all submissions at once; skip a scheduler that does not respond."""
    job_ids: dict[str, list[str]] = {}  # scheduler -> ids of its jobs
    for submission in submissions:
        job_ids.setdefault(submission.scheduler, []).extend(submission.job_ids)
    found: dict[str, Status] = {}
    for name, ids in job_ids.items():
        with contextlib.suppress(SchedulerError):
            found |= scheduler_named(name).statuses(ids)
    return found


def _rows(
    submission: Submission, statuses: Mapping[str, Status], parent: Path
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    failed_before = False
    for job_id in submission.job_ids:
        status = _with_record(submission.folder, job_id, statuses.get(job_id))
        if status is None:
            state = "no response"
        else:
            state = status.state.replace("_", " ")
            if status.ended and status.state != "completed" and status.exit_code:
                state += f" ({status.exit_code})"
            if failed_before and status.state in ("queued", "held"):
                state += ", will refuse to start"
            failed_before = failed_before or breaks_chain(status)
        when = submission.submitted[:16].replace("T", " ")
        folder = str(parent / submission.folder.name)
        rows.append((job_id, state, when, submission.name, folder))
    return rows


def stop(scheduler: Scheduler, submission: Submission, job_id: str) -> int:
    """Let a running job save and stop, by the file that its StopSignal watches."""
    with contextlib.suppress(SchedulerError):  # the file works without the scheduler
        status = query(scheduler, submission.folder, job_id)
        if is_over(status):
            note(f"error: {describe(status)}. Expected a running job. There is nothing to stop")
            return 1
        if status.state not in ("running", "ending"):
            note(
                f"error: {describe(status)}. Expected a running job, which can save. To end this "
                f"one: ddpkit submit cancel {job_id}"
            )
            return 1
    records.stop_file(submission.folder, job_id).touch()
    print(f"job {job_id}: saves and stops at its next step, where the training has a StopSignal")
    if submission.after(job_id):
        print(
            f"The next job of its chain continues it. To end it all: ddpkit submit cancel {job_id}"
        )
    return 0


def cancel(scheduler: Scheduler, submission: Submission | None, job_id: str) -> int:
    """Cancel a job and all that is left of its chain, the last first; return an exit status."""
    chain = [job_id]
    if submission is not None:
        chain = [*submission.before(job_id), job_id, *submission.after(job_id)]
    statuses = {chained_id: scheduler.status(chained_id) for chained_id in chain}
    left = [chained_id for chained_id in reversed(chain) if not is_over(statuses[chained_id])]
    for chained_id in left:
        scheduler.cancel(chained_id)
        if submission is not None:
            with contextlib.suppress(OSError):  # the scheduler knows it, too, for a while
                records.write_status(submission.folder, chained_id, records.CANCELLED)
        print(f"job {chained_id}: cancelled")
    if statuses[job_id].ended:
        print(f"{visible(describe(statuses[job_id]))}; it had already ended")
    elif not left:
        note(
            f"error: There is no job {job_id}, or no longer. Nothing was cancelled. "
            f"`ddpkit submit list` shows the jobs submitted from here."
        )
        return 1
    return 0


def is_over(status: Status) -> bool:
    """Whether a job has ended or is no longer known."""
    return status.ended or status.state == "unknown"


def print_logs(
    scheduler: Scheduler, submission: Submission | None, job_id: str, follow_job: bool
) -> int:
    """Print the output of a job; with follow_job until it has ended. Return an exit status."""

    def files(job_id: str) -> list[Path]:
        status = Status(job_id, "unknown") if submission else scheduler.status(job_id)
        return output_files(submission, status)

    if follow_job:
        folder = submission.folder if submission is not None else None
        return follow(partial(query, scheduler, folder), files, [job_id])
    found = files(job_id)
    if not found:
        status = scheduler.status(job_id)
        later = "Wait with --follow. " if status.state in ("queued", "running") else ""
        note(
            f"error: No output was found of {describe(status)}. {later}For a job submitted from "
            "another folder, run this command there, or name its folder with --folder."
        )
        return 1
    Log(lambda: found, sys.stdout.buffer).print_new()
    return 0


def output_files(submission: Submission | None, status: Status) -> list[Path]:
    """Find the output of a job, which may have no record here."""
    if submission is not None:
        return submission.logs(status.job_id)
    if status.output and Path(status.output).is_file():
        return [Path(status.output)]
    number = records.job_number(status.job_id)
    patterns = (f"slurm-{number}.out", f"*.o{number}", f"{status.job_id}*.OU")
    found = [path for pattern in patterns for path in Path().glob(pattern)]
    return sorted(path for path in found if path.is_file())

"""What submit.py does with jobs that were submitted: status, list, logs, cancel."""
from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import following
import records

from utils.schedulers import Scheduler, SchedulerError, Status
from utils.schedulers.exit_status import EXIT_REQUEUE
from utils.schedulers.scheduler import failed_or_stopped

LISTED = 20


def worst(statuses: Sequence[int]) -> int:
    """The exit status of several jobs: that of the first failure, else EXIT_REQUEUE if one of them stopped, else 0."""
    return next((status for status in statuses if status not in (0, EXIT_REQUEUE)), max(statuses, default=0))


def known_status(scheduler: Scheduler, record: records.Record | None, job_id: str) -> Status:
    """The status of a job; what the job itself has kept, where the scheduler no longer knows it."""
    status = scheduler.status(job_id)
    return (status.state == "unknown" and _kept_status(record, job_id)) or status


def current_status(scheduler: Scheduler, record: records.Record | None, job_id: str) -> Status:
    """The same; also where the scheduler does not answer."""
    try:
        return known_status(scheduler, record, job_id)
    except SchedulerError:
        if kept := _kept_status(record, job_id):
            return kept
        raise


def _kept_status(record: records.Record | None, job_id: str) -> Status | None:
    kept = records.kept_status(record.folder, job_id) if record is not None else None
    reason = "kept by the job; the scheduler does not know it"
    if kept is None:
        return None
    if isinstance(kept, str):
        return Status(job_id, "timeout", reason=reason)
    return Status(job_id, failed_or_stopped(kept) if kept else "completed", kept, reason)


def print_status(scheduler: Scheduler, record: records.Record | None, job_id: str) -> int:
    """Print how a job is, and those before it in its chain that failed: it is no success after them."""
    status = current_status(scheduler, record, job_id)
    print(following.describe(status))
    failed_before = False
    if record is not None:
        for earlier in record.before(job_id):
            before = current_status(scheduler, record, earlier)
            if following.spoils_the_chain(before):
                print(f"  earlier in its chain, {following.describe(before)}")
                failed_before = True
        print(f"  record: {record.folder}")
    if status.state == "stopped" and not failed_before:
        return EXIT_REQUEUE
    return int(failed_before or status.state == "unknown" or (status.ended and status.state != "completed"))


def print_list(folder: Path, scheduler_called: Callable[[str], Scheduler], everything: bool) -> int:
    """Print a line for each job of the submissions in a folder, the latest first."""
    found = records.all_records(folder)
    if not found:
        print(f"submit: no submissions in {folder}", file=sys.stderr)
    rows = [("JOB", "STATE", "SUBMITTED", "NAME", "FOLDER")]
    for record in found if everything else found[:LISTED]:
        for job_id in record.job_ids:
            try:
                status = current_status(scheduler_called(record.scheduler), record, job_id)
                state = status.state.replace("_", " ")
                if status.ended and status.state != "completed" and status.exit_code:
                    state += f" ({status.exit_code})"
            except SchedulerError:
                state = "no answer"
            when = record.submitted[:16].replace("T", " ")
            rows.append((job_id, state, when, record.name, str(folder / record.folder.name)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows if found else ():
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4]])
              .encode(errors="surrogateescape").decode(errors="replace"))
    if len(found) > LISTED and not everything:
        print(f"submit: {len(found) - LISTED} earlier submissions are left out; --all lists them", file=sys.stderr)
    return 0


def cancel(scheduler: Scheduler, record: records.Record | None, job_id: str) -> int:
    """Cancel a job and, since they would not start after it, the later ones of its chain, the last first."""
    status = scheduler.status(job_id)
    if status.state == "unknown":
        print(f"submit: error: There is no job {job_id}, or no longer. Nothing was cancelled. `submit.py list` shows "
              "the jobs submitted from here.", file=sys.stderr)
        return 1
    if status.ended:
        print(f"{following.describe(status)}; it had ended already")
        return 0
    later = record.after(job_id) if record is not None else ()
    for one in (*reversed(later), job_id):
        scheduler.cancel(one)
    print(f"job {job_id}: cancelled")
    if later:
        print(f"and the later jobs of its chain, which do not run after a cancelled one: {' '.join(later)}")
    return 0


def is_over(status: Status) -> bool:
    return status.ended or status.state == "unknown"


def dependency_is_over(scheduler: Scheduler, dependency: str) -> bool:
    """Whether all jobs that a dependency names have ended or are no longer known."""
    statuses = [scheduler.status(job_id) for part in re.split("[,?]", dependency) for job_id in part.split(":")[1:]
              if not job_id.startswith("+")]
    return all(map(is_over, statuses))


def print_logs(scheduler: Scheduler, record: records.Record | None, job_id: str, follow: bool) -> int:
    """Print the output of a job; with follow until it has ended, whose exit status it then is."""
    def files(job_id: str) -> list[Path]:
        if record is not None:
            return record.logs(job_id)
        return _output_elsewhere(scheduler.status(job_id))

    if follow:
        return following.follow(partial(known_status, scheduler, record), files, [job_id])
    found = files(job_id)
    if not found:
        print(f"submit: error: No output was found of {following.describe(scheduler.status(job_id))}. Try again later, "
              "or wait with --follow; for a job of another folder run this there, or name it by --folder.",
              file=sys.stderr)
        return 1
    following.Log(lambda: found, sys.stdout.buffer).print_new()
    return 0


def _output_elsewhere(status: Status) -> list[Path]:
    """The output of a job without a record: where the scheduler says, or under its usual name in this folder."""
    number, index = records.bare_number(status.job_id), records.array_index(status.job_id)
    usual = (f"slurm-{number}{f'_{index}' if index else ''}.out", f"*.o{number}{f'.{index}' if index else ''}",
             f"{status.job_id}*.OU")
    if status.output and Path(status.output).is_file():
        return [Path(status.output)]
    return sorted(path for pattern in usual for path in Path().glob(pattern.replace("[", "[[]")) if path.is_file())

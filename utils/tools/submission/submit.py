"""Submit jobs: one, a chain of jobs that continue each other, or recorded ones again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...host.trust import NotTrusted
from ...job.commands import SchedulerError
from ...job.notation import format_walltime
from ...job.requeue import CHAIN_VARIABLE
from ..schedulers import get_scheduler
from ..schedulers.job_checks import check_paths
from ..schedulers.job_spec import Job, quote
from ..schedulers.scheduler import Scheduler
from . import bad_hosts as exclusion
from . import submissions as records
from .build_job import (
    UsageError,
    build_job,
    choose_profile,
    missing_account,
    nested_launcher,
    note_misplaced_options,
    with_python,
)
from .following import follow, note
from .paths import JOBS, PACKAGE
from .queries import query
from .submissions import Submission

SCRIPT = "job.sh"
MAX_CHAIN = 100
# StopSignal stops 90 s before the time limit by default, and the start takes time, too.
MIN_CHAIN_SECONDS = 300
# Variables that trainings and the kit read. sbatch passes all shell variables to a job, qsub none.
_READ_BY_JOBS = re.compile(
    r"(?:DDPKIT|FI|GLOO|HF|MKL|MLFLOW|NCCL|OMP|PYTORCH|RCCL|TORCH\w*|UCX|WANDB)_|PYTHONPATH$"
)


def run(args: argparse.Namespace) -> int:
    """Carry out `submit run`; return an exit status."""
    if not 1 <= args.chain <= MAX_CHAIN:
        raise UsageError(f"--chain is {args.chain}. Expected a number from 1 to {MAX_CHAIN}.")
    profile = choose_profile(args.site)
    job, problems = with_python(build_job(args, profile), args, profile)
    scheduler = get_scheduler(profile.scheduler)
    script = job_script(scheduler, job)
    problems += [*nested_launcher(job), *missing_account(profile, job)]
    if args.chain > 1 and job.walltime and job.walltime < MIN_CHAIN_SECONDS:
        note(
            f"note: a time limit of {format_walltime(job.walltime)} leaves the jobs of a chain "
            "little time to train. By default StopSignal stops 90 s before the limit "
            "(save_seconds + margin), and each job starts anew. Give a longer --time"
        )

    known = {*job.environment, "DDPKIT_SITE"}  # this command has read the latter
    unset = sorted({name for name in os.environ if _READ_BY_JOBS.match(name)} - known)
    if profile.scheduler == "pbs" and unset:
        note(
            "note: PBS does not pass on variables of this shell. The job does not get "
            f"{', '.join(unset)}. For each that it needs, give --env NAME=VALUE"
        )

    if args.dry_run:
        if job.walltime is None and not scheduler.has_time_limit(job):
            note("note: no --time is given: the limit is the default of the queue")
        if args.site is None:  # the scheduler of this host; a named site may be far away
            problems += scheduler.check(job)
        for problem in check_paths(job) if args.site else ():
            if problem.startswith("command:"):  # the folder there may be another one
                note(f"note: {problem}")
        print(script, end="")
        for problem in problems:
            note(f"{'warning' if args.no_check else 'would not be submitted'}: {problem}")
        return int(bool(problems) and not args.no_check)

    note_misplaced_options(args)
    return _check_and_submit(scheduler, profile.name, job, args, problems, args.chain)


def _check_and_submit(
    scheduler: Scheduler,
    site: str,
    job: Job,
    args: argparse.Namespace,
    problems: Sequence[str],
    count: int,
) -> int:
    """Submit a job `count` times as a chain, unless there are problems; follow it if requested."""
    problems = [*problems, *scheduler.check(job)]
    for problem in problems:
        note(f"{'warning' if args.no_check else 'error'}: {problem}")
    if problems and not args.no_check:
        note("nothing was submitted. --no-check submits despite these problems.")
        return 1
    submission = submit_chain(scheduler, site, job, args.folder, count)
    limit = f"time limit {format_walltime(job.walltime)}; " if job.walltime else ""
    note(f"submitted; {limit}script, settings and output: {submission.folder}")
    for job_id in submission.job_ids:
        print(job_id, flush=True)
    if not args.follow:
        return 0
    return follow(partial(query, scheduler, submission.folder), submission.logs, submission.job_ids)


_WRITTEN = '# Written by "submit run". submission.json in this folder records the settings.'


def job_script(
    scheduler: Scheduler,
    job: Job,
    folder: Path | None = None,
    previous_job_id: str = "",
    *,
    in_chain: bool = False,
) -> str:
    """Return the script to submit for a job.

    folder: folder of the submission, where the job records its exit status; None for a dry run.
    previous_job_id: job of the chain that this job continues. in_chain: whether the job is in a
    chain.
    Raises JobError, which names the field, for a value that cannot be written into a script.
    """
    lines, run = [], "launch"
    if folder is not None:
        lines.append(f"SUBMISSION={quote(str(folder))} # where this job records its exit status")
        lines.append(f"PREVIOUS={quote(previous_job_id)} # the job of the chain that it continues")
        if in_chain:
            # Its value is the job id: a job that this one submits inherits the variable.
            lines.append(f'export {CHAIN_VARIABLE}="${{SLURM_JOB_ID-}}" # no requeue() in this job')
        run = 'job "$SUBMISSION" "$PREVIOUS"'
        if job.preflight:
            run += f" --preflight {quote(shlex.join(job.preflight))}"
    elif job.preflight:
        lines.append(f"# first: doctor {shlex.join(job.preflight)}")
    # The ready script without its options, and without its last two lines: set-up and command.
    shebang, *ready = (JOBS / f"{scheduler.name}.sh").read_text(encoding="utf-8").splitlines()
    first = [line for line in ready if line and not line.startswith("#")][:-2]
    command = f"exec python3 {quote(str(PACKAGE))} {run} {job.launch_words()}"
    head = [shebang, _WRITTEN, *scheduler.directive_lines(job), ""]
    return "\n".join([*head, *first, *lines, *job.setup_lines(), command, ""])


# Chains -------------------------------------------------------------------------------------------


def submit_chain(scheduler: Scheduler, site: str, job: Job, parent: Path, count: int) -> Submission:
    """Submit a job `count` times: each job continues the one before. Submit all of them, or none.

    Each waits with "afterany", since no scheduler knows exit status 75. Its script refuses to start
    ranks when the job before has failed or completed the training (job_start.py).
    Raises UsageError and SchedulerError.
    """
    try:
        folder = records.new_folder(parent.absolute(), job.name or "job")
    except NotTrusted as error:
        raise UsageError(f"{error}.") from None
    except OSError as error:
        raise UsageError(
            f"The folder for this submission cannot be made in {parent}: {error.strerror}. Give "
            "another one with --folder."
        ) from None
    job_ids: list[str] = []
    try:
        _submit_each(scheduler, site, job, folder, count, job_ids)
    except BaseException as error:
        raise _withdraw(scheduler, folder, job_ids, error) from None
    return Submission(folder, scheduler.name, tuple(job_ids))


def _submit_each(
    scheduler: Scheduler, site: str, job: Job, folder: Path, count: int, job_ids: list[str]
) -> None:
    """Submit the jobs of a chain; job_ids receives their ids."""
    output = _output(scheduler, folder)
    submitted = exclusion.avoid_bad_hosts(scheduler, job, folder.parent)
    environment = quote(str(records.write_environment(folder, job.environment)))
    read = f"while IFS= read -rd '' variable; do export \"$variable\"; done < {environment}"
    setup = (read, *job.setup)
    submitted = dataclasses.replace(submitted, environment={}, setup=setup)
    record = records.new_record(job, scheduler.name, site)
    for number in range(count):
        previous = job_ids[-1] if job_ids else ""
        dependency = f"afterany:{previous}" if previous else job.dependency
        chained_job = dataclasses.replace(submitted, dependency=dependency, output=output)
        script = folder / (SCRIPT if count == 1 else f"job-{number + 1}.sh")
        script.write_text(
            job_script(scheduler, chained_job, folder, previous, in_chain=count > 1),
            encoding="utf-8",
            errors="surrogateescape",
        )
        script.chmod(script.stat().st_mode | 0o100)
        job_ids.append(scheduler.submit(script, chained_job))
        records.write(folder, record, job_ids)


def _withdraw(
    scheduler: Scheduler, folder: Path, job_ids: Sequence[str], error: BaseException
) -> BaseException:
    """Cancel the jobs of an incomplete chain; return the error to raise.

    Its folder is removed, unless the scheduler refused the script, or jobs may be in the queue.
    """
    # Last job first: a job must not start because the one before it has ended.
    remaining = [job_id for job_id in reversed(job_ids) if not _cancelled(scheduler, job_id)]
    no_response = isinstance(error, SchedulerError) and error.command and error.exit_code is None
    if remaining:
        ids = " ".join(remaining)
        return UsageError(
            f"{error} Still in the queue: {ids}. Cancel with: ddpkit submit cancel {ids}. The "
            f"scripts are kept in {folder}"
        )
    if no_response:
        return UsageError(
            f"{error} The job may be in the queue all the same: check before submitting it again. "
            f"The scripts are kept in {folder}"
        )
    if isinstance(error, SchedulerError) and error.output:
        (folder / records.FILE).unlink(missing_ok=True)  # it records jobs that were cancelled
        refusal = str(error).rstrip(".")
        return UsageError(f"{refusal}. Nothing is in the queue. The script is kept in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds other submissions
        folder.parent.rmdir()
    if isinstance(error, OSError):
        return UsageError(
            f"{error.filename or folder}: {error.strerror or error}. Nothing is in the queue. Make "
            "room there, or give another folder with --folder."
        )
    return error


def _cancelled(scheduler: Scheduler, job_id: str) -> bool:
    try:
        scheduler.cancel(job_id)
    except SchedulerError:
        return False
    return True


def _output(scheduler: Scheduler, folder: Path) -> str:
    if scheduler.name == "pbs":
        return f"{folder}/"
    escaped = str(folder).replace("%", "%%")  # a percent sign in the path itself
    return f"{escaped}/%j.out"

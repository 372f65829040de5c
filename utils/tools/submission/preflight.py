"""Run the quick check of `doctor` at the start of a job; later jobs avoid bad hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...job import exclude_file
from ...job.commands import SchedulerError
from ...job.requeue import CHAIN_VARIABLE, requeue
from ...launch_protocol import EXIT_REQUEUE, Failure
from ..cli.launch_options import words_for_preflight
from ..launch import launch_cli as launch_cli
from ..schedulers import current_allocation
from ..schedulers.allocation import AllocationError
from ..schedulers.scheduler import Scheduler
from . import bad_hosts as exclusion
from . import submissions as records
from .following import note
from .paths import doctor_words

MAX_RESTARTS = 10  # requeues of one job; so many bad nodes in a row have another cause
_GOOD, _WARNING, _BAD = range(3)  # exit statuses of doctor


def options(checkpoints: str | None) -> tuple[str, ...]:
    """Return the options of doctor. checkpoints: folder that it also checks; None for none."""
    if checkpoints is None:
        return ("--quick",)
    return "--quick", "--checkpoints", os.path.abspath(checkpoints)


def check(
    scheduler: Scheduler,
    folder: Path,
    job_id: str,
    doctor_options: Sequence[str],
    launch_words: Sequence[str],
) -> int | None:
    """Check the hosts of this job; return None if the training may start, else an exit status.

    folder: folder of the submission. launch_words: command line of `launch`; its options also start
    the ranks of doctor. EXIT_REQUEUE: the job has bad hosts. It is back in its queue, or should be
    submitted again, and then avoids them. 2: other hosts would not help.
    """
    file = exclusion.path(folder.parent)
    words = ["--exclude-file", str(file), *doctor_options]
    spares = launch_cli.parse(launch_words).spare
    launch_options = words_for_preflight(launch_words[: launch_words.index("--")])
    status = _launch([*launch_options, "--", *doctor_words(), *words])
    if status in (_GOOD, _WARNING):
        return None
    if status != _BAD:
        note(
            f"preflight: the check ended with status {status}, expected {_GOOD}, {_WARNING} or "
            f"{_BAD}. The training starts all the same"
        )
        return None

    hosts = hosts_of_job()
    bad = exclude_file.listed(file, hosts)
    if not bad:
        text = (
            "preflight: the training is not started, because of the findings marked BAD above. "
            "Other nodes would not help. Correct them, or submit without --preflight"
        )
        Failure(text, "preflight").write()
        note(text)
        return _BAD
    if len(bad) <= spares:
        note(f"preflight: {', '.join(bad)} gets no rank; a spare takes its place. {file} lists it")
        return None
    text = (
        f"preflight: the training is not started on {', '.join(bad)}. {file} lists bad hosts for a "
        f"day{exclusion.share(len(bad), len(hosts))}"
    )
    Failure(text, "bad host", host=bad[0]).write()
    note(text)
    later = records.read(folder).after(job_id)
    for later_id in later:  # a job that gets a bad host again checks it again
        exclude(scheduler, later_id, bad)
    if scheduler.can_requeue:
        can_avoid = exclude(scheduler, job_id, bad, dry_run=True)
        if not can_avoid and not later:
            return _BAD
        if can_avoid and requeue({**os.environ, CHAIN_VARIABLE: ""}, limit=MAX_RESTARTS):
            note(f"preflight: job {job_id} is back in the queue, and avoids {', '.join(bad)}")
            return EXIT_REQUEUE
    if not later:
        note(f"preflight: submit the job again; {folder / records.FILE} has its command line")
    return EXIT_REQUEUE


def _launch(words: Sequence[str]) -> int:
    """Start the ranks of doctor and return the exit status."""
    environ = dict(os.environ)  # launch_cli.main() changes it, and is called for the training next
    try:
        return launch_cli.main(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        os.environ.clear()
        os.environ.update(environ)


def hosts_of_job() -> tuple[str, ...]:
    """Return the hosts of this job; () if they are unknown."""
    try:
        allocation = current_allocation()
    except AllocationError:
        return ()
    return allocation.hosts if allocation is not None else ()


def exclude(
    scheduler: Scheduler,
    job_id: str,
    bad: Sequence[str],
    dry_run: bool = False,
) -> bool:
    """Let a queued job avoid the bad hosts; return whether it does."""
    try:
        problem = scheduler.exclude_hosts(job_id, bad, dry_run=dry_run)
    except SchedulerError as error:
        problem = str(error)
    if problem:
        note(f"job {job_id} may get {', '.join(bad)} again: {problem}")
        return False
    if not dry_run:
        note(f"job {job_id}, which continues this one, avoids {', '.join(bad)}")
    return True

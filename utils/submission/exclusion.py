"""The hosts that the jobs of a folder of submissions avoid."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..schedulers import Job, Scheduler, SchedulerError, exclude_file
from ..schedulers.exclude_file import Entry
from .following import note

FILE = "bad-hosts.txt"


def path(parent: Path) -> Path:
    """Return the exclude file of a folder of submissions."""
    return parent / FILE


def avoid_bad_hosts(scheduler: Scheduler, job: Job, parent: Path) -> Job:
    """Return a job that avoids the listed hosts, and print which and why."""
    file = path(parent)
    entries = exclude_file.read(file)
    if not entries:
        return job
    try:
        changed, problem = scheduler.without_hosts(job, [entry.host for entry in entries])
    except SchedulerError as error:
        changed, problem = job, str(error)
    if problem:
        note(f"warning: the job may get {_names(entries)}, listed in {file}: {problem}")
    elif changed != job:
        for text in describe(entries, job.nodes):
            note(f"avoided: {text}. To allow it again, remove its line in {file}")
    return changed


def describe(entries: Sequence[Entry], nodes: int | None = None) -> list[str]:
    """Describe each entry in a line. nodes: that a job requests."""
    lines = []
    for entry in entries:
        until = ""
        if entry.since is not None:
            expires = time.localtime(entry.since + exclude_file.LIFETIME_SECONDS)
            until = time.strftime(" until %Y-%m-%d %H:%M", expires)
        lines.append(f"{entry.host}{until}" + (f", {entry.reason}" if entry.reason else ""))
    if nodes and 4 * len(entries) > nodes:
        lines.append(f"{len(entries)} hosts, more than a quarter of the {nodes} requested")
    return lines


def _names(entries: Sequence[Entry]) -> str:
    return ", ".join(entry.host for entry in entries)

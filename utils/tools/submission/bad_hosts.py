"""The hosts that the jobs of a folder of submissions avoid."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from ...job import exclude_file
from ...job.commands import SchedulerError
from ...job.exclude_file import Entry
from ..schedulers.job_spec import Job
from ..schedulers.scheduler import Scheduler
from .following import note

FILE = "bad-hosts.txt"
_REASON_LENGTH = 160


def path(parent: Path) -> Path:
    """Return the exclude file of a folder of submissions."""
    return parent / FILE


def listed(parent: Path) -> list[Entry]:
    """Return the hosts that jobs of a folder of submissions avoid.

    A file of another user, which may even be a FIFO, is not read; a line says so.
    """
    file = path(parent)
    try:
        owner = file.lstat().st_uid
    except OSError:  # no such file, or an unusable folder, which a submission reports
        return []
    if owner not in (0, os.geteuid()):
        note(
            f"warning: {file} belongs to user {owner}, and the hosts that it lists are not "
            f"avoided. Expected a file of user {os.geteuid()}. Remove it, or give another --folder"
        )
        return []
    return exclude_file.read(file)


def avoid_bad_hosts(scheduler: Scheduler, job: Job, parent: Path) -> Job:
    """Return a job that avoids the listed hosts, and print which and why."""
    file = path(parent)
    entries = listed(parent)
    if not entries:
        return job
    try:
        changed, problem = scheduler.without_hosts(job, [entry.host for entry in entries])
    except SchedulerError as error:
        changed, problem = job, str(error)
    if problem:
        note(f"warning: the job may get {_names(entries)}, listed in {file}: {problem}")
    elif changed != job:
        for text in describe(entries):
            note(f"avoided: {text}")
        note(f"to allow a host again, remove its line in {file}{share(len(entries), job.nodes)}")
    return changed


def describe(entries: Sequence[Entry]) -> list[str]:
    """Describe each entry in a line: "n2 until 2026-11-23 22:10, storage: ..."."""
    lines = []
    for entry in entries:
        until = ""
        if entry.since is not None:
            expires = time.localtime(entry.since + exclude_file.LIFETIME_SECONDS)
            until = time.strftime(" until %Y-%m-%d %H:%M", expires)
        reason = textwrap.shorten(entry.reason, _REASON_LENGTH, placeholder=" ...")
        lines.append(f"{entry.host}{until}" + (f", {reason}" if reason else ""))
    return lines


def share(bad: int, nodes: int) -> str:
    """Return a clause about the number of avoided hosts where it is large; "" otherwise."""
    if 4 * bad <= nodes:
        return ""
    return f". {bad} of {nodes} is more than a quarter: check whether the hosts are the cause"


def _names(entries: Sequence[Entry]) -> str:
    return ", ".join(entry.host for entry in entries)

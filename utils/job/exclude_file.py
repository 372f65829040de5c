"""The exclude file: hosts that were found bad, which later jobs avoid for a day.

One host per line: its name, the time when it was found bad (UTC), and the reason. A person may
remove a line, or add one with a name alone, which does not expire.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .allocation import same_host

VARIABLE = "DDPKIT_EXCLUDE_FILE"  # in the jobs of submit.py: the path of the file
LIFETIME_SECONDS = 24 * 3600.0
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class Entry(NamedTuple):
    """A line of the file. since: seconds since 1970; None for a line without a time."""

    host: str
    since: float | None = None
    reason: str = ""


def read(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries that have not expired; none where there is no file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            entries = [_parse(line) for line in file if line.strip() and line[0] != "#"]
    except OSError:
        return []
    oldest = time.time() - LIFETIME_SECONDS
    return [entry for entry in entries if entry.since is None or entry.since >= oldest]


def add(path: str | os.PathLike[str], reasons: Mapping[str, str]) -> None:
    """Write hosts with the reasons why they are bad, and drop entries that have expired.

    Raises OSError.
    """
    kept = [entry for entry in read(path) if not _names(entry.host, reasons)]
    now = time.time()
    entries = [*kept, *(Entry(host, now, reason) for host, reason in reasons.items())]
    unfinished = f"{os.fspath(path)}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write("# Hosts that jobs avoid: name, time, reason. Remove a line to allow one.\n")
            file.writelines(map(_format, entries))
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def listed(path: str | os.PathLike[str], hosts: Iterable[str]) -> list[str]:
    """Return those of the hosts that the file lists."""
    bad = [entry.host for entry in read(path)]
    return [host for host in hosts if _names(host, bad)]


def _names(host: str, others: Iterable[str]) -> bool:
    return any(same_host(host, other) for other in others)


def _parse(line: str) -> Entry:
    host, _, rest = line.strip().partition(" ")
    text, _, reason = rest.strip().partition(" ")
    try:
        since = calendar.timegm(time.strptime(text, _TIME_FORMAT))
    except ValueError:
        return Entry(host, None, rest.strip())
    return Entry(host, float(since), reason)


def _format(entry: Entry) -> str:
    since = ""
    if entry.since is not None:
        since = time.strftime(_TIME_FORMAT, time.gmtime(entry.since))
    words = (entry.host, since, " ".join(entry.reason.split()))
    return " ".join(word for word in words if word) + "\n"

"""The exclude file: hosts that were found bad. Later jobs avoid them for a day.

One host per line: its name, the time it was found bad (UTC), and the reason. A person may remove a
line, or add a line with only a name, which does not expire.
"""

from __future__ import annotations

import calendar
import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .notation import same_host

VARIABLE = "DDPKIT_EXCLUDE_FILE"  # set in jobs of ddpkit submit: path of the file
LIFETIME_SECONDS = 24 * 3600.0
_HEADER = "# Hosts that jobs avoid: name, time, reason. Remove the lines of one to allow it."
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class Entry(NamedTuple):
    """A line of the file. since: seconds since 1970; None for a line without a time."""

    host: str
    since: float | None = None
    reason: str = ""


def read(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries that have not expired; empty if there is no file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            entries = [_parse(line) for line in file if line.strip() and line[0] != "#"]
    except OSError:
        return []
    oldest = time.time() - LIFETIME_SECONDS
    newest = {entry.host: entry for entry in entries}
    return [entry for entry in newest.values() if entry.since is None or entry.since >= oldest]


def add(path: str | os.PathLike[str], reasons: Mapping[str, str]) -> None:
    """Append hosts, each with the reason why it is bad. Other jobs may append at the same time.

    Raises OSError.
    """
    now = time.time()
    text = "".join(_format(Entry(host, now, reason)) for host, reason in reasons.items())
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o644), "a", encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_size == 0:
            text = f"{_HEADER}\n{text}"
        file.write(text)  # a single write(2), so lines do not mix


def listed(path: str | os.PathLike[str], hosts: Iterable[str]) -> list[str]:
    """Return the hosts that are in the file."""
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

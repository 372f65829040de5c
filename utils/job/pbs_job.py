"""Run PBS commands and parse their records; query the time left."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence

from . import commands as command
from .commands import SchedulerError
from .notation import parse_duration

DEFAULT_PREFIX = "/opt/pbs"  # prefix of the OpenPBS and PBS Professional packages


def find_program(name: str) -> str:
    """Return the path of a PBS command: on PATH, below PBS_EXEC or DEFAULT_PREFIX; else its name.

    The Debian package slurm-wlm-torque installs Perl scripts called qsub, qstat and pbsnodes, which
    submit to Slurm. In a job's PATH they come before /opt/pbs/bin. They are skipped.
    """
    path = shutil.which(name)
    if path is not None and not submits_to_slurm(path):
        return path

    for prefix in (os.environ.get("PBS_EXEC"), configuration().get("PBS_EXEC"), DEFAULT_PREFIX):
        installed = os.path.join(prefix, "bin", name) if prefix else ""
        if os.access(installed, os.X_OK):
            return installed
    return name


def submits_to_slurm(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            beginning = file.read(4096)
    except OSError:
        return False
    first_line = beginning.partition(b"\n")[0]
    return first_line.startswith(b"#!") and b"perl" in first_line and b"slurm" in beginning.lower()


def configuration() -> dict[str, str]:
    """Return the settings in pbs.conf(5); empty if there is no such file."""
    path = os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            settings = [line.partition("=") for line in file if "=" in line]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in settings}


# Low byte of PBSE_JOBHISTNOTSET (15140): exit status of qstat -x without job_history_enable.
_NO_HISTORY = 36
JOB_FINISHED = 35  # exit status of qstat and qdel
MISSING_JOBS = (153, JOB_FINISHED, _NO_HISTORY)  # exit statuses of qstat


def query_objects(
    kind: str,
    program: str,
    *words: str,
    timeout_seconds: float = command.TIMEOUT_SECONDS,
    accepted_statuses: Sequence[int] = (0,),
) -> dict[str, Fields]:
    """Run qstat or pbsnodes and return its records; kind: see objects().

    Raises SchedulerError.
    """
    query = [find_program(program), "-F", "json", *words]
    output = command.run_command(
        query, timeout_seconds=timeout_seconds, accepted_statuses=accepted_statuses
    )
    if not output.strip() and any(accepted_statuses):  # qstat knows none of the jobs
        return {}
    return objects(output, kind)


def query_job(
    job_id: str, *, ended: bool = False, timeout_seconds: float = command.TIMEOUT_SECONDS
) -> Fields | None:
    """Return the record of a job; None if the output lacks it.

    ended: also search ended jobs, if the server keeps a history.

    Raises SchedulerError when qstat fails, also for an unknown job.
    """
    options = ["-x", "-f"] if ended else ["-f"]
    try:
        jobs = query_objects("Jobs", "qstat", *options, job_id, timeout_seconds=timeout_seconds)
    except command.SchedulerError as error:
        if not ended or error.exit_code != _NO_HISTORY:
            raise
        jobs = {}
    if ended and not jobs:  # OpenPBS 23 exits with 0 even if it keeps no history
        return query_job(job_id, timeout_seconds=timeout_seconds)
    for name, job in jobs.items():
        if name == job_id or name.partition(".")[0] == job_id:
            return job
    return next(iter(jobs.values())) if len(jobs) == 1 else None


# One record: attribute -> text as printed. Nested attributes have names as in `qstat -f`:
# "Resource_List.walltime".
Fields = dict[str, str]

# Matches the line '"A": 005,'. JSON has no such number, but PBS before 2024 prints it.
_BARE_VALUE = re.compile(r'^(\s*"[^"\n]*":\s*)([^\s"{\[][^\n]*?)(,?)$', re.MULTILINE)


def objects(text: str, kind: str) -> dict[str, Fields]:
    """Return the records in the JSON output of qstat or pbsnodes, by name and in its order.

    kind: "Jobs" for `qstat -f -F json`, "Queue" for -Qf, "Server" for -Bf, "nodes" for
    `pbsnodes -a -F json`.

    PBS prints every value that looks like a number as a JSON number (a job named 0123 as 123, the
    variable B=1e5 as 100000). Numbers stay the text that was printed. Control characters are
    accepted.

    Raises SchedulerError where the text is not JSON of this form.
    """
    import json  # only here: a launch often imports this module, and rarely parses JSON

    try:
        printed = json.loads(_BARE_VALUE.sub(r'\1"\2"\3', text), strict=False)
        return {name: dict(_flatten(record)) for name, record in printed.get(kind, {}).items()}
    except (ValueError, AttributeError):
        raise SchedulerError(
            f"PBS printed {text.strip()[:80]!r}. Expected a JSON object of {kind}. "
            "Run the command by hand to see whether the server responds."
        ) from None


def _flatten(record: dict[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _as_text(value)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(_as_text, value))
    return "null" if value is None else str(value).lower()  # True, False


_TIMEOUT_SECONDS = 10.0  # seconds per query; a job is waiting


def query_running_job(job_id: str) -> Fields:
    """Return the record of the job around this process; empty if qstat does not respond."""
    try:
        return query_job(job_id, timeout_seconds=_TIMEOUT_SECONDS) or {}
    except SchedulerError:
        return {}


def seconds_left(job_id: str) -> float | None:
    """Query the seconds until the walltime limit; None without a limit or a response.

    PBS counts the used time only every two minutes, so the time since the start is considered, too.
    """
    from email.utils import parsedate  # loads many modules, which a launch does not need

    job = query_running_job(job_id)
    limit = _seconds(job, "Resource_List.walltime")
    if limit is None:
        return None
    used = float(_seconds(job, "resources_used.walltime") or 0)
    start = parsedate(job.get("stime", ""))  # "Sat Nov 21 03:56:14 2026", local time
    since_start = time.time() - time.mktime(start) if start is not None else 0.0
    if 0 <= since_start <= limit + 3600:
        used = max(used, since_start)
    return max(0.0, limit - used)


def _seconds(job: Fields, name: str) -> int | None:
    return parse_duration(job.get(name, ""), plain_number_seconds=1)

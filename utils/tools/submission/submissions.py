"""Keep a submission in one folder: scripts, settings (submission.json), output, exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...host.trust import make_folder, make_folders, may_trust
from ...launch_protocol import EXIT_REQUEUE
from ..schedulers.job_spec import Job

FILE = "submission.json"
ENVIRONMENT = "environment"  # file with the job's variables: --env may have secrets
CLOCK_SECONDS = 30.0  # tolerance: clocks differ, and so do ends of jobs at their limit
LOGS = ("*.out", "*.OU")  # Slurm writes 12.out, as --output sets; PBS 12.head.OU

# Recorded in place of an exit status:
UNTIL = "until"  # followed by the time limit: the job runs, or could not record its end
TIME_LIMIT = "time limit"  # the time limit was reached
HOST_LOST = "host lost"  # a host failed, or was cut off
NOT_STARTED = "not started"  # the job before it in the chain had failed
CANCELLED = "cancelled"  # cancelled by `ddpkit submit cancel`


@dataclass(frozen=True)
class Submission:
    """What submission.json holds, and the folder that it is in."""

    folder: Path
    scheduler: str
    job_ids: tuple[str, ...]  # several for a chain, in order
    name: str = ""  # name of the job
    submitted: str = ""  # "2026-11-22T06:30:00+0000"

    def before(self, job_id: str) -> tuple[str, ...]:
        """Return the jobs of the chain before this one."""
        return self.job_ids[: self._index(job_id)]

    def after(self, job_id: str) -> tuple[str, ...]:
        """Return the jobs of the chain after this one."""
        return self.job_ids[self._index(job_id) + 1 :]

    def _index(self, job_id: str) -> int:
        return [job_number(known) for known in self.job_ids].index(job_number(job_id))

    def logs(self, job_id: str) -> list[Path]:
        """Return the existing output files of a job."""
        files = [path for pattern in LOGS for path in self.folder.glob(pattern)]
        return [path for path in files if job_number(path.name) == job_number(job_id)]


# Writing and finding submissions ------------------------------------------------------------------


def new_folder(parent: Path, name: str) -> Path:
    """Make the folder PARENT/NAME-DATE-TIME, which did not exist before. Raises OSError.

    Only this user may enter it: --env and the output may have secrets. Nobody else may replace it:
    a job runs its script.
    """
    make_folders(parent)
    remedy = "close it to writing by others (chmod go-w), or name another folder with --folder"
    opened = may_trust(parent, remedy)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        for attempt in range(1000):
            folder = parent / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
            with suppress(FileExistsError):
                make_folder(folder.name, 0o700, dir_fd=opened)
                return folder
    finally:
        os.close(opened)
    raise FileExistsError(f"{parent} holds a thousand folders {name}-{stamp}")


def write_environment(folder: Path, environment: Mapping[str, str]) -> Path:
    """Write the variables of a job to a file that nobody else can read; return its path.

    Each is NAME=VALUE and a zero byte, as in /proc/PID/environ (proc(5)). Raises OSError.
    """
    path = folder / ENVIRONMENT
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.writelines(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    return path


def write(folder: Path, record: Mapping[str, Any], job_ids: Sequence[str]) -> None:
    """Write submission.json atomically. record: from new_record(). Raises OSError."""
    text = json.dumps({"job_ids": list(job_ids), **record}, indent=2, ensure_ascii=True)
    _replace(folder / FILE, text)


def new_record(job: Job, scheduler: str, site: str) -> dict[str, Any]:
    """Return the content of submission.json without job ids, and without values of variables."""
    values = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    values |= values.pop("launch")._asdict()
    names = {f"{name}={value}": name for name, value in values.pop("environment").items()}
    return {
        "scheduler": scheduler,
        "site": site,
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "submit_folder": os.getcwd(),
        "command_line": [names.get(word.removeprefix("--env="), word) for word in sys.argv],
        "job": values,
        "git": git_state(Path.cwd()),
    }


def git_state(folder: Path) -> dict[str, object] | None:
    """Return the commit of the repository around a folder and whether files differ from it.

    Programs that the repository's own settings name do not run: others may have written them.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    listed = _git(folder, "config", "--name-only", "--get-regexp", _FILTERS)
    filters = {name.rpartition(".")[0] for name in (listed or "").splitlines()}
    if commit is None or any("=" in name for name in filters):
        return None
    off = [f"{name}.{key}" for name in filters for key in ("clean=", "process=", "required=false")]
    options = [word for setting in off for word in ("-c", setting)]
    # A submodule has settings of its own.
    changes = _git(folder, *options, "status", "--porcelain", "--ignore-submodules=dirty")
    return None if changes is None else {"commit": commit, "dirty": bool(changes)}


_GIT = (
    "git",
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
)
_FILTERS = r"^filter\..*\.(clean|process)$"  # programs that change a file before it is compared
_NO_FETCH = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}  # never fetch missing objects


def _git(folder: Path, *words: str) -> str | None:
    environ = {**os.environ, **_NO_FETCH}
    try:
        done = subprocess.run(
            [*_GIT, *words], cwd=folder, env=environ, capture_output=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def read(folder: Path) -> Submission:
    """Read the submission in a folder.

    Raises OSError, ValueError, KeyError or TypeError where it cannot be read.
    """
    data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not isinstance(data.get("job"), dict):
        raise ValueError(f"{folder / FILE} is not the record of a submission")
    return Submission(
        folder=folder,
        scheduler=str(data["scheduler"]),
        job_ids=tuple(map(str, data["job_ids"])),
        name=str(data["job"].get("name") or ""),
        submitted=str(data.get("submitted", "")),
    )


def read_all(parent: Path) -> list[Submission]:
    """Read the submissions in a folder, the newest first.

    Other users' submissions are left out: files and jobs in a record are read, shown and cancelled.
    Raises OSError where the folder cannot be listed.
    """
    found = []
    for name in os.listdir(parent) if parent.exists() else ():
        folder = parent / name
        try:
            owners = {folder.lstat().st_uid, (folder / FILE).lstat().st_uid}
            if not owners <= {0, os.geteuid()}:
                continue
            found.append(((folder / FILE).stat().st_mtime, read(folder)))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another program's folder, or a file that is still being written
    return [record for _, record in sorted(found, key=lambda item: item[0], reverse=True)]


def find(parent: Path, job_id: str) -> Submission | None:
    """Find the submission of a job; the newest one if ids were used again."""
    try:
        submissions = read_all(parent)
    except OSError:
        return None
    for submission in submissions:
        if any(_same_job(job_id, known) for known in submission.job_ids):
            return submission
    return None


# Exit statuses, which the jobs themselves record --------------------------------------------------


def write_limit(folder: Path, job_id: str, seconds: float) -> None:
    """Record that a job has started, and its time limit. An earlier run's record is replaced.

    seconds: time limit in seconds since 1970; infinite if unknown. Raises OSError.
    """
    _replace(_status_path(folder, job_id), f"{UNTIL} {seconds:.0f}")


def write_status(folder: Path, job_id: str, status: int | str) -> None:
    """Record the exit status of a job, or one of the words above. Raises OSError.

    A job that was cancelled and then fails stays cancelled.
    """
    if read_status(folder, job_id) == CANCELLED and status not in (0, EXIT_REQUEUE):
        return
    _replace(_status_path(folder, job_id), str(status))


def read_status(folder: Path, job_id: str) -> int | str | None:
    """Return a job's recorded exit status, or one of the words above; None: nothing is recorded.

    UNTIL: only the time limit is recorded, and it has passed.
    """
    try:
        text = _status_path(folder, job_id).read_text(encoding="ascii").strip()
        if text.isdecimal():
            return int(text)
        word, _, limit = text.partition(" ")
        if word == UNTIL:
            return UNTIL if time.time() > float(limit) - CLOCK_SECONDS else None
    except (OSError, ValueError):
        return None
    return text if text in (TIME_LIMIT, HOST_LOST, NOT_STARTED, CANCELLED) else None


def has_started(folder: Path, job_id: str) -> bool:
    """Whether a job has recorded an earlier run of itself."""
    return _status_path(folder, job_id).exists()


def failure_file(folder: Path, job_id: str) -> Path:
    """Return the file in which `ddpkit launch` records what failed first in a job."""
    return folder / f"{job_number(job_id)}.failure"


def stop_file(folder: Path, job_id: str) -> Path:
    """Return the file that lets a running job save and stop."""
    return folder / f"{job_number(job_id)}.stop"


def _status_path(folder: Path, job_id: str) -> Path:
    return folder / f"{job_number(job_id)}.status"


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


# Job ids ------------------------------------------------------------------------------------------


def job_number(text: str) -> str:
    """Return the number in a job id or output file: "79.head", "79.out" -> "79"."""
    return re.match("[0-9]*", text)[0]  # type: ignore[index]


def _same_job(requested: str, known: str) -> bool:
    """Whether two ids name one job: "12" and "12.server" are."""
    servers = [text.partition(".")[2] for text in (requested, known)]
    same_server = not all(servers) or servers[0] == servers[1]
    return job_number(requested) == job_number(known) and same_server

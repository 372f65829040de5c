"""The record of a submission: one folder with the script, the settings as JSON, the job's output and exit status."""
from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.schedulers import Job

FILE = "submission.json"
SCRIPT = "job.sh"
LOGS = ("*.out", "*.OU")  # of Slurm by our --output, of PBS in a folder
TIME_LIMIT = "time limit"  # kept in place of an exit status


@dataclass(frozen=True)
class Record:
    """What submission.json holds, and where it is."""

    folder: Path
    scheduler: str
    job_ids: tuple[str, ...]  # several for a chain, in order
    submit_folder: str
    name: str = ""  # of the job
    site: str = ""
    submitted: str = ""  # "2026-11-22T06:30:00+0000"

    def _place(self, job_id: str) -> int:
        return [bare_number(known) for known in self.job_ids].index(bare_number(job_id))

    def before(self, job_id: str) -> tuple[str, ...]:
        """The jobs of the chain that come before one of them."""
        return self.job_ids[:self._place(job_id)]

    def after(self, job_id: str) -> tuple[str, ...]:
        """The jobs of the chain that come after one of them."""
        return self.job_ids[self._place(job_id) + 1:]

    def logs(self, job_id: str | None = None) -> list[Path]:
        """The output files that are there, of one job and its array elements or of all, oldest first."""
        files = [path for pattern in LOGS for path in self.folder.glob(pattern)]
        if job_id is not None:
            number, index = bare_number(job_id), array_index(job_id)
            files = [path for path in files if bare_number(path.name) == number
                     and index in ("", array_index(path.name))]
        return sorted(files, key=lambda path: (path.stat().st_ctime, path.name))

    def job(self) -> Job:
        """The job that was submitted, without what a chain adds. ValueError or JobError when it cannot be read."""
        known = {part.name for part in dataclasses.fields(Job)}
        values = json.loads((self.folder / FILE).read_text(encoding="utf-8"))["job"]
        return Job(**{name: tuple(value) if isinstance(value, list) else value
                      for name, value in values.items() if name in known})


def keep_status(folder: Path, job_id: str, status: int | str) -> None:
    """Keep the exit status of a job, or TIME_LIMIT, for the next job of its chain and for `submit.py status`."""
    path = _status_path(folder, job_id)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(f"{status}\n", encoding="ascii")
    unfinished.replace(path)


def forget_status(folder: Path, job_id: str) -> None:
    """Remove what an earlier run of the same job has kept."""
    _status_path(folder, job_id).unlink(missing_ok=True)


def kept_status(folder: Path, job_id: str) -> int | str | None:
    """The exit status that a job has kept, or TIME_LIMIT; None when it kept none."""
    try:
        text = _status_path(folder, job_id).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else TIME_LIMIT if text == TIME_LIMIT else None


def _status_path(folder: Path, job_id: str) -> Path:
    """FOLDER/79_2.status of "79[2].head" or "79_2"."""
    index = array_index(job_id)
    return folder / (bare_number(job_id) + (f"_{index}" if index else "") + ".status")


def array_index(text: str) -> str:
    """Of an array element's id or output file: "79[2].head", "79[2].head.OU", "79_2.out" -> "2"; else empty."""
    found = re.match(r"\d+(?:\[(\d+)\]|_(\d+))", text)
    return (found[1] or found[2]) if found else ""


def bare_number(text: str) -> str:
    """The sequence number of a job id or of its output file: "79[2].head", "79[2].head.OU", "79_2.out" -> "79"."""
    digits = ""
    for character in text:
        if not character.isdigit():
            break
        digits += character
    return digits


def new_folder(parent: Path, name: str) -> Path:
    """A folder that was not there before: PARENT/NAME-DATE-TIME."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = parent / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} holds a thousand folders {name}-{stamp}")


def write(folder: Path, job: Job, *, scheduler: str, site: str, job_ids: Sequence[str],
          dependencies: Sequence[str | None]) -> None:
    """Write submission.json, whole or not at all. dependencies: what each of job_ids was made to wait for."""
    record: dict[str, Any] = {
        "job_ids": list(job_ids),
        "scheduler": scheduler,
        "site": site,
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "submit_folder": os.getcwd(),
        "command_line": sys.argv,
        "dependencies": list(dependencies),
        "job": {key: value if not hasattr(value, "items") else dict(value)
                for key, value in ((part.name, getattr(job, part.name)) for part in dataclasses.fields(job))},
        "git": git_state(Path.cwd()),
    }
    text = json.dumps(record, indent=2, ensure_ascii=True)
    unfinished = folder / f"{FILE}.unfinished"
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(folder / FILE)


def git_state(folder: Path) -> dict[str, object] | None:
    """The commit of the repository around a folder and whether files differ from it; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def find(parent: Path, job_id: str) -> Record | None:
    """The record of a job below a folder, the newest where ids were used again. None where there is none to be read."""
    try:
        records = all_records(parent)
    except OSError:
        return None
    return next((record for record in records if any(_same(job_id, known) for known in record.job_ids)), None)


def all_records(parent: Path) -> list[Record]:
    """The records below a folder, the newest first. OSError when the folder cannot be listed."""
    found = []
    for name in os.listdir(parent) if parent.exists() else ():
        path = parent / name / FILE
        try:
            found.append((path.stat().st_mtime, _read(path)))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # somebody else's file, or half of one
    return [record for _, record in sorted(found, key=lambda item: item[0], reverse=True)]


def read(folder: Path) -> Record:
    """The record in a folder. OSError, ValueError, KeyError or TypeError when it cannot be read."""
    return _read(folder / FILE)


def _read(path: Path) -> Record:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not isinstance(job := data.get("job"), dict):
        raise ValueError(f"{path} is not the record of a submission")
    return Record(path.parent, str(data["scheduler"]), tuple(map(str, data["job_ids"])), str(data["submit_folder"]),
                  str(job.get("name") or ""), str(data.get("site", "")), str(data.get("submitted", "")))


def _same(asked: str, known: str) -> bool:
    """"12" and "12.server" are one job where the other does not contradict; elements belong to their array."""
    same_number = bare_number(asked) == bare_number(known)
    servers = [text.partition(".")[2] for text in (asked, known)]
    return same_number and (not all(servers) or servers[0] == servers[1])

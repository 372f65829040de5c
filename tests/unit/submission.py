"""`submit` on a login host, and a scheduler whose jobs have given statuses."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unit.scheduler_commands import Commands
from utils.tools.schedulers.scheduler import Status
from utils.tools.submission import build_job as build
from utils.tools.submission import submit as submitting
from utils.tools.submission import submit_cli as cli


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Login:
    """A person in a folder with train.py, on a host where PATH has the stand-ins alone."""

    def __init__(self, folder: Path, commands: Commands, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.commands = commands
        self._capture = capture

    def submit(self, *words: str) -> Ended:
        try:
            status = cli.main(words)
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        return Ended(status, *self._capture.readouterr())

    def submissions(self) -> list[Path]:
        """The folders of all submissions."""
        parent = self.folder / "jobs-out"
        return sorted(parent.iterdir()) if parent.exists() else []


class Scripted:
    """A scheduler that reports the given statuses of each job in turn, the last one again and again."""

    name = "slurm"
    can_requeue = False

    def __init__(self, statuses: Mapping[str, Any], problem: str | Exception = "") -> None:
        self._problem = problem  # why no host can be excluded
        self._statuses = {job_id: list(values) if isinstance(values, list) else [values]
                          for job_id, values in statuses.items()}
        self.cancelled: list[str] = []
        self.excluded: dict[str, list[str]] = {}  # the hosts, by job

    def status(self, job_id: str) -> Status:
        values = self._statuses[job_id]
        value = values.pop(0) if len(values) > 1 else values[0]
        if isinstance(value, Exception):
            raise value
        return value

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        return {job_id: self.status(job_id) for job_id in job_ids}

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def exclude_hosts(self, job_id: str, hosts: Sequence[str], *, dry_run: bool) -> str:
        self.excluded[job_id] = [*hosts]
        if isinstance(self._problem, Exception):
            raise self._problem
        return self._problem


def use_scheduler(monkeypatch: pytest.MonkeyPatch, scheduler: object) -> None:
    for module in (build, cli, submitting):
        monkeypatch.setattr(module, "get_scheduler", lambda name=None: scheduler)

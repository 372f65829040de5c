"""Fixtures for the tests of `submit`."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.submission import Programs
from utils.schedulers import Job
from utils.submission import following, records


@pytest.fixture()
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with train.py, from which jobs are submitted."""
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture()
def programs(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder))
    return made


@pytest.fixture()
def chain(work: Path) -> records.Submission:
    """The submission of a chain of three jobs."""
    folder = work / "jobs-out" / "train-1"
    folder.mkdir(parents=True)
    records.write(folder, Job(command=("train.py",)), scheduler="slurm", site="x",
                  job_ids=["1", "2", "3"], dependencies=[None, "a", "b"])
    return records.read(folder)


@pytest.fixture()
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_QUERY_SECONDS", "MAX_QUERY_SECONDS", "LOG_SECONDS"):
        monkeypatch.setattr(following, name, 0.01)

"""Fixtures that several unit tests share."""
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.scheduler_commands import ROOT, Commands
from tests.unit.submission import Login


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture,
           monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's own, with the log of the kit also where setup_logging() was called in this process, as another rank."""
    log = logging.getLogger("ddpkit")
    monkeypatch.setattr(log, "propagate", True)
    level = log.level
    log.setLevel(logging.NOTSET)
    yield caplog
    log.setLevel(level)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test may call setup_distributed() in this process, which has imported torch already."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored afterwards


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """No command of a scheduler but those that the test adds; the repository as current folder."""
    made = Commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder))
    monkeypatch.delenv("PBS_EXEC", raising=False)
    monkeypatch.setenv("PBS_CONF_FILE", str(made.folder / "pbs.conf"))
    monkeypatch.setenv("SLURM_CONF", str(made.folder / "slurm.conf"))
    monkeypatch.setattr("utils.job.pbs_job.DEFAULT_PREFIX", "")  # may hold a real PBS
    monkeypatch.chdir(ROOT)
    return made


@pytest.fixture
def login(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
          capfd: pytest.CaptureFixture[str]) -> Login:
    """A login host of Slurm that shares all its folders with the nodes."""
    monkeypatch.setattr("utils.tools.schedulers.job_checks.NODE_LOCAL", ())
    commands.add_submitter("sbatch")
    commands.add("scancel")
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    return Login(folder, commands, capfd)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test runs in this process, such as the start of a job, sets the variable for its ranks."""
    monkeypatch.setenv("DDPKIT_FAILURE_FILE", "")

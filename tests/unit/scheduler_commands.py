"""Commands of a scheduler on PATH that print recorded output."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"


class Commands:
    """Programs in a folder that is PATH; each prints what it was given, and logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cases: dict[str, list[str]] = {}

    def add(self, name: str, output: str = "", error: str = "", status: int = 0,
            when: str = "") -> None:
        """Let a program print and exit. The case added last comes first.

        when: only for calls with this word among their arguments.
        """
        number = sum(map(len, self._cases.values()))
        files = [self.folder / f"{number}.out", self.folder / f"{number}.err"]
        for file, text in zip(files, (output, error), strict=True):
            file.write_text(text, encoding="utf-8")
        case = f'cat "{files[0]}"; cat "{files[1]}" >&2; exit {status}'
        case = f'case " $* " in *" {when} "*) {case};; esac' if when else case
        cases = self._cases.setdefault(name, [])
        cases.insert(0, case)
        log = f'echo "{name} $*" >> "{self.folder}/calls"'
        self.write(name, "\n".join(["#!/bin/sh", log, *cases]))

    def write(self, name: str, text: str) -> None:
        """Write a program."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """No command of a scheduler but those that the test adds; the repository as current folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cat").symlink_to(shutil.which("cat") or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("PBS_EXEC", raising=False)
    monkeypatch.setenv("PBS_CONF_FILE", str(folder / "pbs.conf"))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setattr("utils.schedulers.pbs.programs.DEFAULT_PREFIX", "")  # may hold a real PBS
    monkeypatch.chdir(ROOT)
    return Commands(folder)


def slurm_output(name: str) -> str:
    """What a command of Slurm printed."""
    recording = json.loads((RECORDINGS / "slurm" / "answers" / f"{name}.json").read_text())
    return str(recording["output"])


def pbs_recording(name: str) -> Any:
    return json.loads((RECORDINGS / "pbs" / f"{name}.json").read_text())


def pbs_record(name: str) -> dict[str, Any]:
    """The last record of qstat in a recording, of the job that it is about."""
    recording = pbs_recording(name)
    if "Jobs" in recording:
        [recording] = recording["Jobs"].values()
    return dict(recording.get("final") or recording.get("afterok") or recording)


def pbs_job(record: dict[str, Any], job_id: str = "7.server") -> str:
    """What qstat -f -F json prints about a job, of which some attributes are known."""
    known = {name: value for name, value in record.items() if value is not None}
    return json.dumps({"Jobs": {job_id: known}})

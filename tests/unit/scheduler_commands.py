"""Commands of a scheduler that print what real ones printed, for tests of what is made of it.

Not here: the recordings (tests/recordings).
"""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"


class Commands:
    """Commands of a scheduler, in a folder that is PATH: each prints what it is told to, and notes its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, output: str = "", error: str = "", status: int = 0, when: str = "") -> None:
        """`when`: only for calls that have this word among their arguments; the last one added comes first."""
        number = len(list(self.folder.iterdir()))
        for kind, text in (("out", output), ("err", error)):
            (self.folder / f"{number}.{kind}").write_text(text, encoding="utf-8")
        path = self.folder / name
        old = path.read_text().partition("\n")[2] if path.exists() else ""
        answer = f'cat "{self.folder}/{number}.out"; cat "{self.folder}/{number}.err" >&2; exit {status}'
        condition = f'case " $* " in *" {when} "*) {answer};; esac' if when else answer
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.folder}/calls"\n{condition}\n'
                        + old.replace(f'echo "{name} $*" >> "{self.folder}/calls"\n', ""))
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cat").symlink_to(shutil.which("cat") or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("PBS_EXEC", raising=False)
    monkeypatch.setenv("PBS_CONF_FILE", str(folder / "pbs.conf"))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setattr("utils.schedulers.pbs._USUAL_FOLDER", None)  # there may be a real one
    return Commands(folder)


def slurm_answer(name: str) -> str:
    return str(json.loads((RECORDINGS / "slurm" / "answers" / f"{name}.json").read_text())["output"])


def pbs_recording(name: str) -> Any:
    return json.loads((RECORDINGS / "pbs" / name).read_text())


def pbs_job(record: dict[str, Any], job_id: str = "7.server") -> str:
    """What qstat -f -F json prints about a job, of which some attributes are known."""
    return json.dumps({"Jobs": {job_id: {name: value for name, value in record.items() if value is not None}}})

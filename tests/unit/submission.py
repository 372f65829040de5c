"""Stand-ins for schedulers and for their programs, for the tests of `submit`."""
from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from utils.schedulers import Status
from utils.submission import build, cli
from utils.submission import submit as submitting

# Prints 101, 102, ... and keeps its arguments. Refuses the submission whose number is in `refuse`.
SUBMITTER = """\
#!/bin/bash
cd {folder}
count=$(($(cat count 2>/dev/null || echo 0) + 1)); echo $count > count
printf '%s\\n' "$@" > words-$count
if [ "$(cat refuse 2>/dev/null)" = $count ]; then cat message >&2; exit "$(cat status)"; fi
echo $((100 + count)){server}
"""
REFUSAL = "sbatch: error: invalid partition specified: nosuch\n"


class Programs:
    """A scheduler's programs, alone on PATH with the few that a job script and git need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("bash", "cat", "git", "env"):
            (folder / name).symlink_to(shutil.which(name) or name)

    def add(self, name: str, text: str) -> None:
        (self.folder / name).write_text("#!/bin/bash\n" + text)
        (self.folder / name).chmod(0o755)

    def slurm(self) -> None:
        self._scheduler("sbatch", "", "scancel", ("scontrol", "sinfo", "squeue", "sacct"))

    def pbs(self) -> None:
        self._scheduler("qsub", ".head", "qdel", ("qstat", "pbsnodes", "qselect"))

    def _scheduler(self, submit: str, server: str, cancel: str, queries: tuple[str, ...]) -> None:
        self.add(submit, SUBMITTER.format(folder=self.folder, server=server))
        self.add(cancel, f'echo "$1" >> {self.folder}/cancelled\n')
        for name in queries:  # a query without a response is no problem
            self.add(name, "exit 1\n")

    def refuse(self, number: int, message: str = REFUSAL, status: int = 1) -> None:
        (self.folder / "refuse").write_text(str(number))
        (self.folder / "message").write_text(message)
        (self.folder / "status").write_text(str(status))

    def words(self, number: int = 1) -> list[str]:
        return (self.folder / f"words-{number}").read_text().splitlines()

    @property
    def submissions(self) -> int:
        count = self.folder / "count"
        return int(count.read_text()) if count.exists() else 0

    @property
    def cancelled(self) -> list[str]:
        file = self.folder / "cancelled"
        return file.read_text().split() if file.exists() else []


class Scripted:
    """A scheduler with a list of statuses for each job; an exception is raised."""

    name = "slurm"

    def __init__(self, **statuses: list[Status | Exception]) -> None:
        self.statuses = {job_id.strip("_"): list(values) for job_id, values in statuses.items()}
        self.cancelled: list[str] = []

    def status(self, job_id: str) -> Status:
        values = self.statuses[job_id]
        value = values.pop(0) if len(values) > 1 else values[0]
        if isinstance(value, Exception):
            raise value
        return value

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def submit(*words: str) -> int:
    """Run `submit`; its exit status."""
    try:
        return cli.main(words)
    except SystemExit as error:  # argparse
        return int(error.code or 0)


def slurm(*words: str) -> int:
    return submit("run", "--site", "generic-slurm", "--no-check", *words)


def pbs(*words: str) -> int:
    return submit("run", "--site", "generic-pbs", "--no-check", *words)


def only_folder(work: Path) -> Path:
    [folder] = (work / "jobs-out").iterdir()
    return folder


def nothing_submitted(programs: Programs, work: Path) -> bool:
    return programs.submissions == 0 and not (work / "jobs-out").exists()


def use_scheduler(monkeypatch: pytest.MonkeyPatch, scheduler: object) -> None:
    for module in (build, cli, submitting):
        monkeypatch.setattr(module, "get_scheduler", lambda name=None: scheduler)

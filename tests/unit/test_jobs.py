"""The ready job scripts, run as a scheduler runs them, from a copy in its spool folder; real jobs: tests/cluster."""
from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.unit.programs import ROOT
from utils.tools.launch.launch_cli import words_of_pbs_job
from utils.tools.launch.launch_plan import PlanError
from utils.tools.schedulers.job_spec import Job
from utils.tools.schedulers.slurm_scheduler import SlurmScheduler
from utils.tools.submission.submit import job_script

SCRIPTS = ["slurm.sh", "pbs.sh"]
DDPKIT = f"#!{os.path.realpath('/usr/bin/env')} python3\n" """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("ACTIVE")]))
sys.exit(7)
"""


class Submitted:
    """A job script that was submitted from a folder with spaces in its name, whose .venv has a ddpkit that reports."""

    def __init__(self, name: str, top: Path) -> None:
        self.folder = top / "a project"
        self.spooled = top / "spool" / "12.SC"
        self.spooled.parent.mkdir()
        self.spooled.write_text((ROOT / "jobs" / name).read_text())
        self.bin = self.folder / ".venv" / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "ddpkit").write_text(DDPKIT)
        (self.bin / "ddpkit").chmod(0o755)
        (self.bin / "activate").write_text(f"PATH='{self.bin}':$PATH; export ACTIVE=venv\n")
        where = {"PBS_O_WORKDIR": str(self.folder)} if name == "pbs.sh" else {}
        self.env = {"PATH": "/usr/bin:/bin", "HOME": str(top), **where}
        self.start_folder = Path("/") if name == "pbs.sh" else self.folder  # where the scheduler starts the script

    def replace(self, old: str, new: str) -> None:
        assert old in self.spooled.read_text()
        self.spooled.write_text(self.spooled.read_text().replace(old, new))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        # Not by its first line: a login shell reads the profile of this machine.
        return subprocess.run(["bash", str(self.spooled), *words], env=self.env, cwd=self.start_folder, text=True,
                              capture_output=True, timeout=60)


@pytest.fixture(params=SCRIPTS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Submitted:
    return Submitted(request.param, tmp_path)


def test_script_activates_the_environment_and_passes_the_words_on(job: Submitted) -> None:
    words = ["--torchrun", "my train.py", "", "3"]
    done = job.run(*words)
    assert json.loads(done.stdout) == [["launch", *words], str(job.folder), "venv"]
    assert (done.returncode, done.stderr) == (7, "")  # the exit status is that of launch


def test_copy_needs_one_other_line(job: Submitted, tmp_path: Path) -> None:
    job.bin.rename(tmp_path / "my environment")
    job.replace('source ".venv/bin/activate"',
                f"PATH='{tmp_path}/my environment':$PATH; echo $NOT_SET; yes | head -n 1")
    done = job.run("train.py")
    assert json.loads(done.stdout.splitlines()[-1])[:2] == [["launch", "train.py"], str(job.folder)]

    job.replace("exec ddpkit launch", f"exec '{ROOT}/scripts/launch.py' --help")  # where ddpkit is not installed
    assert "usage: ddpkit launch" in job.run("train.py").stdout


@pytest.mark.parametrize(("missing", "status", "sentence"), [
    ("activate", 1, r": line \d+: \.venv/bin/activate: No such file or directory\n"
                    "Name your environment in the line 'source' of the job script\\.\n"),
    ("ddpkit", 127, r": line \d+: exec: ddpkit: not found\n")])
def test_what_is_missing_is_said_once(job: Submitted, missing: str, status: int, sentence: str) -> None:
    (job.bin / missing).unlink()
    done = job.run("train.py")
    assert done.returncode == status and re.fullmatch(re.escape(str(job.spooled)) + sentence, done.stderr), done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short(name: str) -> None:
    assert len((ROOT / "jobs" / name).read_text().splitlines()) <= 20


@pytest.mark.parametrize(("args", "expected"), [
    ("""'my train.py' --note "a  b" $(touch ran) `touch ran` ; touch ran""",
     ["my train.py", "--note", "a  b", "$(touch", "ran)", "`touch", "ran`", ";", "touch", "ran"]),
    ("""train.py --json '{"a": 1}' '' "c
d" é""", ["train.py", "--json", '{"a": 1}', "", "c\nd", "é"]),
    *((args, "nothing to run.* line of the script, which .qsub -v. replaces") for args in ("", "  ", "'' --epochs 3")),
    ("train.py it's", "Expected words quoted as for a shell"),
    ("train.py \\a b\\", "qsub changes quotes.* qsub OPTIONS -- /path")])
def test_args_are_split_as_by_a_shell_and_not_run(args: str, expected: list[str] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(PlanError, match=expected):
            words_of_pbs_job(args)
    else:
        assert words_of_pbs_job(args) == expected


def test_pbs_job_without_args_ends_with_a_sentence() -> None:
    done = subprocess.run([str(ROOT / "scripts" / "launch.py")], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PBS_ENVIRONMENT": "PBS_BATCH", "ARGS": ""})
    assert (done.returncode, done.stdout) == (2, "")
    assert "ddpkit launch: error: there is nothing to run: ARGS is empty or not set" in done.stderr


@pytest.mark.parametrize("home", [True, False])
def test_modules_are_found_where_csh_passes_no_function_on(home: bool, tmp_path: Path) -> None:
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text('module() { echo "module $*"; }\n')
    script = job_script(SlurmScheduler(), Job(nodes=1, modules=("python",), setup=("exit 0",), command=("train.py",)))
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", **({"MODULESHOME": str(tmp_path)} if home else {})})
    if home:
        assert (done.returncode, done.stdout) == (0, "module load python\n")
    else:
        assert done.returncode != 0 and "MODULESHOME: is not set, and there is no command module" in done.stderr

"""The ready job scripts, run as a scheduler runs them: from a copy in its spool folder.

`launch` is replaced by a program that reports its arguments. Real jobs are in tests/cluster.
"""
from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pythons import make_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["slurm.sh", "pbs.sh"]
PATH = "/usr/local/bin:/usr/bin:/bin"
SET_UP = "# Your set-up lines go here: module load ..., source .../activate\n"
LAUNCH = """\
import json, os, pathlib, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "tools"))
import interpreter
command, *words = sys.argv[1:]
assert command == "launch"
python = interpreter.choose(os.environ).path if "--choose" in words else sys.executable
print(json.dumps({"words": words, "folder": os.getcwd(), "python": python, "BASH_ENV": os.environ.get("BASH_ENV"),
                  "kit": str(pathlib.Path(__file__).parents[1])}), flush=True)
sys.exit(int(os.environ.get("EXIT", 0)))
"""


class Kit:
    """The kit in a folder with spaces in its name, and jobs that are submitted from a folder without it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.folder = top / "a kit with spaces"
        shutil.copytree(ROOT / "jobs", self.folder / "jobs")
        (self.folder / "utils" / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "utils" / "tools" / "interpreter.py", self.folder / "utils" / "tools")
        (self.folder / "utils" / "__main__.py").write_text(LAUNCH)
        for name in ("elsewhere", "programs", "spool", "home"):
            (top / name).mkdir()

    def program(self, name: str, text: str) -> None:
        (self.top / "programs" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.top / "programs" / name).chmod(0o755)

    def spooled(self, name: str, set_up: str = SET_UP) -> Path:
        """A copy of a script where a scheduler puts it, with set-up lines."""
        copy = Path(shutil.copy(self.folder / "jobs" / name, self.top / "spool"))
        assert SET_UP in copy.read_text()
        copy.write_text(copy.read_text().replace(SET_UP, set_up))
        return copy

    def environment(self, name: str, submitted_from: Path | None = None, **more: str) -> dict[str, str]:
        folder = str(submitted_from or self.folder)
        job = {"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": folder} if name == "slurm.sh" else {
            "PBS_JOBID": "12.head", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_O_WORKDIR": folder}
        return {"PATH": f"{self.top}/programs:{PATH}", "HOME": str(self.top), **job, **more}

    def run(self, name: str, *words: str, submitted_from: Path | None = None, set_up: str = SET_UP,
            **more: str) -> subprocess.CompletedProcess[str]:
        # Not by its first line: a login shell reads the profile of this machine, which may change PATH.
        return subprocess.run(["bash", str(self.spooled(name, set_up)), *words], text=True, timeout=120,
                              env=self.environment(name, submitted_from, **more), capture_output=True,
                              cwd="/" if name == "pbs.sh" else submitted_from or self.folder)

    def report(self, name: str, *words: str, **options: Any) -> dict[str, Any]:
        return reported(self.run(name, *words, **options))

    def login_shell(self, profile: str, **more: str) -> str:
        """The output of a job as PBS starts it: -bash reads the path of the script, in a session of its own."""
        home = self.top / "home"
        (home / ".bash_profile").write_text(profile)
        env = {"MODULEPATH_ROOT": "/none", **self.environment("pbs.sh", **more)}  # Lmod then sets no BASH_ENV
        done = subprocess.run(["-bash"], executable="/bin/bash", input=f"{self.spooled('pbs.sh')}\n", text=True,
                              start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
                              env={**env, "HOME": str(home), "TMPDIR": str(home)})
        assert done.returncode == 0, done.stdout
        return done.stdout


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a job that ended well has reported."""
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


SQUEUE = """\
[ "$*" = '--noheader --jobs=12 --format=%o' ] || exit 1
# Each element of an array for the id of its last one; newer versions of Slurm show no arguments.
for element in 1 2; do echo '{kit}/jobs/slurm.sh my train.py --lr 3'; done"""
QSTAT = """\
[ "$*" = '-f -w 12.head' ] || exit 1
echo 'Job Id: 12.head'
echo '    Submit_arguments = -l select=1:ncpus=1 -v FOO=a b,ARGS=x y {kit}/jobs/pbs.sh'"""


@pytest.mark.parametrize(("name", "program", "text"), [
    ("slurm.sh", "squeue", SQUEUE), ("slurm.sh", "squeue", SQUEUE.replace(" my train.py --lr 3", "")),
    ("pbs.sh", "qstat", QSTAT), ("pbs.sh", "qstat", QSTAT.replace("{kit}", "../a kit with spaces"))])
def test_kit_is_where_the_scheduler_has_the_submitted_file(name: str, program: str, text: str, kit: Kit) -> None:
    kit.program(program, text.format(kit=kit.folder))
    elsewhere = kit.top / "elsewhere"
    words = ["--torchrun", "my train.py", "", "3"]
    found = kit.report(name, *words, submitted_from=elsewhere, ARGS="other.py")
    assert (found["kit"], found["words"]) == (str(kit.folder), words)
    assert found["folder"] == str(elsewhere)  # not the home directory, where PBS starts


@pytest.mark.parametrize("name", SCRIPTS)
def test_kit_is_above_the_script_or_the_submission_or_named(name: str, kit: Kit) -> None:
    by_hand = {"PATH": PATH, "HOME": "/", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_O_WORKDIR": "/"}
    done = subprocess.run(["bash", f"a kit with spaces/jobs/{name}", "train.py"], env=by_hand, cwd=kit.top,
                          capture_output=True, text=True)
    assert (reported(done)["kit"], reported(done)["folder"]) == (str(kit.folder), str(kit.top))

    for folder in (kit.folder, kit.folder / "jobs"):
        assert kit.report(name, "train.py", submitted_from=folder)["kit"] == str(kit.folder)
    elsewhere = kit.top / "elsewhere"
    found = kit.report(name, "train.py", submitted_from=elsewhere, DDPKIT_HOME=str(kit.folder))
    assert found["kit"] == str(kit.folder)

    done = kit.run(name, "train.py", submitted_from=elsewhere)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"was not found in {elsewhere}" in done.stderr and "DDPKIT_HOME=/path/to/the/kit" in done.stderr
    assert "qsub -v" not in done.stderr  # it would replace the line that guards the login shell


@pytest.mark.parametrize(("args", "expected"), [
    ("""'my train.py' --note "a  b" $(touch ran) `touch ran` ; touch ran""",
     ["my train.py", "--note", "a  b", "$(touch", "ran)", "`touch", "ran`", ";", "touch", "ran"]),
    ("""train.py --json '{"a": 1}' '' "c
d" é""", ["train.py", "--json", '{"a": 1}', "", "c\nd", "é"]),
    *((args, "nothing to run.* line of the script, which .qsub -v. replaces")
      for args in (None, "  ", "'' --epochs 3")),
    ("train.py it's", "Correct the quotes"), ("train.py \\a b\\", "qsub changes quotes.* qsub OPTIONS -- /path")])
def test_args_are_split_as_by_a_shell_and_not_run(args: str | None, expected: list[str] | str, kit: Kit) -> None:
    done = kit.run("pbs.sh", **({} if args is None else {"ARGS": args}))
    if isinstance(expected, str):
        assert (done.returncode, done.stdout) == (2, "") and re.search(expected, done.stderr)
    else:
        assert reported(done)["words"] == expected
    assert not (kit.folder / "ran").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_python_is_named_of_the_set_up_lines_or_active(name: str, kit: Kit) -> None:
    """What the job script has to pass on; the choice itself is in test_interpreter.py."""
    active, loaded = (make_environment(kit.top / folder, torch=True) for folder in ("venv", "module"))
    path = "PBS_O_PATH" if name == "pbs.sh" else "PATH"
    for more, python in (
            ({"PYTHON": str(loaded), "VIRTUAL_ENV": str(active.parents[1])}, loaded),
            ({"set_up": f"PATH='{loaded.parent}':$PATH\n", "VIRTUAL_ENV": str(active.parents[1])}, loaded),
            ({"VIRTUAL_ENV": str(active.parents[1])}, active), ({path: f"{active.parent}:{PATH}"}, active)):
        assert Path(kit.report(name, "t.py", "--choose", **more)["python"]).parent == python.parent, more


@pytest.mark.parametrize("name", SCRIPTS)
def test_launch_starts_under_any_python_that_works(name: str, kit: Kit) -> None:
    ours = make_environment(kit.folder / ".venv", torch=True)
    kit.program("python3", "echo pyenv: python3: not found >&2; exit 127")
    assert kit.report(name, "t.py")["python"] == str(ours)

    shutil.rmtree(kit.folder / ".venv")
    for tool in ("bash", "sed", "dirname", "cut", "tr"):  # all that a job script itself needs
        (kit.top / "programs" / tool).symlink_to(shutil.which(tool) or tool)
    done = kit.run(name, "t.py", PATH=f"{kit.top}/programs")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Python was found" in done.stderr and "setup_env.sh" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_set_up_lines_may_be_as_careless_as_those_of_sites(name: str, kit: Kit) -> None:
    """Unset variables, broken pipes; the command `module` exists although csh cannot pass it on."""
    (kit.top / "init").mkdir()
    (kit.top / "init" / "bash").write_text('export LOADED=$NOT_SET\nmodule() { export LOADED="$*"; }\n')
    set_up = ('module load python; echo "$NOT_SET"; yes | head -n 1 >/dev/null; '
              "export EXIT=$((40 + ${#LOADED}))\n")
    done = kit.run(name, "t.py", set_up=set_up, LMOD_PKG=str(kit.top))
    assert done.returncode == 40 + len("load python")  # the exit status is that of launch


@pytest.mark.parametrize(("profile", "value", "remedy"), [
    ("", "/dev/null", "submit without -v and -V"),  # as by Lmod and qsub -V
    ("", "", "BASH_ENV is not set"),  # as by qsub -v A=1
    ("trap : USR1 TERM\n", "/dev/null", "")])  # a remedy that the warning names
def test_login_shell_that_ends_at_usr1_is_reported(profile: str, value: str, remedy: str, kit: Kit) -> None:
    output = kit.login_shell(profile, BASH_ENV=value, ARGS="train.py")
    assert '"train.py"' in output and remedy in output
    for text in ("job script: warning: the login shell of this job (-bash) ends", 'Add "trap : USR1 TERM" to'):
        assert (text in output) == bool(remedy)


def test_script_without_a_login_shell_is_not_warned_about(kit: Kit) -> None:
    """As under qsub --, the other remedy; BASH_ENV of the user is kept."""
    theirs = kit.top / "theirs"
    theirs.write_text("")
    for value, expected in ((str(theirs), str(theirs)), ("/x/.survive.a1b2c3", None)):
        done = subprocess.run([str(kit.spooled("pbs.sh")), "t.py"], env=kit.environment("pbs.sh", BASH_ENV=value),
                              start_new_session=True, capture_output=True, text=True, timeout=120)
        assert reported(done)["BASH_ENV"] == expected and "warning: the login shell" not in done.stderr

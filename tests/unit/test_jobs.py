"""The ready job scripts, run as a scheduler runs them: from a copy in its spool folder.

`launch` is replaced by a program that reports its arguments. Real jobs are in tests/cluster.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import wait_until
from tests.unit.pythons import make_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["slurm.sh", "pbs.sh"]
PATH = "/usr/local/bin:/usr/bin:/bin"
SET_UP = "# Your set-up lines go here: module load ..., source .../activate\n"
LAUNCH = """\
import json, os, pathlib, signal, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "launch"))
import interpreter
command, *words = sys.argv[1:]
assert command == "launch"
python = interpreter.choose(os.environ).path if "--choose" in words else sys.executable
print(json.dumps({"words": words, "folder": os.getcwd(), "python": python,
                  "kit": str(pathlib.Path(__file__).parents[1])}), flush=True)
if "--wait" in words:
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"launch has USR1\\n"))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    pathlib.Path(words[-1]).touch()
    time.sleep(20)
sys.exit(int(os.environ.get("EXIT", 0)))
"""


@pytest.fixture()
def kit(tmp_path: Path) -> Path:
    """The kit in a folder with spaces in its name, beside a folder `elsewhere` without it."""
    folder = tmp_path / "a kit with spaces"
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    (folder / "utils" / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "utils" / "launch" / "interpreter.py", folder / "utils" / "launch")
    (folder / "utils" / "__main__.py").write_text(LAUNCH)
    (tmp_path / "elsewhere").mkdir()
    return folder


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def spooled(kit: Path, name: str, set_up: str = "") -> Path:
    """A copy of a script where a scheduler puts it, with set-up lines."""
    spool = kit.parent / "spool"
    spool.mkdir(exist_ok=True)
    copy = spool / ("slurm_script" if name == "slurm.sh" else "12.head.SC")
    text = (kit / "jobs" / name).read_text()
    assert SET_UP in text
    copy.write_text(text.replace(SET_UP, set_up or SET_UP))
    copy.chmod(0o755)
    return copy


def environment(name: str, submitted_from: Path, **more: str) -> dict[str, str]:
    programs = submitted_from.parent / "programs"
    job = {"slurm.sh": {"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": str(submitted_from)},
           "pbs.sh": {"PBS_JOBID": "12.head", "PBS_ENVIRONMENT": "PBS_BATCH",
                      "PBS_O_WORKDIR": str(submitted_from)}}[name]
    return {"PATH": f"{programs}:{PATH}", "HOME": str(submitted_from.parent), **job, **more}


def run(script: Path, env: Mapping[str, str], words: Sequence[str] = (), folder: Path | None = None,
        ) -> subprocess.CompletedProcess[str]:
    # Not by its first line: a login shell reads the profile of this machine, which may change PATH.
    return subprocess.run(["bash", str(script), *words], env=env, cwd=folder, capture_output=True,
                          text=True, timeout=30)


def report(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert isinstance(values, dict)
    return values


# --- the texts

@pytest.mark.parametrize("name", SCRIPTS)
def test_script_follows_the_rules_for_job_scripts(name: str) -> None:
    text = (ROOT / "jobs" / name).read_text()
    assert os.access(ROOT / "jobs" / name, os.X_OK)
    assert len(text.splitlines()) < 40  # people edit it
    commands = re.split(r"^[^#\n]", text, maxsplit=1, flags=re.M)[1]
    assert not re.search("^#(SBATCH|PBS)", commands, re.M)  # the scheduler would ignore it
    # The batch shell has other values of these than the tasks.
    of_task = "SLURM_(PROCID|LOCALID|NODEID)|PBS_(NODENUM|TASKNUM)|RANK|LOCAL_RANK"
    assert not re.search(rf"\$\{{?({of_task})", text + (ROOT / "jobs" / "in_job.sh").read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck (Debian package shellcheck)")
    command = ["shellcheck", "--external-sources", f"jobs/{name}", f"jobs/templates/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- finding the kit

@pytest.mark.parametrize("shown", [
    "{kit}/jobs/slurm.sh my train.py --epochs 3", "{kit}/jobs/slurm.sh"])
def test_kit_is_where_squeue_has_the_submitted_file(shown: str, kit: Path) -> None:
    """Older and newer versions of Slurm show the command with and without its arguments."""
    elsewhere = kit.parent / "elsewhere"
    program(kit.parent / "programs", "squeue", f"""
[ "$*" = '--noheader --jobs=12 --format=%o' ] || exit 1
# squeue shows every element of an array for the id of its last one
for element in 1 2; do echo '{shown.format(kit=kit)}'; done""")
    words = ["my train.py", "--epochs", "3"]
    env = environment("slurm.sh", elsewhere)
    found = report(run(spooled(kit, "slurm.sh"), env, words, elsewhere))
    assert (found["kit"], found["folder"], found["words"]) == (str(kit), str(elsewhere), words)


@pytest.mark.parametrize("path", ["../a kit with spaces/jobs/pbs.sh", "{kit}/jobs/pbs.sh"])
def test_kit_is_where_qstat_has_the_submitted_file(path: str, kit: Path) -> None:
    elsewhere = kit.parent / "elsewhere"
    program(kit.parent / "programs", "qstat", f"""
[ "$*" = '-f -w 12.head' ] || exit 1
echo 'Job Id: 12.head'
echo '    Submit_arguments = -l select=1:ncpus=1 -v FOO=a b,ARGS=x y {path.format(kit=kit)}'""")
    env = environment("pbs.sh", elsewhere, ARGS="train.py --epochs 3")
    found = report(run(spooled(kit, "pbs.sh"), env, (), Path("/")))
    assert found["kit"] == str(kit)
    assert found["folder"] == str(elsewhere)  # not the home directory, where PBS starts
    assert found["words"] == ["train.py", "--epochs", "3"]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("submitted_from", "more"), [
    ("a kit with spaces", {}), ("a kit with spaces/jobs", {}),
    ("elsewhere", {"DDPKIT_HOME": "a kit with spaces"})])
def test_kit_is_above_the_submission_or_named(name: str, submitted_from: str, more: dict[str, str],
                                              kit: Path) -> None:
    folder = kit.parent / submitted_from
    env = environment(name, folder, **{key: str(kit.parent / value) for key, value in more.items()})
    assert report(run(spooled(kit, name), env, ["train.py"], folder))["kit"] == str(kit)


@pytest.mark.parametrize("name", SCRIPTS)
def test_kit_is_found_when_the_script_runs_by_hand(name: str, kit: Path) -> None:
    env = {"PATH": PATH, "HOME": "/", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_O_WORKDIR": "/"}
    found = report(run(Path("a kit with spaces/jobs") / name, env, ["train.py"], kit.parent))
    assert (found["kit"], found["folder"]) == (str(kit), str(kit.parent))


@pytest.mark.parametrize("name", SCRIPTS)
def test_kit_that_is_not_found_is_an_error(name: str, kit: Path) -> None:
    elsewhere = kit.parent / "elsewhere"
    done = run(spooled(kit, name), environment(name, elsewhere), ["train.py"], elsewhere)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"was not found in {elsewhere}" in done.stderr
    assert "DDPKIT_HOME=/path/to/the/kit" in done.stderr
    assert "qsub -v" not in done.stderr  # it would replace the line that guards the login shell


# --- arguments, Python, exit status

@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_reach_launch_unchanged(name: str, kit: Path) -> None:
    words = ["--torchrun", "a b.py", "", "c"]
    env = environment(name, kit, ARGS="other.py")
    assert report(run(kit / "jobs" / name, env, words))["words"] == words


@pytest.mark.parametrize(("text", "words"), [
    ("""'my train.py' --note "a  b" $(touch ran) `touch ran` ; touch ran""",
     ["my train.py", "--note", "a  b", "$(touch", "ran)", "`touch", "ran`", ";", "touch", "ran"]),
    (r"""train.py --json "{\"a\": 1}" a\ b '' "c
d" é""", ["train.py", "--json", '{"a": 1}', "a b", "", "c\nd", "é"])])
def test_args_are_split_as_by_a_shell_and_not_run(text: str, words: list[str], kit: Path) -> None:
    env = environment("pbs.sh", kit, ARGS=text)
    assert report(run(spooled(kit, "pbs.sh"), env))["words"] == words
    assert not (kit / "ran").exists()


@pytest.mark.parametrize("more", [{}, {"ARGS": ""}, {"ARGS": "  "}, {"ARGS": "'' --epochs 3"}])
def test_missing_args_are_an_error_that_names_qsub_V(more: dict[str, str], kit: Path) -> None:
    done = run(spooled(kit, "pbs.sh"), environment("pbs.sh", kit, **more))
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is nothing to run" in done.stderr and "qsub -V" in done.stderr


@pytest.mark.parametrize("text", [
    "train.py --note 'it is", 'train.py --note "it is --epochs 3', "train.py it's", "a \\"])
def test_unbalanced_quote_in_args_is_an_error(text: str, kit: Path) -> None:
    done = run(spooled(kit, "pbs.sh"), environment("pbs.sh", kit, ARGS=text))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Correct the quotes" in done.stderr


def chosen(name: str, kit: Path, set_up: str = "", **more: str) -> str:
    """The Python for the ranks of a job."""
    done = run(spooled(kit, name, set_up), environment(name, kit, **more), ["t.py", "--choose"])
    return str(report(done)["python"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_python_is_named_active_or_the_kits(name: str, kit: Path) -> None:
    """One without torch is passed over."""
    ours = make_environment(kit / ".venv", torch=True)
    active = make_environment(kit.parent / "venv", torch=True)
    base = make_environment(kit.parent / "base", torch=False)
    assert chosen(name, kit, PYTHON=str(active)) == str(active)
    for python, expected in ((active, active), (base, ours)):
        path, prefix = f"{python.parent}:{PATH}", str(python.parents[1])
        for more in ({"VIRTUAL_ENV": prefix}, {"CONDA_PREFIX": prefix},
                     {"PBS_O_PATH": path} if name == "pbs.sh" else {"PATH": path}):
            assert Path(chosen(name, kit, **more)).parent == expected.parent, more


@pytest.mark.parametrize("name", SCRIPTS)
def test_python_of_the_set_up_lines_comes_first(name: str, kit: Path) -> None:
    make_environment(kit / ".venv", torch=True)
    loaded = make_environment(kit.parent / "module", torch=True)
    active = make_environment(kit.parent / "venv", torch=True)
    found = chosen(name, kit, f"PATH='{loaded.parent}':$PATH\n", VIRTUAL_ENV=str(active.parents[1]))
    assert found == str(loaded.parent / "python3")


@pytest.mark.parametrize("name", SCRIPTS)
def test_launch_starts_under_any_python_that_works(name: str, kit: Path) -> None:
    ours = make_environment(kit / ".venv", torch=True)
    program(kit.parent / "programs", "python3", "echo pyenv: python3: not found >&2; exit 127")
    assert report(run(spooled(kit, name), environment(name, kit), ["t.py"]))["python"] == str(ours)
    shutil.rmtree(kit / ".venv")
    done = run(spooled(kit, name), environment(name, kit, PATH=str(tools(kit))), ["t.py"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Python was found" in done.stderr and "setup_env.sh" in done.stderr


def tools(kit: Path) -> Path:
    """A folder with the programs that a job script itself needs, and no Python."""
    folder = kit.parent / "tools"
    folder.mkdir()
    for name in ("bash", "sed", "dirname", "cut", "tr"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_set_up_lines_may_be_as_careless_as_those_of_sites(name: str, kit: Path) -> None:
    """Unset variables, broken pipes; the command `module` exists although csh cannot pass it on."""
    lmod = kit.parent / "lmod"
    (lmod / "init").mkdir(parents=True)
    (lmod / "init" / "bash").write_text(
        'export LOADED=$NOT_SET\nmodule() { export LOADED="$*"; }\n')
    script = spooled(kit, name, 'module load python; echo "$NOT_SET"; yes | head -n 1 >/dev/null; '
                                "export EXIT=$((40 + ${#LOADED}))\n")
    done = run(script, environment(name, kit, LMOD_PKG=str(lmod)), ["t.py"])
    assert done.returncode == 40 + len("load python")  # the exit status is that of launch


# --- signals

@pytest.mark.parametrize("name", SCRIPTS)
def test_signal_to_the_script_reaches_launch_once(name: str, kit: Path) -> None:
    started = kit.parent / "started"
    with subprocess.Popen(["bash", str(spooled(kit, name)), "--wait", str(started)], text=True,
                          env=environment(name, kit), stdout=subprocess.PIPE,
                          start_new_session=True) as process:
        wait_until(started.exists, "the start")
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B:USR1 does
            assert process.stdout.readline() == "launch has USR1\n"
        os.killpg(process.pid, signal.SIGTERM)  # PBS: to every process of the session
        assert process.wait(20) == 7


def guard(kit: Path) -> str:
    found = re.search("^#PBS -v BASH_ENV='(.*)'$", (kit / "jobs" / "pbs.sh").read_text(), re.M)
    assert found is not None
    return found[1]


def in_login_shell(script: Path, env: Mapping[str, str],
                   profile: str = "") -> subprocess.Popen[str]:
    """As PBS does it: -bash reads the path of the script; one session; signals go to all of it."""
    home = script.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".bash_profile").write_text(profile)
    shell = subprocess.Popen(["-bash"], executable="/bin/bash", stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             start_new_session=True,  # MODULEPATH_ROOT: Lmod then sets no BASH_ENV
                             env={"MODULEPATH_ROOT": "/none", **env, "HOME": str(home),
                                  "TMPDIR": str(home)})
    assert shell.stdin is not None
    shell.stdin.write(f"{script}\n")
    shell.stdin.close()
    return shell


@pytest.mark.parametrize("profile", ["", "echo welcome; set -u; false\n"])
def test_login_shell_of_pbs_outlives_usr1(profile: str, kit: Path) -> None:
    started = kit.parent / "started"
    env = environment("pbs.sh", kit, BASH_ENV=guard(kit), ARGS=f"--wait '{started}'")
    with in_login_shell(spooled(kit, "pbs.sh"), env, profile) as shell:
        assert shell.stdout is not None
        wait_until(started.exists, "the start")
        lines = iter(shell.stdout.readline, "")
        before = next(line for line in lines if line != "welcome\n")
        assert '"words"' in before  # no warning
        os.killpg(shell.pid, signal.SIGUSR1)
        assert next(lines) == "launch has USR1\n"
        os.killpg(shell.pid, signal.SIGTERM)
        assert shell.wait(20) == 7


def test_login_shell_guard_follows_no_link_in_a_shared_folder(kit: Path) -> None:
    script = spooled(kit, "pbs.sh")
    (script.parent / "home").mkdir()
    target = kit.parent / "target"
    target.write_text("precious")
    (script.parent / "home" / ".survive").symlink_to(target)  # by another user, in /tmp
    env = environment("pbs.sh", kit, BASH_ENV=guard(kit), ARGS="train.py")
    with in_login_shell(script, env) as shell:
        assert shell.stdout is not None
        assert "script: warning" not in shell.stdout.read()
    assert target.read_text() == "precious"


@pytest.mark.parametrize(("profile", "value", "remedy"), [
    ("", "/dev/null", "BASH_ENV is /dev/null"),  # as by Lmod and qsub -V
    ("export BASH_ENV=/dev/null\n", None, "env -u BASH_ENV qsub -V"),  # as by a site with Lmod
    ("", "", "BASH_ENV is not set")])  # as by qsub -v A=1
def test_login_shell_that_ends_at_usr1_is_reported(profile: str, value: str | None, remedy: str,
                                                   kit: Path) -> None:
    value = guard(kit) if value is None else value
    env = environment("pbs.sh", kit, BASH_ENV=value, ARGS="train.py")
    with in_login_shell(spooled(kit, "pbs.sh"), env, profile) as shell:
        assert shell.stdout is not None
        output = shell.stdout.read()
        assert shell.wait(20) == 0
    assert output.startswith("job script: warning: the login shell of this job (-bash) ends")
    assert remedy in output and 'Add "trap : USR1 TERM" to ~/.bash_profile' in output
    assert '"train.py"' in output


def test_remedies_that_the_warning_names_silence_it(kit: Path) -> None:
    env = environment("pbs.sh", kit, BASH_ENV="/dev/null", ARGS="train.py")
    with in_login_shell(spooled(kit, "pbs.sh"), env, "trap : USR1 TERM\n") as shell:
        assert shell.stdout is not None
        assert "script: warning" not in shell.stdout.read()
    done = subprocess.run([str(spooled(kit, "pbs.sh")), "train.py"], env=env, text=True,
                          start_new_session=True, capture_output=True, timeout=30)  # qsub --
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_env_of_the_user_is_kept(kit: Path) -> None:
    theirs = kit.parent / "theirs"
    theirs.write_text("")
    (kit / "utils" / "__main__.py").write_text("import os; print(os.environ.get('BASH_ENV'))")
    for value, expected in ((str(theirs), f"{theirs}\n"), ("/x/.survive.a1b2c3", "None\n")):
        done = run(spooled(kit, "pbs.sh"), environment("pbs.sh", kit, BASH_ENV=value), ["t.py"])
        assert done.stdout == expected

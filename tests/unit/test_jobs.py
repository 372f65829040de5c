"""The ready job scripts: equal to what the templates give, and run as a scheduler runs them, from a copy in its folder.

launch.py is replaced by a program that tells what it was started with; real jobs are in tests/cluster.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.unit.pythons import make_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # where the scripts import each other from
import job_scripts

ROOT = Path(__file__).resolve().parents[2]

SLURM = ["slurm_srun.sh", "slurm_torchrun.sh"]
PBS = ["pbs_mpiexec.sh", "pbs_torchrun.sh"]
PATH = "/usr/local/bin:/usr/bin:/bin"
TELL = """\
import json, os, pathlib, signal, sys, time
import interpreter
words = sys.argv[1:]
python = interpreter.choose(os.environ).path if "--choose" in words else sys.executable
told = {"words": words, "folder": os.getcwd(), "python": python, "kit": str(pathlib.Path(__file__).parents[1])}
print(json.dumps(told), flush=True)
if "--wait" in words:
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"launch.py has USR1\\n"))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    pathlib.Path(words[-1]).touch()
    time.sleep(20)
sys.exit(int(os.environ.get("EXIT", 0)))
"""


@pytest.fixture()
def kit(tmp_path: Path) -> Path:
    """The kit in a folder with spaces in its name."""
    folder = tmp_path / "a kit with spaces"
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "interpreter.py", folder / "scripts")
    (folder / "scripts" / "launch.py").write_text(TELL)
    return folder


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def spooled(kit: Path, name: str) -> Path:
    """A copy of a script where a scheduler puts it."""
    spool = kit.parent / "spool"
    spool.mkdir(exist_ok=True)
    copy = spool / ("slurm_script" if name in SLURM else "12.head.SC")
    shutil.copy(kit / "jobs" / name, copy)
    return copy


def environment(name: str, submitted_from: Path, **more: str) -> dict[str, str]:
    programs = submitted_from.parent / "programs"
    job = ({"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": str(submitted_from)} if name in SLURM else
           {"PBS_JOBID": "12.head", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_O_WORKDIR": str(submitted_from)})
    return {"PATH": f"{programs}:{PATH}", "HOME": str(submitted_from.parent), **job, **more}


def run(script: Path, env: Mapping[str, str], words: Sequence[str] = (), folder: Path | None = None,
        ) -> subprocess.CompletedProcess[str]:
    # Not by its first line: a login shell reads the profile of this machine, which may change PATH.
    return subprocess.run(["bash", str(script), *words], env=env, cwd=folder, capture_output=True, text=True,
                          timeout=30)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


# --- the texts

@pytest.mark.parametrize("name", SLURM + PBS)
def test_a_ready_script_is_what_its_template_gives(name: str) -> None:
    assert (ROOT / "jobs" / name).read_text() == job_scripts.ready_script(name), "run: python scripts/job_scripts.py"


@pytest.mark.parametrize("name", SLURM + PBS)
def test_a_ready_script_can_be_executed(name: str) -> None:
    assert os.access(ROOT / "jobs" / name, os.X_OK)


@pytest.mark.parametrize("name", SLURM + PBS)
def test_shellcheck_finds_nothing(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck (Debian package shellcheck)")
    done = subprocess.run(["shellcheck", "--external-sources", f"jobs/{name}", "jobs/in_job.sh"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SLURM + PBS)
def test_no_variable_of_a_task_is_expanded_in_the_batch_shell(name: str) -> None:
    text = (ROOT / "jobs" / name).read_text() + (ROOT / "jobs" / "in_job.sh").read_text()
    assert not re.search(r"\$\{?(SLURM_(PROCID|LOCALID|NODEID)|PBS_(NODENUM|TASKNUM)|RANK|LOCAL_RANK)", text)


@pytest.mark.parametrize("name", SLURM + PBS)
def test_the_directives_come_before_the_first_command(name: str) -> None:
    lines = (ROOT / "jobs" / name).read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith(("#SBATCH", "#PBS"))]


# --- finding the kit

@pytest.mark.parametrize("between", ["", " SubmitLine=sbatch -N 2 {kit}/jobs/{name} my train.py --epochs 3"])
@pytest.mark.parametrize("name", SLURM)
def test_slurm_says_where_the_file_was_that_was_submitted(name: str, between: str, kit: Path) -> None:
    elsewhere = kit.parent / "elsewhere"
    elsewhere.mkdir()
    words = ["my train.py", "--epochs", "3"]
    between = between.format(kit=kit, name=name)
    program(kit.parent / "programs", "scontrol", f"""
[ "$*" = 'show job --oneliner 12' ] || exit 1
for element in 1 2; do # the last element of an array has the id of the array, and scontrol shows them all
    echo 'JobId=12 JobName=x Command={kit}/jobs/{name} {" ".join(words)}{between} WorkDir={elsewhere} StdErr=/x'
done""")
    answer = told(run(spooled(kit, name), environment(name, elsewhere), words, elsewhere))
    assert answer["kit"] == str(kit)
    assert answer["folder"] == str(elsewhere)
    assert answer["words"] == [*(["--torchrun"] if "torchrun" in name else ["--by", "srun"]), "--", *words]


@pytest.mark.parametrize("name", PBS)
@pytest.mark.parametrize("path", ["../a kit with spaces/jobs/{}", "{kit}/jobs/{}"])
def test_pbs_says_where_the_file_was_that_was_submitted(name: str, path: str, kit: Path) -> None:
    elsewhere = kit.parent / "elsewhere"
    elsewhere.mkdir()
    program(kit.parent / "programs", "qstat", f"""
[ "$*" = '-f -w 12.head' ] || exit 1
echo 'Job Id: 12.head'
echo '    Submit_arguments = -l select=1:ncpus=1 -v FOO=a b,ARGS=x y {path.format(name, kit=kit)}'""")
    answer = told(run(spooled(kit, name), environment(name, elsewhere, ARGS="train.py --epochs 3"), (), Path("/")))
    assert answer["kit"] == str(kit)
    assert answer["folder"] == str(elsewhere)  # not the home directory, where PBS starts
    assert answer["words"] == [*(["--torchrun"] if "torchrun" in name else []), "--", "train.py", "--epochs", "3"]


@pytest.mark.parametrize("name", SLURM + PBS)
@pytest.mark.parametrize("inside", [".", "jobs"])
def test_the_kit_is_found_when_submitted_from_its_folder(name: str, inside: str, kit: Path) -> None:
    answer = told(run(spooled(kit, name), environment(name, kit / inside), ["train.py"], kit / inside))
    assert answer["kit"] == str(kit)


@pytest.mark.parametrize("name", SLURM + PBS)
def test_the_kit_is_found_when_the_script_runs_by_hand(name: str, kit: Path) -> None:
    env = {"PATH": PATH, "HOME": "/", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_O_WORKDIR": "/"}
    answer = told(run(Path("a kit with spaces/jobs") / name, env, ["train.py"], kit.parent))
    assert (answer["kit"], answer["folder"]) == (str(kit), str(kit.parent))


@pytest.mark.parametrize("name", SLURM + PBS)
def test_the_folder_of_the_kit_can_be_named(name: str, kit: Path) -> None:
    env = environment(name, kit.parent / "spool", DDPKIT_HOME=str(kit))
    assert told(run(spooled(kit, name), env, ["train.py"], kit.parent))["kit"] == str(kit)


@pytest.mark.parametrize("name", SLURM + PBS)
def test_a_kit_that_is_not_found_is_a_clear_error(name: str, kit: Path) -> None:
    elsewhere = kit.parent / "elsewhere"
    elsewhere.mkdir()
    done = run(spooled(kit, name), environment(name, elsewhere), ["train.py"], elsewhere)
    assert done.returncode == 1
    assert "was not found" in done.stderr and str(elsewhere) in done.stderr
    assert "DDPKIT_HOME=/path/to/the/kit" in done.stderr
    assert "qsub -v" not in done.stderr  # it would replace the line that guards the login shell


# --- arguments, Python, exit status

def test_arguments_by_qsub_v_may_be_quoted_and_nothing_in_them_runs(kit: Path) -> None:
    name = "pbs_mpiexec.sh"
    env = environment(name, kit, ARGS="""'my train.py' --note "a  b" $(touch ran) `touch ran` ; touch ran""")
    words = told(run(spooled(kit, name), env))["words"]
    assert words == ["--", "my train.py", "--note", "a  b", "$(touch", "ran)", "`touch", "ran`", ";", "touch", "ran"]
    assert not (kit / "ran").exists()


def test_words_of_the_command_line_go_before_args(kit: Path) -> None:
    name = "pbs_mpiexec.sh"
    env = environment(name, kit, ARGS="other.py")
    assert told(run(kit / "jobs" / name, env, ["a b.py", "c"]))["words"] == ["--", "a b.py", "c"]


@pytest.mark.parametrize("name", PBS)
@pytest.mark.parametrize("more", [{}, {"ARGS": ""}, {"ARGS": "  "}, {"ARGS": "'' --epochs 3"}])
def test_pbs_script_without_anything_to_run_says_how_to_pass_it(name: str, more: dict[str, str], kit: Path) -> None:
    done = run(spooled(kit, name), environment(name, kit, **more))
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is nothing to run" in done.stderr and "qsub -V" in done.stderr


@pytest.mark.parametrize("text", [
    "train.py --note 'it is", 'train.py --note "it is --epochs 3', "train.py it's", "a \\"])
def test_unbalanced_quote_in_args_is_refused(text: str, kit: Path) -> None:
    done = run(spooled(kit, PBS[0]), environment(PBS[0], kit, ARGS=text))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Correct the quotes" in done.stderr


def test_args_are_split_as_a_shell_splits_words(kit: Path) -> None:
    text = r"""train.py --json "{\"a\": 1}" a\ b '' "c
d" é"""
    assert told(run(spooled(kit, PBS[0]), environment(PBS[0], kit, ARGS=text)))["words"] == [
        "--", "train.py", "--json", '{"a": 1}', "a b", "", "c\nd", "é"]


def chosen(name: str, kit: Path, **more: str) -> str:
    """The Python for the ranks of a job."""
    return str(told(run(spooled(kit, name), environment(name, kit, **more), ["t.py", "--choose"]))["python"])


def test_the_python_is_the_one_that_is_named(kit: Path) -> None:
    make_environment(kit / ".venv", torch=True)
    python = make_environment(kit.parent / "other", torch=True)
    assert chosen("slurm_srun.sh", kit, PYTHON=str(python)) == str(python)


@pytest.mark.parametrize("name", SLURM + PBS)
def test_the_python_is_that_of_an_active_environment_unless_it_has_no_torch(name: str, kit: Path) -> None:
    own = make_environment(kit / ".venv", torch=True)
    active = make_environment(kit.parent / "venv", torch=True)
    base = make_environment(kit.parent / "base", torch=False)
    for python, expected in ((active, active), (base, own)):
        path = f"{python.parent}:{PATH}"
        for more in ({"VIRTUAL_ENV": str(python.parents[1])}, {"CONDA_PREFIX": str(python.parents[1])},
                     {"PBS_O_PATH": path} if name in PBS else {"PATH": path}):
            assert Path(chosen(name, kit, **more)).parent == expected.parent, more


@pytest.mark.parametrize("name", SLURM + PBS)
def test_the_python_is_that_of_the_set_up_lines(name: str, kit: Path) -> None:
    make_environment(kit / ".venv", torch=True)
    brought = make_environment(kit.parent / "module", torch=True)
    active = make_environment(kit.parent / "venv", torch=True)
    script = spooled(kit, name)
    script.write_text(script.read_text().replace("# set-up lines of your own:", f"PATH='{brought.parent}':$PATH"))
    done = run(script, environment(name, kit, VIRTUAL_ENV=str(active.parents[1])), ["t.py", "--choose"])
    assert told(done)["python"] == str(brought.parent / "python3")


@pytest.mark.parametrize("name", SLURM + PBS)
def test_any_python_that_starts_serves_for_launch_py(name: str, kit: Path) -> None:
    own = make_environment(kit / ".venv", torch=True)
    program(kit.parent / "programs", "python3", "echo pyenv: python3: command not found >&2; exit 127")
    assert told(run(spooled(kit, name), environment(name, kit), ["t.py"]))["python"] == str(own)
    shutil.rmtree(kit / ".venv")
    done = run(spooled(kit, name), environment(name, kit, PATH=str(tools(kit))), ["t.py"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Python was found" in done.stderr and "setup_env.sh" in done.stderr


def tools(kit: Path) -> Path:
    """A folder with what a job script itself needs, and no Python."""
    folder = kit.parent / "tools"
    folder.mkdir()
    for name in ("bash", "sed", "dirname", "cut", "tr"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


@pytest.mark.parametrize("name", SLURM + PBS)
def test_set_up_lines_may_use_unset_variables_broken_pipes_and_modules(name: str, kit: Path) -> None:
    """As the files of a site do; the command `module` is there although csh, say, could not pass it on."""
    lmod = kit.parent / "lmod"
    (lmod / "init").mkdir(parents=True)
    (lmod / "init" / "bash").write_text('export LOADED=$NOT_SET\nmodule() { export LOADED="$*"; }\n')
    script = spooled(kit, name)
    lines = 'module load python; echo "$NOT_SET"; yes | head -n 1 >/dev/null; export EXIT=$((40 + ${#LOADED}))'
    script.write_text(script.read_text().replace("# set-up lines of your own:", lines))
    assert run(script, environment(name, kit, LMOD_PKG=str(lmod)), ["t.py"]).returncode == 40 + len("load python")


@pytest.mark.parametrize("name", SLURM + PBS)
def test_the_exit_status_is_that_of_launch(name: str, kit: Path) -> None:
    done = run(spooled(kit, name), environment(name, kit, EXIT="42"), ["train.py"])
    assert done.returncode == 42


# --- signals

def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 20
    while not path.exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("name", SLURM + PBS)
def test_a_signal_to_the_script_reaches_launch_at_once_and_once(name: str, kit: Path) -> None:
    started = kit.parent / "started"
    with subprocess.Popen(["bash", str(spooled(kit, name)), "--wait", str(started)], env=environment(name, kit),
                          stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for(started, process)
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B:USR1 does
            assert process.stdout.readline() == "launch.py has USR1\n"
        os.killpg(process.pid, signal.SIGTERM)  # PBS: to every process of the session
        assert process.wait(20) == 7


def guard(name: str, kit: Path) -> str:
    line = next(line for line in (kit / "jobs" / name).read_text().splitlines() if line.startswith("#PBS -v BASH_ENV="))
    return line.removeprefix("#PBS -v BASH_ENV=").strip("'")


def in_login_shell(script: Path, env: Mapping[str, str], profile: str = "",
                   login_shell: str = "/bin/bash") -> subprocess.Popen[str]:
    """As PBS does it: -bash reads the path of the script, everything is one session, signals go to all of it."""
    home = script.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".bash_profile").write_text(profile)
    shell = subprocess.Popen([f"-{Path(login_shell).name}"], executable=login_shell, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                             env={"MODULEPATH_ROOT": "/none",  # keeps a profile of Lmod from setting BASH_ENV
                                  **env, "HOME": str(home), "TMPDIR": str(home)})
    assert shell.stdin is not None
    shell.stdin.write(f"{script}\n")
    shell.stdin.close()
    return shell


@pytest.mark.parametrize("name", PBS)
@pytest.mark.parametrize("profile", ["", "echo welcome; set -u; false\n"])
def test_the_login_shell_of_pbs_outlives_usr1(name: str, profile: str, kit: Path) -> None:
    started = kit.parent / "started"
    env = environment(name, kit, BASH_ENV=guard(name, kit), ARGS=f"--wait '{started}'")
    with in_login_shell(spooled(kit, name), env, profile) as shell:
        assert shell.stdout is not None
        wait_for(started, shell)
        lines = iter(shell.stdout.readline, "")
        before = next(line for line in lines if line != "welcome\n")
        assert '"words"' in before  # no warning
        os.killpg(shell.pid, signal.SIGUSR1)
        assert next(lines) == "launch.py has USR1\n"
        os.killpg(shell.pid, signal.SIGTERM)
        assert shell.wait(20) == 7


@pytest.mark.parametrize("name", PBS)
def test_the_guard_of_the_login_shell_follows_no_link_in_a_shared_folder(name: str, kit: Path) -> None:
    env = environment(name, kit, BASH_ENV=guard(name, kit), ARGS="train.py")
    script = spooled(kit, name)
    (script.parent / "home").mkdir()
    target = kit.parent / "target"
    target.write_text("precious")
    (script.parent / "home" / ".survive").symlink_to(target)  # by another user, in /tmp
    with in_login_shell(script, env) as shell:
        assert shell.stdout is not None
        assert "warning" not in shell.stdout.read()
    assert target.read_text() == "precious"


@pytest.mark.parametrize("name", PBS)
@pytest.mark.parametrize(("profile", "value", "said"), [
    ("", "/dev/null", "BASH_ENV is /dev/null"),  # as by Lmod and qsub -V
    ("export BASH_ENV=/dev/null\n", None, "env -u BASH_ENV qsub -V"),  # as by a site with Lmod
    ("", "", "BASH_ENV is not set")])  # as by qsub -v A=1
def test_a_login_shell_that_ends_at_usr1_is_reported_before_the_start(name: str, profile: str, value: str | None,
                                                                      said: str, kit: Path) -> None:
    env = environment(name, kit, BASH_ENV=guard(name, kit) if value is None else value, ARGS="train.py")
    with in_login_shell(spooled(kit, name), env, profile) as shell:
        assert shell.stdout is not None
        output = shell.stdout.read()
        assert shell.wait(20) == 0
    assert output.startswith("job script: warning: the login shell of this job (-bash) ends at USR1 and TERM")
    assert said in output and 'Add "trap : USR1 TERM" to ~/.bash_profile' in output and '"train.py"' in output


@pytest.mark.parametrize("profile", ["trap : USR1 TERM\n"])
def test_the_remedies_that_the_warning_names_silence_it(profile: str, kit: Path) -> None:
    env = environment(PBS[0], kit, BASH_ENV="/dev/null", ARGS="train.py")
    with in_login_shell(spooled(kit, PBS[0]), env, profile) as shell:
        assert shell.stdout is not None
        assert "warning" not in shell.stdout.read()
    done = subprocess.run([str(spooled(kit, PBS[0])), "train.py"], env=env, start_new_session=True, text=True,
                          capture_output=True, timeout=30)  # qsub --
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PBS)
def test_bash_env_of_the_user_is_kept(name: str, kit: Path) -> None:
    own = kit.parent / "own"
    own.write_text("")
    (kit / "scripts" / "launch.py").write_text("import os; print(os.environ.get('BASH_ENV'))")
    for value, expected in ((str(own), f"{own}\n"), ("/x/.survive.a1b2c3", "None\n")):
        assert run(spooled(kit, name), environment(name, kit, BASH_ENV=value), ["t.py"]).stdout == expected

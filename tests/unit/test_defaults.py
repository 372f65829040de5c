"""Defaults of options in files: which wins, what a mistake says, and what commands do with them."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.programs import ROOT
from tests.unit.pythons import make_environment
from tests.unit.scheduler_commands import Commands
from tests.unit.submission import Login
from utils.tools.cli import defaults, interpreter
from utils.tools.cli.defaults import DefaultsError
from utils.tools.cli.main import main

READS_TOML = sys.version_info >= (3, 11)
PROJECT = """
[tool.ddpkit]
site = "./ours.yaml"
hang-timeout = 90
check-training = false
"""
USER = """\
---
# mine
account: abc@v100  # of this year
hang-timeout: 30
partition: "gpu"
"""
CENTRE = "partition: long\nport-range: 20000-20999\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder below a project, with a home and a centre's file; no variable is set."""
    for setting in defaults.SETTINGS.values():
        monkeypatch.delenv(setting.variable or "DDPKIT_NONE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(defaults.CENTRE_VARIABLE, raising=False)
    monkeypatch.setattr(defaults, "SYSTEM_FILE", str(tmp_path / "etc.yaml"))
    monkeypatch.setattr(defaults, "KIT_FILE", str(tmp_path / "centre.yaml"))
    (tmp_path / "config").mkdir()
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "project" / "src")
    return tmp_path


def write(folder: Path, project: str = "", user: str = "", centre: str = "") -> None:
    (folder / "project/pyproject.toml").write_text(project)
    (folder / "config/ddpkit.yaml").write_text(user)
    (folder / "centre.yaml").write_text(centre)


def test_project_wins_over_user_over_centre(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert defaults.load() == {}
    write(folder, PROJECT if READS_TOML else "", USER, CENTRE)
    project, user, centre = f"{folder}/project/pyproject.toml", f"{folder}/config/ddpkit.yaml", f"{folder}/centre.yaml"
    expected = {"account": ("abc@v100", user), "partition": ("gpu", user), "port-range": ("20000-20999", centre),
                "hang-timeout": ("30", user)}
    if READS_TOML:
        expected |= {"site": (f"{folder}/project/./ours.yaml", project), "hang-timeout": ("90", project),
                     "check-training": ("false", project)}
    if READS_TOML:
        assert main(["sites", "trust"]) == 0
    assert defaults.load() == expected
    monkeypatch.setenv("DDPKIT_HANG_TIMEOUT", "7")
    assert defaults.load() == {**expected, "hang-timeout": ("7", "$DDPKIT_HANG_TIMEOUT")}


@pytest.mark.parametrize(("files", "message"), [
    ({"user": "account: a\nhang-timeout: soon"}, "hang-timeout is 'soon'. Expected a value such as 300"),
    ({"centre": "account: a\n- b"}, "centre.yaml, line 2: '- b' is not 'key: value'"),
    *[({"project": "[tool.ddpkit]\nport-range = 7"}, "port-range is '7'. Expected"),
      ({"project": "[tool.ddpkit"}, "pyproject.toml is not TOML")] * READS_TOML])
def test_mistake_names_file_and_key(folder: Path, files: dict[str, str], message: str,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, **files)
    with pytest.raises(DefaultsError) as raised:
        defaults.load()
    assert message in str(raised.value)
    for words in (["launch", "-n", "2", "hostname"], ["submit", "run", "train.py"], ["sites", "config"]):
        assert main(words) in (1, 2)
        assert message in capsys.readouterr().err


def test_unknown_key_is_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, user="acount: x\naccount: a\n")
    assert main(["sites", "config"]) == 0
    found = capsys.readouterr()
    assert found.out.splitlines()[1].split()[:2] == ["account", "a"]
    mistake = "config/ddpkit.yaml, line 1: the key 'acount' is unknown and ignored. Did you mean 'account'?"
    assert found.err.count(mistake) == 1


def test_python_3_10_says_that_it_reads_no_toml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    write(folder, "[project]\nname = 'ddpkit'\n")
    assert defaults.load() == {}
    write(folder, PROJECT)
    with pytest.raises(DefaultsError, match=r"cannot read TOML. Expected Python 3.11 or newer. Write these lines into"):
        defaults.load()


def test_config_prints_each_value_with_its_origin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "", USER, CENTRE)
    assert main(["sites", "config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["account", "abc@v100", f"{folder}/config/ddpkit.yaml"]
    of_key = {line.split()[0]: line for line in lines[:10]}
    assert of_key["port-range"].split() == ["port-range", "20000-20999", f"{folder}/centre.yaml"]
    assert len(lines) == 10 + 2 + 3
    assert {of_key[key].index("not set") for key in ("check-training", "stage", "stage-dir")} == {
        of_key["port-range"].index(str(folder))}  # a column


def test_ranks_get_the_values_that_they_read(folder: Path) -> None:
    write(folder, "", "hang-timeout: 30\nport-range: 23000-23999\ncheck-training: false\n")
    show = "echo $DDPKIT_HANG_TIMEOUT $DDPKIT_PORT_RANGE $DDPKIT_CHECK_TRAINING"
    words = [sys.executable, str(ROOT / "scripts/launch.py"), "-n", "2"]

    def launched(*options: str, **environ: str) -> str:
        done = subprocess.run([*words, *options, "sh", "-c", show], text=True, capture_output=True, timeout=60,
                              env={**os.environ, **environ})
        assert done.returncode == 0, done.stderr
        return done.stdout
    assert launched() == "30 23000-23999 0\n" * 2
    assert launched("--hang-timeout", "5", DDPKIT_CHECK_TRAINING="1") == "5 23000-23999 1\n" * 2


def test_python_of_a_file_is_for_shells_without_an_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(folder / "env", torch=True)
    active = make_environment(folder / "active", torch=True)
    write(folder, "", f"python: {python}\n")
    environ = {"PATH": f"{active.parent}:/usr/bin:/bin"}
    assert interpreter.choose(environ, default=defaults.python()).path == str(python)
    environ["VIRTUAL_ENV"] = str(active.parents[1])
    assert interpreter.choose(environ, default=defaults.python()).path == str(active)
    write(folder, "", "python: /nowhere/python\n")
    with pytest.raises(interpreter.InterpreterError, match="ddpkit.yaml sets python to '/nowhere/python'"):
        interpreter.choose(environ, default=defaults.python())


def test_command_line_of_submit_wins(folder: Path, commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "", "site: generic-slurm\naccount: a1\npartition: gpu\n")
    login = Login(folder, commands, capsys)
    script = login.submit("run", "--dry-run", "train.py").out
    assert "--account=a1\n" in script and "--partition=gpu\n" in script
    script = login.submit("run", "--dry-run", "--site", "generic-pbs", "-A", "a2", "train.py").out
    assert "#PBS -A a2\n" in script and "#PBS -q gpu\n" in script


@pytest.mark.parametrize(("site", "variables", "files"), [
    ("generic-slurm", ["--account=of-shell\n", "--partition=of-shell\n"], ["--account=a1\n", "--partition=gpu\n"]),
    ("perlmutter", ["--account=of-shell\n", "--qos=gpu\n"], ["--account=a1\n", "--qos=gpu\n"]),
    ("generic-pbs", ["-A a1\n", "-q gpu\n"], ["-A a1\n", "-q gpu\n"])])
def test_variables_of_sbatch_win_over_files(folder: Path, commands: Commands, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch, site: str, variables: list[str],
                                            files: list[str]) -> None:
    write(folder, "", f"site: {site}\naccount: a1\npartition: gpu\n")
    login = Login(folder, commands, capsys)
    script = login.submit("run", "--dry-run", "train.py").out
    assert all(line in script for line in files), script
    monkeypatch.setenv("SBATCH_ACCOUNT", "of-shell")
    monkeypatch.setenv("SBATCH_PARTITION", "of-shell")
    script = login.submit("run", "--dry-run", "train.py").out
    assert all(line in script for line in variables), script
    assert "of-option" in login.submit("run", "--dry-run", "-A", "of-option", "train.py").out


# The file of a centre -----------------------------------------------------------------------------

def test_centres_file_lies_outside_of_the_installation(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, centre="account: kit\n")
    assert defaults.load() == {"account": ("kit", f"{folder}/centre.yaml")}
    (folder / "etc.yaml").write_text("account: system\n")
    assert defaults.load() == {"account": ("system", f"{folder}/etc.yaml")}
    (folder / "module.yaml").write_text("account: module\n")
    monkeypatch.setenv("DDPKIT_CENTRE_FILE", f"{folder}/module.yaml")
    assert defaults.load() == {"account": ("module", f"{folder}/module.yaml")}
    assert main(["sites", "config"]) == 0 and capsys.readouterr().out.endswith(f"  {folder}/module.yaml\n")
    monkeypatch.setenv("DDPKIT_CENTRE_FILE", f"{folder}/none.yaml")
    assert defaults.load() == {} and f"{folder}/none.yaml, which does not exist" in capsys.readouterr().err


def test_job_reads_the_centres_file_that_its_submission_read(folder: Path, commands: Commands,
                                                             capsys: pytest.CaptureFixture[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """qsub passes no variable of the shell to a job."""
    write(folder)
    (folder / "ours.yaml").write_text("port-range: 20000-20999\n")
    monkeypatch.setenv("DDPKIT_CENTRE_FILE", f"{folder}/ours.yaml")
    found = Login(folder, commands, capsys).submit("run", "--dry-run", "--site", "generic-pbs", "train.py")
    assert f"export DDPKIT_CENTRE_FILE={folder}/ours.yaml\n" in found.out and "DDPKIT_CENTRE_FILE" not in found.err


def test_check_of_a_file_names_each_mistake_with_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python, file = make_environment(folder / "env", torch=True), folder / "new.yaml"
    file.write_text(f"# ours\nsite: derecho\naccount: abc\npython: {python}\nport-range: 20000-20999\nstage: true\n")
    assert main(["sites", "config", str(file)]) == 0
    found = capsys.readouterr()
    assert found.out.endswith(f"{file}: no mistake found\n") and not found.err
    assert found.out.splitlines()[0].split() == ["site", "derecho"]

    file.write_text("acount: abc\nsite: dercho\n- x\nport-range: 30000-20000\nport-range: 20000-90000\nstage: maybe\n"
                    "python: /nowhere/python\nhang-timeout: 10\nhang-timeout: 20\nfollow-seconds: 0\n")
    assert main(["sites", "config", str(file)]) == 1
    lines = capsys.readouterr().err.splitlines()
    expected = {1: "the key 'acount' is unknown. Did you mean 'account'?", 2: "There is no site 'dercho'",
                3: "'- x' is not 'key: value'", 4: "port-range is '30000-20000'. Expected two ports such as ",
                5: "port-range is '20000-90000'", 6: "stage is 'maybe'. Expected a value such as true",
                7: "no program on this host", 9: "hang-timeout is set a second time", 10: "follow-seconds is '0'"}
    assert len(lines) == len(expected), lines
    for number, text in expected.items():
        assert sum(f"{file}, line {number}: " in line and text in line for line in lines) == 1, (number, lines)
    assert main(["sites", "config", str(folder / "none.yaml")]) == 1
    assert "none.yaml cannot be read: No such file" in capsys.readouterr().err

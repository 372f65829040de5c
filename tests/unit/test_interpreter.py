"""Which Python runs the ranks: choose() alone, and the commands in a copy of the kit with a .venv."""
from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.pythons import make_environment
from utils.launch import interpreter
from utils.launch.interpreter import InterpreterError, choose

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "/usr/bin:/bin"
TRAIN = "import sys, torch\nprint('trains with', sys.executable)\n"
COMMANDS = ["scripts/launch.py", "scripts/submit.py", "utils/__main__.py"]  # started by any Python


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Environments: two with torch, two without, one with torch that is Python 3.9."""
    folder = tmp_path_factory.mktemp("environments")
    made = {name: make_environment(folder / name, torch=name.startswith("torch"))
            for name in ("torch", "torch 2", "base", "pyenv")}
    made["old"] = make_environment(folder / "old", torch=True, version=(3, 9))
    return made


@pytest.fixture
def chosen(pythons: dict[str, Path], tmp_path: Path,
           monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Call choose() without any other Python; `kit` names the environment of the kit's .venv."""
    def call(kit: str | None, torch: bool = True, **environ: str) -> str:
        path = str(pythons[kit]) if kit else str(tmp_path / "none")
        monkeypatch.setattr(interpreter, "KIT_PYTHON", path)
        base = {"PATH": "/nowhere", interpreter.STARTED_BY: "/nowhere/python3"}
        return str(choose({**base, **environ}, torch=torch))
    return call


def folder(python: Path) -> str:
    return str(python.parent)


def prefix(python: Path) -> str:
    return str(python.parents[1])


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_active_environment_with_torch_comes_first(chosen: Callable[..., str],
                                                   pythons: dict[str, Path], name: str) -> None:
    path = pythons["torch"]
    assert chosen("torch 2", **{name: prefix(path)}) == f"Python for the ranks: {path} ({name})"


def test_environments_without_torch_are_passed_over_and_named(chosen: Callable[..., str],
                                                              pythons: dict[str, Path]) -> None:
    path = f"{folder(pythons['pyenv'])}:/bin"
    assert chosen("torch", CONDA_PREFIX=prefix(pythons["base"]), PATH=path) == (
        f"Python for the ranks: {pythons['torch']} (the kit's .venv). Passed over: "
        f"{pythons['base']} (CONDA_PREFIX) has no torch; {folder(pythons['pyenv'])}/python3 (PATH) "
        "has no torch")


def test_python_of_path_comes_first_unless_the_system_brought_it(
        chosen: Callable[..., str], pythons: dict[str, Path],
        monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(pythons["torch"])
    assert f"{path}/python3 (PATH)" in chosen("torch 2", PATH=path)
    monkeypatch.setattr(interpreter, "SYSTEM_FOLDERS", (path,))
    assert "(the kit's .venv)" in chosen("torch 2", PATH=path)
    assert f"{path}/python3 (PATH)" in chosen("base", PATH=path)


def test_set_up_lines_come_before_active_environments(chosen: Callable[..., str],
                                                      pythons: dict[str, Path]) -> None:
    path = folder(pythons["torch"])
    environ = {"PATH": f"{path}:{SYSTEM}", "CONDA_PREFIX": prefix(pythons["torch 2"])}
    changed = chosen(None, DDPKIT_PYTHON_AT_START="/usr/bin/python3", **environ)
    assert "(the job's set-up lines)" in changed
    assert "(CONDA_PREFIX)" in chosen(None, DDPKIT_PYTHON_AT_START=f"{path}/python3", **environ)


def test_pbs_job_takes_the_python_of_the_submission(chosen: Callable[..., str],
                                                    pythons: dict[str, Path]) -> None:
    path = f"{folder(pythons['torch'])}:{SYSTEM}"
    assert "(PATH at submission)" in chosen("torch 2", PBS_JOBID="1.head", PBS_O_PATH=path)


def test_no_python_with_torch_is_an_error_that_names_each(chosen: Callable[..., str],
                                                          pythons: dict[str, Path]) -> None:
    with pytest.raises(InterpreterError) as raised:
        chosen(None, CONDA_PREFIX=prefix(pythons["base"]), VIRTUAL_ENV=prefix(pythons["old"]))
    text = str(raised.value)
    assert f"{pythons['base']} (CONDA_PREFIX) has no torch" in text
    assert f"{pythons['old']} (VIRTUAL_ENV) is Python 3.9, older than 3.10" in text
    assert "Expected Python 3.10 or newer with torch" in text and "setup_env.sh" in text


@pytest.mark.parametrize(("value", "found"), [
    ("{base}", "has no torch"), ("{old}", "is Python 3.9"), ("/nowhere/python", "is not a program"),
    ("/bin/false", "does not start (exit status 1)"), ("/bin/echo", "does not start")])
def test_named_python_that_cannot_be_used_is_an_error(
        chosen: Callable[..., str], pythons: dict[str, Path], value: str, found: str) -> None:
    named = value.format_map({name: str(path) for name, path in pythons.items()})
    with pytest.raises(InterpreterError, match="PYTHON is ") as raised:
        chosen("torch", PYTHON=named)
    assert found in str(raised.value)


def test_named_python_may_be_a_name_on_path(chosen: Callable[..., str],
                                            pythons: dict[str, Path]) -> None:
    path = folder(pythons["torch"])
    text = chosen("torch 2", PYTHON="python3", PATH=path)
    assert text == f"Python for the ranks: {path}/python3 (PYTHON)"


def test_program_needs_no_torch_but_gets_it_where_possible(chosen: Callable[..., str],
                                                           pythons: dict[str, Path]) -> None:
    base = prefix(pythons["base"])
    assert "(CONDA_PREFIX)" in chosen(None, torch=False, CONDA_PREFIX=base)
    assert "(the kit's .venv)" in chosen("torch", torch=False, CONDA_PREFIX=base)
    assert "(PYTHON)" in chosen("torch", torch=False, PYTHON=str(pythons["base"]))


def test_folder_named_torch_is_no_torch(chosen: Callable[..., str], pythons: dict[str, Path],
                                        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = prefix(pythons["base"])
    (tmp_path / "torch").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterpreterError, match="has no torch"):
        chosen(None, CONDA_PREFIX=base, PYTHONPATH=str(tmp_path))
    (tmp_path / "torch" / "__init__.py").touch()  # in the current folder, not that of the script
    with pytest.raises(InterpreterError, match="has no torch"):
        chosen(None, CONDA_PREFIX=base)
    assert "(CONDA_PREFIX)" in chosen(None, CONDA_PREFIX=base, PYTHONPATH=str(tmp_path))


def test_pythonhome_that_breaks_every_python_is_named(chosen: Callable[..., str],
                                                      tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match=f"does not start with PYTHONHOME={tmp_path}"):
        chosen("torch", PYTHONHOME=str(tmp_path))


def test_running_python_with_torch_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("a second Python was started")
    monkeypatch.setattr(subprocess, "run", fail)
    for name in (interpreter.AT_START, interpreter.STARTED_BY, "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    assert choose(os.environ).path == sys.executable


def test_other_environment_is_checked_by_starting_python(tmp_path: Path) -> None:
    """PYTHONHOME may break the Python of the ranks alone."""
    with pytest.raises(InterpreterError, match="PYTHONHOME"):
        choose({**os.environ, "PYTHON": sys.executable, "PYTHONHOME": str(tmp_path)})


def test_choosing_imports_no_torch() -> None:
    code = ("import os, sys; from utils.launch import interpreter; interpreter.choose(os.environ); "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- the commands

@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the kit after setup_env.sh, with a training script."""
    folder = tmp_path_factory.mktemp("copy") / "the kit"
    for name in ("scripts", "utils", "jobs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    make_environment(folder / ".venv", torch=True)
    (folder / "train.py").write_text(TRAIN)
    return folder


def run(python: str | Path, kit: Path, *words: str,
        **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": SYSTEM, "HOME": str(kit.parent), **environ}
    return subprocess.run([str(python), *words], cwd=kit, text=True, capture_output=True,
                          timeout=60, env=env)


@pytest.mark.parametrize("name", ["base", "old"])
@pytest.mark.parametrize("command", [["scripts/launch.py"], ["utils", "launch"]])
def test_active_python_without_torch_does_not_hide_the_kits(
        kit: Path, pythons: dict[str, Path], name: str, command: list[str]) -> None:
    path = f"{folder(pythons[name])}:{SYSTEM}"
    done = run(pythons[name], kit, *command, "train.py", CONDA_PREFIX=prefix(pythons[name]), PATH=path)
    assert done.returncode == 0, done.stderr
    assert f"trains with {kit}/.venv/bin/python" in done.stdout
    assert f"Passed over: {pythons[name]} (runs this script)" in done.stderr


def test_launch_py_starts_no_rank_without_torch(kit: Path, pythons: dict[str, Path]) -> None:
    done = run(kit / ".venv/bin/python", kit, "scripts/launch.py", "train.py",
               PYTHON=str(pythons["base"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"PYTHON is '{pythons['base']}', which has no torch" in done.stderr


def test_image_brings_its_own_torch(kit: Path, pythons: dict[str, Path], tmp_path: Path) -> None:
    apptainer = tmp_path / "apptainer"
    apptainer.write_text("#!/bin/sh\necho in the image: $*\n")
    apptainer.chmod(0o755)
    environ = {"PYTHON": "/in/the/image/python", "PATH": f"{tmp_path}:{SYSTEM}"}
    words = ["--container", "a.sif", "train.py"]
    done = run(pythons["base"], kit, "scripts/launch.py", *words, **environ)
    assert done.returncode == 0, done.stderr
    assert "in the image: exec a.sif python -u train.py" in done.stdout
    done = run(pythons["base"], kit, "scripts/launch.py", "--torchrun", *words, **environ)
    assert done.returncode == 2 and "PYTHON is '/in/the/image/python'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_old_python_alone_is_an_error_that_says_what_to_do(
        kit: Path, pythons: dict[str, Path], tmp_path: Path, command: str) -> None:
    for name in ("scripts", "utils"):
        shutil.copytree(kit / name, tmp_path / name)
    done = run(pythons["old"], tmp_path, command, "--help", PATH=folder(pythons["old"]))
    assert done.returncode == 1
    assert f"{Path(command).name}: error: this is Python 3.9" in done.stderr
    assert "Expected Python 3.10 or newer" in done.stderr


@pytest.mark.parametrize("file", [*COMMANDS, "utils/launch/interpreter.py"])
def test_python_3_6_can_parse_what_starts_first(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(), feature_version=(3, 6))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "__future__" not in [node.module for node in imports]


def test_variables_of_the_start_do_not_reach_the_ranks(kit: Path, pythons: dict[str, Path]) -> None:
    (kit / "shows.py").write_text("import os; print([n for n in os.environ if 'DDPKIT_' in n])")
    done = run(pythons["old"], kit, "scripts/launch.py", "shows.py",
               DDPKIT_PYTHON_AT_START="/usr/bin/python3")
    assert "DDPKIT_PYTHON_AT_START" not in done.stdout and "DDPKIT_STARTED_BY" not in done.stdout


def test_submit_restarts_under_the_kits_python_for_yaml(kit: Path, pythons: dict[str, Path]) -> None:
    yaml = kit / ".venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages" / "yaml.py"
    yaml.write_text("import sys\nsys.exit(f'yaml of {sys.executable}')\n")
    words = ["scripts/submit.py", "run", "--site", "lumi", "--dry-run", "train.py"]
    done = run(pythons["torch"], kit, *words)
    assert done.stderr == f"yaml of {kit}/.venv/bin/python\n"
    yaml.unlink()
    done = run(pythons["torch"], kit, *words)
    assert done.returncode == 1 and "PyYAML is not installed" in done.stderr

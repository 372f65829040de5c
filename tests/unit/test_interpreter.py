"""Which Python runs the ranks: choose() alone, and launch.py in a copy of the kit whose .venv has torch."""
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # where the scripts import each other from
import interpreter
from interpreter import InterpreterError, choose

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "/usr/bin:/bin"
TRAIN = "import sys, torch\nprint('trains with', sys.executable)\n"


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Environments: two with torch, two without, one with torch that is Python 3.9."""
    folder = tmp_path_factory.mktemp("environments")
    made = {name: make_environment(folder / name, torch=name.startswith("torch")) for name in (
        "torch", "torch 2", "base", "pyenv")}
    made["old"] = make_environment(folder / "old", torch=True, version=(3, 9))
    return made


@pytest.fixture
def chosen(pythons: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Call choose() for an environment without any other Python, with a kit whose .venv is one of these or missing."""
    def call(kit: str | None, torch: bool = True, **environ: str) -> str:
        monkeypatch.setattr(interpreter, "KIT_PYTHON", str(pythons[kit]) if kit else str(tmp_path / "none"))
        return str(choose({"PATH": "/nowhere", interpreter.STARTED_BY: "/nowhere/python3", **environ}, torch=torch))
    return call


def folder(python: Path) -> str:
    return str(python.parent)


def prefix(python: Path) -> str:
    return str(python.parents[1])


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_active_environment_with_torch_comes_before_the_kits(chosen: Callable[..., str], pythons: dict[str, Path],
                                                             name: str) -> None:
    assert chosen("torch 2", **{name: prefix(pythons["torch"])}) == f"Python for the ranks: {pythons['torch']} ({name})"


def test_active_environments_without_torch_are_passed_over_and_named(chosen: Callable[..., str],
                                                                     pythons: dict[str, Path]) -> None:
    text = chosen("torch", CONDA_PREFIX=prefix(pythons["base"]), PATH=f"{folder(pythons['pyenv'])}:/bin")
    assert text == (
        f"Python for the ranks: {pythons['torch']} (the kit's .venv). Passed over: {pythons['base']} (CONDA_PREFIX) "
        f"has no torch; {folder(pythons['pyenv'])}/python3 (PATH) has no torch")


def test_python_of_path_comes_before_the_kits_unless_the_system_brought_it(
        chosen: Callable[..., str], pythons: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(pythons["torch"])
    assert f"{path}/python3 (PATH)" in chosen("torch 2", PATH=path)
    monkeypatch.setattr(interpreter, "SYSTEM_FOLDERS", (path,))
    assert "(the kit's .venv)" in chosen("torch 2", PATH=path)
    assert f"{path}/python3 (PATH)" in chosen("base", PATH=path)


def test_set_up_lines_come_before_active_environments(chosen: Callable[..., str], pythons: dict[str, Path]) -> None:
    environ = {"PATH": f"{folder(pythons['torch'])}:{SYSTEM}", "CONDA_PREFIX": prefix(pythons["torch 2"])}
    assert "(the job's set-up lines)" in chosen(None, DDPKIT_PYTHON_AT_START="/usr/bin/python3", **environ)
    at_start = f"{folder(pythons['torch'])}/python3"
    assert "(CONDA_PREFIX)" in chosen(None, DDPKIT_PYTHON_AT_START=at_start, **environ)


def test_pbs_job_takes_the_python_that_was_active_at_submission(chosen: Callable[..., str],
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
def test_named_python_that_cannot_be_used_is_an_error(chosen: Callable[..., str], pythons: dict[str, Path], value: str,
                                                      found: str) -> None:
    with pytest.raises(InterpreterError, match="PYTHON is ") as raised:
        chosen("torch", PYTHON=value.format_map({name: str(path) for name, path in pythons.items()}))
    assert found in str(raised.value)


def test_named_python_may_be_a_name_on_path(chosen: Callable[..., str], pythons: dict[str, Path]) -> None:
    text = chosen("torch 2", PYTHON="python3", PATH=folder(pythons["torch"]))
    assert text == f"Python for the ranks: {folder(pythons['torch'])}/python3 (PYTHON)"


def test_program_needs_no_torch_but_gets_it_where_it_is(chosen: Callable[..., str], pythons: dict[str, Path]) -> None:
    assert "(CONDA_PREFIX)" in chosen(None, torch=False, CONDA_PREFIX=prefix(pythons["base"]))
    assert "(the kit's .venv)" in chosen("torch", torch=False, CONDA_PREFIX=prefix(pythons["base"]))
    assert "(PYTHON)" in chosen("torch", torch=False, PYTHON=str(pythons["base"]))


def test_folder_named_torch_is_no_torch(chosen: Callable[..., str], pythons: dict[str, Path], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterpreterError, match="has no torch"):
        chosen(None, CONDA_PREFIX=prefix(pythons["base"]), PYTHONPATH=str(tmp_path))
    (tmp_path / "torch" / "__init__.py").touch()  # a package in the current folder, where the script need not be
    with pytest.raises(InterpreterError, match="has no torch"):
        chosen(None, CONDA_PREFIX=prefix(pythons["base"]))
    assert "(CONDA_PREFIX)" in chosen(None, CONDA_PREFIX=prefix(pythons["base"]), PYTHONPATH=str(tmp_path))


def test_pythonhome_that_hinders_every_python_is_named(chosen: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match=f"does not start with PYTHONHOME={tmp_path}"):
        chosen("torch", PYTHONHOME=str(tmp_path))


# --- launch.py

@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the kit after setup_env.sh, with a training script."""
    folder = tmp_path_factory.mktemp("copy") / "the kit"
    for name in ("scripts", "utils"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    make_environment(folder / ".venv", torch=True)
    (folder / "train.py").write_text(TRAIN)
    return folder


def launch(python: str | Path, kit: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), "scripts/launch.py", *words], cwd=kit, text=True, capture_output=True,
                          timeout=60, env={"PATH": SYSTEM, "HOME": str(kit.parent), **environ})


@pytest.mark.parametrize("name", ["base", "old"])
def test_active_conda_base_without_torch_does_not_hide_the_kits_venv(kit: Path, pythons: dict[str, Path],
                                                                     name: str) -> None:
    done = launch(
        pythons[name], kit, "train.py", CONDA_PREFIX=prefix(pythons[name]), PATH=f"{folder(pythons[name])}:{SYSTEM}")
    assert done.returncode == 0, done.stderr
    assert f"trains with {kit}/.venv/bin/python" in done.stdout
    assert f"Passed over: {pythons[name]} (runs this script)" in done.stderr


def test_launch_py_starts_no_rank_where_no_python_has_torch(kit: Path, pythons: dict[str, Path]) -> None:
    done = launch(kit / ".venv/bin/python", kit, "train.py", PYTHON=str(pythons["base"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"PYTHON is '{pythons['base']}', which has no torch" in done.stderr


def test_image_needs_no_python_outside_that_has_torch(kit: Path, pythons: dict[str, Path], tmp_path: Path) -> None:
    apptainer = tmp_path / "apptainer"
    apptainer.write_text("#!/bin/sh\necho in the image: $*\n")
    apptainer.chmod(0o755)
    environ = {"PYTHON": "/in/the/image/python", "PATH": f"{tmp_path}:{SYSTEM}"}
    done = launch(pythons["base"], kit, "--container", "a.sif", "train.py", **environ)
    assert done.returncode == 0, done.stderr
    assert "in the image: exec a.sif python -u train.py" in done.stdout
    done = launch(pythons["base"], kit, "--torchrun", "--container", "a.sif", "train.py", **environ)
    assert done.returncode == 2 and "PYTHON is '/in/the/image/python'" in done.stderr


def test_launch_py_under_an_old_python_alone_says_what_to_do(kit: Path, pythons: dict[str, Path],
                                                             tmp_path: Path) -> None:
    for name in ("scripts", "utils"):
        shutil.copytree(kit / name, tmp_path / name)
    old = pythons["old"]
    done = launch(old, tmp_path, "--help", PATH=folder(old))
    assert done.returncode == 1
    assert "launch.py: error: this is Python 3.9" in done.stderr and "Expected Python 3.10 or newer" in done.stderr


@pytest.mark.parametrize("script", ["launch.py", "launch_recorded.py", "submit.py", "interpreter.py"])
def test_python_3_6_can_read_what_restarts_under_a_newer_one(script: str) -> None:
    tree = ast.parse((ROOT / "scripts" / script).read_text(), feature_version=(3, 6))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [node for node in imports if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    if script != "interpreter.py":  # modules that Python 3.6 does not have come after the restart
        assert isinstance(imports[0], ast.Import) and imports[0].names[0].name == "interpreter"


def test_python_of_a_launch_is_looked_for_once(kit: Path, pythons: dict[str, Path]) -> None:
    """What marks the start of a job script or a restart does not reach the ranks."""
    (kit / "shows.py").write_text("import os; print([name for name in os.environ if name.startswith('DDPKIT_')])")
    done = launch(pythons["old"], kit, "shows.py", DDPKIT_PYTHON_AT_START="/usr/bin/python3")
    assert "DDPKIT_PYTHON_AT_START" not in done.stdout and "DDPKIT_STARTED_BY" not in done.stdout, done.stdout


def test_checking_leaves_nothing_in_this_process() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import interpreter, os; interpreter.choose(os.environ); " \
           "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ)).returncode == 0

"""Which Python runs the ranks: choose() alone, and the commands in a copy of the kit with a .venv."""
from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.programs import ROOT
from tests.unit.pythons import make_environment
from utils.tools.cli import interpreter
from utils.tools.cli.interpreter import InterpreterError, choose

SYSTEM = "/usr/bin:/bin"
COMMANDS = ["utils/__main__.py", "scripts/launch.py"]  # started by any Python
TRAIN = """
import os, sys, torch
print("trains with", sys.executable, *{"DDPKIT_STARTED_BY"} & set(os.environ))
"""


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of environments: two with torch, two without, one with torch that is Python 3.9."""
    folder = tmp_path_factory.mktemp("the environments")
    for name in ("torch", "torch2", "base", "pyenv"):
        make_environment(folder / name, torch=name.startswith("torch"))
    make_environment(folder / "old", torch=True, version=(3, 9))
    return {name: folder / name for name in ("torch", "torch2", "base", "pyenv", "old")}


@pytest.fixture
def chosen(pythons: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Call choose() without any other Python; `kit` names the environment of the kit's .venv."""
    def call(kit: str, torch: bool = True, **environ: str) -> str:
        monkeypatch.setattr(interpreter, "KIT_PYTHON", f"{pythons.get(kit, '/nowhere')}/bin/python")
        values = {name: value.format_map(pythons) for name, value in environ.items()}
        return str(choose({"PATH": "/nowhere", interpreter.STARTED_BY: "/nowhere/python3", **values}, torch=torch))
    return call


@pytest.mark.parametrize(("kit", "environ", "expected"), [
    ("torch2", {"VIRTUAL_ENV": "{torch}"}, "Python for the ranks: {torch}/bin/python (VIRTUAL_ENV)"),
    ("torch", {"CONDA_PREFIX": "{base}", "PATH": "{pyenv}/bin:/bin"},
     "{torch}/bin/python (the kit's .venv). Passed over: {base}/bin/python (CONDA_PREFIX) has no torch; "
     "{pyenv}/bin/python3 (PATH) has no torch"),
    ("", {"PATH": "{torch}/bin:/bin", "CONDA_PREFIX": "{torch2}"}, "{torch2}/bin/python (CONDA_PREFIX)"),
    ("", {"PATH": "/bin", "CONDA_PREFIX": "{torch2}", "DDPKIT_STARTED_BY": "{torch}/bin/python3"},  # after set-up lines
     "{torch}/bin/python3 (runs this script)"),
    ("", {"PATH": "{torch}/bin:/bin", "VIRTUAL_ENV": "{torch}", "DDPKIT_STARTED_BY": "{torch2}/bin/python3"},
     "{torch}/bin/python (VIRTUAL_ENV)"),
    ("", {"PATH": "{torch2}/bin:{torch}/bin", "VIRTUAL_ENV": "{torch}", "CONDA_PREFIX": "{torch2}"},
     "{torch2}/bin/python (CONDA_PREFIX)"),  # activated last
    ("torch2", {"PBS_JOBID": "1.head", "PBS_O_PATH": "{torch}/bin:/bin"},
     "{torch}/bin/python3 (PATH at submission)"),
    ("torch2", {"PYTHON": "python3", "PATH": "{torch}/bin"}, "Python for the ranks: {torch}/bin/python3 (PYTHON)")])
def test_first_python_with_torch_is_chosen(chosen: Callable[..., str], pythons: dict[str, Path],
                                           kit: str, environ: dict[str, str], expected: str) -> None:
    assert expected.format_map(pythons) in chosen(kit, **environ)


def test_python_of_the_system_comes_last(
        chosen: Callable[..., str], pythons: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "SYSTEM_FOLDERS", (f"{pythons['torch']}/bin",))
    assert "(the kit's .venv)" in chosen("torch2", PATH="{torch}/bin")
    assert "/python3 (PATH)" in chosen("base", PATH="{torch}/bin")
    # A program needs no torch, but gets it where possible.
    assert "(CONDA_PREFIX)" in chosen("", torch=False, CONDA_PREFIX="{base}")
    assert "(the kit's .venv)" in chosen("torch", torch=False, CONDA_PREFIX="{base}")
    assert "(PYTHON)" in chosen("torch", torch=False, PYTHON="{base}/bin/python")


@pytest.mark.parametrize(("kit", "environ", "parts"), [
    ("", {"CONDA_PREFIX": "{base}", "VIRTUAL_ENV": "{old}"}, [
        "{base}/bin/python (CONDA_PREFIX) has no torch",
        "{old}/bin/python (VIRTUAL_ENV) is Python 3.9, older than 3.10",
        "Expected Python 3.10 or newer with torch", "setup_env.sh"]),
    ("torch", {"PYTHON": "{base}/bin/python"}, ["PYTHON is ", "has no torch"]),
    ("torch", {"PYTHON": "/nowhere/python"}, ["PYTHON is ", "is not a program"]),
    ("torch", {"PYTHON": "/bin/false"}, ["PYTHON is ", "does not start (exit status 1)"])])
def test_no_usable_python_is_an_error_that_names_each(
        chosen: Callable[..., str], pythons: dict[str, Path], kit: str, environ: dict[str, str],
        parts: list[str]) -> None:
    with pytest.raises(InterpreterError) as raised:
        chosen(kit, **environ)
    for part in parts:
        assert part.format_map(pythons) in str(raised.value)


def test_folder_named_torch_is_no_torch(
        chosen: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    with pytest.raises(InterpreterError, match="has no torch"):
        chosen("", CONDA_PREFIX="{base}", PYTHONPATH=str(tmp_path))
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)  # which is not the folder of the script
    with pytest.raises(InterpreterError, match="has no torch"):
        chosen("", CONDA_PREFIX="{base}")


def test_running_python_with_torch_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InterpreterError, match="does not start with PYTHONHOME=/nowhere"):  # may break that of ranks
        choose({**os.environ, "PYTHON": sys.executable, "PYTHONHOME": "/nowhere"})
    for name in (interpreter.STARTED_BY, "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a second Python was started"))
    assert choose(os.environ).path == sys.executable


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the kit after setup_env.sh, with a training script."""
    folder = tmp_path_factory.mktemp("copy") / "the kit"
    for name in ("scripts", "utils", "jobs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    make_environment(folder / ".venv", torch=True)
    (folder / "train.py").write_text(TRAIN)
    return folder


def run(python: Path, kit: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python / "bin/python"), *words], cwd=kit, text=True, capture_output=True, timeout=60,
                          env={"PATH": SYSTEM, "HOME": str(kit.parent), **environ})


@pytest.mark.parametrize(("name", "command"), [("base", ["scripts/launch.py"]), ("old", ["utils", "launch"])])
def test_active_python_without_torch_does_not_hide_the_kits(
        kit: Path, pythons: dict[str, Path], name: str, command: list[str]) -> None:
    active = str(pythons[name])
    done = run(pythons[name], kit, *command, "train.py", CONDA_PREFIX=active, PATH=f"{active}/bin:{SYSTEM}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"trains with {kit}/.venv/bin/python\n"
    assert f"Passed over: {active}/bin/python" in done.stderr


@pytest.mark.parametrize(("path", "options", "python", "is_named"), [
    ("{torch2}/bin:{module}/bin", [], "torch2", False),  # activated after `module load`
    ("{module}/bin:{torch2}/bin", [], "torch2", True),  # before it: `python` is that of the module
    ("{torch2}/bin:{module}/bin", ["--python", "{torch}/bin/python"], "torch", True),
    ("{module}/bin", [], "module", False)])
def test_active_environment_wins_over_a_centres_module(
        kit: Path, pythons: dict[str, Path], tmp_path: Path, path: str, options: list[str], python: str,
        is_named: bool) -> None:
    module = make_environment(tmp_path / "module", torch=True).parents[1]
    folders = {**pythons, "module": module}
    ddpkit = module / "bin" / "ddpkit"  # as pip installs it there
    ddpkit.write_text(
        f"import sys\nsys.path[0] = {str(kit)!r}\nfrom utils.tools.cli.main import main\nsys.exit(main())\n")
    environ = {"PATH": f"{path}:{SYSTEM}".format_map(folders)}
    if "torch2" in path:
        environ["VIRTUAL_ENV"] = str(pythons["torch2"])
    words = [word.format_map(folders) for word in options]
    done = run(module, kit, str(ddpkit), "launch", *words, "train.py", **environ)
    assert done.returncode == 0, done.stderr
    chosen = f"{folders[python]}/bin/python"
    assert done.stdout.startswith(f"trains with {chosen}"), done.stdout
    first = done.stderr.splitlines()[0]
    assert (f"ddpkit launch: Python for the ranks: {chosen}" in first) == is_named, done.stderr


def test_image_brings_its_own_torch_and_scripts(kit: Path, pythons: dict[str, Path], tmp_path: Path) -> None:
    apptainer = tmp_path / "apptainer"
    apptainer.write_text("#!/bin/sh\necho in the image: $*\n")
    apptainer.chmod(0o755)
    environ = {"PYTHON": "/in/the/image/python", "PATH": f"{tmp_path}:{SYSTEM}"}
    words = ["--container", "a.sif", "/opt/train.py"]
    done = run(pythons["base"], kit, "scripts/launch.py", *words, **environ)
    assert done.returncode == 0, done.stderr
    assert re.search("in the image: exec (--nv |--rocm )?a.sif python -u /opt/train.py", done.stdout), done.stdout
    done = run(pythons["base"], kit, "scripts/launch.py", "--torchrun", *words, **environ)
    assert done.returncode == 2 and "PYTHON is '/in/the/image/python'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_old_python_alone_is_an_error_that_says_what_to_do(
        kit: Path, pythons: dict[str, Path], tmp_path: Path, command: str) -> None:
    shutil.copytree(kit, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".venv"))
    done = run(pythons["old"], tmp_path, command, "--help", PATH=f"{pythons['old']}/bin")
    assert done.returncode == 1
    name = "ddpkit" if command.startswith("utils") else f"ddpkit {Path(command).stem}"
    assert f"{name}: error: this is Python 3.9" in done.stderr
    assert "Expected Python 3.10 or newer" in done.stderr


@pytest.mark.parametrize("file", [*COMMANDS, "utils/tools/cli/interpreter.py"])
def test_python_3_6_can_parse_what_starts_first(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(), feature_version=(3, 6))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "__future__" not in [node.module for node in imports]


def test_submit_restarts_under_the_kits_python_for_yaml(kit: Path, pythons: dict[str, Path]) -> None:
    yaml = kit / ".venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages" / "yaml.py"
    yaml.write_text("import sys\nsys.exit(f'yaml of {sys.executable}')\n")
    words = ["utils", "submit", "run", "--site", "lumi", "--dry-run", "train.py"]
    assert run(pythons["torch"], kit, *words).stderr == f"yaml of {kit}/.venv/bin/python\n"
    yaml.unlink()
    done = run(pythons["torch"], kit, *words)
    assert done.returncode == 1 and "PyYAML is not installed" in done.stderr


def test_a_yaml_of_another_python_is_named_with_its_error(kit: Path, pythons: dict[str, Path], tmp_path: Path) -> None:
    """As of a module, or a .bashrc, that exports PYTHONPATH."""
    foreign = tmp_path / "foreign" / "yaml" / "__init__.py"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("raise ImportError('cannot import name _yaml: built for Python 3.9')\n")
    words = ["utils", "submit", "run", "--site", "lumi", "--dry-run", "train.py"]
    done = run(pythons["torch"], kit, *words, PYTHONPATH=str(tmp_path / "foreign"))
    assert done.returncode == 1 and "not installed" not in done.stderr, done.stderr
    assert f"yaml of {foreign} was found and does not load: cannot import name _yaml: built for" in done.stderr
    assert f"Take {tmp_path}/foreign out of PYTHONPATH: it may belong to another Python" in done.stderr


def test_bench_restarts_under_a_python_with_torch(kit: Path, pythons: dict[str, Path], tmp_path: Path) -> None:
    done = run(pythons["base"], kit, "utils", "bench", "--help")
    assert "No module named 'torch.distributed'" in done.stderr  # the stand-in for torch in the kit's .venv
    (kit / "scripts/ddpkit").write_text(  # as pip installs it
        "import sys\nsys.path[0] = '.'\nfrom utils.tools.cli.main import main\nsys.exit(main())\n")
    done = run(pythons["base"], kit, "scripts/ddpkit", "bench", "--help")
    assert done.returncode == 1 and "ddpkit is installed for it alone. Expected both in one Python" in done.stderr
    shutil.copytree(kit, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".venv"))
    done = run(pythons["base"], tmp_path, "utils", "bench", "--help")
    assert done.returncode == 1 and done.stderr.startswith("ddpkit bench: error: no Python for the ranks:")


def test_plan_without_torch_is_an_error_that_says_what_to_do(
        kit: Path, pythons: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(kit, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".venv"))
    yaml = str(Path(importlib.import_module("yaml").__file__ or "").parents[1])
    done = run(pythons["base"], tmp_path, "-c", f"""
import sys; sys.path.append({yaml!r}); import yaml; sys.path.pop()
from utils.tools.cli import main; sys.exit(main.main(["plan", "--gpus", "8", "train.py"]))""")
    assert done.returncode == 1 and "has no torch. Expected torch for --model and for a script" in done.stderr

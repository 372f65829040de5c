"""scripts/setup_env.sh: what it refuses, and what it leaves as it is. No network is used."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pip
import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script needs of a checkout, in a path with a blank."""
    folder = tmp_path / "a clone"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def set_up(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = {**kept, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **variables}
    command = [checkout / "scripts" / "setup_env.sh", *words]
    return subprocess.run(command, env=env, cwd=checkout.parent, capture_output=True, text=True, timeout=100)


def shell_word(path: Path) -> str:
    return str(path).replace(" ", "\\ ")


def environment(checkout: Path, *, has_torch: bool) -> Path:
    """Make a .venv that the script says it has completed; return the file that says so."""
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    installed = next((venv / "lib").glob("python*/site-packages"))
    (installed / "pip").symlink_to(Path(pip.__file__).parent)  # its own takes seconds
    if has_torch:  # of the environment of the tests
        (installed / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        (installed / "ddpkit").symlink_to(ROOT / "utils")
    project = (checkout / "pyproject.toml").read_text()
    wanted = re.findall(r'"((?:torch|numpy|pyyaml)[^"]*)"', project)
    state = venv / ".setup_env"
    state.write_text("\n".join([f"made {venv}", *wanted, f"--editable={checkout}"]) + "\n")
    return state


@pytest.mark.parametrize(("words", "variables", "sentence"), [
    (["--tets"], {}, "the arguments are '--tets'. Expected --tests, or none. See: "),
    (["--tests", "torch"], {}, "the arguments are '--tests torch'"),
    ([], {"PYTHON": "/no/python3"}, "no Python >= 3.10 found (tried: /no/python3). Install one"),
    ([], {"PYTHON": "OLD"}, "no Python >= 3.10 found (tried: OLD)")])
def test_mistake_is_one_line_and_makes_nothing(words: list[str], variables: dict[str, str], sentence: str,
                                               checkout: Path) -> None:
    old = checkout.parent / "python3.9"  # runs the check of its version as a Python 3.9 would
    old.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c \"import sys; sys.version_info = (3, 9); $2\"\n")
    old.chmod(0o755)
    variables = {name: value.replace("OLD", str(old)) for name, value in variables.items()}
    done = set_up(checkout, *words, **variables)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not done.stdout, done
    assert done.stderr.startswith(f"setup_env: error: {sentence.replace('OLD', str(old))}")
    assert not (checkout / ".venv").exists()


def test_help_is_the_head_of_the_script(checkout: Path) -> None:
    done = set_up(checkout, "--help")
    assert done.returncode == 0 and "PIP_TORCH_SPEC=..." in done.stdout and not done.stderr


def test_environment_of_another_origin_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").touch()
    done = set_up(checkout)
    assert done.returncode == 1 and ".venv was not made by this script. Move it away" in done.stderr
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["mine"]


def test_failed_installation_ends_with_what_to_do_and_is_repeated(checkout: Path) -> None:
    done = set_up(checkout, PIP_TORCH_SPEC="torch=2.8")
    assert done.returncode == 1 and "Invalid requirement: 'torch=2.8'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("setup_env: error: pip could not install this, see above. ")
    assert (checkout / ".venv" / ".setup_env").read_text() == "" and "is ready" not in done.stdout


def test_complete_environment_is_left_as_it_is(checkout: Path) -> None:
    state = environment(checkout, has_torch=True)
    before = state.read_text()
    done = set_up(checkout)
    assert done.returncode == 0 and state.read_text() == before, done
    build, ready = done.stdout.splitlines()
    assert re.fullmatch(r"setup_env: torch \S+ for .+", build)
    assert ready == f"setup_env: {checkout}/.venv is ready: source {shell_word(checkout)}/.venv/bin/activate"


def test_environment_that_lacks_torch_is_not_believed(checkout: Path) -> None:
    state = environment(checkout, has_torch=False)
    done = set_up(checkout)
    assert done.returncode == 1 and "setup_env: error: pip could not install this" in done.stderr, done
    assert "cannot import ddpkit and torch: installing what is missing again" in done.stdout
    assert state.read_text() == "" and "is ready" not in done.stdout

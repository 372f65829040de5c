"""environment.yml and pyproject.toml agree, and the kit works where pip has installed it."""
from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPI_NAME = {"pytorch": "torch"}  # where conda-forge calls a package otherwise


def bounds(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(requirement) for requirement in requirements]
    return {PYPI_NAME.get(r.name, r.name): str(r.specifier) for r in parsed}


def pyproject() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def conda_bounds() -> dict[str, str]:
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    from_conda = [entry for entry in entries if isinstance(entry, str)]
    from_pip = [line for entry in entries if isinstance(entry, dict) for line in entry["pip"]]
    return bounds(from_conda + from_pip)


def test_environment_yml_lists_the_packages_and_bounds_of_pyproject() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    wanted = bounds([*project["dependencies"], *(requirement for extra in extras for requirement in extra)])
    wanted["python"] = project["requires-python"]
    listed = conda_bounds()
    del listed["pip"]  # only conda needs it listed
    assert listed == wanted


def test_every_package_has_a_lower_bound() -> None:
    listed = conda_bounds()
    del listed["pip"]
    assert [name for name, specifier in listed.items() if not specifier.startswith(">=")] == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit's wheel, installed. Built from a copy, because a build leaves files in the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("utils", "jobs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    for command in (["wheel", "--no-build-isolation", "--wheel-dir", out, source],
                    ["install", "--no-compile", "--target", out / "site", "--find-links", out, "hpc-ddp-kit"]):
        done = subprocess.run([*pip, command[0], *offline, *command[1:]], capture_output=True,
                              text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    return out / "site"


def run(installed: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that is not the checkout, with the installed kit."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(installed), "PYTHON": sys.executable}
    (installed.parent / "train.py").touch()
    return subprocess.run(command, env=env, cwd=installed.parent, capture_output=True, text=True,
                          timeout=60)


def test_wheel_holds_every_file_of_utils_and_jobs(installed: Path) -> None:
    def files(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in folder.rglob("*")
                if path.is_file() and path.suffix != ".pyc"}
    jobs = {Path("jobs") / path for path in files(ROOT / "jobs") if path.suffix != ".md"}
    expected = files(ROOT / "utils") | jobs
    assert {Path("py.typed"), Path("jobs/sites/lumi.yaml")} <= expected
    assert files(installed / "ddpkit") == expected, "is a new folder missing in pyproject.toml?"
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"ddpkit", "bin"}


def test_launchers_imports_from_the_wheel_without_torch(installed: Path) -> None:
    code = ("import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None\n"
            "import ddpkit.launchers; print(ddpkit.__file__, ddpkit.__version__)")
    done = run(installed, sys.executable, "-I", "-c", code, installed)
    assert done.returncode == 0, done.stderr
    (metadata,) = importlib.metadata.distributions(path=[str(installed)])
    assert metadata.name == "hpc-ddp-kit"
    assert done.stdout.split() == [str(installed / "ddpkit" / "__init__.py"), metadata.version]


def test_installed_submit_has_profiles_and_templates(installed: Path) -> None:
    ddpkit = installed / "bin" / "ddpkit"
    done = run(installed, ddpkit, *"submit run --site lumi --account p --dry-run train.py".split())
    assert done.returncode == 0, done.stderr
    assert f"KIT={installed}/ddpkit\n" in done.stdout and "#SBATCH --account=p" in done.stdout
    done = run(installed, ddpkit, "submit", "stats", "1")
    assert done.returncode == 2 and "Did you mean: ddpkit submit status 1" in done.stderr


@pytest.mark.parametrize("command", [
    ["SITE/bin/ddpkit", "launch"], [sys.executable, "-m", "ddpkit", "launch"],
    [sys.executable, "SITE/ddpkit", "launch"], ["bash", "SITE/ddpkit/jobs/slurm.sh"]])
def test_installed_launch_starts_ranks(installed: Path, command: list[str]) -> None:
    words = [word.replace("SITE", str(installed)) for word in command]
    done = run(installed, *words, "--ntasks-per-node", "2", "--dry-run", "train.py")
    assert done.returncode == 0, done.stderr
    assert f"{sys.executable} -u train.py" in done.stdout


@pytest.mark.parametrize(("words", "status", "text"), [
    (["explain"], 0, "launcher          single"), (["--help"], 0, "submit a training script"),
    (["lanch"], 2, "Did you mean launch?"), ([], 2, "a command is missing")])
def test_installed_commands_explain_themselves(installed: Path, words: list[str], status: int,
                                               text: str) -> None:
    done = run(installed, installed / "bin" / "ddpkit", *words)
    assert done.returncode == status and text in done.stdout + done.stderr, done.stderr

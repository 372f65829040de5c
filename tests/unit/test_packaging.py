"""environment.yml and pyproject.toml agree, and the wheel holds utils/ as ddpkit."""
from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
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
    del listed["pip"]  # only conda needs to be told
    assert listed == wanted


def test_every_package_has_a_lower_bound() -> None:
    listed = conda_bounds()
    del listed["pip"]
    assert [name for name, specifier in listed.items() if not specifier.startswith(">=")] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit's wheel, unpacked. Built from a copy, because a build leaves files beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "utils", source / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    build = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                            "--no-index", "--wheel-dir", out, source], capture_output=True, text=True, timeout=120)
    assert build.returncode == 0, build.stdout + build.stderr
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_the_wheel_holds_every_file_of_utils_as_ddpkit_and_nothing_else(wheel: Path) -> None:
    sources = {path.relative_to(ROOT / "utils") for path in (ROOT / "utils").rglob("*")
               if path.suffix == ".py" or path.name == "py.typed"}
    assert Path("py.typed") in sources
    packed = {path.relative_to(wheel / "ddpkit") for path in (wheel / "ddpkit").rglob("*") if path.is_file()}
    assert packed == sources, "a new folder in utils/ has to be added to `packages` in pyproject.toml"
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"ddpkit"}


def test_launchers_imports_from_the_wheel_without_torch(wheel: Path) -> None:
    code = ("import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None\n"
            "import ddpkit.launchers; print(ddpkit.__file__, ddpkit.__version__)")
    run = subprocess.run([sys.executable, "-I", "-c", code, wheel], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    (metadata,) = importlib.metadata.distributions(path=[str(wheel)])
    assert metadata.name == "hpc-ddp-kit"
    assert run.stdout.split() == [str(wheel / "ddpkit" / "__init__.py"), metadata.version]

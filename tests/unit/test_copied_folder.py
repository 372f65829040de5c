"""utils/ works when it is copied alone into another project, under any name."""
from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.unit.programs import ROOT, python

# All modules can be imported without the packages that only some functions need.
TRAIN = """
import importlib, os, pkgutil, sys
sys.modules.update(dict.fromkeys(["numpy", "yaml", "mpi4py", "submitit"]))

import pkg.mykit
from pkg.mykit import LaunchError, setup_distributed

for module in pkgutil.walk_packages(pkg.mykit.__path__, "pkg.mykit."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "utils" not in sys.modules

with setup_distributed("gloo", timeout=60) as job:
    mean = job.all_reduce_mean(job.rank)
    print(f"rank {job.rank} of {job.world_size} mean {mean}\\n", end="", flush=True)
"""


def test_copy_under_another_name_starts_two_ranks(tmp_path: Path) -> None:
    project = tmp_path / "my project"
    shutil.copytree(ROOT / "utils", project / "pkg" / "mykit", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "train.py").write_text(TRAIN)
    done = python("train.py", ranks=2, cwd=project, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 2 mean 0.5\n" in done.stdout for rank in range(2))


def test_no_file_imports_the_folder_by_its_name() -> None:
    """Not in a function either."""
    absolute = re.compile(r"^ *(from|import) (utils|scripts|jobs|examples|tests)\b", re.MULTILINE)
    assert not [file for file in (ROOT / "utils").rglob("*.py") if absolute.search(file.read_text())]

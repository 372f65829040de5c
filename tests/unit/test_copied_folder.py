"""utils/ works when it is copied alone into another project, under any name."""
from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "utils").rglob("*.py"))

TRAIN = """
from {package} import LaunchError, setup_distributed

with setup_distributed("gloo", timeout=60) as job:
    mean = job.all_reduce_mean(job.rank)
    print(f"rank {{job.rank}} of {{job.world_size}} mean {{mean}}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("package", ["mykit", "pkg.mykit"])
def test_copy_under_another_name_starts_two_ranks(package: str, tmp_path: Path) -> None:
    project = tmp_path / "my project"
    shutil.copytree(ROOT / "utils", project.joinpath(*package.split(".")),
                    ignore=shutil.ignore_patterns("__pycache__"))
    (project / "train.py").write_text(TRAIN.format(package=package))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                "2"]
    done = subprocess.run([*torchrun, "train.py"], cwd=project, env=environ, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 mean 0.5\n" in done.stdout


def imports(node: ast.AST, *, also_late: bool = True) -> Iterator[tuple[int, str]]:
    """Yield level and top name of each import; without `also_late` not those in functions."""
    if isinstance(node, ast.Import):
        yield from ((0, alias.name.partition(".")[0]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.level, (node.module or "").partition(".")[0]
    if also_late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from imports(child, also_late=also_late)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_of_a_file(file: Path) -> None:
    """Relative ones stay inside the folder. At import time only torch and Python are needed."""
    tree = ast.parse(file.read_text())
    found = set(imports(tree))
    depth = len(file.relative_to(ROOT / "utils").parts)
    assert max([level for level, _ in found], default=0) <= depth
    absolute = {name for level, name in found if level == 0}
    assert absolute.isdisjoint({"utils", "scripts", "jobs", "examples", "tests"})
    at_import = {name for level, name in imports(tree, also_late=False) if level == 0}
    assert at_import <= {"torch", *sys.stdlib_module_names}

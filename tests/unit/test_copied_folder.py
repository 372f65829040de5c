"""utils/ works when it is copied alone into another project, under any name."""
from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "utils").rglob("*.py"))

TRAIN = """
from {package} import LaunchError, setup_distributed

with setup_distributed("gloo", timeout=60) as job:
    print(f"rank {{job.rank}} of {{job.world_size}} mean {{job.all_reduce_mean(job.rank)}}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("package", ["mykit", "pkg.mykit"])
def test_a_copy_under_another_name_starts_two_ranks(package: str, tmp_path: Path) -> None:
    project = tmp_path / "my project"
    shutil.copytree(ROOT / "utils", project.joinpath(*package.split(".")),
                    ignore=shutil.ignore_patterns("__pycache__"))
    (project / "train.py").write_text(TRAIN.format(package=package))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           "train.py"], cwd=project, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 mean 0.5\n" in done.stdout


def imports(tree: ast.Module, everywhere: bool) -> list[tuple[int, str]]:
    """(level, name) of each import; without `everywhere` only of those that run when the file is imported."""
    found: list[tuple[int, str]] = []
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_of_utils_never_imports_utils_or_the_other_folders_by_name(file: Path) -> None:
    absolute = [name for level, name in imports(ast.parse(file.read_text()), everywhere=True) if level == 0]
    assert {name.partition(".")[0] for name in absolute}.isdisjoint({"utils", "scripts", "jobs", "examples", "tests"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_importing_a_file_of_utils_needs_torch_and_the_standard_library_alone(file: Path) -> None:
    absolute = [name for level, name in imports(ast.parse(file.read_text()), everywhere=False) if level == 0]
    assert {name.partition(".")[0] for name in absolute} <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_relative_import_stays_inside_the_folder(file: Path) -> None:
    depth = len(file.relative_to(ROOT / "utils").parts)
    assert all(level <= depth for level, _ in imports(ast.parse(file.read_text()), everywhere=True))

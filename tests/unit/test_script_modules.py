"""plan.py and bench.py with a script whose project has its own `utils`, the name of the kit's package."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.programs import ROOT

TRAINING = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
torch.distributed.init_process_group("gloo")
model = DDP(torch.nn.Linear(300, 700, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.ones(4, 300)).square().mean()
    loss.backward()
    optimizer.step()
    accuracy()
"""
OWN = "def accuracy(): pass\n"
LAYOUTS = {
    "module": ("train.py", "from utils import accuracy", "utils.py"),
    "package": ("train.py", "from utils.metrics import accuracy\nimport utils.more", "utils/__init__.py"),
    "no_init": ("train.py", "from utils.metrics import accuracy", "utils/more.py"),
    "parent": ("tools/train.py", "import sys; sys.path.append({folder!r})\nfrom utils import accuracy", "utils.py"),
    "beside_a_copy": ("train.py", "from utils import accuracy\nfrom kit import setup_distributed\n"
                      "from kit.training import StepTimer", "utils.py"),
    "kit": ("train.py", "import sys; sys.path.insert(0, {root!r})\nfrom utils import setup_distributed\n"
            "from utils.training import linear_warmup as accuracy; accuracy = lambda: None", "utils.py")}


def project(folder: Path, layout: str, training: str = TRAINING) -> str:
    """Write a project whose imports are those of a layout; return the path of its script."""
    script, imports, own = LAYOUTS[layout]
    files = {script: imports.format(folder=str(folder), root=str(ROOT)) + f"\n{training}", own: OWN}
    if "/" in own:
        files |= {"utils/metrics.py": OWN, "utils/more.py": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "kit").symlink_to(ROOT / "utils")
    return script


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "utils"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


@pytest.mark.parametrize("layout", ["module", "package", "no_init", "parent"])
def test_script_imports_its_own_package(tmp_path: Path, layout: str) -> None:
    script = tmp_path / project(tmp_path, layout, training="accuracy()")
    code = ("import runpy, sys; from utils.tools.bench.script_modules import script_modules\n"
            f"with script_modules({str(script.parent)!r}): runpy.run_path({str(script)!r})\n"
            "import utils; assert hasattr(utils, '__version__')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("layout", "words", "shown"), [
    ("beside_a_copy", ["plan", "--gpu", "a100-40"], "Notes"),
    *((layout, ["bench", "ddp", "--full-only", "--steps", "2"], "efficiency (weak scaling)")
      for layout in ("package", "kit"))])
def test_commands_import_what_the_script_does(tmp_path: Path, layout: str, words: list[str], shown: str) -> None:
    done = run(tmp_path, *words, project(tmp_path, layout))
    assert done.returncode == 0 and shown in done.stdout, done.stderr


def test_factory_imports_its_own_package(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import torch\ndef size(): return 10\n")
    (tmp_path / "models.py").write_text(
        "import torch, utils\ndef make(batch):\n    from utils import size\n"
        "    return torch.nn.Linear(size(), 10), torch.zeros(batch, utils.size())\n")
    done = run(tmp_path, "plan", "--model", "models:make")
    assert done.returncode == 0, done.stderr


def test_script_that_imports_the_kit_gets_the_modules_of_the_command(tmp_path: Path) -> None:
    """plan prints its own kind of error as it is, and describes others."""
    (tmp_path / "train.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                                       "from utils.tools.plan.hardware import PredictionError\n"
                                       "raise PredictionError('the same')")
    done = run(tmp_path, "plan", "train.py")
    assert done.returncode == 1 and done.stderr == "ddpkit plan: error: train.py could not be traced. the same\n"


@pytest.mark.parametrize("command", [["plan"], ["bench", "ddp"]], ids=" ".join)
def test_kit_hidden_by_the_scripts_own_package_is_named(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "utils.py").write_text(OWN)
    (tmp_path / "train.py").write_text("from utils import setup_distributed")
    done = run(tmp_path, *command, "train.py")
    assert done.returncode == 1 and "cannot import name 'setup_distributed'" in done.stderr
    assert ("The script's own utils and the kit's package have the same name. If the script means the kit, install "
            "the kit with pip, where it is ddpkit") in done.stderr


def test_trial_of_a_script_that_spawns_its_ranks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)")
    done = run(tmp_path, "bench", "ddp", "train.py")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert ("the script starts its own ranks with torch.multiprocessing.spawn. Expected one process per rank"
            in done.stderr)

"""Python programs that tests run in the repository root, alone or as ranks of launch.py."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n"]  # which does not import torch, as torchrun does


def python(*words: str, ranks: int = 1, cwd: Path = ROOT, env: dict[str, str] | None = None,
           ) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, under launch.py if there are several ranks."""
    command = [*([*LAUNCH, str(ranks), "--"] if ranks > 1 else []), sys.executable, *words]
    # One thread: threads that wait for a busy core would spin.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=400)


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

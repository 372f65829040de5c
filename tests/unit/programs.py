"""Python programs that tests run in the repository root, alone or as ranks of launch.py."""
from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from tests.cluster.hosts import killed_at_end, wait_until

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n"]  # which does not import torch, as torchrun does


@contextlib.contextmanager
def warm_python(folder: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Start tests/warm_python.py; return the path of the `python` that it serves."""
    server = [sys.executable, str(ROOT / "tests" / "warm_python.py"), str(folder)]
    process = subprocess.Popen(server, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    with killed_at_end(process):  # type: ignore[arg-type]
        wait_until((folder / "ready").exists, "a Python with torch", process, seconds=60)
        yield folder / "python"


@functools.cache
def kept_warm() -> str:
    """A warm Python for the tests of this process."""
    until_exit = contextlib.ExitStack()
    atexit.register(until_exit.close)
    folder = Path(until_exit.enter_context(tempfile.TemporaryDirectory(prefix="ddpkit-warm-")))
    return str(until_exit.enter_context(warm_python(folder, {**os.environ, "OMP_NUM_THREADS": "1"})))


def python(*words: str, ranks: int = 1, cwd: Path = ROOT, env: dict[str, str] | None = None, warm: bool = False,
           ) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, under launch.py if there are several ranks.

    warm: Python has imported torch already, in the environment of the tests. For tests of what comes after the start.
    """
    program = kept_warm() if warm else sys.executable
    command = [*([*LAUNCH, str(ranks), "--"] if ranks > 1 else []), program, *words]
    # One thread: threads that wait for a busy core would spin.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=400)


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

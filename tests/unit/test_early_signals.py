"""Signals that arrive before there is a StopSignal are held for it. No torch."""
from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.unit.programs import ROOT, python
from utils.preemption import StopSignal
from utils.tools.launch.script_imports import imports_this_package

RAISE = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)  # while torch is imported\n"
TRAIN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import utils
%s
from utils.preemption import StopSignal
stop = StopSignal()
stop.should_stop()
assert "torch" not in sys.modules
sys.exit(stop.exit_status)  # without close()
"""
# What launch.py does between fork() and exec(), but without the variable, as in a container.
STARTER = """
import os, signal, sys
from utils import signals
signals.block()
os.kill(os.getpid(), signal.SIGUSR1)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
HANDLER = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n"
FAULTHANDLER = "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1, chain=True)\n"
CHILD = "import subprocess, sys, utils\nsys.exit(-subprocess.run(['sh', '-c', 'kill -USR1 $$']).returncode)"


@pytest.mark.parametrize(("words", "status"), [
    (["-c", TRAIN % ""], 0), (["-c", TRAIN % RAISE], 75),
    (["-c", STARTER, "-c", TRAIN % ""], 75),
    (["-c", f"{HANDLER}import utils\n{RAISE}"], 7),
    (["-c", f"{FAULTHANDLER}import utils\n{RAISE}"], -signal.SIGUSR1),
    (["-c", CHILD], signal.SIGUSR1)])  # child programs have the default action
def test_a_signal_after_the_import_stops_the_run(words: list[str], status: int) -> None:
    ended = python(*words)
    assert (ended.returncode, ended.stderr if status == 75 else "") == (status, "")


@pytest.mark.parametrize(("options", "program", "status"), [
    ([], RAISE + TRAIN % "", 75), (["--torchrun"], RAISE + TRAIN % "", 75),
    ([], f"def setup_distributed(): ...  # another one\n{HANDLER}{RAISE}", 7)])
def test_launch_py_keeps_a_signal_until_the_import(
        options: list[str], program: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    ended = python("scripts/launch.py", *options, "-n", "1", str(tmp_path / "train.py"))
    assert ended.returncode == status, ended.stderr


def test_a_signal_between_two_stop_signals_is_for_the_second() -> None:
    with StopSignal() as first:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert first.should_stop()
    with StopSignal() as second:
        assert not second.should_stop()  # the first one has taken its signal
    os.kill(os.getpid(), signal.SIGUSR1)
    with StopSignal() as third:
        assert third.should_stop()


@pytest.mark.parametrize(("command", "line", "expected"), [
    ("python -m mine.train", "from utils.preemption import StopSignal", True),
    ("python -m mine", "from .kit import setup_distributed", True),
    ("python -m torch.distributed.run mine/train.py", "import kit.preemption", True),
    ("python -m torch.distributed.run -m mine.train", "from utils import setup_distributed", True),
    ("python -m other", "from utils import setup_distributed", False),
    ("python mine/train.py", "from kit import setup_distributed", True),
    ("python mine/train.py", "from lib.utils import setup_distributed", False),
    ("python mine/train.py", "from 'here' on", False),
    ("python shadowed/train.py", "from utils import setup_distributed", False)])
def test_programs_that_import_the_package_are_recognised(
        command: str, line: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("mine/kit/preemption", "shadowed"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("mine/train.py", "mine/__main__.py", "shadowed/train.py"):
        (tmp_path / file).write_text(f"import os\n{line}\n")
    for file in ("mine/kit/preemption/stop_signal.py", "shadowed/utils.py"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    assert imports_this_package(command.split()) is expected

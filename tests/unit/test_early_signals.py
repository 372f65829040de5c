"""Signals that arrive before there is a StopSignal are held for it. No torch."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from utils.launch.script_imports import imports_this_package
from utils.preemption import StopSignal

ROOT = Path(__file__).resolve().parents[2]
RAISE = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)  # while torch is imported\n"
TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import utils
%s
from utils.preemption import StopSignal
stop = StopSignal()
sys.exit(stop.exit_status if stop.should_stop() else 1)
"""
# What launch.py does between fork() and exec(); the rank may lack the variable, as in a container.
STARTER = """
import os, signal, sys
from utils import signals
signals.block()
if sys.argv[1] == "with variable":
    os.environ[signals.VARIABLE] = "1"
os.kill(os.getpid(), signal.SIGUSR1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)


def test_a_signal_after_the_import_stops_the_run_at_its_first_boundary() -> None:
    ended = run("-c", TRAIN % RAISE, str(ROOT))
    assert (ended.returncode, ended.stderr) == (75, "")


@pytest.mark.parametrize("variable", ["with variable", "without"])
def test_a_signal_blocked_before_exec_is_delivered(variable: str) -> None:
    ended = run("-c", STARTER, variable, "-c", TRAIN % "", str(ROOT))
    assert (ended.returncode, ended.stderr) == (75, "")


@pytest.mark.parametrize("options", [[], ["--torchrun"]])
def test_launch_py_keeps_a_signal_until_the_import(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RAISE + TRAIN % "")
    ended = run("scripts/launch.py", *options, "-n", "1", str(script), str(ROOT))
    assert ended.returncode == 75, ended.stderr


def test_launch_py_blocks_no_signal_of_other_programs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def setup_distributed(): ...  # another one\nimport os, signal\n"
                      f"signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n{RAISE}")
    ended = run("scripts/launch.py", "-n", "1", str(script))
    assert ended.returncode == 7, ended.stderr


@pytest.mark.parametrize(("handler", "status"), [
    ("signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))", 3),
    ("import faulthandler; faulthandler.register(signal.SIGUSR1, chain=True)", -signal.SIGUSR1)])
def test_the_import_keeps_other_handlers(handler: str, status: int) -> None:
    ended = run("-c", f"import os, signal\n{handler}\nimport utils\n{RAISE}")
    assert ended.returncode == status, ended.stderr


def test_child_programs_get_the_default_action() -> None:
    ended = run("-c", "import subprocess, utils\n"
                "print(subprocess.run(['sh', '-c', 'kill -USR1 $$']).returncode)")
    assert ended.stdout == f"{-signal.SIGUSR1}\n", ended.stderr


def test_a_signal_between_two_stop_signals_is_for_the_second() -> None:
    with StopSignal() as first:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert first.should_stop()
    with StopSignal() as second:
        assert not second.should_stop()  # the first one has taken its signal
    os.kill(os.getpid(), signal.SIGUSR1)
    with StopSignal() as third:
        assert third.should_stop()


# Which programs import this package ---------------------------------------------------------------

def test_scripts_and_modules_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("from utils import setup_distributed\n")
    (tmp_path / "mine" / "__main__.py").write_text("from utils.preemption import StopSignal\n")
    (tmp_path / "other.py").write_text("import signal\n")
    monkeypatch.chdir(tmp_path)
    for words, expected in (
            ("python -u mine/train.py", True), ("python -m mine.train", True),
            ("python -m mine", True), ("python -m torch.distributed.run mine/train.py", True),
            ("python -m torch.distributed.run -m mine.train", True), ("python other.py", False),
            ("python -m other", False), ("python -m torch.distributed.run", False),
            ("sh -c true", False)):
        assert imports_this_package(words.split()) is expected, words


def test_the_package_is_recognised_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "kit" / "preemption").mkdir(parents=True)
    (tmp_path / "kit" / "preemption" / "stop_signal.py").touch()
    script = tmp_path / "train.py"

    def is_recognised(line: str) -> bool:
        script.write_text(f"import os\n{line}\n")
        return imports_this_package(["python", str(script)])

    for line, expected in (
            ("from kit import setup_distributed", True), ("import kit.preemption", True),
            ("from .kit import setup_distributed", True), ("def setup_distributed(): ...", False),
            ("from lib.utils import setup_distributed", False), ("# like StopSignal", False),
            ("from 'here' on", False), ("from utils import setup_distributed", True)):
        assert is_recognised(line) is expected, line
    (tmp_path / "utils.py").touch()  # another module of that name
    assert not is_recognised("from utils import setup_distributed")

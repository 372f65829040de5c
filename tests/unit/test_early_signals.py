"""A stop that reaches launch.py before a rank can handle it waits for the rank. The import itself does nothing."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.programs import ROOT, python

IMPORT = """
import os, signal, torch

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    masks = [line for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC"))]
    return handlers, masks, os.listdir("/proc/self/task"), dict(os.environ)

before = state()
import utils
import utils.distributed
assert state() == before
"""
# Signals launch.py, and then takes as long as the import of torch.
RANK = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils.host import process
launch = next(pid for pid in process.parent_pids() if "launch.py" in process.command_line(pid))
os.kill(launch, signal.SIGUSR1)
time.sleep(0.5)
"""
STOPS = """
from utils.preemption import StopSignal
stop = StopSignal()
while not stop.should_stop():
    time.sleep(0.01)
sys.exit(stop.exit_status)
"""
HANDLES = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\ntime.sleep(60)\n"


def test_the_import_changes_no_signal_thread_or_variable() -> None:
    ended = python("-c", IMPORT)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("options", "program", "status"), [
    ([], STOPS, 75), (["--torchrun"], STOPS, 75), ([], HANDLES, 7), ([], "", 0)])
def test_launch_py_keeps_a_signal_until_a_rank_has_a_handler(
        options: list[str], program: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK + program)
    ended = python("scripts/launch.py", *options, "-n", "1", str(tmp_path / "train.py"))
    assert ended.returncode == status, ended.stderr

"""A rank that a signal has stopped, alone on its host: the one that has started it sees it."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launchers import LAUNCH
from utils.host import process
from utils.tools.launch.stopped_ranks import StoppedRanks, hang_limit

STOP = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_stopped_rank_alone_ends_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOP)
    done = subprocess.run([*LAUNCH, "-n", "1", "--hang-timeout", "2", str(script)], capture_output=True, text=True,
                          timeout=60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "rank 0 on " in last and "its process is stopped by a signal" in last, done.stderr


@pytest.mark.parametrize(("text", "limit"), [("", 0), ("auto", 0), ("0", 0), ("12.5", 12.5)])
def test_limit(text: str, limit: float) -> None:
    assert hang_limit({"DDPKIT_HANG_TIMEOUT": text}) == limit == hang_limit({"DDPKIT_HANG_TIMEOUT": text})
    assert hang_limit({}) == 0


def test_a_rank_is_reported_once_and_not_after_a_pause_of_the_job() -> None:
    """scontrol suspend stops who looks, too: that time does not count."""
    child = subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(60)"])
    reports: list[tuple[int, str, float]] = []
    ranks = StoppedRanks(8, lambda *report: reports.append(report))
    try:
        assert ranks.check([child.pid], 0.0) == 0.5
        os.kill(child.pid, signal.SIGSTOP)
        while not process.why_stopped(child.pid):
            pass
        for look in range(10):
            ranks.check([child.pid], 0.5 * look)
        ranks.check([child.pid], 100.0)  # a pause before
        for look in range(1, 20):
            ranks.check([child.pid], 100 + 0.5 * look)
        assert not reports
        for look in range(20, 40):
            ranks.check([child.pid], 100 + 0.5 * look)
        assert reports == [(child.pid, "stopped by a signal (SIGSTOP or SIGTSTP)", 10.0)]
        assert ranks.check([child.pid], 200.0) is None
    finally:
        child.kill()
        child.wait()
    assert StoppedRanks(0, print).check([child.pid], 0.0) is None

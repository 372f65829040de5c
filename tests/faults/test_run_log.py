"""The log of a training that is killed has every step exactly once."""
from __future__ import annotations

import subprocess
import sys

from tests.faults.programs import ENVIRONMENT, ROOT


def test_log_of_a_killed_training() -> None:
    """log_kills.py does it as often as it is asked to."""
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "faults" / "log_kills.py"), "--kills", "2",
                           "--steps", "60"], env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=400)
    assert done.returncode == 0 and "every step exactly once" in done.stdout, done.stdout + done.stderr

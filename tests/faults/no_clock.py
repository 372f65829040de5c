"""Run a script as if the scheduler did not report a time limit: no_clock.py script.py [arguments]"""
from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.preemption import stop_signal

stop_signal.scheduler_time_left = lambda: None  # type: ignore[attr-defined]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

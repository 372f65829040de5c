"""Runs a script as if the scheduler told nothing about the time limit: no_clock.py script.py [arguments]."""
from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils import stop_sources

stop_sources._scheduler_clock = lambda: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

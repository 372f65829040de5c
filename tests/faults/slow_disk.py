"""Run a script on a disk whose fsync takes longer: slow_disk.py SECONDS script.py ...

A test can then signal the script during a save.
"""
from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.checkpoint import disk

SECONDS = float(sys.argv[1])


class SlowDisk:
    """The real disk; fsync waits first."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, file: int) -> None:
        time.sleep(SECONDS)
        os.fsync(file)


disk.system = SlowDisk()
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")

"""Run a script on a disk that is full for some saves: full_disk.py FIRST LAST script.py ...

The saves of rank 0 from number FIRST to LAST, counted from 1, fail with ENOSPC.
"""
from __future__ import annotations

import errno
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from utils.checkpoint import disk

FIRST, LAST = int(sys.argv[1]), int(sys.argv[2])


class FullDisk:
    """The real disk; it counts the temporary folders and refuses to write into some of them."""

    saves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self.saves += 1

    def write(self, file: int, data: memoryview) -> int:
        if FIRST <= self.saves <= LAST:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, data)


disk.system = FullDisk()
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")

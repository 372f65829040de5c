"""The training that nothing interrupts."""
from __future__ import annotations

import fcntl
import os

import pytest

from tests.faults.programs import SURVIVE, done_line, run_ranks


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of an uninterrupted run of SURVIVE on two ranks, which one of pytest's processes does for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (folder / "whole.txt").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (line := file.read()):
            arguments = [*SURVIVE[1:], "--folder", str(folder / "whole")]
            line = done_line(run_ranks(tmp_path_factory.mktemp("whole"), SURVIVE[0], (2, arguments)))
            file.write(line)
    return line

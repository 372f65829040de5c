"""The training that nothing interrupts."""
from __future__ import annotations

import subprocess

import pytest

from tests.faults.programs import ENVIRONMENT, LAUNCH, SURVIVE, done_line


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of an uninterrupted run of SURVIVE on two ranks."""
    command = [*LAUNCH, *SURVIVE, "--folder", str(tmp_path_factory.mktemp("whole"))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
                           env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stdout
    return done_line(ended.stdout)

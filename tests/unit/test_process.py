"""The reader of /proc, on processes that the tests start."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.programs import python
from utils import process

NOBODY = 1 << 30  # above every process id


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A running process whose folder, name and arguments have odd characters."""
    program = tmp_path / "a folder" / "my (cat) x"
    program.parent.mkdir()
    shutil.copy("/bin/cat", program)
    child = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             env={"ONE": "1", "EQUALS": "a=b"}, text=True)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("x\n")
    child.stdin.flush()
    assert child.stdout.readline() == "x\n"
    yield child
    child.kill()
    child.communicate()


def test_a_process_is_described(sleeper: subprocess.Popen[str]) -> None:
    assert process.name(sleeper.pid) == "my (cat) x"
    assert process.parent(sleeper.pid) == process.parents_by_pid()[sleeper.pid] == os.getpid()
    assert (process.command_line(sleeper.pid) or "").split() == ["my", "(cat)", "x", "-"]
    assert process.environment(sleeper.pid) == {b"ONE": b"1", b"EQUALS": b"a=b"}
    assert any(path.endswith("my (cat) x") for path in process.mapped_files(sleeper.pid))

    mine, its = process.start_time(os.getpid()), process.start_time(sleeper.pid)
    assert mine is not None and its is not None and mine <= its
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # only its exit status is left
    assert process.start_time(sleeper.pid) is None


def test_what_does_not_exist_is_empty() -> None:
    assert process.name(NOBODY) == "" and process.parent(NOBODY) is None
    assert process.start_time(NOBODY) is None
    assert process.command_line(NOBODY) is None and process.environment(NOBODY) == {}
    assert process.mapped_files(NOBODY) == [] and process.namespace("none") == ""
    assert process.thread_states("no such thread") == []
    assert list(process.parent_command_lines([NOBODY, os.getpid()])) == []


OF_ITSELF = """
import faulthandler, json, os, signal
from utils import process
faulthandler.register(signal.SIGHUP)
print(json.dumps([list(process.parent_pids()), list(process.parent_command_lines()), process.caught_signals(),
                  process.thread_states(process.name(os.getpid()))]))
"""


def test_a_process_describes_itself() -> None:
    pids, commands, caught, states = json.loads(python("-c", OF_ITSELF).stdout)
    assert pids == [os.getpid(), *process.parent_pids()]  # nearest first
    assert commands == [process.command_line(os.getpid()), *process.parent_command_lines()]
    # faulthandler's handler is unknown to the module signal.
    assert caught >> (signal.SIGHUP - 1) & 1 and not caught >> (signal.SIGALRM - 1) & 1
    assert states == ["R"]  # the thread that reads it
    assert len(process.boot_id()) == 36 and process.namespace("net").startswith("net:[")

"""The reader of /proc, on processes that the tests start."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert process.parent(sleeper.pid) == os.getpid()
    assert process.parents_by_pid()[sleeper.pid] == os.getpid()
    assert sleeper.pid in process.process_ids()
    assert (process.command_line(sleeper.pid) or "").split() == ["my", "(cat)", "x", "-"]
    assert process.environment(sleeper.pid) == {b"ONE": b"1", b"EQUALS": b"a=b"}
    assert any(path.endswith("my (cat) x") for path in process.mapped_files(sleeper.pid))


def test_start_times_order_processes_and_end_with_them(sleeper: subprocess.Popen[str]) -> None:
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
    assert list(process.parent_command_lines([NOBODY, os.getpid()])) == []


def test_ancestors_come_nearest_first() -> None:
    code = ("import json; from utils import process; "
            "print(json.dumps([list(process.parent_pids()), list(process.parent_command_lines())]))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids, commands = json.loads(done.stdout)  # an argument may hold line breaks
    assert pids == [os.getpid(), *process.parent_pids()]
    assert commands == [process.command_line(os.getpid()), *process.parent_command_lines()]


def test_threads_are_found_by_name() -> None:
    assert "R" in process.thread_states(process.name(os.getpid()))  # the thread that reads it
    assert process.thread_states("no such thread") == []


def test_caught_signals_include_handlers_unknown_to_python() -> None:
    code = ("import faulthandler, signal; from utils import process; "
            "faulthandler.register(signal.SIGHUP); print(process.caught_signals())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    caught = int(done.stdout)
    assert caught >> (signal.SIGHUP - 1) & 1 and not caught >> (signal.SIGALRM - 1) & 1


def test_the_boot_and_the_namespaces_have_names() -> None:
    assert len(process.boot_id()) == 36 and process.namespace("net").startswith("net:[")

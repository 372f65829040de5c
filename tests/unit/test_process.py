"""The reader of /proc, on a process that the tests start."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.programs import ROOT
from utils.host import process
from utils.host.process import environment, work_done


def test_a_process_is_described(tmp_path: Path) -> None:
    """Its folder, name and arguments have odd characters."""
    program = tmp_path / "a folder" / "my (cat) x"
    program.parent.mkdir()
    shutil.copy("/bin/cat", program)
    environ = {"ONE": "1", "EQUALS": "a=b"}
    with subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as cat:
        print("x", file=cat.stdin, flush=True)
        assert cat.stdout.readline() == "x\n"
        assert process.name(cat.pid) == "my (cat) x"
        assert process.parent(cat.pid) == process.parents_by_pid()[cat.pid] == os.getpid()
        assert process.command_line(cat.pid).split() == ["my", "(cat)", "x", "-"]
        assert environment(cat.pid) == {b"ONE": b"1", b"EQUALS": b"a=b"}
        assert process.start_time(os.getpid()) <= process.start_time(cat.pid)

        cat.kill()
        os.waitid(os.P_PID, cat.pid, os.WEXITED | os.WNOWAIT)  # only its exit status is left
        assert process.start_time(cat.pid) is None

    assert process.name(cat.pid) == "" and process.parent(cat.pid) is None
    assert process.command_line(cat.pid) == "" and environment(cat.pid) == {}


def test_work_of_descendants_and_of_children_that_have_ended_counts() -> None:
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    before = work_done()[0]
    words = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-S", "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout and shell.stdout.readline()
        assert work_done()[0] - before >= 0.25  # the shell waits
        shell.communicate("\n")
    assert work_done()[0] - before >= 0.25


FORKED = """\
import os, threading, time
from tests.unit.programs import ROOT
from utils.host import process
from utils.host.process import work_done
def measure():
    before = work_done()[0]
    time.sleep(1)
    print(work_done()[0] - before, flush=True)
    os._exit(0)
if os.fork() == 0:
    threading.Thread(target=measure).start()
    while True: pass
os.wait()
"""


def test_forked_process_that_waits_for_a_core_works() -> None:
    core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    others = [subprocess.Popen([*core, sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4)]
    try:
        done = subprocess.run([*core, sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert float(done.stdout) > 0.6, done.stderr


def test_process_that_runs_uses_a_core_and_one_that_waits_none() -> None:
    program = "import sys\nprint(flush=True)\nwhile sys.argv[1] == 'run': pass\ninput()"
    words = [sys.executable, "-S", "-c", program]
    with (subprocess.Popen([*words, "run"], stdout=subprocess.PIPE) as runs,
          subprocess.Popen([*words, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waits):
        assert runs.stdout and runs.stdout.readline() and waits.stdout and waits.stdout.readline()
        before, start = [process.schedule(pid, pid) for pid in (runs.pid, waits.pid)], time.monotonic()
        time.sleep(0.25)
        after, seconds = [process.schedule(pid, pid) for pid in (runs.pid, waits.pid)], time.monotonic() - start
        assert process.why_stopped(runs.pid) == ""
        runs.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert process.why_stopped(runs.pid) == "stopped by a signal (SIGSTOP or SIGTSTP)"
        runs.kill()
        waits.kill()
    use = [(sum(late[:2]) - sum(early[:2])) / seconds for early, late in zip(before, after, strict=True)]
    assert use[0] > 0.5 and use[1] < 0.2, use
